"""Predicts several layouts of any JAX program, and searches over its meshes and sharding rules."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valkyrie.foreign_errors import first_lines, is_compile_only
from valkyrie.parallel.slice import Slice
from valkyrie.problems import describe_value, require_type
from valkyrie.runs.folder import package_versions
from valkyrie.search import FIRST_RESULT_FACTOR
from valkyrie.search.compile.partitioner import ProgramEstimate
from valkyrie.search.compile.predict import (
    PredictedProgram,
    ProgramWork,
    foreign_program,
    is_jitted,
    is_pmapped,
    predict_function,
    require_function,
)
from valkyrie.search.compile.prediction import CompileStatus, Prediction
from valkyrie.search.compile.runner import Progress
from valkyrie.search.program_order import (
    CompileOrder,
    ProgramLayout,
    count_compiled,
    describe_missing,
    estimate_layouts,
)

if TYPE_CHECKING:
    import jax

_CALL_KEYS = ("args", "kwargs", "mesh", "options", "function")
_BUILD_SHARE = 0.2
"""Share of a search's budget after which it builds no more programs before the first compile."""
_ESTIMATE_SHARE = 0.2
"""Share of a search's budget that lowering and estimating its programs may take."""
_MAX_NAMES = 8
"""Maximum number of untried layouts that the note of a search names."""
_RETURNS = "(jitted, arguments) or (jitted, arguments, keywords)"


@dataclass(frozen=True)
class ProgramCall:
    """A function call to predict. The fields are arguments of `valkyrie.predict`."""

    function: Any
    arguments: Sequence[Any] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    mesh: jax.sharding.Mesh | Mapping[str, int] | None = None
    options: Mapping[str, Any] | None = None


def require_mesh(mesh: object, key: str) -> None:
    """Raise TypeError if `mesh` is not a JAX mesh, the sizes of its axes by name, or None. `key` starts the message."""
    import jax

    require_type(
        mesh,
        jax.sharding.Mesh | Mapping | None,
        f'{key} takes sizes by axis name, such as {{"data": 2, "model": 4}}, or a mesh from slice.mesh(...)',
    )


def parse_layouts(function: Any, layouts: Mapping[str, Any], defaults: ProgramCall) -> dict[str, ProgramCall]:
    """Parse `layouts=` of `valkyrie.predict` into a call for each layout. Raises ValueError or TypeError if malformed.

    Args:
        function: Function of layouts that do not set one.
        layouts: Maps the name of each layout to its positional arguments, or to a dict with any of `args`, `kwargs`,
            `mesh`, `options` and `function`.
        defaults: Default mesh and options. Its keywords are merged with those of each layout, which take precedence.
    """
    usage = 'layouts= takes {name: arguments}, such as {"dp": (w, x), "fsdp": (w, x)}'
    require_type(layouts, Mapping, usage)
    if not layouts:
        raise ValueError(f"layouts= is empty. Use {usage.partition(' takes ')[2]}.")
    calls = {}
    for name, value in layouts.items():
        require_type(name, str, "layouts= takes strings as names")
        key = f'layouts["{name}"]'
        if isinstance(value, Mapping):
            if unknown := [str(entry) for entry in value if entry not in _CALL_KEYS]:
                raise ValueError(
                    f"{key} has the unknown key {unknown[0]!r}. Use the keys {', '.join(_CALL_KEYS)}, or pass the "
                    "positional arguments as a tuple: (arguments,)."
                )
            require_type(
                value.get("args", ()), list | tuple, f'{key}["args"] takes the positional arguments as a tuple'
            )
            require_mesh(value.get("mesh"), f'{key}["mesh"]')
            calls[name] = replace(
                defaults,
                function=value.get("function", function),
                arguments=tuple(value.get("args", ())),
                keywords={**defaults.keywords, **value.get("kwargs", {})},
                mesh=value.get("mesh", defaults.mesh),
                options=value.get("options", defaults.options),
            )
        elif isinstance(value, list | tuple):
            calls[name] = replace(defaults, function=function, arguments=tuple(value))
        else:
            raise TypeError(
                f"{key} takes the positional arguments as a tuple, not {type(value).__name__}. Use (arguments,)."
            )
        require_function(calls[name].function, key)
    return calls


