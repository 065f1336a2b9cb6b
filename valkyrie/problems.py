"""Problems of a run as data, and their messages. Does not import JAX."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import UnionType
from typing import Any, get_args

Number = int | float
_MAX_VALUE_LENGTH = 40
"""Maximum number of characters of a value in the message for a wrong type."""


class ProblemCode(Enum):
    """Kind of a problem.

    A problem either carries its message (`Problem.text`), or the message is made in this module from its code and its
    other fields.
    """

    # General codes, for single settings and their combinations.
    out_of_range = "out_of_range"
    not_finite = "not_finite"
    too_large = "too_large"
    unknown_name = "unknown_name"
    malformed = "malformed"
    damaged = "damaged"
    conflict = "conflict"
    missing = "missing"
    unsupported = "unsupported"
    not_installed = "not_installed"
    # Meshes and hardware.
    mesh_shape = "mesh_shape"
    mesh_names = "mesh_names"
    placement = "placement"
    topology = "topology"
    device_count = "device_count"
    slice_count = "slice_count"
    # The rules of a partition.
    unknown_logical_axis = "unknown_logical_axis"
    unknown_role = "unknown_role"
    missing_mesh_axis = "missing_mesh_axis"
    idle_mesh_axis = "idle_mesh_axis"
    mesh_axis_used_twice = "mesh_axis_used_twice"
    same_sharding = "same_sharding"
    # Sizes.
    not_divisible = "not_divisible"
    batch_not_divisible = "batch_not_divisible"
    seq_not_divisible = "seq_not_divisible"
    batch_tokens_not_divisible = "batch_tokens_not_divisible"
    device_batch_not_divisible = "device_batch_not_divisible"
    # Pipelines.
    several_stage_axes = "several_stage_axes"
    stage_axis_shared = "stage_axis_shared"
    no_stack = "no_stack"
    wrong_rounds = "wrong_rounds"
    too_few_microbatches = "too_few_microbatches"
    several_stacks = "several_stacks"
    remat_with_1f1b = "remat_with_1f1b"
    rounds_not_divisible = "rounds_not_divisible"


_DIVISORS = {
    ProblemCode.not_divisible: "its mesh axes",
    ProblemCode.batch_not_divisible: "shards x microbatches",
    ProblemCode.seq_not_divisible: "its mesh axes",
    ProblemCode.rounds_not_divisible: "stages x partition.rounds",
}
"""Divisors as `Problem.label` names them."""
DIVISIBILITY_CODES = frozenset({*_DIVISORS, ProblemCode.device_batch_not_divisible})
"""Codes for sizes that are not divisible by the number of parts that a layout splits them into.

`valkyrie.parallel.problems.add_advice` adds legal values to problems with these codes.
"""


@dataclass(frozen=True)
class Range:
    """A range of finite numbers. `least` and `most` belong to the range, `above` and `below` do not.

    A bound of None does not limit the range.
    """

    least: Number | None = None
    above: Number | None = None
    most: Number | None = None
    below: Number | None = None

    def __contains__(self, value: Number) -> bool:
        return (
            (isinstance(value, int) or math.isfinite(value))  # a float cannot hold every integer
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def describe(self, value: Number) -> str:
        """Return the requirement that a value violates, such as `must be at least 0 and below 1`."""
        bounds = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        words = " and ".join(f"{word} {_number_text(number)}" for word, number in bounds.items() if number is not None)
        if not math.isfinite(value):
            return f"must be a finite number, {words}"
        return f"must be {words}"


Identity = tuple[ProblemCode, str | None, tuple[str, ...], tuple[str, ...]]
"""A problem's code, key, logical axes and mesh axes."""


