"""Estimates programs without the compiler of their target: XLA partitions them on this machine's CPU.

`python -m valkyrie.search.compile.partitioner FOLDER PARENT` is the child process. It runs only the passes of XLA's CPU
compiler that partition and simplify a program, for as many simulated devices as the slice has, and replays the
partitioned module on the slice. Products take the time at peak FLOP/s or, if that is longer, the time to move their
bytes. The time of other operations is corrected (`MOVING_SHARE`), because the compiler for the target fuses more.
"""

from __future__ import annotations

import importlib
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from valkyrie.checksums import digest
from valkyrie.compiled.collectives import collective_kind
from valkyrie.compiled.flops import product_flops
from valkyrie.compiled.hbm import map_users
from valkyrie.compiled.hlo import Computation, Instruction, Module, parse_module
from valkyrie.compiled.schema import dump_class
from valkyrie.foreign_errors import first_lines
from valkyrie.hardware.platforms import get_platform
from valkyrie.hardware.position import Position
from valkyrie.hardware.target import TargetConfig, usable_hbm
from valkyrie.parts import PartKind, sum_seconds
from valkyrie.paths import write_atomic
from valkyrie.processes.child import ChildProcess, die_with_parent, module_command
from valkyrie.records import read_record, write_record
from valkyrie.search.compile.lowered import (
    DUMP_FOLDER,
    OPTIONS_FILE,
    REQUEST_FILE,
    STABLEHLO_FILE,
    LoweredProgram,
    plain_target,
)
from valkyrie.search.compile.prediction import CompileStatus
from valkyrie.search.compile.replayed import correct_replay, replay_on
from valkyrie.search.compile.runner import run_compiler

if TYPE_CHECKING:
    from collections.abc import Callable

PASSES = (
    "shardy-xla",
    "sharding-propagation",
    "spmd-partitioning",
    "call-inliner",
    "dce",
    "cse",
    "algsimp",
    "tuple-simplifier",
    "fusion",
)
"""Passes of XLA's CPU compiler (jaxlib 0.10) that partition a program, remove repeated work and fuse operations."""
ESTIMATE_FILE = "estimate.json"
"""File with the `ProgramEstimate`, which the child process writes."""
PARTITION_LIMIT_S = 60.0
"""Time limit for partitioning a program, in seconds. Most take less than one."""
MOVING_SHARE = 0.6
"""Time of operations other than products, kernels and collectives in a compiled step, as a share of their time in the
partitioned module. It was 0.34 to 1.08 for 16 layouts of two programs on v5e, with a median of 0.62 (LOG.md)."""
PEAK_RATIO = 2.2
"""Maximum ratio of an estimate's buffers to the peak memory of the compiled program. It was 0.6 to 2.2 (LOG.md)."""
_MOVING_OPCODES = {"bitcast", "convert", "copy", "get-tuple-element", "opt-barrier", "reshape", "transpose", "tuple"}
"""Operations that pass on their operands in another form."""
_LAST_DUMP = "*memory-usage-report*"
"""File that XLA writes after the partitioned module. It would generate code next, which is not needed."""


@dataclass(frozen=True)
class EstimateRequest:
    """Contents of `request.json`.

    Args:
        target: The slice.
        axes: Names and sizes of the axes of the program's mesh, in order.
        positions: Positions of its devices, in the order of `mesh.devices.flat`.
        overrides: Compiler options of the program.
    """

    target: TargetConfig
    axes: dict[str, int]
    positions: tuple[Position, ...]
    overrides: dict[str, str | int | float | bool]


@dataclass(frozen=True)
class ProgramEstimate:
    """Estimate of a program, or the reason why there is none.

    Args:
        axes: Names and sizes of the axes of the program's mesh, in order.
        step_s: Estimated seconds per step.
        waiting_s: Seconds of waiting for communication.
        peak: Bytes of all buffers of a device.
        is_too_large: Whether the program probably does not fit.
        program: Digest of the partitioned program, its compiler options and the positions of its devices. Equal
            programs share it.
        reason: Why the program was not estimated, or None. The other fields are then not set.
    """

    axes: dict[str, int] = field(default_factory=dict)
    step_s: float = 0.0
    waiting_s: float = 0.0
    peak: int = 0
    is_too_large: bool = False
    program: str = ""
    reason: str | None = None


