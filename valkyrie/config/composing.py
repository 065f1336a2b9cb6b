"""Lets Hydra compose from the user's config folders and the package's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl  # public ConfigLoaders cannot take another folder
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra

from valkyrie.config.compose import register


@contextmanager
def composing(folders: Sequence[str], primary: str | None = None) -> Iterator[None]:
    """Let Hydra compose from `folders` and then from the package's groups.

    `primary`: the folder of the primary config, or None for the package's. Raises ValueError if one of `folders` is not
    a folder.
    """
    conf = register()
    with _beside_hydra(), initialize_config_dir(primary or str(conf), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        assert isinstance(loader, ConfigLoaderImpl)
        for own in folders:
            if not Path(own).is_dir():
                raise ValueError(f"--config-dir {own} is not a folder.")
            loader.config_search_path.prepend(
                "command-line", f"file://{own}", anchor=SearchPathQuery(provider="schema")
            )
        loader.repository.initialize_sources(loader.config_search_path)
        yield


@contextmanager
def _beside_hydra() -> Iterator[None]:
    """Set aside the running Hydra, so that a run can be composed while a multirun composes its jobs."""
    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = running
