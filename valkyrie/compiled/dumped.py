"""Reads dumped modules, as HLO text or as a proto, and rejects those that cannot be replayed.

XLA writes these files with `--xla_dump_to`: `*after_optimizations.txt` or, with `--xla_dump_hlo_as_proto`,
`*after_optimizations.hlo.pb`, which also has the buffer assignment, and thus the memory of the program. The text of
`compiled.as_text()` works as well.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from valkyrie.compiled.flops import product_flops
from valkyrie.compiled.groups import permute_pairs, replica_groups
from valkyrie.compiled.hlo import HBM, Instruction, Module, parse_module
from valkyrie.compiled.memory import ProgramMemory
from valkyrie.compiled.schema import dump_class

HOW_TO_DUMP = (
    "Run the program with XLA_FLAGS='--xla_dump_to=FOLDER --xla_dump_hlo_as_proto' and take "
    "FOLDER/*after_optimizations.hlo.pb, or save compiled.as_text()"
)
"""Advice in error messages: how to dump the scheduled module of a JAX program."""
MAX_FILE_BYTES = 2 * 2**30
"""Maximum size of a file in bytes. Protos are limited to 2 GiB; the HLO text of a large model has a few hundred MiB."""
_REPLICAS_PATTERN = re.compile(r"replica_count=(\d+)")
_PARTITIONS_PATTERN = re.compile(r"num_partitions=(\d+)")
_ENTRY_PATTERN = re.compile(r"^\s*ENTRY\b", re.MULTILINE)
_ROOT_PATTERN = re.compile(r"^\s*ROOT\b", re.MULTILINE)
_GPU_TARGETS = ("__cublas", "__cudnn", "__triton", "__gpu", "cu_", "xla.gpu")
_GPU_CONFIGS = (b'"operation_queue_id"', b'"fusion_backend_config"')
"""Keys of XLA:GPU's settings of an operation. Every operation on a queue of a GPU has the first of them."""
_GPU_NAME_PATTERN = re.compile(r"(?:^|\.)(sm_\d+\.\d+|gfx\w+?)[a-z]?_gpu_")
"""Matches XLA's name of the GPU in names of dumps, such as `m.jit_step.sm_9.0_gpu_after_optimizations.txt`."""
_CMEM_SPACE = 3
"""ID of the memory space CMEM, which only v4 chips have."""
_LARGE_PRODUCT_FLOPS = 1e9
"""Minimum FLOPs of the matrix products that are compared with a chip's peak."""


@dataclass(frozen=True)
class DumpedModule:
    """A compiled HLO module read from an XLA dump.

    Args:
        module: The parsed module.
        platform: Name of the platform that the module was compiled for, `tpu` or `gpu`.
        gpu_name: XLA's name of the GPU in the name of the file, such as `sm_9.0` (compute capability 9.0) or `gfx950`
            (AMD), or None if it has none.
        device_count: Number of devices that the module was compiled for, or None if unknown.
        memory: Memory of the program, or None if unknown.
        argument_bytes: Bytes of the arguments in HBM on one device, including padding.
    """

    module: Module
    platform: str
    gpu_name: str | None
    device_count: int | None
    memory: ProgramMemory | None
    argument_bytes: int


def read_dumped_module(path: Path) -> DumpedModule:
    """Read a scheduled module for TPUs or GPUs from a file. Raises ValueError with one line for anything else."""
    if not path.exists():
        raise ValueError(f"{path} does not exist.")
    if path.is_dir():
        raise ValueError(f"{path} is a folder. Use one of the *after_optimizations.txt or .hlo.pb files in it.")
    if (size := path.stat().st_size) > MAX_FILE_BYTES:
        raise ValueError(f"{path} is too large for a module ({size / 2**30:.1f} GiB). {HOW_TO_DUMP}.")
    content = path.read_bytes()
    if not content.strip():
        raise ValueError(f"{path} is empty. {HOW_TO_DUMP}.")
    if content.startswith(b"ML\xefR") or content.lstrip().startswith((b"module @", b"module attributes", b"#loc")):
        raise ValueError(f"{path} is StableHLO, the program before compilation. {HOW_TO_DUMP}.")
    if content.startswith(b"\x1f\x8b"):
        raise ValueError(f"{path} is compressed with gzip. Decompress it with gunzip.")
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError(f"{path} is UTF-16 text. Convert it to UTF-8: iconv -f UTF-16 -t UTF-8 {path}.")
    text = content.removeprefix(codecs.BOM_UTF8).lstrip()
    if text.startswith(b"HloModule"):
        module, devices, memory = _read_text(path, text.decode(errors="replace"))
    else:
        module, devices, memory = _read_proto(path, content)
    platform, gpu_name = _find_platform(path, module), _GPU_NAME_PATTERN.search(path.name)
    argument_bytes = sum(p.shape.padded_bytes for p in module.entry.parameters.values() if _is_in_hbm(p))
    return DumpedModule(module, platform, gpu_name and gpu_name[1], devices, memory, argument_bytes)


