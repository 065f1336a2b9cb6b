"""Decides where the configuration that ships with the package lies: in the wheel, or in the checkout beside it."""

from __future__ import annotations

from pathlib import Path


def conf_dir() -> Path:
    """Return the folder of config groups: `valkyrie/_conf` in an installed wheel, `conf/` in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "_conf"
    return installed if installed.is_dir() else package.parent / "conf"
