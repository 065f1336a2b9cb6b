"""Finds the shipped configuration and the caches, reads configs without Hydra, and writes files safely."""

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
from typing import IO, TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from omegaconf import DictConfig

Schema = TypeVar("Schema")

_DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT}
_PROBE_BYTES = 4 * 2**20
"""Bytes that must be free for a cache. A compiled step takes one to ten MiB."""


class DiskError(OSError):
    """A file or folder could not be written. The message has its path and a remedy."""


def conf_dir() -> Path:
    """Return the folder of config groups: `valkyrie/_conf` in an installed wheel, `conf/` in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "_conf"
    return installed if installed.is_dir() else package.parent / "conf"


def cache_root() -> Path:
    """Return the folder of all caches: `VALKYRIE_CACHE`, or else `~/.cache/valkyrie`.

    Raises ValueError if the variable names a file, or if the path starts with `~` and the user has no home folder.
    """
    env_value = os.environ.get("VALKYRIE_CACHE")
    try:
        path = Path(env_value or "~/.cache/valkyrie").expanduser()
    except RuntimeError:
        raise ValueError("This user has no home folder for caches. Set VALKYRIE_CACHE=DIR, or HOME.") from None
    if path.is_file():
        name, remedy = (f"VALKYRIE_CACHE={path}", ", or unset it") if env_value else (path, "")
        raise ValueError(f"{name} is a file, not a folder for caches. Set VALKYRIE_CACHE=DIR{remedy}.")
    return path


def open_to_append(path: Path) -> IO[bytes]:
    """Open a file, unbuffered, to read it and to append to it. Creates it if missing.

    Raises ValueError for a symbolic link: a run folder from someone else may link to any file of this user.
    """
    try:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.fdopen(os.open(path, flags, 0o666), "a+b", buffering=0)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise ValueError(f"{path} is a symbolic link. Valkyrie does not write through links: delete it.") from None
        raise


def write_atomic(path: Path, content: str | bytes, alternative: str | None = None) -> Path:
    """Write a file atomically, text as UTF-8, and return its path.

    Readers see either the old file or the complete new one, even after a kill, a full disk or a crash of the machine.
    Only devices and pipes are written directly. Raises DiskError if the file cannot be written. The message suggests
    the setting `alternative` (see `disk_errors`).
    """
    body = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():  # a device or a pipe cannot be replaced
        with disk_errors(path, alternative):
            path.write_bytes(body)
        return path
    partial_path = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
    try:
        with disk_errors(path, alternative), partial_path.open("wb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        with disk_errors(path, alternative):
            partial_path.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial_path.unlink(missing_ok=True)
    return path


def require_suffix(path: str | Path, suffix: str, key: str = "") -> Path:
    """Return the path of a file to write.

    Raises ValueError if it does not end in `suffix`, because the user may have passed an input by mistake. Devices
    such as `/dev/stdout` are accepted. `key` precedes the path in the message.
    """
    path = Path(path)
    if path.suffix.lower() != suffix and not (path.is_char_device() or path.is_fifo()):
        raise ValueError(
            f"{key}{path}: the name must end in {suffix}, such as {path.stem.removesuffix(suffix) or 'report'}{suffix}."
        )
    return path


@contextlib.contextmanager
def disk_errors(path: Path, alternative: str | None = None) -> Iterator[None]:
    """Raise an OSError of this context as a DiskError, with the path of the file or folder and a remedy.

    `alternative` is the setting that selects another location, for the remedy. The default is `VALKYRIE_CACHE` for a
    path inside the caches, else `runs`.
    """
    try:
        yield
    except DiskError:
        raise
    except OSError as error:
        alternative = alternative or ("VALKYRIE_CACHE=DIR" if path.is_relative_to(cache_root()) else "runs=DIR")
        remedy = (
            f"{'Free some space there, or write' if is_disk_full(error) else 'Write'} elsewhere with {alternative}."
        )
        raise DiskError(f"{path} cannot be written ({error_reason(error)}). {remedy}") from error


def publish_folder(partial_folder: Path, final_folder: Path) -> None:
    """Rename a complete folder to its final name.

    If another process has already published the final folder, keeps that one and leaves `partial_folder` in place.
    """
    try:
        partial_folder.rename(final_folder)
    except OSError:
        if not final_folder.is_dir() or not any(final_folder.iterdir()):
            raise


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error of the system or of a library means that a disk or a quota is full."""
    number = error.errno if isinstance(error, OSError) else None
    return number in _DISK_FULL_ERRNOS or os.strerror(errno.ENOSPC) in str(error)


