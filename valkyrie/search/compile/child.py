"""The child process of a compile: builds the run's step for its target, compiles it, writes the outcome.

`python -m valkyrie.search.compile.child FOLDER PARENT` reads FOLDER/run.yaml and leaves FOLDER/outcome.json, with the
optimised module in FOLDER/module.hlo.pb. A separate process, because the compiler of another chip may abort or never
return. It exits, and removes its folder, when the process PARENT is gone.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valkyrie.config.modes import MODULE, TEXT
from valkyrie.config.run import Run
from valkyrie.foreign_errors import first_lines, is_out_of_memory, parse_out_of_memory, parse_scratch_memory
from valkyrie.hardware.platforms import Platform, platform_of
from valkyrie.hardware.target import topology_of, usable_hbm
from valkyrie.paths import write_whole
from valkyrie.runs.folder import saved_config

if TYPE_CHECKING:
    from valkyrie.train.options import Option

OUTCOME = "outcome.json"
"""The result of a compile in its folder, beside the optimised module."""

KEYS = {
    "ok": ("status", "lower_s", "compile_s", "options", "memory", "parameters", "larger", "device_kind", "placement")
    + ("partitions", "positions", "axes", "module_sha256"),
    "does_not_fit": ("status", "needed", "usable", "largest", "reason", "savings"),
}
"""The keys of the results that are kept in the cache, by their status."""

NEARLY = 1.1
"""Up to this multiple of the memory there is, a program is compiled once more with options that save some."""


def main() -> None:
    """Compile the run in the folder named by the first argument, for the process named by the second."""
    folder, parent = Path(sys.argv[1]), int(sys.argv[2])
    threading.Thread(target=_end_with, args=(parent, folder), daemon=True).start()
    write_whole(folder / OUTCOME, json.dumps(_outcome(folder)))


def _end_with(parent: int, folder: Path) -> None:
    """End this process once its parent is gone: whoever was killed cannot tell the compiler to stop, nor clean up."""
    while os.getppid() == parent:
        time.sleep(1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _outcome(folder: Path) -> dict[str, Any]:
    run = Run.from_config(saved_config(folder))
    try:
        target = run.config.target
        devices = platform_of(target.platform).compile_devices(target, run.config.mesh.size)
    except ValueError as error:
        return {"status": "refused", "reason": str(error)}
    from valkyrie.train.options import OptionRefused

    try:
        return _compile(run, devices, folder)
    except OptionRefused as error:
        return {"status": "refused", "reason": str(error)}
    except Exception as error:  # the compiler raises what it likes; what is not about memory is told as it came
        text = str(error)
        if not is_out_of_memory(text):
            reason = _about_scratch_memory(text) or f"{type(error).__name__}: {first_lines(text)}"
            return {"status": "failed", "reason": reason}
        return _too_large(run, parse_out_of_memory(text))


def _compile(run: Run, devices: list[Any], folder: Path) -> dict[str, Any]:
    from valkyrie.parallel.mesh import build_mesh
    from valkyrie.search.compile.alternatives import fuller_layouts, other_partitions
    from valkyrie.search.compile.executable import compiled_memory, compiled_program
    from valkyrie.train.options import refusals_in_plain_words
    from valkyrie.train.program import StepProgram

    mesh = build_mesh(run.config.mesh, devices)
    program, platform = StepProgram(run, mesh, backend=devices[0].platform), platform_of(devices[0].platform)
    began = time.perf_counter()
    lowered = program.lower_step()
    lowered_at = time.perf_counter()
    with refusals_in_plain_words():
        compiled, options = within_memory(program.options, lowered.compile, platform)
    done_at = time.perf_counter()
    peak = peak_beside_host(compiled, lowered.compile, options, platform)
    built, usable = compiled_program(compiled, mesh, peak), usable_hbm(run.config.target.chip)
    if usable is not None and (needed := built.memory["peak"]) > usable:  # the user's limit is below the compiler's own
        needs, limit = (f"{size / 2**30:.2f} GiB" for size in (needed, usable))
        reason = f"its peak of {needs} exceeds the {limit} of target.chip.usable_hbm_gib"
        return _too_large(run, {"needed": needed, "usable": usable, "largest": [], "reason": reason})
    write_whole(folder / MODULE, built.module)
    if run.config.mode.hlo:
        write_whole(folder / TEXT, compiled.as_text() or "")
    return {
        "status": "ok",
        "lower_s": lowered_at - began,
        "compile_s": done_at - lowered_at,
        "options": [asdict(option) for option in options],
        "memory": compiled_memory(program, compiled, peak),
        "parameters": run.model.parameter_count(),
        "larger": fuller_layouts(run),
        "partitions": other_partitions(run),
        "device_kind": built.device_kind,
        "placement": _placement(run, mesh),
        "positions": built.positions,
        "axes": built.axes,
        "module_sha256": hashlib.sha256(built.module).hexdigest(),
    }


def within_memory(options: list[Option], compile: Callable[..., Any], platform: Platform) -> tuple[Any, list[Option]]:
    """Return what `compile` returns, and the options it took.

    A program that a TPU's compiler refuses by at most a tenth of the memory is compiled once more with the options that
    save some; where these do not help, the first refusal is raised.
    """
    from valkyrie.train.options import with_saving

    try:
        return compile(), options
    except Exception as error:
        found = parse_out_of_memory(str(error))
        needed, usable = found["needed"], found["usable"]
        saving = with_saving(options)
        if (
            platform.memory_limit_option is None
            or saving == options
            or not needed
            or not usable
            or needed > NEARLY * usable
        ):
            raise
        try:
            values = {option.name: option.value for option in saving if option.value is not None}
            return compile(compiler_options=values), saving
        except Exception as again:
            if not is_out_of_memory(str(again)):
                raise
            raise error from None


def peak_beside_host(
    compiled: Any, compile: Callable[..., Any], options: list[Option], platform: Platform
) -> int | None:
    """Return the bytes of a device at the peak of a TPU's program that has arrays in host memory; None for others.

    XLA states the peak of both memories as one. Told that the device has 1 MiB, `compile(compiler_options=...)`
    refuses the program in seconds, with the bytes it needs: within 2% of a whole compile's (experiments/LOG.md).
    """
    sizes, limit = compiled.memory_analysis(), platform.memory_limit_option
    if limit is None or sizes is None or not sizes.host_temp_size_in_bytes:
        return None
    values = {option.name: option.value for option in options if option.value is not None}
    try:
        compile(compiler_options=values | {limit: "1"})
    except Exception as error:
        if is_out_of_memory(str(error)) and (needed := parse_out_of_memory(str(error))["needed"]):
            return min(needed, platform.peak_bytes(sizes))
    return None


def _about_scratch_memory(text: str) -> str | None:
    """Return what a compiler's refusal of a kernel for its scratch memory says, in words; None for other messages."""
    used = parse_scratch_memory(text)
    if used is None:
        return None
    return (
        f"a kernel, {used.kernel or 'that XLA does not name'}, needs {used.needed_mib:g} MiB of the "
        f"{used.limit_mib:g} MiB of scratch memory (VMEM) of a core. "
        "No layout helps: another model.attention.head_dim may, or a larger "
        "target.chip.xla_options.xla_tpu_scoped_vmem_limit_kib."
    )