def parse_builder_result(value: Any, source: str) -> ProgramCall:
    """Parse the value returned by a function that builds a step: `(jitted, arguments)`, with keywords optional.

    Raises ValueError for other values. `source` is the name of the function in the message.
    """
    if isinstance(value, list | tuple) and len(value) in (2, 3):
        function, arguments, keywords = (*value, {})[:3]
        if isinstance(arguments, list | tuple) and isinstance(keywords, Mapping):
            if is_pmapped(function):
                raise ValueError(f"{source} returns a jax.pmap. Use jax.jit with shardings over slice.mesh(...).")
            if not is_jitted(function):
                actual = describe_value(function)
                raise ValueError(f"{source} must return a jitted function, not {actual}. Use jax.jit(step).")
            return ProgramCall(function, tuple(arguments), keywords)
    actual = type(value).__name__ + (f" with {len(value)} entries" if isinstance(value, list | tuple) else "")
    raise ValueError(
        f"{source} must return {_RETURNS}, with the positional arguments as a tuple. It returned a value of type "
        f"{actual}."
    )


def require_builder(build: Callable[..., Any], rules: Mapping[str, Any] | None) -> None:
    """Raise TypeError if the function that `search` gets is jitted, or cannot be called with a mesh (and a rule).

    Raises ValueError if `rules` is empty.
    """
    if rules is not None:
        require_type(rules, Mapping, 'rules= takes a dict of second arguments of build, such as {"fsdp": FSDP}')
        if not rules:
            raise ValueError("rules= is empty. Leave it out if build takes only the mesh.")
    if hasattr(build, "lower"):
        raise TypeError(
            "build is a jitted function. Pass a function that returns the jitted function and its arguments: "
            "lambda mesh: (step, (w, x))."
        )
    try:
        signature = inspect.signature(build)
    except (TypeError, ValueError):  # of a function without a signature
        return
    try:
        signature.bind(*["mesh", "rule"][: 1 if rules is None else 2])
    except TypeError:
        names = ", ".join(signature.parameters)
        call, change = ("build(mesh) without", "add") if rules is None else ("build(mesh, rule) with", "remove")
        raise TypeError(
            f"build has the arguments ({names}), but is called as {call} rules=. Change the arguments, or "
            f"{change} rules=."
        ) from None


@contextlib.contextmanager
def explain_exit(start: str, remedy: str) -> Iterator[None]:
    """Convert `sys.exit` in the user's code to a ValueError with the message `START (sys.exit(STATUS)). REMEDY`."""
    try:
        yield
    except SystemExit as error:
        raise ValueError(f"{start} (sys.exit({'' if error.code is None else repr(error.code)})). {remedy}") from None


def predict_call(
    layout: str,
    build: Callable[[], ProgramCall],
    target: Slice,
    work: ProgramWork,
    axes: Mapping[str, int],
    time_limit_s: float | int | None,
    progress: Progress,
) -> PredictedProgram:
    """Predict a call of a function. If building, tracing or compiling it raises, the status is `failed`.

    Args:
        layout: Name of the layout, for the name of the program.
        build: Returns the call.
        target: The slice.
        work: Name, tokens, FLOPs and unit of the program. The name defaults to that of the function.
        axes: Names and sizes of the mesh axes, for the record of a program that cannot be built. Empty if unknown.
        time_limit_s: Time limit of the compile in seconds, or None.
        progress: Called with status lines.
    """
    name = f"{work.name or 'program'} ({layout})"
    progress(f"lowering {layout}")
    try:
        with explain_exit("the function ended the process", "Return the step and its arguments instead."):
            call = build()
        mesh, name = call.mesh, f"{work.name or getattr(call.function, '__name__', 'program')} ({layout})"
        if isinstance(mesh, Mapping):
            mesh = target.mesh(list(mesh.values()), list(mesh))
        return predict_function(
            *(call.function, call.arguments, call.keywords, target),
            mesh=mesh,
            options=call.options,
            work=replace(work, name=name),
            time_limit_s=time_limit_s,
            progress=progress,
        )
    except Exception as error:  # of the user's code, of JAX or of XLA
        program = foreign_program(work, name, target, axes)
        reason = describe_error(error)
        return PredictedProgram(
            Prediction(None, CompileStatus.failed, reason, package_versions(), program=program), None
        )


def describe_error(error: Exception) -> str:
    """Return the first lines of an error, and the file and line of the user's code that raised it.

    The type of the error comes first, unless it is ValueError. If the user's code computes on devices that exist only
    to compile for, returns advice to pass shapes instead.
    """
    location = find_user_line(error)
    text, place = first_lines(str(error)), f" ({location})" if location else ""
    if is_compile_only(text):
        return (
            f"{location or 'the function'} computes on devices of the slice, which exist only for compiling. Pass "
            "shapes instead of arrays: jax.ShapeDtypeStruct(shape, dtype, sharding=...), or a result of jax.eval_shape."
        )
    return (
        f"{text or type(error).__name__}{place}"
        if type(error) is ValueError
        else f"{type(error).__name__}: {text}{place}"
    )


