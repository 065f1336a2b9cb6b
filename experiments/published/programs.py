"""Digests of a row's program and replay. Results stay valid if sources change but these digests do not."""

from __future__ import annotations

import hashlib
import os
from typing import Any

from valkyrie.config.run import Run
from valkyrie.hardware.target import build_topology
from valkyrie.paths import source_digest

FIGURES = ("name", "peak_tflops", "hbm_gib", "usable_hbm_gib", "hbm_gbs", "clock_ghz", "devices", "ici_axes")
FIGURES += ("ici_link_gbs", "hop_us", "host_bounds", "dcn_gbs_per_host")
"""Names of the fields of `ChipConfig` that the replay reads."""


def program_of(run: Run) -> str:
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
        digest = hashlib.sha256(program.lower_step().as_text().encode())
    finally:
        jax.config.update("jax_traceback_in_locations_limit", limit)
    digest.update(repr(sorted(map(repr, program.options))).encode())
    return digest.hexdigest()[:32]


def replay_of(run: Run) -> str:
    """Return a digest of all that a run's replay depends on: source code, topology, and the settings in `FIGURES`."""
    chip = run.config.target.chip
    figures = [getattr(chip, name) for name in FIGURES]
    text = repr([source_digest("compiled", "machine"), build_topology(run.config.target), figures])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def still_of(result: dict[str, Any], made_by: str, libtpu: str, run: Run) -> bool:
    """Return whether a stored result is still valid for `made_by`, the key of the current sources and settings.

    If the keys differ, it is valid if libtpu, the replay and the lowered program are the same.
    """
    if result.get("made_by") == made_by:
        return True
    replay = made_by.rpartition(" ")[2]
    known = result.get("program") is not None and result["libtpu"] == libtpu
    return known and result["made_by"].rpartition(" ")[2] == replay and result["program"] == program_of(run)
