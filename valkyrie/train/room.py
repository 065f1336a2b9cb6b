"""Checks whether a run fits in device memory before its arrays are allocated, and explains out-of-memory errors.

Refuses runs whose parameters, optimizer state and gradients do not fit, warns if the activations may not fit, and
suggests settings that fit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from valkyrie.config.run import Run
from valkyrie.foreign_errors import allocated_bytes, is_out_of_memory
from valkyrie.hardware.platforms import get_platform
from valkyrie.hardware.target import usable_hbm
from valkyrie.host_memory import free_memory
from valkyrie.parallel.mesh import abstract_mesh
from valkyrie.parallel.partition import PartitionConfig
from valkyrie.parallel.remat import load_remat
from valkyrie.paths import config_files, read_config, read_defaults
from valkyrie.train.memory import ExpectedMemory
from valkyrie.train.memory_errors import UNKNOWN_ERROR, MemoryRatios, memory_estimate_errors
from valkyrie.train.run_memory import estimated_memory, expected_memory
from valkyrie.units import GIB, gib_text, memory_text

if TYPE_CHECKING:
    from valkyrie.train.devices import Devices
    from valkyrie.train.program import StepProgram

_CPU_ESTIMATE_FACTOR = 2.0
"""Factor by which simulated devices may exceed the estimate: a step of valkyrie_tiny at seq=4096 took 18 GiB, not 9."""

_SLICE_ADVICE = "To check whether this run fits on a slice, use `mode=compile target=v5p-64`."


class MemoryFit(NamedTuple):
    """Whether a step should fit into the memory of a device, and a sentence that explains it."""

    should_fit: bool
    text: str


class DoesNotFitError(ValueError):
    """The parameters, optimizer state and gradients of a run exceed its devices' memory, or an allocation failed."""


def check_memory_fit(
    program: StepProgram, devices: Devices, *, is_training: bool = True, say: Callable[[str], Any] | None = None
) -> None:
    """Check that a run fits in the memory of its devices. Does nothing if the size of the memory is unknown.

    Raises DoesNotFitError if the parameters, their EMA, the optimizer state and the gradients alone exceed the
    memory, unless `force=true`. Simulated devices share the host's free memory; for them, the error is a plain
    ValueError. Warns if the estimate with activations exceeds the memory, or half of the memory for simulated devices
    (`_CPU_ESTIMATE_FACTOR`).

    Args:
        program: Step program of the run.
        devices: Devices of the run.
        is_training: Whether the run trains. If not, gradients do not count, and there is no warning.
        say: Prints the warning. None for no warning.
    """
    run = program.run
    available_bytes = _available_bytes(devices)
    if available_bytes is None:
        return
    estimate = expected_memory(run, program.abstract_state)
    devices_per_memory = devices.devices_per_memory
    known_bytes, expected_bytes = (
        devices_per_memory * _known_bytes(estimate, is_training),
        devices_per_memory * estimate.total,
    )
    memory_note = _describe_memory(devices, available_bytes)
    if known_bytes > available_bytes and not run.config.force:
        if is_training:
            advice = _suggest_smaller_state(run, available_bytes, devices_per_memory)
        elif devices.simulated:
            advice = "Use a machine with more memory. "
        else:
            advice = "Use a mesh with more devices, or the mesh that the model was trained on. "
        raise (ValueError if devices.simulated else DoesNotFitError)(
            f"{_describe_misfit(run, known_bytes, is_training)}, but {memory_note}. {advice}{_SLICE_ADVICE} force=true "
            "runs it anyway."
        )
    possible_bytes = expected_bytes * (_CPU_ESTIMATE_FACTOR if devices.simulated else 1.0)
    if not is_training or say is None or possible_bytes <= available_bytes:
        return
    activations_text = memory_text(devices_per_memory * estimate.activations)
    needs_text = f"about {memory_text(expected_bytes)}, including {activations_text} of activations"
    if expected_bytes > available_bytes:
        warning = f"likely does not fit in memory: it needs {needs_text} (accurate to a factor of two)"
    else:
        upper_bound = memory_text(int(possible_bytes))
        warning = f"may not fit in memory: it needs {needs_text}, and possibly up to {upper_bound}"
    advice = _suggest_fewer_activations(program, available_bytes, devices_per_memory)
    say(f"This run {warning}, but {memory_note}. {advice}")