def find_user_line(error: Exception) -> str:
    """Return `FILE:LINE` of the innermost line of the user's code that led to an error, or "" if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_user_file(frame.filename)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def _is_user_file(file: str) -> bool:
    package = str(Path(__file__).parents[1])
    return not file.startswith((package, "<frozen")) and "site-packages" not in file and "/lib/python" not in file


def divide_devices(devices: int, axes: Sequence[str], slices: int) -> list[dict[str, int]]:
    """Return all meshes with these axes and this number of devices, as sizes by axis name.

    The size of the first axis is a multiple of `slices`, because only the first axis can span several slices.
    """
    sizes = [n for n in range(1, devices + 1) if devices % n == 0]
    shapes = itertools.product(sizes, repeat=len(axes))
    return [
        dict(zip(axes, shape, strict=True)) for shape in shapes if math.prod(shape) == devices and not shape[0] % slices
    ]


def parse_meshes(
    meshes: Sequence[Sequence[int] | Mapping[str, int]] | None, axes: Sequence[str], target: Slice
) -> list[dict[str, int]]:
    """Return the meshes of a search as sizes by axis name. None means all meshes of `divide_devices`.

    Raises ValueError if `meshes` is empty, if a mesh does not fit the slice, or if a mesh without names does not have
    one size for each of `axes`. Raises TypeError for arguments of a wrong type.
    """
    usage = 'axes= takes names of mesh axes, such as ("data", "model")'
    require_type(axes, list | tuple, usage)
    for axis in axes:
        require_type(axis, str, usage)
    if meshes is None:
        assert target.devices is not None
        return divide_devices(target.devices, axes, target.slices)
    usage = 'meshes= takes a list of meshes, such as [(2, 4), {"data": 8}], or None for all divisions over axes='
    require_type(meshes, list | tuple, usage)
    if not meshes:
        raise ValueError(f"meshes= is empty. Use {usage.partition(' takes ')[2]}.")
    parsed = []
    for mesh in meshes:
        require_type(mesh, list | tuple | Mapping, usage)
        if not isinstance(mesh, Mapping):
            if len(mesh) != len(axes):
                raise ValueError(
                    f"meshes= has {tuple(mesh)}, with another number of axes than axes={tuple(axes)}. Name the axes of "
                    "this mesh in axes=."
                )
            mesh = dict(zip(axes, mesh, strict=True))
        target.axes(list(mesh.values()), list(mesh), None)
        parsed.append(dict(mesh))
    return parsed


def layout_name(axes: Mapping[str, int], rule: str | None) -> str:
    """Return the name of a layout in a search, such as `fsdp on mesh data=2 model=4`, or without a rule its mesh."""
    mesh = " ".join(["mesh", *(f"{name}={size}" for name, size in axes.items())])
    return mesh if rule is None else f"{rule} on {mesh}"


@dataclass
class ProgramSearch:
    """A search over the meshes and sharding rules of a program.

    Args:
        build: Called with a mesh and, if there are rules, one of them. Returns the function and its arguments.
        target: The slice.
        meshes: Meshes as sizes by axis name.
        rules: Second arguments of `build` by name, or None if it takes only a mesh.
        work: Name, tokens, FLOPs and unit of the program.
        options: Compiler options.
        time_limit_s: Time limit of each compile in seconds, or None.
        budget_s: Time limit of the search in seconds, or None. The search does not start a compile that would likely
            exceed the limit, judging by the median so far, and stops a compile that exceeds it. It reads programs in
            the cache even after the limit. Until a layout has a step time, cached or new, the limit is
            `FIRST_RESULT_FACTOR` times as long. The search does not stop `build`, the lowering, or a compile in this
            process (see `predict_function`).
        note: How many layouts were tried and why the search ended, or empty if all were.
        estimate_note: Why layouts were not estimated, or empty if all were.
        estimates: Estimates by name of the layout, once the search has made them.
    """

    build: Callable[..., Any]
    target: Slice
    meshes: Sequence[Mapping[str, int]]
    rules: Mapping[str, Any] | None
    work: ProgramWork
    options: Mapping[str, Any] | None = None
    time_limit_s: float | int | None = None
    budget_s: float | None = None
    note: str = ""
    estimate_note: str = ""
    estimates: Mapping[str, ProgramEstimate] = field(default_factory=dict)

    @property
    def notes(self) -> tuple[str, ...]:
        """`note` and `estimate_note`, without empty ones."""
        return tuple(filter(None, (self.note, self.estimate_note)))

    @property
    def names(self) -> list[str]:
        """Names of all layouts, by mesh and rule (see `layout_name`)."""
        return [layout.name for layout in self._layouts()]

    def predictions(self, progress: Progress) -> Iterator[tuple[str, PredictedProgram]]:
        """Compile the programs one by one, and yield their names and predictions. Sets `note` if the budget ends.

        `CompileOrder` chooses the order. Programs are built before the first compile, for at most `_BUILD_SHARE` of
        the budget, and the others when they are compiled. Then they are estimated, for at most `_ESTIMATE_SHARE`.
        """
        search_start, durations_s, has_step = time.monotonic(), list[float](), False
        layouts = self.build_layouts(progress)
        if len(layouts) > 1:
            limit_s = _ESTIMATE_SHARE * (self.budget_s or math.inf)
            self.estimates = estimate_layouts(layouts, self.target, limit_s, progress)
            self.estimate_note = describe_missing(self.estimates)
        order = CompileOrder(layouts, self.estimates)
        while order.untried:
            tried, untried = order.tried, order.untried
            factor = 1.0 if has_step else FIRST_RESULT_FACTOR
            limit = "the budget" if has_step else f"{factor:g} times the budget"
            longer = "" if has_step and durations_s else " with a longer budget="  # it would end with the same compile
            budget_s = math.inf if self.budget_s is None else factor * self.budget_s
            remaining_s = budget_s - (time.monotonic() - search_start)
            if remaining_s < statistics.median(durations_s or [0.0]) and not any(
                layout.is_cached for layout in untried
            ):
                self._end(f"another compile would likely exceed {limit}", limit, order, longer)
                return
            layout = order.pop()
            limit_s = min(remaining_s, self.time_limit_s or math.inf)
            start = time.monotonic()
            prefix = f"{len(tried) + 1} of {len(tried) + 1 + len(untried)}: "
            predicted = predict_call(
                *(layout.name, layout.build, self.target, self.work, layout.axes),
                None if math.isinf(limit_s) else limit_s,
                lambda line, prefix=prefix: progress(prefix + line),
            )
            status, compile_times = predicted.prediction.status, predicted.prediction.compile
            if status is CompileStatus.timeout and limit_s == remaining_s:
                order.untried.insert(0, layout)
                if layout.is_cached:  # its stored program is damaged
                    layout.is_cached = False
                    continue
                self._end(f"the compile of {layout.name} was stopped", limit, order, longer)
                return
            has_step = has_step or status is CompileStatus.ok
            if not compile_times.cached:
                durations_s.append(time.monotonic() - start)
            order.add(layout, predicted)
            yield layout.name, predicted
            for equal_layout, equal_prediction in order.pop_equal(layout.name):
                order.add(equal_layout, equal_prediction)
                yield equal_layout.name, equal_prediction

    def build_layouts(self, progress: Progress = lambda line: None) -> list[ProgramLayout]:
        """Return the layouts, and build their programs until `_BUILD_SHARE` of the budget has passed."""
        layouts, start = self._layouts(), time.monotonic()
        for number, layout in enumerate(layouts, 1):
            progress(f"building {number} of {len(layouts)}: {layout.name}")
            layout.build_once()
            if time.monotonic() - start > _BUILD_SHARE * (self.budget_s or math.inf):
                break
        return layouts

    def _layouts(self) -> list[ProgramLayout]:
        return [
            ProgramLayout(layout_name(axes, rule), axes, rule, functools.partial(self._build, axes, rule))
            for axes in self.meshes
            for rule in (self.rules or [None])
        ]

    def _build(self, axes: Mapping[str, int], rule: str | None) -> ProgramCall:
        mesh = self.target.mesh(list(axes.values()), list(axes))
        built = self.build(mesh) if self.rules is None else self.build(mesh, self.rules[rule or ""])
        return replace(parse_builder_result(built, "build"), mesh=mesh, options=self.options)

    def _end(self, reason: str, limit: str, order: CompileOrder, longer: str) -> None:
        """Set `note`. `reason` is why the search ends, and `longer` how to change the call that continues it."""
        steps_s = {name: estimate.step_s or math.inf for name, estimate in self.estimates.items()}
        statuses = {name: predicted.prediction.status for name, predicted in order.predicted.items()}
        compiled = [name for name in statuses if statuses[name] in (CompileStatus.ok, CompileStatus.does_not_fit)]
        untried = [layout.name for layout in order.untried]
        names = sorted(untried, key=lambda name: steps_s.get(name, math.inf))
        names = names if len(names) <= _MAX_NAMES else [*names[:_MAX_NAMES], f"{len(names) - _MAX_NAMES} more"]
        self.note = (
            f"compiled {count_compiled(compiled, [*statuses, *untried], self.estimates)} within {limit}, because "
            f"{reason}; "
            f"untried: {', '.join(names)}. To continue, repeat the same call{longer}"
        )
