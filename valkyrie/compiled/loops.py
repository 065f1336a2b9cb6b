"""Finds the trip count of a loop from its condition and the initial value and increment of its counter."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from valkyrie.compiled.hlo import Computation, Instruction

_TRIP_COUNT_PATTERN = re.compile(rb'"known_trip_count":(\{[^}]*\})')
_PASS_THROUGH_OPCODES = {
    "copy",
    "bitcast",
    "reshape",
    "convert",
    "opt-barrier",
    "copy-start",
    "copy-done",
    "broadcast",
}
"""Operations that do not change the value of their operand."""
_MIRRORED_COMPARISONS = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "EQ": "EQ", "NE": "NE"}


class LoopCounter(NamedTuple):
    """The value of element `index` of a loop's carry, which may change in each iteration."""

    loop: Instruction
    index: int


def trip_count(loop: Instruction) -> int | None:
    """Return the number of iterations of a `while` instruction, or None if it is not static."""
    match = _TRIP_COUNT_PATTERN.search(loop.message.backend_config)
    if match:
        return int(json.loads(match[1])["n"])
    condition, body = condition_and_body(loop)
    compare = _fused_root(condition.root)
    if compare is None or compare.opcode != "compare":
        return None
    counter, limit = (_resolve(operand) for operand in compare.operands)
    direction = compare.message.comparison_direction
    if isinstance(limit, LoopCounter):
        counter, limit, direction = limit, counter, _MIRRORED_COMPARISONS[direction]
    if not isinstance(counter, LoopCounter) or counter.loop is not loop or not isinstance(limit, int):
        return None
    start = _initial_value(loop.operands[0], counter.index)
    step = _counter_step(body, counter)
    if not isinstance(start, int) or not step:
        return None
    return _count_iterations(start, limit, step, direction)


def condition_and_body(loop: Instruction) -> tuple[Computation, Computation]:
    """Return the condition and the body of a loop. The condition is the computation that returns a boolean."""
    first, second = loop.called_computations
    return (first, second) if first.root is not None and first.root.shape.dtype == "pred" else (second, first)


def constant_value(instruction: Instruction) -> int | None:
    """Return the integer value of an instruction, or None if it is not constant.

    Like `find_origin`, looks through tuples, copies, fusions, calls and loops.
    """
    value = _resolve(instruction)
    return value if isinstance(value, int) else None


def find_origin(instruction: Instruction) -> Instruction:
    """Return the instruction that computes the value of `instruction`.

    Looks through tuples, copies, fusions and calls, and through loops that do not change the value.
    """
    while True:
        source = _forwarded_operand(instruction)
        if source is None:
            return instruction
        instruction = source


