"""Chooses which layouts of a program to compile first: by estimate, or without estimates by how they differ."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Never

from valkyrie.parallel.slice import Slice
from valkyrie.search.compile.lowered import capture_program, is_cached
from valkyrie.search.compile.partitioner import ProgramEstimate, estimate_programs
from valkyrie.search.compile.predict import PredictedProgram, lower_on_mesh, option_texts
from valkyrie.search.compile.prediction import CompileStatus
from valkyrie.units import count_text

if TYPE_CHECKING:
    from valkyrie.search.programs import ProgramCall

RIVAL_RATIO = 1.3
"""An estimated layout may be faster than the best compiled one if its estimate is below this multiple of that step.

Compiled steps took 0.77 to 1.66 times their estimate for 36 layouts of four programs (experiments/foreign/ranking.py).
"""
MIN_ESTIMATE_S = 4.0
"""Minimum time limit of the estimates, in seconds. The process that estimates starts in about two."""


@dataclass
class ProgramLayout:
    """A mesh and a rule to build a program for.

    Args:
        name: Name of the layout.
        axes: Sizes of the mesh axes by name.
        rule: Name of the rule, or None.
        build: Returns the call, or raises the error of the function that builds it.
        device_bytes: Bytes of the call's arguments on each device. Infinite if it is not built yet, or if
            building or counting failed.
        is_cached: Whether the compile cache has its program. False if it is not lowered yet.
    """

    name: str
    axes: Mapping[str, int]
    rule: str | None
    build: Callable[[], ProgramCall]
    device_bytes: float = math.inf
    is_cached: bool = False

    @property
    def mesh(self) -> tuple[tuple[str, int], ...]:
        """The axes, as a key."""
        return tuple(self.axes.items())

    def build_once(self) -> None:
        """Call `build`, keep its result or error for the next call, and set `device_bytes`."""
        try:
            call = self.build()
        except (Exception, SystemExit) as error:
            self.build = functools.partial(_raise, error)
            return
        self.build = lambda: call
        with contextlib.suppress(Exception):  # such as a mesh that does not divide an argument: lowering reports it
            self.device_bytes = count_device_bytes(call)


def _raise(error: BaseException) -> Never:
    raise error


def count_device_bytes(call: ProgramCall) -> int:
    """Return the bytes of a call's arguments on each device. Arguments without a sharding count as replicated."""
    import jax

    arrays = [
        a for a in jax.tree.leaves((call.arguments, call.keywords)) if hasattr(a, "shape") and hasattr(a, "dtype")
    ]
    shapes = [(getattr(array, "sharding", None), array.shape, array.dtype.itemsize) for array in arrays]
    return sum(
        math.prod(shape if sharding is None else sharding.shard_shape(shape)) * itemsize
        for sharding, shape, itemsize in shapes
    )


def estimate_layouts(
    layouts: Sequence[ProgramLayout], target: Slice, time_limit_s: float, progress: Callable[[str], None]
) -> dict[str, ProgramEstimate]:
    """Lower and estimate layouts. Returns their estimates by name, without layouts that raise errors.

    Sets `is_cached` of the layouts.
    Programs with Python callbacks are not estimated. No lowering begins after half of `time_limit_s`. The estimates
    stop after all of it, but take `MIN_ESTIMATE_S` if lowering leaves less.
    """
    from valkyrie.search.compile.executable import device_positions

    programs, estimates, start_s = {}, {}, time.monotonic()
    for number, layout in enumerate(layouts, 1):
        if time.monotonic() - start_s > time_limit_s / 2:
            estimates[layout.name] = ProgramEstimate(reason="lowering the programs took too long")
            continue
        progress(f"lowering {number} of {len(layouts)}: {layout.name}")
        with contextlib.suppress(Exception, SystemExit):  # the compile of this layout reports the error
            call = layout.build()
            assert not isinstance(call.mesh, Mapping)
            lowered, _, mesh = lower_on_mesh(call.function, call.arguments, call.keywords, target, call.mesh)
            if lowered is not None and (program := capture_program(lowered, {})) is not None:
                programs[layout.name] = program, dict(mesh.shape), device_positions(mesh)
                texts = option_texts(call.options or {}, target)
                program_to_compile = capture_program(lowered, texts) if texts else program
                layout.is_cached = program_to_compile is not None and is_cached(program_to_compile, mesh, target)
    if not programs:
        return estimates
    remaining_s = None
    if not math.isinf(time_limit_s):
        remaining_s = max(start_s + time_limit_s - time.monotonic(), MIN_ESTIMATE_S)
    return estimates | estimate_programs(
        programs, target, remaining_s, lambda count: progress(f"estimating: {count} of {len(programs)} layouts")
    )


