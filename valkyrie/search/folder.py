"""Manages the folder of a search: its path, whether it belongs to this search, and the stored answer.

`refuse_other_folder` and `refuse_other_search` check the folder of a search of another program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from valkyrie.checksums import digest
from valkyrie.config.modes import ANSWER_FILE
from valkyrie.paths import disk_errors, write_atomic
from valkyrie.processes.locks import write_lock
from valkyrie.records import RecordError, read_record, write_record
from valkyrie.runs.folder import RUN_FILE
from valkyrie.search.answer_record import MeasureReport, SearchAnswer
from valkyrie.search.comparison import PAGE_FILE, SEARCH_FILE
from valkyrie.search.request import SearchRequest
from valkyrie.sweep.trial import MULTIRUN_FILE, TRIALS_FILE, refuse_other_files
from valkyrie.units import count_text

LOCK_FILE = ".search"
"""File in the folder of a search that a running search has locked. NFS cannot lock a folder itself."""
COMMANDS_FILE = "commands.txt"
"""File in the folder of a search with the commands that compile and train each of its best layouts."""


def search_folder(request: SearchRequest) -> Path:
    """Return the folder of a search. Without `name=`, it is named after the model, first slice and `request_digest`."""
    config = request.run.config
    name = config.name or f"search-{request.run.model.name}-{request.targets[0].name}-{request_digest(request)}"
    return Path(config.runs) / name


def request_digest(request: SearchRequest) -> str:
    """Return a short digest of the slices and settings of a search.

    Settings of the mode (`mode.*`, `budget=`, `tokens=`, `budget_usd=`) do not change the digest, except those that
    change which layouts are searched (`device_batch=`, `batch=auto`, `mode.vary`).
    """
    config = request.run.config
    slices = [(target.name, target.slices) for target in request.targets]
    request_fields = [request.arguments, slices, repr(request.run.model), asdict(config.precision), config.device_batch]
    request_fields += [
        config.batch,
        config.seq,
        request.microbatches,
        *(
            [request.device_batches, request.search_batch]
            if request.search_batch or request.mode.device_batches
            else []
        ),
        *([request.mode.vary] if request.mode.vary else []),
        request.mesh,
        request.partitions,
        request.remats,
        config.remat,
    ]
    return digest(repr(request_fields))[:8]


@contextlib.contextmanager
def lock_folder(folder: Path, request: SearchRequest) -> Iterator[None]:
    """Create the folder of a search, and keep other searches out of it. Removes it at the end if nothing was written.

    Raises ValueError if it is a file, if another search is running in it, if it belongs to another command or search,
    if it contains files of the user, or if it has an answer that cannot be read. Raises DiskError if it cannot be
    created.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, but the search needs this folder. Use another name=.")
    if folder.exists():  # first without the lock, so that a refused folder stays as it is
        _refuse_other_owner(folder, request)
    with contextlib.ExitStack() as stack:
        with disk_errors(folder):
            stack.enter_context(write_lock(folder, file_name=LOCK_FILE))
        stack.callback(_remove_if_empty, folder)
        _refuse_other_owner(folder, request)  # another search may have ended in the meantime
        yield


def _refuse_other_owner(folder: Path, request: SearchRequest) -> None:
    """Raise ValueError if a folder belongs to the user, another command or search, or has an unreadable answer."""
    name = request.run.config.name
    if (folder / RUN_FILE).exists():
        key = "" if name is None else f"name={name}: "
        raise ValueError(f"{key}{folder} is the run folder of another command, with a {RUN_FILE}. Use another name=.")
    earlier_answer = _read_earlier_answer(folder)
    if earlier_answer is not None and earlier_answer.question is None:
        raise ValueError(f"{folder / ANSWER_FILE} was not written by mode=search. Delete it, or use another name=.")
    if earlier_answer is None:
        refuse_other_files(folder, "name", name)
    if name is not None and earlier_answer is not None and earlier_answer.question != request_digest(request):
        command = " ".join(earlier_answer.command)
        raise ValueError(
            f"name={name}: {folder / ANSWER_FILE} belongs to another search: {command}. Use another name=."
        )


def _remove_if_empty(folder: Path) -> None:
    """Remove the folder of a search if it contains nothing but the lock file."""
    with contextlib.suppress(OSError):
        if [path.name for path in folder.iterdir()] == [LOCK_FILE]:
            (folder / LOCK_FILE).unlink()
            folder.rmdir()