def _placement(run: Run, mesh: Any) -> list[str]:
    """Return a line for each mesh axis of where it lies on the torus, and how to ask for another placement."""
    if not platform_of(run.config.target.platform).has_torus:
        return []
    from valkyrie.parallel.placement import describe_placement, placement_of, placements

    topology = topology_of(run.config.target)
    lines = [str(axis) for axis in describe_placement(mesh, topology).values() if axis.size > 1]
    chosen, count = placement_of(mesh, topology), len(placements(run.config.mesh.axes, topology))
    if chosen is not None:
        lines.append(f"mesh.placement=[{','.join(chosen)}], one of {count} on this torus")
    return lines


def _too_large(run: Run, found: dict[str, Any]) -> dict[str, Any]:
    """Return the outcome of a program that needs more memory than there is, with the layouts that need less."""
    from valkyrie.search.compile.alternatives import cheaper_layouts

    missing = (found["needed"] or 0) - (found["usable"] or 0)
    return {"status": "does_not_fit", **_with_largest(run, found), "savings": cheaper_layouts(run, missing)}


def _with_largest(run: Run, found: dict[str, Any]) -> dict[str, Any]:
    """Return what a message leaves out, by the shapes of the run: the largest parts of what it needs.

    The bytes that the compiler needs "for HLO temporaries" have the arguments in them (experiments/LOG.md).
    """
    if found["largest"]:
        return found
    from valkyrie.parallel.mesh import abstract_mesh
    from valkyrie.train.memory import expected_memory
    from valkyrie.train.program import StepProgram

    program = StepProgram(run, abstract_mesh(run.config.mesh), backend="cpu")
    expected = expected_memory(run, program.abstract_state)
    resting = expected.parameters + expected.average + expected.optimizer
    temporaries = (found["needed"] or expected.total) - resting
    parts = {
        "parameters": expected.parameters + expected.average,
        "optimizer state": expected.optimizer,
        "gradients": expected.gradients,
        "activations and other temporaries": max(temporaries - expected.gradients, 0),
    }
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return found | {"largest": [{"bytes": size, "shape": name, "op_name": None} for name, size in ordered]}


if __name__ == "__main__":
    main()