def describe_missing(estimates: Mapping[str, ProgramEstimate]) -> str:
    """Return why layouts have no estimate, and how they are compiled, or an empty string if all have one."""
    reasons = [estimate.reason for estimate in estimates.values() if estimate.reason is not None]
    if not reasons:
        return ""
    if len(reasons) == len(estimates):
        return f"no layout has an estimate, so those that differ most are compiled first: {reasons[0]}"
    return f"{count_text(len(reasons), 'layout')} compiled last for lack of an estimate: {reasons[0]}"


@dataclass
class CompileOrder:
    """Chooses the layout to compile next.

    Args:
        untried: Layouts that are not compiled.
        estimates: Estimates by name of the layout.
        predicted: Predictions of compiled layouts by name.
    """

    untried: list[ProgramLayout]
    estimates: Mapping[str, ProgramEstimate]
    tried: list[ProgramLayout] = field(default_factory=list)
    predicted: dict[str, PredictedProgram] = field(default_factory=dict)

    def pop(self) -> ProgramLayout:
        """Remove and return the layout to compile next.

        This is one in the cache, which costs nothing, or else the one with the shortest estimate (see `_expected_s`),
        if possible one that may fit. Among layouts without an estimate, it is the one with the fewest tried layouts of
        its mesh and of its rule, and among these the one with the fewest bytes of arguments per device, because layouts
        that shard more rarely repeat work and more often fit.
        """
        not_fitting = [name for name, p in self.predicted.items() if p.prediction.status is CompileStatus.does_not_fit]
        peak_limit = min(
            (self.estimates[name].peak for name in not_fitting if name in self.estimates), default=math.inf
        )
        meshes, rules = Counter(layout.mesh for layout in self.tried), Counter(layout.rule for layout in self.tried)

        def sort_key(layout: ProgramLayout) -> tuple[float, ...]:
            estimate = self.estimates.get(layout.name)
            if estimate is not None and estimate.reason is None:
                return 0, estimate.is_too_large or estimate.peak >= peak_limit, self._expected_s(layout, estimate)
            return 1, meshes[layout.mesh] + rules[layout.rule], layout.device_bytes

        layout = min(self.untried, key=lambda layout: (not layout.is_cached, sort_key(layout)))
        self.untried.remove(layout)
        return layout

    def _expected_s(self, layout: ProgramLayout, estimate: ProgramEstimate) -> float:
        """Return the estimate, corrected by compiled layouts that have as many bytes of arguments on each device.

        Estimates of such layouts, for example fully sharded ones, are off in the same direction. Without the
        correction, a search compiles all of them before a layout that is estimated to be slightly slower.
        """
        ratios = [
            step.step_s / self.estimates[other.name].step_s
            for other in self.tried
            if other.device_bytes == layout.device_bytes
            and (step := self.predicted[other.name].prediction.step) is not None
            and self.estimates.get(other.name, ProgramEstimate()).step_s
        ]
        return estimate.step_s * (statistics.median(ratios) if ratios else 1.0)

    def pop_equal(self, name: str) -> list[tuple[ProgramLayout, PredictedProgram]]:
        """Remove and return the untried layouts with the program of a compiled one, with its prediction for each."""
        program, equal_names = self.predicted[name].prediction.program, find_equal_names(self.estimates, name)
        layouts = [layout for layout in self.untried if program is not None and layout.name in equal_names]
        self.untried = [layout for layout in self.untried if layout not in layouts]
        return [(layout, self._rename(self.predicted[name], name, layout)) for layout in layouts]

    def _rename(self, predicted: PredictedProgram, name: str, layout: ProgramLayout) -> PredictedProgram:
        program = predicted.prediction.program
        assert program is not None
        renamed = replace(program, name=program.name.replace(name, layout.name), axes=dict(layout.axes))
        return replace(predicted, prediction=replace(predicted.prediction, program=renamed))

    def add(self, layout: ProgramLayout, predicted: PredictedProgram) -> None:
        """Add the prediction of a compiled layout."""
        self.tried.append(layout)
        self.predicted[layout.name] = predicted


