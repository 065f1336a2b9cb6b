"""Where the shipped configuration lies, how it is read without Hydra, where caches are, how files are written."""

from __future__ import annotations

import hashlib
import os
import threading
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


@cache
def source_digest(*names: str) -> str:
    """Return a digest of the source of modules and folders: of this package (`run.py`, `models`), or by full path."""
    digest = hashlib.sha256()
    for name in names:
        path = Path(__file__).resolve().parent / name
        for file in sorted([*path.glob("*.py"), *path.glob("*/*.py")]) if path.is_dir() else [path]:
            digest.update(f"{name}/{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()


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