def estimate_programs(
    programs: Mapping[str, tuple[LoweredProgram, Mapping[str, int], Sequence[Position]]],
    target: TargetConfig,
    time_limit_s: float | None,
    progress: Callable[[int], None],
) -> dict[str, ProgramEstimate]:
    """Estimate programs on a slice, in a child process.

    Args:
        programs: Maps the name of each program to the lowered program, the names and sizes of the axes of its mesh,
            and the positions of the mesh's devices.
        target: The slice.
        time_limit_s: Time limit for all programs in seconds, or None for no limit.
        progress: Called about five times a second with the number of programs that are finished.
    """
    root = Path(tempfile.mkdtemp(prefix="valkyrie-estimate-"))
    try:
        folders = {name: root / f"{number:05}" for number, name in enumerate(programs)}
        for name, (program, axes, positions) in programs.items():
            folder = folders[name]
            folder.mkdir()
            write_atomic(folder / STABLEHLO_FILE, program.stablehlo)
            write_atomic(folder / OPTIONS_FILE, program.options)
            request = EstimateRequest(plain_target(target), dict(axes), tuple(positions), program.overrides)
            write_record(folder / REQUEST_FILE, request)
        command = module_command("valkyrie.search.compile.partitioner", str(root), str(os.getpid()))
        flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith("--xla_dump")]
        files = {name: folder / ESTIMATE_FILE for name, folder in folders.items()}
        failure = run_compiler(
            ChildProcess(command, {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}, root / "log"),
            get_platform(target.platform),
            time_limit_s,
            "time_limit_s",
            lambda elapsed: progress(sum(file.is_file() for file in files.values())),
            lambda: all(file.is_file() for file in files.values()),
        )
        reason = None if failure is None else failure.reason
        if failure is not None and failure.status is CompileStatus.timeout:
            reason = f"estimating took longer than {time_limit_s:.0f} s"
        missing = ProgramEstimate(reason=reason)
        return {name: read_record(ProgramEstimate, file) if file.is_file() else missing for name, file in files.items()}
    finally:
        shutil.rmtree(root, ignore_errors=True)


def main() -> None:
    """Estimate the programs in the subfolders of the folder given by the first argument.

    The second argument is the id of the parent process. If that process ends, removes the folder.
    """
    root, parent = Path(sys.argv[1]), int(sys.argv[2])
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        estimate = estimate_program(folder, parent)
        if os.getppid() != parent:
            break
        write_record(folder / ESTIMATE_FILE, estimate)
    if os.getppid() != parent:
        shutil.rmtree(root, ignore_errors=True)


def estimate_program(folder: Path, parent: int) -> ProgramEstimate:
    """Partition and replay the program whose files are in a folder. Stops partitioning if the parent process ends."""
    request = read_record(EstimateRequest, folder / REQUEST_FILE)
    devices = len(request.positions)
    try:
        _partition_in_fork(folder, devices, parent)
        files = sorted((folder / DUMP_FOLDER).rglob("*after_optimizations.hlo.pb"))
        if not files:
            return ProgramEstimate(reason=(folder / "error").read_text())
        dump = dump_class().FromString(files[-1].read_bytes())
        module = parse_module(dump.module.SerializeToString())
        module.num_partitions = devices
        schedule_communication(module)
        replay = correct_replay(replay_on(request.target, module, request.axes, request.positions), request.target)
    except Exception as error:  # the replay raises errors of many types for programs that are not of its platform
        return ProgramEstimate(reason=f"{type(error).__name__}: {first_lines(str(error))}")
    moving_s = sum_seconds(replay.parts, PartKind.compute, PartKind.memory)
    peak = sum(buffer.size for buffer in dump.memory.allocations if not buffer.thread_local)
    return ProgramEstimate(
        request.axes,
        float(replay.step_s) - (1 - MOVING_SHARE) * moving_s,
        sum_seconds(replay.parts, PartKind.exposed),
        peak,
        peak > PEAK_RATIO * (usable_hbm(request.target.chip) or math.inf),
        digest([_fingerprint(dump.module.SerializeToString()), list(map(str, request.positions)), request.overrides]),
    )


def _partition_in_fork(folder: Path, devices: int, parent: int) -> None:
    """Partition a program in a copy of this process, which XLA may abort, and end it once the module is written.

    Also ends it if the process `parent` ends. Raises RuntimeError if XLA aborts or exceeds `PARTITION_LIMIT_S` before
    it writes the module.
    """
    for module in ("jax._src.compiler", "jax._src.interpreters.mlir"):
        importlib.import_module(module)  # once, before the copies of this process are made
    sys.stdout.flush()
    here = os.getpid()
    process = os.fork()
    if not process:
        try:
            die_with_parent(here)
            partition(folder, devices)
        except Exception as error:  # also of code generation, for lack of the other passes
            write_atomic(folder / "error", f"{type(error).__name__}: {first_lines(str(error))}")
        finally:
            os._exit(0)
    deadline = time.monotonic() + PARTITION_LIMIT_S
    while not (ended := os.waitpid(process, os.WNOHANG))[0]:
        is_done = [*(folder / DUMP_FOLDER).rglob(_LAST_DUMP)] or os.getppid() != parent
        if is_done or time.monotonic() > deadline:
            os.kill(process, signal.SIGKILL)
            ended = os.waitpid(process, 0)
            break
        time.sleep(0.01)
    if not [*(folder / DUMP_FOLDER).rglob(_LAST_DUMP)] and not (folder / "error").is_file():
        timed_out = time.monotonic() > deadline
        raise RuntimeError(f"XLA's partitioner {'took too long' if timed_out else f'ended with status {ended[1]}'}")


