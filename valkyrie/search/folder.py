"""The folder of a search: where it lies, whether it is this search's, and the answer that is kept in it."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from valkyrie.paths import write_whole, writing
from valkyrie.runs.folder import RUN
from valkyrie.search.question import Question

ANSWER = "search.json"


def folder_of(question: Question) -> Path:
    """Return the folder of a search: its name, or one that the same question finds again."""
    config = question.run.config
    name = config.name or f"search-{question.run.model.name}-{question.targets[0].name}-{digest_of(question)}"
    return Path(config.runs) / name


def digest_of(question: Question) -> str:
    """Return a name for what is asked, however long and how much of it is compiled and measured."""
    config = question.run.config
    slices = [(target.name, target.slices) for target in question.targets]
    asked = [question.command, slices, repr(question.run.model), asdict(config.precision), config.device_batch]
    asked += [config.batch, config.seq, question.microbatches, question.partitions, question.remats, config.remat]
    return hashlib.sha256(repr(asked).encode()).hexdigest()[:8]


def begin(folder: Path, question: Question) -> None:
    """Make the folder; ValueError where it is a file or holds something else, DiskError where it cannot be made."""
    name = question.run.config.name
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"name={name}: {folder} is a file. Use another name=.")
    if (folder / RUN).exists():
        raise ValueError(f"name={name}: {folder} is the run folder of another command ({RUN}). Use another name=.")
    earlier = _earlier(folder)
    if name is not None and earlier is not None and earlier.get("question") != digest_of(question):
        command = " ".join(earlier.get("command", []))
        raise ValueError(f"name={name}: {folder / ANSWER} answers another search, {command}. Use another name=.")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)


def leave(folder: Path) -> None:
    """Remove the folder where nothing was written into it."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def keep(folder: Path, question: Question, answer: dict[str, Any]) -> str:
    """Write the answer, but not over an earlier one that knows more; return in a line where it is, or why it is not."""
    file, earlier = folder / ANSWER, _earlier(folder) or {}
    for stage, count in (("measured", _measured), ("compiled", _compiled)):
        if count(earlier) and not count(answer):
            return (
                f"answer: not kept, for {file} is of the same search with {count(earlier)} {stage}, and this one has "
                "none. To keep both, use another name="
            )
    write_whole(file, json.dumps(answer | {"question": digest_of(question)}, indent=1) + "\n")
    return f"answer: {file}"


def _measured(answer: dict[str, Any]) -> int:
    return len([one for one in answer.get("measured", {}).get("layouts", []) if one["step_s"] is not None])


def _compiled(answer: dict[str, Any]) -> int:
    return answer.get("compiled", 0)


def _earlier(folder: Path) -> dict[str, Any] | None:
    """Return the answer that a folder has; None where it has none."""
    file = folder / ANSWER
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read ({error}). Delete it, or use another name=.") from error
