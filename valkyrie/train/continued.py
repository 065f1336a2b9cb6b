"""A text that is generated bit by bit: its tokens and the streaming state after them, kept in the run folder."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from valkyrie.data.tokenizer import Tokenizer
from valkyrie.paths import write_whole, writing

_ABOUT, _ABOUT_IT = "about", ("ids", "prompt", "read", "step", "ended")


@dataclass
class Text:
    """A document as far as it is known: `ids`, BOS first, of which the state has read the first `read`.

    `prompt`: the one that it began with. `state`: the model's streaming state after those, None before any. `step`: the
    checkpoint that it is of. `ended`: the model has drawn the end of the document.
    """

    ids: list[int]
    prompt: str = ""
    read: int = 0
    step: int = 0
    ended: bool = False
    state: Any = field(default=None, repr=False)

    def bytes(self, tokenizer: Tokenizer) -> bytes:
        """Return its UTF-8 bytes, of which the last may be part of a character."""
        return tokenizer.decode_bytes(self.ids[1:])

    def add(self, tokenizer: Tokenizer, prompt: str) -> None:
        """Append text that the model has still to read."""
        added = [int(i) for i in tokenizer.encode_ordinary(prompt)]
        self.ids += added
        self.ended = self.ended and not added

    def unread(self, step: int) -> Text:
        """Return the same text as one that the model of another checkpoint has still to read."""
        return Text(self.ids, self.prompt, step=step, ended=self.ended)

    def take(self, drawn: int, tokenizer: Tokenizer) -> bool:
        """Append a drawn token, and return whether it is one of the text and not the end of the document."""
        self.ended = drawn == tokenizer.bos_id
        if not self.ended:
            self.ids.append(drawn)
        return not self.ended


def begin(tokenizer: Tokenizer, prompt: str, step: int = 0) -> Text:
    """Return a new document that begins with a prompt."""
    text = Text([tokenizer.bos_id], prompt, step=step)
    text.add(tokenizer, prompt)
    return text


def save(text: Text, path: Path, *, writes: bool = True) -> None:
    """Write a text with its state, in one piece; every process calls it, and the one that `writes` does."""
    from jax.experimental.multihost_utils import process_allgather

    about = {name: getattr(text, name) for name in _ABOUT_IT}
    leaves = [np.asarray(process_allgather(leaf, tiled=True)) for leaf in jax.tree.leaves(text.state)]
    if not writes:
        return
    arrays, content = {str(i): _plain(leaf) for i, leaf in enumerate(leaves)}, io.BytesIO()
    np.savez(content, allow_pickle=False, **{_ABOUT: np.array(json.dumps(about)), **arrays})
    with writing(path):
        path.parent.mkdir(exist_ok=True)
    write_whole(path, content.getvalue())


def load(path: Path, like: Any) -> Text:
    """Return a kept text, its state in the dtypes of `like`, a state of the same model.

    ValueError where the file is damaged or of another model.
    """
    try:
        with path.open("rb") as opened, np.load(opened) as file:
            about = json.loads(str(file[_ABOUT]))
            found = [file[str(i)] for i in range(len(file.files) - 1)]
        text = Text(**{name: about[name] for name in _ABOUT_IT})
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is damaged ({error}). Delete it to begin that text anew.") from error
    if not text.read:  # kept before any token was read
        return text
    leaves, structure = jax.tree.flatten(like)
    if len(leaves) != len(found) or any(a.ndim != b.ndim for a, b in zip(found, leaves, strict=True)):
        raise ValueError(f"{path} was made by another model than this run's. Delete it to begin that text anew.")
    typed = [a.view(b.dtype) if a.dtype != b.dtype else a for a, b in zip(found, leaves, strict=True)]
    text.state = jax.tree.unflatten(structure, typed)
    return text


def grown(state: Any, like: Any) -> Any:
    """Return a state with the room of another, as every array's first entries.

    Caches of keys lie by position from their beginning until they are full, and full ones are as large as windows get.
    """

    def grow(small: Any, large: Any) -> Any:
        if small.shape == large.shape:
            return small
        return np.pad(np.asarray(small), [(0, b - a) for a, b in zip(small.shape, large.shape, strict=True)])

    return jax.tree.map(grow, state, like)


def _plain(array: np.ndarray) -> np.ndarray:
    """Return an array in a dtype of NumPy's own: bfloat16 as the integers of its bits."""
    return array if array.dtype.isbuiltin else array.view(f"u{array.dtype.itemsize}")