def error_reason(error: BaseException) -> str:
    """Return the reason for a file error in one short line, such as `no space left on device`."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    if is_disk_full(error):
        return os.strerror(errno.ENOSPC).lower()
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def cache_problem(folder: Path, alternative: str = "VALKYRIE_CACHE=DIR") -> str | None:
    """Return the reason why a folder cannot be used as a cache, such as too little space, or None if it can.

    Creates the folder if it is missing, and writes a temporary file of `_PROBE_BYTES`.
    """
    try:
        with disk_errors(folder, alternative):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(bytes(_PROBE_BYTES))
    except DiskError as error:
        return str(error)
    return None


def source_digest(*names: str) -> str:
    """Return a digest of the source code in modules and folders, including all importable subfolders.

    Names are relative to this package (`run.py`, `models`) or absolute. Files outside the package are read every time,
    because users edit them while a notebook runs.
    """
    package = Path(__file__).resolve().parent
    hasher = hashlib.sha256()
    for name in names:
        path = package / name
        digest_sources = _digest_package_sources if path.is_relative_to(package) else _digest_sources
        hasher.update(f"{name}\0{digest_sources(path)}\0".encode())
    return hasher.hexdigest()


def _digest_sources(path: Path) -> str:
    """Return a digest of a module, or of a folder's modules and their relative paths."""
    hasher = hashlib.sha256()
    for file in sorted(_iter_modules(path, set())) if path.is_dir() else [path]:
        hasher.update(f"{file.relative_to(path)}\0".encode() + file.read_bytes() + b"\0")
    return hasher.hexdigest()


_digest_package_sources = cache(_digest_sources)


def _iter_modules(folder: Path, visited: set[Path]) -> Iterator[Path]:
    """Yield the modules of a folder and its subfolders. Follows links and visits each folder once."""
    visited.add(folder.resolve())
    for path in sorted(folder.iterdir()):
        if path.suffix == ".py" and path.is_file():
            yield path
        elif path.name.isidentifier() and path.is_dir() and path.resolve() not in visited:
            yield from _iter_modules(path, visited)


def config_names(group: str) -> list[str]:
    """Return the sorted names of the configs of a group that ship with the package."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def config_files(group: str) -> dict[str, Path]:
    """Return the YAMLs of a config group by name, from the package and from the user's folders on `sys.path`.

    For equal names, the package's YAML takes precedence, then the first folder on `sys.path`.
    """
    folders = [Path(entry) for entry in reversed(sys.path) if entry]
    return {path.stem: path for folder in (*folders, conf_dir()) for path in sorted((folder / group).glob("*.yaml"))}


def read_defaults(path: Path) -> list[Any]:
    """Return the defaults list of a YAML. An entry is a name, or a dict that maps a config group to a name.

    Returns an empty list if the YAML has no defaults list or cannot be read. Callers also read YAMLs that the command
    does not use, and Hydra reports the errors of the others.
    """
    import yaml

    try:
        values = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, OSError, UnicodeDecodeError):
        return []
    defaults = values.get("defaults") if isinstance(values, dict) else None
    return defaults if isinstance(defaults, list) else []


def read_config(group: str, name: str, schema: type[Schema]) -> Schema:
    """Read `GROUP/NAME.yaml` as the dataclass `schema`. Of its defaults list, only files of the same folder count.

    A shipped YAML takes precedence over the user's. Raises KeyError if neither exists.
    """
    from omegaconf import OmegaConf

    path = conf_dir() / group / f"{name}.yaml"
    path = path if path.is_file() else config_files(group)[name]
    value = OmegaConf.to_object(_parse_config(path, path.stat().st_mtime_ns, schema))
    assert isinstance(value, schema), path
    return value


@cache
def _parse_config(path: Path, modified_ns: int, schema: type) -> DictConfig:
    """Parse a config. Cached until the file changes, because a search reads every partition for every request."""
    from omegaconf import DictConfig, OmegaConf

    values = OmegaConf.load(path)
    assert isinstance(values, DictConfig), path
    files = (path.with_name(f"{name}.yaml") for name in values.pop("defaults", []))
    bases = [_parse_config(file, file.stat().st_mtime_ns, schema) for file in files if file.is_file()]
    merged = OmegaConf.merge(OmegaConf.structured(schema), *bases, values)
    assert isinstance(merged, DictConfig), path
    return merged


def read_group(group: str, schema: type[Schema]) -> list[Schema]:
    """Return every shipped config of a group as its dataclass, sorted by file name."""
    return [read_config(group, name, schema) for name in config_names(group)]


def unused_path(folder: Path) -> Path:
    """Return the first folder of FOLDER, FOLDER-2, FOLDER-3, ... that does not exist yet."""
    candidate, number = folder, 2
    while candidate.exists():
        candidate, number = folder.with_name(f"{folder.name}-{number}"), number + 1
    return candidate