def check_target_fit(run: Run) -> MemoryFit | None:
    """Check that a training run fits in the memory of the devices of its target, which this machine need not have.

    Returns None if the size of the memory is unknown. Raises DoesNotFitError if the parameters, their EMA, the
    optimizer state and the gradients alone exceed the memory, unless `force=true`.
    """
    available_bytes, estimate = usable_hbm(run.config.target.chip), estimated_memory(run)
    if available_bytes is None:
        return None
    known_bytes = _known_bytes(estimate, is_training=True)
    if known_bytes > available_bytes and not run.config.force:
        advice = _suggest_smaller_state(run, available_bytes) or "Use a larger target=, or a smaller model=. "
        raise DoesNotFitError(
            f"{_describe_misfit(run, known_bytes)}, but {_device_name(run)} has {gib_text(available_bytes)} usable. "
            f"{advice}force=true overrides this."
        )
    return judge_target_fit(run, estimate)


def judge_target_fit(run: Run, memory: ExpectedMemory[int]) -> MemoryFit | None:
    """Return `judge_fit` for the devices of the run's target, or None if the size of their memory is unknown."""
    chip = run.config.target.chip
    usable_bytes = usable_hbm(chip)
    if chip is None or usable_bytes is None:
        return None
    has_pipeline = run.layout.pipeline is not None
    errors = memory_estimate_errors(has_pipeline) if get_platform(chip.platform).has_estimate_errors else None
    return judge_fit(memory, usable_bytes, _device_name(run), errors)


def _device_name(run: Run) -> str:
    chip = run.config.target.chip
    assert chip is not None
    return f"each {chip.name} {'chip' if chip.devices == 1 else 'device'}"


def judge_fit(
    memory: ExpectedMemory[int], usable_bytes: int, device_name: str, errors: MemoryRatios | None
) -> MemoryFit:
    """Judge whether a step fits into the usable bytes of a device.

    `errors` are those of estimates on the platform, or None if unknown: then a factor of two is assumed.
    """
    ratios = (1 / UNKNOWN_ERROR, UNKNOWN_ERROR) if errors is None else (errors.low, errors.high)
    min_bytes, max_bytes = (max(memory.persistent, ratio * memory.total) for ratio in ratios)
    should_fit = max_bytes <= usable_bytes
    judgement = "does not fit" if min_bytes > usable_bytes else "should fit" if should_fit else "may not fit"
    source = (
        "an error of a factor of 2"
        if errors is None
        else f"its error on {errors.layouts} layouts of {errors.models} models"
    )
    estimate = f"{memory.total / GIB:.1f} GiB ({min_bytes / GIB:.1f} to {max_bytes / GIB:.1f} GiB, given {source})"
    usable_gib = f"{usable_bytes / GIB:.1f} GiB"
    text = f"{judgement}: estimated {estimate}; {device_name} has {usable_gib} usable. To be certain, run mode=compile"
    return MemoryFit(should_fit, text)


@contextlib.contextmanager
def explain_oom(run: Run, devices: Devices) -> Iterator[None]:
    """Turn MemoryError and XLA's out-of-memory errors into DoesNotFitError with suggestions."""
    import jax

    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and not is_out_of_memory(str(error)):
            raise
        size = allocated_bytes(str(error))
        request_note = "" if size is None else f" while allocating {memory_text(size)}"
        available_bytes = _available_bytes(devices)
        memory_note = "" if available_bytes is None else f"; {_describe_memory(devices, available_bytes)}"
        config = run.config
        # Remat and microbatches, which the suggestions for training name, do not change what these modes need.
        setting, remedy = {
            "generate": (f"sample_tokens={config.sample_tokens}", "fewer sample_tokens or a shorter prompt"),
            "code_eval": (f"code_eval.batch={config.code_eval.batch}", "a smaller batch or fewer code_eval.tokens"),
            "eval": (f"batch={config.batch}", "a smaller batch or seq"),
        }.get(config.mode.name, ("", ""))
        if setting:
            raise DoesNotFitError(
                f"{setting}: {run.model.name} ran out of memory{request_note}{memory_note}. Use {remedy}."
            ) from None
        from valkyrie.train.program import StepProgram

        program = StepProgram(run, abstract_mesh(run.config.mesh), backend=devices.platform)
        suggestion = _suggest_fewer_activations(program, available_bytes or 0, devices.devices_per_memory)
        raise DoesNotFitError(
            f"{run.model.name} under {run.layout.name} ran out of memory{request_note}{memory_note}. {suggestion}"
        ) from None