def save_answer(folder: Path, answer: SearchAnswer) -> list[str]:
    """Write `search.json` and `commands.txt`, and return lines to print with their paths.

    `commands.txt` has the commands that compile and train each of the best layouts.

    Does not replace an earlier answer that has measured layouts if the new one has none, or that has compiled layouts
    if the new one has none. The line then gives this reason.
    """
    file, earlier_answer = folder / ANSWER_FILE, _read_earlier_answer(folder)
    if earlier_answer is not None:
        for stage, before, now in (
            ("measured", _measured_count(earlier_answer), _measured_count(answer)),
            ("compiled", earlier_answer.compiled, answer.compiled),
        ):
            if before and not now:
                layouts = count_text(before, f"{stage} layout")
                return [
                    f"answer: not saved, because {file} has {layouts} of the same search and this answer has none. "
                    "To save both, use another name="
                ]
    write_record(file, answer)
    blocks = []
    for place, row in enumerate(answer.best, start=1):
        commands = [command for command in (row.compile, row.train) if command]
        blocks.append("\n".join([f"# {place}: {' '.join(row.overrides)}, {row.stage.adjective}", *commands]) + "\n")
    commands_file = write_atomic(folder / COMMANDS_FILE, "\n".join(blocks), "another name=")
    return [f"commands that compile and train each row: {commands_file}", f"answer: {file}"]


@dataclass(frozen=True)
class _EarlierAnswer:
    """Fields of an earlier `search.json` that decide if a new search may replace it. All versions of it have them."""

    command: list[str] = field(default_factory=list)
    question: str | None = None
    compiled: int = 0
    measured: MeasureReport = field(default_factory=MeasureReport)


def _measured_count(answer: SearchAnswer | _EarlierAnswer) -> int:
    return len([layout for layout in answer.measured.layouts if layout.step_s is not None])


def _read_earlier_answer(folder: Path) -> _EarlierAnswer | None:
    file = folder / ANSWER_FILE
    try:
        return read_record(_EarlierAnswer, file)
    except FileNotFoundError:
        return None
    except (OSError, RecordError) as error:
        raise ValueError(f"{file} cannot be read ({error}). Delete it, or use another name=.") from error


def refuse_other_folder(folder: Path) -> None:
    """Raise ValueError if a comparison must not be saved into a folder.

    This is the case if the folder belongs to a run, a sweep or a search of layouts, or if it has a `search.json` or
    `report.html` that is not from `valkyrie.search`.
    """
    from valkyrie.report.records import is_program_search

    file, page, remedy = folder / SEARCH_FILE, folder / PAGE_FILE, "Use another folder=."
    for name, kind in ((RUN_FILE, "run"), (MULTIRUN_FILE, "sweep"), (TRIALS_FILE, "sweep or a search of layouts")):
        if (folder / name).exists():
            raise ValueError(f"folder={folder} is the folder of a {kind} ({name}). {remedy}")
    if file.exists() and not is_program_search(folder):
        raise ValueError(f"folder={folder}: {file} was not written by valkyrie.search. {remedy}")
    if page.exists() and not file.exists():
        raise ValueError(f"folder={folder}: {page} was not written by valkyrie.search. {remedy}")


@dataclass(frozen=True)
class _EarlierRow:
    name: str = ""


@dataclass(frozen=True)
class _EarlierSearch:
    """Fields of an earlier `search.json` that a new search compares with its own."""

    target: str = ""
    rows: tuple[_EarlierRow, ...] = ()


def refuse_other_search(folder: Path, target: str, layouts: Collection[str]) -> None:
    """Raise ValueError if the `search.json` of a folder is for another slice, or has rows that are not in `layouts`.

    A search replaces the file, so these rows would be lost.
    """
    file = folder / SEARCH_FILE
    if not file.exists():
        return
    earlier = read_record(_EarlierSearch, file)
    if earlier.rows and earlier.target != target:
        raise ValueError(f"folder={folder}: {file} is for {earlier.target}, not {target}. Use another folder=.")
    if other := next((row.name for row in earlier.rows if row.name not in layouts), None):
        raise ValueError(
            f"folder={folder}: {file} has {other}, a layout that this search does not try. The file may be from an "
            "earlier version with other names of layouts. Use another folder=."
        )
