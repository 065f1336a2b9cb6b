"""Where the shipped configuration lies, how it is read without Hydra, where caches are, how files are written."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from valkyrie.problems import first_line

Schema = TypeVar("Schema")

_FULL = {errno.ENOSPC, errno.EDQUOT}
_PROBE = 4 * 2**20
"""Bytes that a cache must have room for: a compiled step is one to ten MiB."""


class DiskError(OSError):
    """A file or folder that could not be written: the message has its path and what to do."""


def conf_dir() -> Path:
    """Return the folder of config groups: `valkyrie/_conf` in an installed wheel, `conf/` in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "_conf"
    return installed if installed.is_dir() else package.parent / "conf"


def cache_root() -> Path:
    """Return the folder of everything kept between runs: `VALKYRIE_CACHE`, else `~/.cache/valkyrie`."""
    return Path(os.environ.get("VALKYRIE_CACHE", "~/.cache/valkyrie")).expanduser()


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write a file in one piece, text as UTF-8, and return its path.

    Readers see the file before or this one, also after a kill, on a full disk, or when the machine goes down.
    DiskError where it cannot be written.
    """
    body = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():  # a device or a pipe: nothing can take its place
        path.write_bytes(body)
        return path
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
    try:
        with writing(path), partial.open("wb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        with writing(path):
            partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    return path


@contextlib.contextmanager
def writing(path: Path, elsewhere: str | None = None) -> Iterator[None]:
    """Around what writes a file or folder: DiskError with its path and the remedy, in place of the system's error.

    `elsewhere` is the setting that chooses another place; by default that of caches for a path in them, else `runs`.
    """
    try:
        yield
    except DiskError:
        raise
    except OSError as error:
        elsewhere = elsewhere or ("VALKYRIE_CACHE=DIR" if path.is_relative_to(cache_root()) else "runs=DIR")
        remedy = f"{'Free some room there, or write' if is_full(error) else 'Write'} elsewhere with {elsewhere}."
        raise DiskError(f"{path} cannot be written ({why(error)}). {remedy}") from error


def publish_folder(partial: Path, final: Path) -> None:
    """Give a complete folder its name, unless another process published one of that name first."""
    try:
        partial.rename(final)
    except OSError:
        if not final.is_dir() or not any(final.iterdir()):
            raise


def is_full(error: BaseException) -> bool:
    """Return whether an error says that a disk or a quota is full, as the system or a library words it."""
    number = error.errno if isinstance(error, OSError) else None
    return number in _FULL or os.strerror(errno.ENOSPC) in str(error)


def why(error: BaseException) -> str:
    """Return what an error about a file says in one short line: `no space left on device`."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    if is_full(error):
        return os.strerror(errno.ENOSPC).lower()
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def cache_trouble(folder: Path, elsewhere: str = "VALKYRIE_CACHE=DIR") -> str | None:
    """Return why a folder cannot serve as a cache, which needs room for a few files; None where it can."""
    try:
        with writing(folder, elsewhere):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(bytes(_PROBE))
    except DiskError as error:
        return str(error)
    return None


def source_digest(*names: str) -> str:
    """Return a digest of the source of modules and folders: of this package (`run.py`, `models`), or by full path.

    A folder counts with all folders in it from which Python can import. Files outside the package are read every time:
    a notebook's user edits them while it runs.
    """
    package = Path(__file__).resolve().parent
    digest = hashlib.sha256()
    for name in names:
        path = package / name
        read = _digest_of_package if path.is_relative_to(package) else _digest_of
        digest.update(f"{name}\0{read(path)}\0".encode())
    return digest.hexdigest()


def _digest_of(path: Path) -> str:
    """Return a digest of a module, or of a folder's modules with their places in it."""
    digest = hashlib.sha256()
    for file in sorted(_modules_in(path, set())) if path.is_dir() else [path]:
        digest.update(f"{file.relative_to(path)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


_digest_of_package = cache(_digest_of)


def _modules_in(folder: Path, entered: set[Path]) -> Iterator[Path]:
    """Yield the modules of a folder and of those in it; links are followed, each folder entered once."""
    entered.add(folder.resolve())
    for path in sorted(folder.iterdir()):
        if path.suffix == ".py" and path.is_file():
            yield path
        elif path.name.isidentifier() and path.is_dir() and path.resolve() not in entered:
            yield from _modules_in(path, entered)


def config_names(group: str) -> list[str]:
    """Return the names of the configs of a group that ship with the package, in order."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def config_files(group: str) -> dict[str, Path]:
    """Return the YAMLs of a config group by name: those of the user's folders on `sys.path`, then the package's."""
    folders = [Path(entry) for entry in reversed(sys.path) if entry]
    return {path.stem: path for folder in (*folders, conf_dir()) for path in sorted((folder / group).glob("*.yaml"))}


def defaults_of(path: Path) -> list[Any]:
    """Return the defaults list of a YAML: names, and one-key mappings of groups. ValueError if it is no YAML."""
    import yaml

    try:
        values = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {first_line(error)}.") from None
    return list(values.get("defaults") or []) if isinstance(values, dict) else []


def read_config(group: str, name: str, schema: type[Schema]) -> Schema:
    """Return a config of a group as its dataclass, without what its defaults list adds to the schema."""
    from omegaconf import DictConfig, OmegaConf

    path = conf_dir() / group / f"{name}.yaml"
    path = path if path.is_file() else config_files(group)[name]
    values = OmegaConf.load(path)
    assert isinstance(values, DictConfig), path
    values.pop("defaults", None)
    value = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), values))
    assert isinstance(value, schema), path
    return value


def read_group(group: str, schema: type[Schema]) -> list[Schema]:
    """Return every config of a group as its dataclass, by file name."""
    return [read_config(group, name, schema) for name in config_names(group)]


def unused(folder: Path) -> Path:
    """Return a folder that does not exist yet: this one, or the first of FOLDER-2, FOLDER-3, ..."""
    candidate, number = folder, 2
    while candidate.exists():
        candidate, number = folder.with_name(f"{folder.name}-{number}"), number + 1
    return candidate