def refuse_other_chip(module: Module, chip: str, has_megacore: bool, flops_per_cycle: float, name: str) -> None:
    """Raise ValueError if a module was clearly compiled for another chip.

    Modules do not name their chip. Evidence for another chip is an operation split over two cores on a chip with one
    core per device (or the reverse), the use of CMEM on a chip other than v4, or a matrix product that would run
    faster than the chip's peak.

    Args:
        module: The module.
        chip: Name of the chip.
        has_megacore: Whether a device of the chip consists of two TensorCores.
        flops_per_cycle: Peak FLOPs of a device per cycle.
        name: Name of the module, for the message.
    """
    instructions = [i for i in module.instructions.values() if i.cycles is not None]
    product_rates = [
        (product_flops(i) / i.cycles, i) for i in instructions if i.cycles and product_flops(i) >= _LARGE_PRODUCT_FLOPS
    ]
    is_split = any(b'"megacore_config"' in i.message.backend_config for i in instructions)
    uses_cmem = any(leaf.memory_space == _CMEM_SPACE for i in module.instructions.values() for leaf in i.shape.leaves)
    evidence = None
    if uses_cmem and chip != "v4":
        evidence = "it uses arrays in CMEM, which only v4 chips have"
    elif is_split and not has_megacore:
        evidence = "its operations are split over two cores, as on v4 and v5p"
    elif product_rates and has_megacore and not is_split:
        evidence = f"its matrix products run on one core, but on {chip} they are split over the two cores of a chip"
    elif product_rates and (fastest := max(product_rates, key=lambda pair: pair[0]))[0] > 1.1 * flops_per_cycle:
        rate_ratio = fastest[0] / flops_per_cycle
        evidence = f"{fastest[1].name} would run at {rate_ratio:.1f} times the peak of {chip}"
    if evidence:
        raise ValueError(f"{name} was not compiled for {chip}: {evidence}. Use the slice that it was compiled for.")


def fastest_product_rate(module: Module, flops_per_cycle: float) -> float | None:
    """Return the rate of the fastest large matrix product as a share of peak, or None if there is no large product.

    Rates use the compiler's estimates of cycles. `flops_per_cycle` is the peak of a device.
    """
    flops_and_cycles = [(product_flops(i), i.cycles) for i in module.instructions.values() if i.cycles]
    rates = [flops / cycles for flops, cycles in flops_and_cycles if flops >= _LARGE_PRODUCT_FLOPS]
    return max(rates) / flops_per_cycle if rates else None


def _read_text(path: Path, text: str) -> tuple[Module, int | None, ProgramMemory | None]:
    first_line = text.partition("\n")[0]
    if (replicas := _REPLICAS_PATTERN.search(first_line)) and int(replicas[1]) > 1:
        raise ValueError(_replicas_message(path, int(replicas[1])))
    entry = _ENTRY_PATTERN.search(text)
    if entry is None:  # XLA's parser would use the last computation instead
        raise ValueError(f"{path} is incomplete: it has no ENTRY computation. {HOW_TO_DUMP}.")
    if _ROOT_PATTERN.search(text, entry.end()) is None:  # XLA's parser would use the last instruction instead
        raise ValueError(f"{path} is incomplete: its ENTRY computation has no ROOT. {HOW_TO_DUMP}.")
    try:
        module = parse_module(text)
    except Exception as error:  # XLA's parser raises several types
        raise ValueError(f"{path} is not HLO text, or is incomplete{_parser_detail(error)}. {HOW_TO_DUMP}.") from None
    partitions = _PARTITIONS_PATTERN.search(first_line)
    return module, int(partitions[1]) if partitions else 1, None


