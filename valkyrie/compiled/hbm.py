"""HBM traffic of an operation, and whether the operation is bound by it."""

from __future__ import annotations

from valkyrie.compiled.hlo import HBM, Computation, Instruction, Shape

_SLICES = {"dynamic-slice", "slice", "gather"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Operations that overwrite a part of their first operand, with the index of the operand that is written."""
_SAME = {"bitcast", "copy", "convert", "reshape"}
_LANES = {"copy", "transpose", "reverse", "concatenate", "sort", "gather", "scatter", "iota", "dot", "convolution"}
"""Operations that cost more than their memory traffic: they move data between lanes or multiply matrices."""


def hbm_bytes(instruction: Instruction) -> float:
    """Return the bytes that an operation reads from and writes to HBM, including padding.

    Arrays in on-chip memory cost nothing. For an operand that is only sliced, only the slices count. For an in-place
    update, only the written part counts.
    """
    if instruction.opcode == "fusion":
        return _fused(instruction)
    if instruction.opcode in _SLICES:
        return _in_hbm(instruction.operands[0].shape, instruction.shape) + _in_hbm(instruction.shape)
    if instruction.opcode in _UPDATES:
        part = instruction.operands[_UPDATES[instruction.opcode]].shape
        return _in_hbm(part) + _in_hbm(instruction.shape, part)
    return sum(_in_hbm(o.shape) for o in instruction.operands) + _in_hbm(instruction.shape)


def is_elementwise(instruction: Instruction) -> bool:
    """Return whether an operation is elementwise or a reduction, and therefore bound by memory bandwidth."""
    if instruction.opcode == "fusion":
        return all(is_elementwise(i) for i in instruction.called[0].instructions)
    return instruction.opcode not in _LANES


def _in_hbm(where: Shape, what: Shape | None = None) -> float:
    """Return the padded bytes of an array, or of its part `what` if given, if the array is in HBM, else 0."""
    if where.parts:
        return sum(_in_hbm(leaf) for leaf in where.leaves)
    return float((where if what is None else what).padded_bytes) if where.memory == HBM else 0.0


def _fused(fusion: Instruction) -> float:
    inside = fusion.called[0]
    read = sum(_read(fusion.operands[n].shape, parameter) for n, parameter in inside.parameters.items())
    return read + _written(fusion, inside)


def _users(computation: Computation) -> dict[Instruction, list[Instruction]]:
    users: dict[Instruction, list[Instruction]] = {}
    for i in computation.instructions:
        for operand in i.operands:
            users.setdefault(operand, []).append(i)
    return users


def _read(outside: Shape, parameter: Instruction) -> float:
    """Return the bytes read from one operand of a fusion, following its uses in the fusion and nested fusions."""
    whole = _in_hbm(outside)
    if outside.parts or not whole:
        return whole
    users = _users(parameter.computation)
    total = 0.0
    for value in _aliases(parameter, users):
        for user in users.get(value, []):
            if user.opcode in _SLICES and user.operands[0] is value:
                total += _in_hbm(outside, user.shape)
            elif user.opcode == "fusion":
                inner = user.called[0].parameters
                total += sum(_read(outside, inner[n]) for n, o in enumerate(user.operands) if o is value)
            elif not (user.opcode in _UPDATES and user.operands[0] is value) and user.opcode not in _SAME:
                return whole
    return min(total, whole)


def _aliases(value: Instruction, users: dict[Instruction, list[Instruction]]) -> list[Instruction]:
    aliases = [value]
    for seen in aliases:
        aliases += [u for u in users.get(seen, []) if u.opcode in _SAME]
    return aliases


def _written(fusion: Instruction, inside: Computation) -> float:
    root = inside.root
    if root is None:
        return _in_hbm(fusion.shape)
    roots = root.operands if root.opcode == "tuple" else [root]
    total = 0.0
    for value, shape in zip(roots, fusion.shape.parts or (fusion.shape,), strict=False):
        while value.opcode in _SAME:
            value = value.operands[0]
        part = value.operands[_UPDATES[value.opcode]].shape if value.opcode in _UPDATES else None
        total += _in_hbm(shape, part)
    return total