def partition(folder: Path, devices: int) -> None:
    """Write the partitioned module of the program in a folder to its subfolder `DUMP_FOLDER`, as XLA's `HloProto`."""
    import numpy as np
    from jax._src.compiler import get_compile_options
    from jax._src.interpreters import mlir
    from jaxlib import xla_client
    from jaxlib.mlir import ir

    client = xla_client.make_cpu_client(num_devices=devices)
    given = xla_client.CompileOptions.ParseFromString((folder / OPTIONS_FILE).read_bytes()).executable_build_options
    options = get_compile_options(1, devices, device_assignment=np.arange(devices).reshape(1, devices))
    for name in (
        "use_shardy_partitioner",
        "allow_spmd_sharding_propagation_to_parameters",
        "allow_spmd_sharding_propagation_to_output",
    ):
        setattr(options.executable_build_options, name, getattr(given, name))
    settings = {"xla_dump_to": str(folder / DUMP_FOLDER), "xla_dump_hlo_as_proto": True}
    options.env_option_overrides = list((settings | {"xla_enable_hlo_passes_only": ",".join(PASSES)}).items())
    with mlir.make_ir_context():
        module = ir.Module.parse((folder / STABLEHLO_FILE).read_bytes())
        client.compile_and_load(module, xla_client.DeviceList(tuple(client.devices())), options)


def schedule_communication(module: Module) -> None:
    """Change the collectives of a partitioned module as the compilers of TPUs and GPUs do.

    - An all-gather of values that are known at the start of a computation, such as weights, runs while the operations
      before its first use do: it starts where the wait for the one before it ends.
    - An all-reduce of which each device uses only its part becomes a reduce-scatter.
    - Of several all-reduces with results that are only added, such as gradients of tied weights, one remains.
    """
    for computation in module.computations:
        if not any(collective_kind(i.opcode) for i in computation.instructions):
            continue
        users, known, sums = map_users(computation), set[Instruction](), set[frozenset[Instruction]]()
        for i in computation.instructions:
            if i.opcode == "all-reduce":
                uses = _find_uses(i, users)
                opcodes = {use.opcode for use in uses}
                if opcodes == {"add"} and uses in sums:
                    i.opcode = "bitcast"  # takes no time
                elif opcodes == {"dynamic-slice"}:
                    i.opcode = "reduce-scatter"
                sums.add(uses)
            is_moving = i.opcode in {*_MOVING_OPCODES, "fusion", "slice", "dynamic-slice"} and not product_flops(i)
            if i.opcode in ("parameter", "constant") or is_moving and all(o in known for o in i.operands):
                known.add(i)
        _start_early(computation, users, known)


def _start_early(
    computation: Computation, users: Mapping[Instruction, list[Instruction]], known: Collection[Instruction]
) -> None:
    """Split all-gathers of `known` values into a start and a wait, which is placed before the first use."""
    order = {i: number for number, i in enumerate(computation.instructions)}
    gathers = {
        i: min(order[user] for user in users[i])
        for i in computation.instructions
        if i.opcode == "all-gather" and i in users and all(o in known for o in i.operands)
    }
    if not gathers:
        return
    inserted: dict[int, list[Instruction]] = {}
    start_at = 0
    for gather, first_use in sorted(gathers.items(), key=lambda item: item[1]):
        start = replace(gather, opcode="all-gather-start")
        inserted.setdefault(start_at, []).append(start)
        inserted.setdefault(first_use, []).append(replace(gather, opcode="all-gather-done", operands=[start]))
        start_at = first_use
    computation.instructions = [
        instruction
        for number, i in enumerate(computation.instructions)
        for instruction in (*inserted.get(number, []), *([] if i in gathers else [i]))
    ]


def _find_uses(value: Instruction, users: Mapping[Instruction, list[Instruction]]) -> frozenset[Instruction]:
    """Return the operations that use a value, also in fusions, without those that pass it on in another form."""
    uses = set[Instruction]()
    for user in users.get(value, []):
        if user.opcode == "fusion":
            body = user.called_computations[0]
            for number, operand in enumerate(user.operands):
                uses |= _find_uses(body.parameters[number], map_users(body)) if operand is value else set()
        else:
            uses |= _find_uses(user, users) if user.opcode in _MOVING_OPCODES else {user}
    return frozenset(uses)


def _fingerprint(module: bytes) -> str:
    """Return the text of a serialised module without names and metadata."""
    hlo = importlib.import_module("jaxlib._hlo")
    options = hlo.HloPrintOptions.fingerprint()
    options.print_backend_config = True  # the code of a kernel
    return hlo.XlaComputation(module).get_hlo_module().to_string(options)


if __name__ == "__main__":
    main()
