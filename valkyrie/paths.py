"""Decides where the configuration that ships with the package lies, how it is read without Hydra, where caches are.

And how a file is written that others may be reading.
"""

from __future__ import annotations

import os
import threading
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
    """Write a file in one piece, text as UTF-8: readers see the one before or this one. Return its path."""
    body = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():  # a device or a pipe: nothing can take its place
        path.write_bytes(body)
        return path
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
    try:
        partial.write_bytes(body)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def read_group(group: str, schema: type[Schema]) -> list[tuple[Schema, list[str]]]:
    """Return every config of a group, by file name, as its dataclass, with the names in its defaults list."""
    from omegaconf import DictConfig, OmegaConf

    found = []
    for path in sorted((conf_dir() / group).glob("*.yaml")):
        values = OmegaConf.load(path)
        assert isinstance(values, DictConfig), path
        bases = [str(base) for base in values.pop("defaults", [])]
        value = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), values))
        assert isinstance(value, schema), path
        found.append((value, bases))
    return found
