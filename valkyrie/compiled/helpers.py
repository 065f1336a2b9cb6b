"""Finds helper functions of a program, such as `def constrain(x, spec)`, and names the lines that call them instead."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from functools import partial

from valkyrie.compiled.hlo import SHARDING_ATTRIBUTE, Frame, Instruction, Module, user_frames

_PRODUCTS = ("dot", "convolution")


def find_helper_lines(module: Module) -> set[str]:
    """Return the source lines of a lowered program that do different things for different callers.

    These are lines with sharding constraints if the sharding depends on the calling line, and lines with the only
    matrix products of a function if their shapes depend on it. A layer that several lines call in the same way is not
    a helper.
    """
    instructions = [i for computation in module.computations for i in computation.instructions]
    constraints = [i for i in instructions if i.opcode == "custom-call" and i.custom_call_target == "Sharding"]
    products = [i for i in instructions if i.opcode in _PRODUCTS]
    product_lines: dict[tuple[str, str], set[str]] = defaultdict(set)
    for product in products:
        for frame in user_frames(product.stack):
            product_lines[_function(frame)].add(frame.line)
    shardings = [(i, i.attributes.get(SHARDING_ATTRIBUTE, "")) for i in constraints]
    shapes = [(i, str([array.shape.dims for array in (i, *i.operands)])) for i in products]
    lines = set[str]()
    while True:
        callers = [(_caller(i, lines), i, text) for i, text in shapes]
        lone_products = [(i, text) for frame, i, text in callers if frame and len(product_lines[_function(frame)]) == 1]
        helper_lines = _lines_that_depend_on_callers(shardings, lines)
        helper_lines |= _lines_that_depend_on_callers(lone_products, lines)
        if not helper_lines:
            return lines
        lines |= helper_lines


def skip_helper_lines(module: Module, lines: Collection[str]) -> None:
    """Change the source of each instruction from these helper lines to the line that calls the helper."""
    for instruction in module.instructions.values() if lines else ():
        if instruction.source in lines and (frame := _caller(instruction, lines)):
            instruction.source = frame.line


def find_helper(instruction: Instruction) -> Frame | None:
    """Return the helper's frame of an instruction with a source changed by `skip_helper_lines`, or None."""
    innermost = user_frames(instruction.stack)[:1]
    return next((frame for frame in innermost if frame.line != instruction.source), None)


def _function(frame: Frame) -> tuple[str, str]:
    return frame.line.rpartition(":")[0], frame.function


def _caller(instruction: Instruction, lines: Collection[str]) -> Frame | None:
    """Return the innermost frame outside of these lines, or None if there is none."""
    frames = user_frames(instruction.stack) or (Frame(instruction.source),)
    return next((frame for frame in frames if frame.line not in lines), None)


def _lines_that_depend_on_callers(effects: Iterable[tuple[Instruction, str]], lines: set[str]) -> set[str]:
    """Return the lines with effects that differ between the lines that call them.

    `effects` pairs instructions with a text that describes their effect. `lines` are the known helper lines.
    """
    effects_by_caller: dict[Frame, dict[Frame | None, set[str]]] = defaultdict(partial(defaultdict, set))
    for instruction, effect in effects:
        if frame := _caller(instruction, lines):
            effects_by_caller[frame][_caller(instruction, {*lines, frame.line})].add(effect)
    return {
        frame.line
        for frame, callers in effects_by_caller.items()
        if None not in callers and len({frozenset(group) for group in callers.values()}) > 1
    }