@dataclass(frozen=True)
class ProblemRecord:
    """The identity of a problem, as files store it. `code` may be unknown to this version of Valkyrie."""

    code: str
    key: str | None = None
    axes: tuple[str, ...] = ()
    mesh_axes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Problem:
    """One reason why a run is illegal or a file cannot be used.

    Args:
        code: Kind of the problem.
        key: The config key at fault, or None if there is none.
        value: The value of `key`, or the name of the file at fault.
        text: The message, or empty to make it from `allowed` or from the template of `code` in `_TEMPLATES`.
        allowed: Allowed numbers, for `out_of_range`.
        otherwise: An alternative to a number, such as "null for no clipping", for `out_of_range`.
        partition: The name of the partition with the rules at fault, or None.
        axes: Logical axes at fault.
        mesh_axes: Mesh axes at fault.
        mesh_sizes: Sizes of `mesh_axes`.
        size: The size that is not divisible by `parts`.
        parts: The divisor.
        names: Arrays at fault.
        nearest: Legal values of `key` nearest to `value`, or None if they were not searched for.
        legal_sizes: If one mesh axis is at fault, its sizes that solve the problem, or None if not searched for.
        details: Other values for the message template of the code, by placeholder.
    """

    code: ProblemCode
    key: str | None = None
    value: Any = field(default=None, hash=False)
    text: str = ""
    allowed: Range | None = None
    otherwise: str = ""
    partition: str | None = None
    axes: tuple[str, ...] = ()
    mesh_axes: tuple[str, ...] = ()
    mesh_sizes: tuple[int, ...] = ()
    size: int = 0
    parts: int = 0
    names: tuple[str, ...] = ()
    nearest: tuple[int, ...] | None = None
    legal_sizes: tuple[int, ...] | None = None
    details: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def identity(self) -> Identity:
        """Code, key, logical axes and mesh axes, which do not depend on sizes."""
        return self.code, self.key, self.axes, self.mesh_axes

    @property
    def label(self) -> str:
        """Short name without sizes, for counting problems: `mlp not divisible by mesh axes x: use a multiple`."""
        if self.code in _DIVISORS:
            subject = ", ".join(self.axes) or self.code.value.removesuffix("_not_divisible").replace("_", " ")
            divisor = _DIVISORS[ProblemCode.rounds_not_divisible if "layers" in self.axes else self.code]
            over = f" ({'·'.join(self.mesh_axes)})" if self.mesh_axes else ""
            return f"{subject} not divisible by {divisor}{over}: use a multiple{f' in {self.key}' * bool(self.key)}"
        subject = ", ".join(self.axes) or (self.key if self.text or self.allowed else None)
        where = " over ".join(filter(None, (subject, "·".join(self.mesh_axes))))
        words = self.code.value.replace("_", " ")
        return f"{words}: {where}" if where else words

    def to_record(self) -> ProblemRecord:
        """Return the identity as a record for files."""
        return ProblemRecord(self.code.value, self.key, self.axes, self.mesh_axes)

    def __str__(self) -> str:
        """Return the message: `text`, or one made from the other fields, with legal values if they are known."""
        if self.text:
            return self.text
        if self.allowed is not None:
            needed = self.allowed.describe(self.value) + (f", or {self.otherwise}" if self.otherwise else "")
            return f"{self.key}={_number_text(self.value)}: {needed}."
        placeholders = {
            "axes": ", ".join(self.axes),
            "axis": next(iter(self.mesh_axes), ""),
            "over": self.mesh_axes_text,
            "names": _first_names(self.names),
            "value": _number_text(self.value),
            **{name: make(self) for name, make in _CLAUSES.get(self.code, {}).items()},
        }
        return _TEMPLATES[self.code].format(self=self, **placeholders, **self.details) + _advice(self)

    @property
    def mesh_axes_text(self) -> str:
        """Mesh axes with their sizes: `x=4·y=2`."""
        return "·".join(f"{axis}={n}" for axis, n in zip(self.mesh_axes, self.mesh_sizes, strict=True))


class MisuseError(ValueError):
    """A user's module passed a wrong argument to a function of Valkyrie. The message of a command names its line."""