def count_compiled(compiled: Collection[str], names: Collection[str], estimates: Mapping[str, ProgramEstimate]) -> str:
    """Return how many of the layouts `names` are compiled, such as `2 of 6 layouts`.

    If several layouts are the same program, returns `2 of 4 distinct programs (3 of 6 layouts)`.
    """
    layouts = f"{len(compiled)} of {count_text(len(names), 'layout')}"
    program_count = count_programs(names, estimates)
    if program_count == len(names):
        return layouts
    return f"{count_programs(compiled, estimates)} of {count_text(program_count, 'distinct program')} ({layouts})"


def count_programs(names: Collection[str], estimates: Mapping[str, ProgramEstimate]) -> int:
    """Return the number of distinct programs of layouts. Those without an estimate count as distinct."""
    return len({(name in estimates and estimates[name].program) or name for name in names})


def find_equal_names(estimates: Mapping[str, ProgramEstimate], name: str) -> list[str]:
    """Return the names of other layouts with the same program, because an axis that differs has size 1."""
    program = estimates[name].program if name in estimates else ""
    return [other for other, estimate in estimates.items() if program and other != name and estimate.program == program]


def describe_estimates(
    estimates: Mapping[str, ProgramEstimate], uncompiled: Sequence[str], best: str | None, best_s: float | None
) -> list[str]:
    """Return lines about layouts that are only estimated, and about those that are the same program.

    Layouts with the program of a compiled one are not among the first, because they take the same time. Of others with
    the same program, only the first is.

    Args:
        estimates: Estimates of all layouts.
        uncompiled: Names of the estimated layouts that are not compiled, the fastest first.
        best: Name of the best compiled layout, or None.
        best_s: Its predicted step time in seconds, or None.
    """
    compiled_programs = {estimates[name].program for name in estimates if name not in uncompiled}
    uncompiled = [name for name in uncompiled if estimates[name].program not in compiled_programs]
    first_names = dict[str, str]()
    for name in uncompiled:
        first_names.setdefault(estimates[name].program or name, name)
    large = [name for name in first_names.values() if estimates[name].is_too_large]
    fitting, lines = [name for name in first_names.values() if name not in large], list[str]()
    if fitting and best is not None and best_s is not None:
        rivals = [name for name in fitting if estimates[name].step_s < RIVAL_RATIO * best_s]
        lines.append(
            f"only estimated, and may be faster than {best}: {', '.join(rivals)}. Before you decide, repeat the "
            "same call to compile them"
            if rivals
            else f"the layouts that are only estimated are probably slower than {best}"
        )
    if large:
        lines.append(f"estimated to need too much memory: {', '.join(large)}")
    equal_names = {tuple(sorted([name, *find_equal_names(estimates, name)])) for name in estimates}
    return lines + [f"the same program: {', '.join(names)}" for names in sorted(equal_names) if len(names) > 1]