def _count_iterations(start: int, limit: int, step: int, direction: str) -> int | None:
    if direction == "NE":
        count, rest = divmod(limit - start, step)
        return count if rest == 0 and count >= 0 else None
    if direction in ("LE", "GE"):
        limit += 1 if direction == "LE" else -1
    distance = limit - start
    if direction == "EQ" or (direction in ("LT", "LE")) != (step > 0):
        return None
    return max(-(-distance // step), 0)


def _literal(instruction: Instruction) -> int | None:
    literal = instruction.message.literal
    for values in (literal.s32s, literal.s64s, literal.u32s, literal.u64s):
        if len(values) == 1:
            return values[0]
    for byte_values in (literal.s8s, literal.u8s, literal.preds):
        if len(byte_values) == 1:
            return byte_values[0]
    return 0 if instruction.shape.element_count == 1 and instruction.shape.dtype[0] in "su" else None


def _resolve(instruction: Instruction) -> int | LoopCounter | None:
    """Return the value that an instruction forwards: an integer constant or an element of a loop's carry.

    Returns None for any other value.
    """
    producer = find_origin(instruction)
    if producer.opcode == "constant":
        return _literal(producer)
    if producer.opcode == "get-tuple-element" and producer.operands[0].opcode == "parameter":
        loop = _enclosing_loop(producer.operands[0])
        return None if loop is None else LoopCounter(loop, producer.message.tuple_index)
    return None


def _fused_root(instruction: Instruction | None) -> Instruction | None:
    """Return the root of a fusion or call, following nested ones, or the instruction itself if it is neither."""
    while instruction is not None and instruction.opcode in ("fusion", "call"):
        instruction = instruction.called_computations[0].root
    return instruction


def _only_caller(computation: Computation) -> Instruction | None:
    return computation.callers[0] if len(computation.callers) == 1 else None


def _enclosing_loop(parameter: Instruction) -> Instruction | None:
    caller = _only_caller(parameter.computation)
    return caller if caller is not None and caller.opcode == "while" else None


def _forwarded_operand(instruction: Instruction) -> Instruction | None:
    """Return the instruction that this one forwards without a change, or None if it computes a new value."""
    opcode = instruction.opcode
    if opcode in _PASS_THROUGH_OPCODES:
        return instruction.operands[0]
    if opcode in ("fusion", "call") and not instruction.shape.tuple_shapes:
        root = instruction.called_computations[0].root
        is_forwarded = root is not None and root.opcode in ("parameter", "constant", *_PASS_THROUGH_OPCODES)
        return root if is_forwarded else None
    if opcode == "parameter":
        caller = _only_caller(instruction.computation)
        if caller is None or caller.opcode not in ("fusion", "call"):
            return None
        return caller.operands[instruction.message.parameter_number]
    if opcode == "get-tuple-element":
        return _find_element(instruction.operands[0], instruction.message.tuple_index)
    return None


def _find_element(tuple_value: Instruction, index: int) -> Instruction | None:
    """Return the instruction that computes an element of a tuple, or None if unknown.

    Looks through loops that do not change the element.
    """
    if tuple_value.opcode == "tuple":
        return tuple_value.operands[index]
    if tuple_value.opcode == "opt-barrier":
        return _find_element(tuple_value.operands[0], index)
    if tuple_value.opcode == "while":
        return _find_element(tuple_value.operands[0], index) if _is_loop_invariant(tuple_value, index) else None
    if tuple_value.opcode == "parameter":
        loop = _enclosing_loop(tuple_value)
        if loop is not None:
            return _find_element(loop.operands[0], index) if _is_loop_invariant(loop, index) else None
        caller = _only_caller(tuple_value.computation)
        if caller is not None and caller.opcode in ("fusion", "call"):
            return _find_element(caller.operands[tuple_value.message.parameter_number], index)
    if tuple_value.opcode == "get-tuple-element":
        producer = _find_element(tuple_value.operands[0], tuple_value.message.tuple_index)
        return None if producer is None else _find_element(producer, index)
    return None


def _is_loop_invariant(loop: Instruction, index: int) -> bool:
    """Return whether a loop leaves an element of its carry as it is. The element may pass through loops in the body."""
    body = condition_and_body(loop)[1]
    if body.root is None or body.root.opcode != "tuple":
        return False
    value = body.root.operands[index]
    while True:
        if value.opcode in _PASS_THROUGH_OPCODES:
            value = value.operands[0]
            continue
        if value.opcode != "get-tuple-element":
            return False
        source, element = value.operands[0], value.message.tuple_index
        if source.opcode != "while":
            return source is body.parameters[0] and element == index
        initial_carry = source.operands[0]
        if initial_carry.opcode != "tuple" or not _is_loop_invariant(source, element):
            return False
        value = initial_carry.operands[element]


def _initial_value(initial_carry: Instruction, index: int) -> int | LoopCounter | None:
    producer = _find_element(initial_carry, index)
    return None if producer is None else _resolve(producer)


def _counter_step(body: Computation, counter: LoopCounter) -> int | None:
    """Return the increment of the counter per iteration, or None if it is not a known constant."""
    if body.root is None or body.root.opcode != "tuple":
        return None
    return _increment(body.root.operands[counter.index], counter, depth=8)


def _increment(value: Instruction, counter: LoopCounter, depth: int) -> int | None:
    """Return the constant that `value` adds to the counter, or None if it is not counter + constant."""
    producer = find_origin(value)
    if _resolve(producer) == counter:
        return 0
    operation = _fused_root(producer)
    if operation is None or depth == 0:
        return None
    if operation.opcode in ("add", "subtract"):
        lhs, rhs = operation.operands
        sign = 1 if operation.opcode == "add" else -1
        constant, base = constant_value(rhs), _increment(lhs, counter, depth - 1)
        if constant is None and sign == 1:
            constant, base = constant_value(lhs), _increment(rhs, counter, depth - 1)
        return None if constant is None or base is None else base + sign * constant
    if operation is not producer:
        return _increment(operation, counter, depth - 1)
    return None
