"""Where the shipped configuration lies, how it is read without Hydra, where caches are, how files are written."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar

Schema = TypeVar("Schema")


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
    """
    body = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():  # a device or a pipe: nothing can take its place
        path.write_bytes(body)
        return path
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


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


def read_config(group: str, name: str, schema: type[Schema]) -> Schema:
    """Return a config of a group as its dataclass, without what its defaults list adds to the schema."""
    from omegaconf import DictConfig, OmegaConf

    path = conf_dir() / group / f"{name}.yaml"
    values = OmegaConf.load(path)
    assert isinstance(values, DictConfig), path
    values.pop("defaults", None)
    value = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), values))
    assert isinstance(value, schema), path
    return value


def read_group(group: str, schema: type[Schema]) -> list[Schema]:
    """Return every config of a group as its dataclass, by file name."""
    return [read_config(group, name, schema) for name in config_names(group)]