class ProblemError(ValueError):
    """A run is illegal. The message has one line for each of its `problems`, which all have different messages."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        by_text: dict[str, Problem] = {}
        for problem in problems:
            by_text.setdefault(str(problem), problem)
        self.problems = tuple(by_text.values())
        super().__init__("\n".join(by_text))


def raise_problems(problems: Sequence[Problem]) -> None:
    """Raise ProblemError if there are any problems."""
    if problems:
        raise ProblemError(problems)


def require_type(value: object, expected: type | UnionType, usage: str) -> None:
    """Raise TypeError if `value`, an argument of a public function, is not an instance of `expected`.

    True and False do not count as numbers. The message starts with `usage`, which says what the function takes: `load
    takes the path of a run folder`.
    """
    if not isinstance(value, expected) or (isinstance(value, bool) and bool not in (get_args(expected) or (expected,))):
        raise TypeError(f"{usage}, not {describe_value(value)}.")


def require_settings(usage: str, settings: Sequence[object], keywords: Mapping[str, object]) -> None:
    """Raise TypeError for a setting that is not a string, or that was passed as a keyword argument: `steps=5`.

    `usage` says what the function takes, such as `compose takes strings, such as compose("model=gpt_tiny")`.
    """
    for setting in settings:
        require_type(setting, str, usage)
    if keywords:
        key, value = next(iter(keywords.items()))
        raise TypeError(f'{key}={value!r} is not an argument. {usage[0].upper()}{usage[1:]}. Write "{key}={value}".')


def describe_value(value: object) -> str:
    """Return a value of a wrong type as Python code or, if that is long, its type: `a value of type list`.

    Leaves out memory addresses: `<function step>`. Arrays are described by their shape.
    """
    if isinstance(shape := getattr(value, "shape", None), tuple):
        return f"an array of shape {shape}"
    shown = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    return shown if len(shown) <= _MAX_VALUE_LENGTH else f"a value of type {type(value).__name__}"


def check_range(
    key: str,
    value: Number | None,
    *,
    least: Number | None = None,
    above: Number | None = None,
    most: Number | None = None,
    below: Number | None = None,
    otherwise: str = "",
) -> list[Problem]:
    """Return a problem if a number is out of bounds or not finite. None is always allowed.

    `otherwise` is an alternative to a number for the message, such as "null for no clipping".
    """
    allowed = Range(least, above, most, below)
    if value is None or value in allowed:
        return []
    return [Problem(ProblemCode.out_of_range, key, value, allowed=allowed, otherwise=otherwise)]


def suggest(name: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the choice most similar to a name, or None if no similarity reaches `cutoff` (0 to 1)."""
    return next(iter(difflib.get_close_matches(name, list(choices), n=1, cutoff=cutoff)), None)


def first_line(error: object) -> str:
    """Return the first line of an error's message, or an empty string."""
    return next(iter(str(error).splitlines()), "")


def nearest_divisor(number: int, value: int) -> int:
    """Return the divisor of `number`, a positive integer, that is nearest to `value`. Tries divisors up to 4096."""
    divisors = [n for n in range(1, min(number, _MAX_DIVISOR) + 1) if number % n == 0]
    return min(divisors, key=lambda n: abs(n - value))


def format_alternatives(key: str | None, values: Iterable[object]) -> str:
    """Format alternatives: `x=1, x=2 or x=4`, or `1, 2 or 4` without a key."""
    *first, last = (f"{key}={value}" if key else str(value) for value in values)
    return f"{', '.join(first)} or {last}" if first else last


_MAX_DIVISOR = 4096
"""Largest divisor to suggest. Bounds the search time for a mistyped number with many digits."""