def _available_bytes(devices: Devices) -> int | None:
    """Return the bytes of one device's memory, or of the host's free memory if simulated. None if unknown."""
    if devices.simulated:
        return free_memory()
    stats = devices.devices[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    chip = devices.chip
    return None if chip is None or chip.hbm_gib is None else int(chip.hbm_gib / chip.devices * 2**30)


def _describe_memory(devices: Devices, available_bytes: int) -> str:
    if devices.simulated:
        devices_per_memory = devices.devices_per_memory
        sharing_note = f", which its {devices_per_memory} simulated devices share" if devices_per_memory > 1 else ""
        return f"this machine has {gib_text(available_bytes)} of memory free{sharing_note}"
    return f"a {devices.devices[0].device_kind} has {gib_text(available_bytes)}"


def _known_bytes(estimate: ExpectedMemory[int], is_training: bool) -> int:
    """Return the bytes of arrays with known shapes, including gradients when training."""
    return estimate.persistent + (estimate.gradients if is_training else 0)


def _describe_misfit(run: Run, known_bytes: int, is_training: bool = True) -> str:
    array_kinds = "parameters, optimizer state and gradients" if is_training else "parameters and optimizer state"
    return (
        f"model={run.model.name} mesh={run.config.mesh.name} partition={run.config.partition.name}: {array_kinds} "
        f"alone take {memory_text(known_bytes)}"
    )


def _suggest_smaller_state(run: Run, available_bytes: int, devices_per_memory: int = 1) -> str:
    """Suggest a partition or a model small enough for the memory. Empty if there is none."""

    def run_bytes(other: Run) -> int:
        return devices_per_memory * _known_bytes(estimated_memory(other), is_training=True)

    suggestions, current_bytes = [], run_bytes(run)
    fsdp_run = run.changed(partition=read_config("partition", "fsdp", PartitionConfig))
    if run.config.partition.name != "fsdp" and not fsdp_run.problems() and run_bytes(fsdp_run) <= available_bytes:
        suggestions.append("partition=fsdp")
    largest_count = run.model.parameter_count() * available_bytes / current_bytes
    prefix = run.model.name.split("_")[0]
    fitting_models = [
        (name.startswith(prefix), n, name) for name, n in _family_sizes(run).items() if n <= largest_count
    ]
    if fitting_models:
        suggestions.append(f"model={max(fitting_models)[-1]}")
    return f"Use {' or '.join(suggestions)}. " if suggestions else ""


def _family_sizes(run: Run) -> dict[str, int]:
    """Return the parameter counts of the models of the run's family, by name."""
    schema = f"{run.model.family}_schema"
    names = [name for name, path in sorted(config_files("model").items()) if schema in read_defaults(path)]
    return {name: read_config("model", name, type(run.model)).parameter_count() for name in names}


def _suggest_fewer_activations(program: StepProgram, available_bytes: int, devices_per_memory: int) -> str:
    """Suggest changes to remat, microbatches or batch size. Each of them alone makes the estimate fit."""
    run, config = program.run, program.run.config
    larger_counts = [config.microbatches * 2**n for n in range(1, 8)]
    full_remat = load_remat("full")
    variants = [[("remat=full", run.changed(remat=full_remat))] if config.remat.label != full_remat.name else []]
    variants.append([(f"microbatches={n}", run.changed(microbatches=n)) for n in larger_counts])
    variants.append([(f"batch={config.batch // 2**n}", run.changed(batch=config.batch // 2**n)) for n in range(1, 8)])
    suggestions = []
    for variant in variants:
        for change, other in variant:
            if other.config.batch < 1 or other.problems():
                continue
            if (size := devices_per_memory * expected_memory(other, program.abstract_state).total) <= available_bytes:
                suggestions.append(f"{change} (about {memory_text(size)})")
                break
    advice = f"{', '.join(suggestions)} or a smaller model" if suggestions else "a smaller batch=, seq= or model="
    return f"Use {advice}. {_SLICE_ADVICE}"
