"""Digests of a row's program and replay. Results stay valid if sources change but these digests do not."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from typing import Any

import grimp

from valkyrie.config.run import Run
from valkyrie.hardware.target import build_topology
from valkyrie.paths import source_digest

CHIP_FIELDS = ("name", "peak_tflops", "hbm_gib", "usable_hbm_gib", "hbm_gbs", "clock_ghz", "devices", "ici_axes")
CHIP_FIELDS += ("ici_link_gbs", "hop_us", "host_bounds", "dcn_gbs_per_host", "switch_gbs", "host_gbs", "gpu")
"""Names of the fields of `ChipConfig` that the replay reads."""


def program_digest(run: Run) -> str:
    """Return a digest of the compiler's input for a run: the lowered step and the options."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # compiling needs only a description of the chips
    import jax

    from valkyrie.hardware.platforms import get_platform
    from valkyrie.parallel.mesh import build_mesh
    from valkyrie.train.program import StepProgram

    devices = get_platform(run.config.target.platform).devices_to_compile_for(run.config.target, run.config.mesh.size)
    program = StepProgram(run, build_mesh(run.config.mesh, devices), backend=devices[0].platform)
    limit = jax.config.values["jax_traceback_in_locations_limit"]
    jax.config.update("jax_traceback_in_locations_limit", 0)  # otherwise kernels include source paths and lines
    try:
        with get_platform(program.backend).lowering_for(run.config.target.chip):
            digest = hashlib.sha256(program.lower_step().as_text().encode())
    finally:
        jax.config.update("jax_traceback_in_locations_limit", limit)
    digest.update(repr(sorted(map(repr, program.options))).encode())
    return digest.hexdigest()[:32]


def replay_digest(run: Run) -> str:
    """Return a digest of what a replay depends on besides the program: code, topology and chip (`CHIP_FIELDS`)."""
    chip = run.config.target.chip
    values = [getattr(chip, name) for name in CHIP_FIELDS]
    text = repr([source_digest(*_replay_sources()), build_topology(run.config.target), values])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def _replay_sources() -> tuple[str, ...]:
    """Return the modules of `valkyrie.machine`, and those of `valkyrie.compiled` that they import, as paths."""
    graph = grimp.build_graph("valkyrie")
    machine = {name for name in graph.modules if name.startswith("valkyrie.machine.")}
    read = machine.union(*map(graph.find_upstream_modules, machine))
    names = sorted(name for name in read if name.startswith(("valkyrie.machine.", "valkyrie.compiled.")))
    return tuple(name.removeprefix("valkyrie.").replace(".", "/") + ".py" for name in names)


def is_still_valid(result: dict[str, Any], current_key: str, libtpu_version: str, run: Run) -> bool:
    """Return whether a stored result is still valid for `current_key`, the key of the current sources and settings.

    If the keys differ, it is valid if libtpu, the replay and the lowered program are the same.
    """
    if result.get("made_by") == current_key:
        return True
    current_replay = current_key.rpartition(" ")[2]
    same_libtpu = result.get("program") is not None and result["libtpu"] == libtpu_version
    return (
        same_libtpu
        and result["made_by"].rpartition(" ")[2] == current_replay
        and result["program"] == program_digest(run)
    )