_TEMPLATES = {
    ProblemCode.not_finite: "{self.key}={value}: must be a finite number.",
    ProblemCode.too_large: "{self.key}={value}: must be a whole number of at {bound}.",
    ProblemCode.mesh_shape: (
        "mesh.shape={value} with mesh.slices={slices}: use 3 sizes (x, y, z) or 4 (w, x, y, z), each at least 1."
    ),
    ProblemCode.mesh_names: (
        "mesh.names=[{value}] does not name each of the {count} axes of mesh={mesh} ({own}). Write one name per "
        "axis, or null."
    ),
    ProblemCode.placement: (
        "mesh.placement=[{value}]: {wrong}. List the axes of mesh={mesh} ({sizes}) from the slowest to the fastest "
        "varying on the torus, each as a whole (x) or split into factors (x:2,y,x:2)."
    ),
    ProblemCode.unknown_logical_axis: (
        "partition={self.partition} has a rule for {kind}.{axes}, which is not a logical axis of {kind}. "
        "{hint} This model has {known}."
    ),
    ProblemCode.unknown_role: (
        "mesh.names (or TPU_AXIS_NAMES) gives mesh axis {over} the role {self.value}, but the roles of "
        "partition={self.partition} are {known}. Use one of these."
    ),
    ProblemCode.missing_mesh_axis: (
        "partition={self.partition} puts {rule} on mesh axis {axis}, but mesh={mesh} has only {has}. "
        "Use a mesh with that axis{such_as}, or write {axis}? in the partition to make the axis optional."
    ),
    ProblemCode.idle_mesh_axis: (
        "partition={self.partition} leaves mesh axis {over} idle: devices along it would do the same work. Use a "
        "mesh with {axis}=1, or a partition that uses {axis}."
    ),
    ProblemCode.mesh_axis_used_twice: (
        "partition={self.partition} uses mesh axis {axis} twice for {names}: for {self.axes[0]} and for "
        "{self.axes[1]}. Put one of them on another mesh axis."
    ),
    ProblemCode.not_divisible: (
        "partition={self.partition} puts {axes} ({self.size}) of {names} on {over}: {self.size} is not divisible by "
        "{self.parts}."
    ),
    ProblemCode.batch_not_divisible: "batch={self.size} is not divisible by {self.parts}: {shards}{microbatches}.",
    ProblemCode.seq_not_divisible: (
        "seq={self.size} is not divisible by {self.parts}: partition={self.partition} splits it over {over}."
    ),
    ProblemCode.batch_tokens_not_divisible: "batch_tokens={value} is not a multiple of seq={seq}.",
    ProblemCode.device_batch_not_divisible: "{batch} is not divisible by {sequences}.",
    ProblemCode.several_stage_axes: (
        "partition={self.partition} puts layers on {over} and on {also}, but a pipeline uses one mesh axis. Put layers "
        "on one of them."
    ),
    ProblemCode.stage_axis_shared: (
        "partition={self.partition} puts {kind}.{axes} on {over}, which already has the pipeline stages "
        "(parameters.layers). Put {pronoun} on another mesh axis."
    ),
    ProblemCode.no_stack: (
        "partition={self.partition} puts layers on {over}, but this model has no stack of equal layers to split into "
        "pipeline stages: it applies the same few layers repeatedly. Use a mesh with {axis}=1, or another partition."
    ),
    ProblemCode.wrong_rounds: "partition.rounds={value}: partition.schedule={schedule} {requirement}. Use {use}.",
    ProblemCode.too_few_microbatches: (
        "microbatches={value}: partition.schedule=circular needs at least one microbatch per stage ({over}). Use "
        "microbatches={self.parts}, or partition.schedule=gpipe."
    ),
    ProblemCode.several_stacks: (
        "partition={self.partition} with schedule=1f1b supports only one stack of equal layers, but this model has "
        "{self.size} stacks in sequence. Use partition.schedule=gpipe."
    ),
    ProblemCode.remat_with_1f1b: (
        "remat={value}: schedule=1f1b saves only the inputs of layers and recomputes the rest. Use remat=full, or "
        "partition.schedule=gpipe."
    ),
    ProblemCode.rounds_not_divisible: (
        "partition={self.partition} with schedule=circular splits the layers ({self.size}) into {self.parts} "
        "groups ({over} times rounds={rounds}): {self.size} is not divisible by {self.parts}."
    ),
}
"""Message templates by code. Placeholders are the fields of a problem, its details and its clauses."""


def _microbatches_clause(problem: Problem) -> str:
    count, stage_axes = problem.details["microbatch_count"], problem.details["stage_axes"]
    if not problem.mesh_axes:
        return f"microbatches={count} splits it"
    if count == 1:
        return ""
    sizes = dict(zip(problem.mesh_axes, problem.mesh_sizes, strict=True))
    if not sizes.keys().isdisjoint(stage_axes):
        axes = problem.details["microbatch_axes"]
        if split := "·".join(f"{axis}={size}" for axis, size in sizes.items() if axis in axes):
            return f", and each of its {count} microbatches over {split}"
    return f", and microbatches={count} splits it too"


