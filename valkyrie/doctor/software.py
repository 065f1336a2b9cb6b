"""Whether the packages that a run is made of fit together. Imports none of them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from valkyrie.config.run import Run
from valkyrie.doctor.findings import FAILS, FINE, Finding
from valkyrie.hardware.platforms import platform_of

_SHOWN = ("jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint")
_WHO = ("valkyrie-jax", "jax")
"""The packages whose demands are looked at."""


def versions_fit(run: Run) -> Finding:
    """Return whether the installed versions are those that Valkyrie and JAX ask for, and whether one is missing."""
    wrong = list(dict.fromkeys(_wrong()))
    platform = platform_of(run.config.target.platform)
    if platform.plugins and not any(map(_installed, platform.plugins)):
        wrong.append(f"{platform.plugins[0]} is not installed, without which JAX finds no {platform.name.upper()}")
    shown = ", ".join(f"{name} {found}" for name in _SHOWN if (found := _installed(name)))
    if wrong:
        extra = "" if platform.extra is None else f" --extra {platform.extra}"
        return Finding("versions", FAILS, f"{'; '.join(wrong)} (here: {shown})", f"Install what fits: uv sync{extra}")
    return Finding("versions", FINE, shown)


def _wrong() -> Iterator[str]:
    """Yield each demand that an installed package does not meet; extras count where what they ask for is installed."""
    for who in _WHO:
        if _installed(who) is None:
            yield f"{who} is not installed"
            continue
        for line in requires(who) or []:
            wanted = Requirement(line)
            optional = wanted.marker is not None and "extra" in str(wanted.marker)
            if not optional and wanted.marker is not None and not wanted.marker.evaluate():
                continue
            if optional and not _is_plugin(wanted.name):
                continue
            found = _installed(wanted.name)
            if found is None and not optional:
                yield f"{wanted.name} is not installed, and {who} needs it"
            if found is not None and not wanted.specifier.contains(found, prereleases=True):
                yield f"{wanted.name} {found} is not {wanted.specifier}, as {who} {_installed(who)} needs it"


def _is_plugin(name: str) -> bool:
    """Return whether a package is how JAX reaches a chip: an extra asks for it, and its version matters."""
    return name == "libtpu" or (name.startswith("jax-") and name.endswith(("-plugin", "-pjrt")))


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
