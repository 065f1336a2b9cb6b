"""Generated texts that later commands can extend (`mode.keep`), saved in the run folder with the model's state."""

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
from valkyrie.paths import disk_errors, write_atomic

_METADATA_KEY, _METADATA_FIELDS = "about", ("ids", "prompt", "read", "step", "ended")


@dataclass
class Text:
    """A generated document that can be continued.

    Args:
        ids: Tokens so far, BOS first.
        prompt: The prompt it began with.
        read: Number of tokens that `state` includes.
        step: Step of the checkpoint that generates it.
        ended: Whether the model has sampled the end of the document.
        state: Streaming state of the model after `read` tokens, or None before any.
    """

    ids: list[int]
    prompt: str = ""
    read: int = 0
    step: int = 0
    ended: bool = False
    state: Any = field(default=None, repr=False)

    def bytes(self, tokenizer: Tokenizer) -> bytes:
        """Return the text as UTF-8 bytes, without the BOS token. The last character may be incomplete."""
        return tokenizer.decode_bytes(self.ids[1:])

    def append(self, tokenizer: Tokenizer, prompt: str) -> None:
        """Append the tokens of `prompt`, for the model to read next. If any are added, an ended document continues."""
        new_ids = [int(i) for i in tokenizer.encode_ordinary(prompt)]
        self.ids += new_ids
        self.ended = self.ended and not new_ids

    def without_state(self, step: int) -> Text:
        """Return the text without its state, so that the checkpoint at `step` reads it from the start."""
        return Text(self.ids, self.prompt, step=step, ended=self.ended)

    def append_token(self, token: int, tokenizer: Tokenizer) -> bool:
        """Append a sampled token, or end the document at a BOS. Returns whether the document continues."""
        self.ended = token == tokenizer.bos_id
        if not self.ended:
            self.ids.append(token)
        return not self.ended


def begin_text(tokenizer: Tokenizer, prompt: str, step: int = 0) -> Text:
    """Return a new document that begins with a prompt."""
    text = Text([tokenizer.bos_id], prompt, step=step)
    text.append(tokenizer, prompt)
    return text


def save_text(text: Text, path: Path, *, is_writer: bool = True) -> None:
    """Write a text and its state atomically.

    All processes must call this, because it gathers the state. Only processes with `is_writer` write the file.
    """
    from jax.experimental.multihost_utils import process_allgather

    metadata = {name: getattr(text, name) for name in _METADATA_FIELDS}
    leaves = [np.asarray(process_allgather(leaf, tiled=True)) for leaf in jax.tree.leaves(text.state)]
    if not is_writer:
        return
    arrays = {str(i): leaf.view(_stored_dtype(leaf.dtype)) for i, leaf in enumerate(leaves)}
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **{_METADATA_KEY: np.array(json.dumps(metadata)), **arrays})
    with disk_errors(path):
        path.parent.mkdir(exist_ok=True)
    write_atomic(path, content.getvalue())


def load_text(path: Path, template: Any) -> Text:
    """Load a text. `template` is a streaming state of the same model, or its shapes and dtypes.

    Omits a state with other dtypes, from a run with another precision, so that the model reads the text again. Raises
    ValueError if the file is damaged or from another model.
    """
    try:
        with path.open("rb") as opened_file, np.load(opened_file) as file:
            metadata = json.loads(str(file[_METADATA_KEY]))
            arrays = [file[str(i)] for i in range(len(file.files) - 1)]
        text = Text(**{name: metadata[name] for name in _METADATA_FIELDS})
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is damaged ({error}). Delete it to start the text over.") from error
    if not text.read:  # saved before any token was read
        return text
    leaves, structure = jax.tree.flatten(template)
    if len(leaves) != len(arrays) or any(a.ndim != b.ndim for a, b in zip(arrays, leaves, strict=True)):
        raise ValueError(f"{path} was written by another model. Delete it to start the text over.")
    if any(a.dtype != _stored_dtype(b.dtype) for a, b in zip(arrays, leaves, strict=True)):
        return text.without_state(text.step)
    text.state = jax.tree.unflatten(structure, [a.view(b.dtype) for a, b in zip(arrays, leaves, strict=True)])
    return text


def pad_state(state: Any, template: Any) -> Any:
    """Pad every array of a state with zeros at the end, to its shape in `template`, a state for longer sequences.

    This is correct for KV caches: they are filled from the start, and a cache overwrites old entries only if it has
    the size of its window, which does not grow.
    """

    def grow(small: Any, large: Any) -> Any:
        if small.shape == large.shape:
            return small
        return np.pad(np.asarray(small), [(0, b - a) for a, b in zip(small.shape, large.shape, strict=True)])

    return jax.tree.map(grow, state, template)


def _stored_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype as which `save_text` stores arrays: unsigned integers for an extension dtype such as bfloat16.

    `np.savez` does not keep extension dtypes. Other dtypes are stored unchanged.
    """
    return dtype if dtype.isbuiltin == 1 else np.dtype(f"u{dtype.itemsize}")  # 2: an extension dtype