def _batch_clause(problem: Problem) -> str:
    tokens = problem.details["batch_tokens"]
    return f"batch={problem.size}" if tokens is None else f"batch={problem.size} (batch_tokens={tokens})"


def _device_batch_clause(problem: Problem) -> str:
    device_batch, shards = f"device_batch={problem.value}", problem.parts
    return f"{problem.value * shards}: {device_batch} on each of {shards} batch shards" if shards > 1 else device_batch


def _suggestion_clause(problem: Problem) -> str:
    near = problem.details["near"]
    return (
        f"Did you mean {near}?"
        if near
        else f"If it is an axis of another model, write {problem.axes[0]}? to make the rule optional."
    )


def _mesh_example_clause(problem: Problem) -> str:
    return {"w": " (four sizes, mesh=2x4x4x2)", "s": " (slices, mesh=2s4x4x2)"}.get(problem.mesh_axes[0], "")


def _rounds_requirement_clause(problem: Problem) -> str:
    circular = problem.details["schedule"] == "circular"
    return "needs at least 2 rounds (groups of layers per stage)" if circular else "supports only one round"


def _rounds_advice_clause(problem: Problem) -> str:
    circular = problem.details["schedule"] == "circular"
    return "partition.rounds=2" if circular else "partition.rounds=1, or partition.schedule=circular"


_CLAUSES: dict[ProblemCode, dict[str, Callable[[Problem], str]]] = {
    ProblemCode.unknown_logical_axis: {"hint": _suggestion_clause},
    ProblemCode.missing_mesh_axis: {"such_as": _mesh_example_clause},
    ProblemCode.batch_not_divisible: {
        "shards": lambda p: f"partition={p.partition} splits it over {p.mesh_axes_text}" if p.mesh_axes else "",
        "microbatches": _microbatches_clause,
    },
    ProblemCode.device_batch_not_divisible: {"batch": _batch_clause, "sequences": _device_batch_clause},
    ProblemCode.stage_axis_shared: {"pronoun": lambda p: "them" if len(p.axes) > 1 else "it"},
    ProblemCode.wrong_rounds: {"requirement": _rounds_requirement_clause, "use": _rounds_advice_clause},
}
"""Functions from a problem to the text of a placeholder in its template, by code and placeholder."""


def _number_text(value: Any) -> str:
    return str(value).removesuffix(".0")


def _advice(problem: Problem) -> str:
    """Return a sentence with legal values for the end of the message, or an empty string if none are known."""
    if problem.nearest is None:
        return ""
    values = problem.nearest
    if problem.code is not ProblemCode.not_divisible and problem.code is not ProblemCode.rounds_not_divisible:
        if not values and problem.code is ProblemCode.device_batch_not_divisible:
            return f" Use a batch that is a multiple of {problem.parts}."
        return f" Use {format_alternatives(problem.key, values)}." if values else ""
    advice = []
    if len(problem.mesh_axes) == 1 and problem.legal_sizes is not None:
        advice += (
            [f"a mesh with {format_alternatives(problem.mesh_axes[0], problem.legal_sizes)}"]
            if problem.legal_sizes
            else []
        )
    else:
        divisors = [n for n in range(1, 65) if problem.size % n == 0]
        product, listed = "·".join(problem.mesh_axes), ", ".join(map(str, divisors[:8]))
        advice.append(f"a mesh where {product} divides {problem.size} ({listed})")
    if values:
        advice.append(
            format_alternatives(problem.key, values) + ("" if problem.key else f" for {', '.join(problem.axes)}")
        )
    return f" Use {', or '.join(advice)}." if advice else ""


def _first_names(names: Sequence[str]) -> str:
    """Return the first three names and the number of others. Omits activations if there are parameters."""
    shown_names = [name for name in dict.fromkeys(names) if not name.startswith("activation")] or list(names)
    more = f" and {len(shown_names) - 3} more" if len(shown_names) > 3 else ""
    return ", ".join(shown_names[:3]) + more
