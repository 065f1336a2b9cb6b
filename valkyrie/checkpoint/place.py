"""Location of a run's durable checkpoints: the run folder, or a folder or bucket that all hosts reach.

Like Orbax, this reads and writes buckets through `etils.epath` and TensorStore. `gs://` and `s3://` each need an extra
package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from valkyrie.buckets import package_problems, scheme_of
from valkyrie.paths import write_whole
from valkyrie.problems import Problem, ProblemCode

FOLDER = "checkpoints"
"""The sub-folder of a run folder with its durable checkpoints, one folder per step."""
POINTER = "checkpoints.path"
"""The file with the path of the durable checkpoints, if they are not in the run folder."""
IDENTITY = "id"
"""The file with the run's identity, which its fast checkpoints are matched by. It exists while the run uses the fast
tier."""
_PACKAGES = {"gs": "gcsfs", "s3": "s3fs"}
"""The package that each scheme needs."""


def place_problems(folder: str | None) -> list[Problem]:
    """Return why `checkpoint.folder` cannot be used here, with the package to install."""
    scheme = None if folder is None else scheme_of(folder)
    if scheme is None:
        return []
    if scheme not in _PACKAGES:
        schemes = " or ".join(f"{known}://" for known in _PACKAGES)
        text = f"checkpoint.folder={folder}: {scheme}:// is not known. Use {schemes}, or a folder of a disk."
        return [Problem(ProblemCode.unknown_name, "checkpoint.folder", folder, text)]
    return package_problems("checkpoint.folder", str(folder), scheme, _PACKAGES[scheme])


def in_bucket(path: Any) -> bool:
    """Return whether a path is in a bucket."""
    return scheme_of(str(path)) is not None


def place_of(folder: Path) -> Any:
    """Return the path of a run's durable checkpoints: a `pathlib` path or, in a bucket, an `etils.epath` path.

    ValueError for a bucket that cannot be used here.
    """
    pointer = folder / POINTER
    if not pointer.is_file():
        return folder / FOLDER
    path = pointer.read_text().strip()
    if problems := place_problems(path):
        raise ValueError(f"{folder} has its checkpoints elsewhere. {problems[0]}")
    return path_of(path)


def set_place(folder: Path, under: str | None) -> None:
    """Record in a run folder that its durable checkpoints are in the folder or bucket `under` (None: the run folder).

    ValueError if the run already has checkpoints in another place.
    """
    wanted = None if under is None else str(asked_place(folder, under))
    pointer = folder / POINTER
    now = pointer.read_text().strip() if pointer.is_file() else None
    if now == wanted:
        return
    from valkyrie.checkpoint.steps import steps_in

    if steps_in(place_of(folder)):
        remedy = "checkpoint.folder=null" if now is None else f"checkpoint.folder={now.rpartition('/')[0]}"
        raise ValueError(
            f"checkpoint.folder={under or 'null'}: {folder} has its checkpoints in {place_of(folder)}. "
            f"Use {remedy}, or another name=."
        )
    if wanted is None:
        pointer.unlink()
    else:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(pointer, f"{wanted}\n")


def asked_place(folder: Path, under: str | None) -> Any:
    """Return the path of a run's durable checkpoints in the folder or bucket `under` (None: in the run folder)."""
    return folder / FOLDER if under is None else path_of(under) / folder.name


def path_of(text: str) -> Any:
    """Return a path on a disk or, for a URL, in a bucket."""
    if scheme_of(text) is None:
        return Path(text).expanduser().absolute()
    from etils import epath

    return epath.Path(text)
