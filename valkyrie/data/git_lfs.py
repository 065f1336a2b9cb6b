"""Recognizes git-lfs pointers, the small text files that git leaves in place of large files it has not downloaded."""

from __future__ import annotations

from pathlib import Path

_FIRST_LINE = b"version https://git-lfs.github.com/spec/v1"


def refuse_git_lfs_pointer(path: Path, content: str) -> None:
    """Raise ValueError if a file is a git-lfs pointer. `content` names what it should hold, such as `the weights`."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_FIRST_LINE)) == _FIRST_LINE
    except OSError:  # the caller reports unreadable files
        return
    if is_pointer:
        raise ValueError(f"{path} is a git-lfs pointer, not {content}. Run `git lfs pull` in the folder it came from.")