def _parser_detail(error: Exception) -> str:
    """Return the first informative line of a parser's error as `: line`, or an empty string if there is none."""
    lines = [line.strip() for line in str(error).splitlines()]
    detail = next((line for line in lines if line and not line.endswith(":")), "")
    return f": {detail[:200].rstrip('.')}" if detail else ""


def _read_proto(path: Path, content: bytes) -> tuple[Module, int | None, ProgramMemory | None]:
    memory = None
    try:
        message = dump_class().FromString(content)
        if message.module.computations:
            memory = _program_memory(message.memory.allocations)
            content = message.module.SerializeToString()
    except DecodeError:
        pass  # not a HloProto: try a HloModuleProto next
    try:
        module = parse_module(content)
    except (DecodeError, KeyError, IndexError, ValueError):
        raise ValueError(
            f"{path} cannot be read as HLO text or as a complete HloProto or HloModuleProto. {HOW_TO_DUMP}."
        ) from None
    if module.replica_count > 1:
        raise ValueError(_replicas_message(path, module.replica_count))
    if module.assigned_device_count is None:
        groups = (group for i in module.instructions.values() for group in _device_groups(i) if group.size)
        module.num_partitions = max((int(group.max()) + 1 for group in groups), default=1)
    return module, module.assigned_device_count, memory


def _replicas_message(path: Path, replicas: int) -> str:
    return f"{path} was compiled for {replicas} replicas (jax.pmap). Use jax.jit over a mesh of devices instead."


def _program_memory(allocations: Sequence[Any]) -> ProgramMemory | None:
    """Sum the buffers in HBM, like `memory_analysis`, or return None if there are none.

    Outputs that reuse arguments count as arguments.
    """
    sizes: dict[str, int] = dict.fromkeys(("arguments", "outputs", "temporary"), 0)
    buffers = [
        allocation for allocation in allocations if allocation.memory_space == HBM and not allocation.thread_local
    ]
    for buffer in buffers:
        kind = "arguments" if buffer.argument else "outputs" if buffer.output else "temporary"
        sizes[kind] += buffer.size
    return ProgramMemory(**sizes, aliased=0, code=0, peak=sum(sizes.values())) if buffers else None


def _is_in_hbm(instruction: Instruction) -> bool:
    return all(leaf.memory_space == HBM for leaf in instruction.shape.leaves)


def _device_groups(instruction: Instruction) -> Iterator[np.ndarray]:
    message = instruction.message
    group_fields = (message.iota_groups.size, message.device_list.iota.size, message.replica_groups)
    if instruction.opcode.startswith("collective-permute"):
        yield permute_pairs(instruction)
    elif message.HasField("mesh_groups") or any(group_fields) or message.device_list.replica_groups:
        yield from replica_groups(instruction, 1)


def _find_platform(path: Path, module: Module) -> str:
    """Return the platform that a module was compiled for: `tpu` or `gpu`.

    Raises ValueError for a module that is not scheduled, or was compiled for another platform.
    """
    if not module.is_scheduled:
        raise ValueError(f"{path} is not scheduled: it is the program before optimisation. {HOW_TO_DUMP}.")
    instructions = module.instructions.values()
    for i in instructions:
        is_gpu_call = i.opcode == "custom-call" and i.custom_call_target.startswith(_GPU_TARGETS)
        if is_gpu_call or any(key in i.message.backend_config for key in _GPU_CONFIGS):
            return "gpu"
    if any(i.cycles is not None or any(leaf.tile for leaf in i.shape.leaves) for i in instructions):
        return "tpu"
    raise ValueError(
        f"{path} was compiled for neither a TPU nor a GPU: its arrays have no tiles, and its operations have neither "
        "cost estimates nor XLA's settings for GPUs. Compile it for a slice of TPUs or GPUs, which needs no device."
    )
