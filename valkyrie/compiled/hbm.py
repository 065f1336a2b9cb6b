"""Computes the HBM traffic of operations, and whether they are bound by memory bandwidth."""

from __future__ import annotations

from valkyrie.compiled.hlo import HBM, Computation, Instruction, Shape

_SLICE_OPCODES = {"dynamic-slice", "slice", "gather"}
_UPDATE_OPERAND_INDEX = {"dynamic-update-slice": 1, "scatter": 2}
"""Operations that overwrite a part of their first operand, with the index of the operand that has the new values."""
_PASS_THROUGH_OPCODES = {"bitcast", "copy", "convert", "reshape"}
_NOT_BANDWIDTH_BOUND_OPCODES = {
    "copy",
    "transpose",
    "reverse",
    "concatenate",
    "sort",
    "gather",
    "scatter",
    "iota",
    "dot",
    "convolution",
}
"""Operations that take longer than their memory traffic: they move data between lanes or multiply matrices."""


def hbm_bytes(instruction: Instruction) -> float:
    """Return the bytes that an operation reads from and writes to HBM, including padding.

    Arrays in on-chip memory do not count. If an operand is only sliced, just the slices count. If an operand is updated
    in place, just the updated part counts.
    """
    if instruction.opcode == "fusion":
        return _fusion_bytes(instruction)
    if instruction.opcode in _SLICE_OPCODES:
        return _bytes_in_hbm(instruction.operands[0].shape, instruction.shape) + _bytes_in_hbm(instruction.shape)
    if instruction.opcode in _UPDATE_OPERAND_INDEX:
        part = instruction.operands[_UPDATE_OPERAND_INDEX[instruction.opcode]].shape
        return _bytes_in_hbm(part) + _bytes_in_hbm(instruction.shape, part)
    return sum(_bytes_in_hbm(o.shape) for o in instruction.operands) + _bytes_in_hbm(instruction.shape)


def is_bandwidth_bound(instruction: Instruction) -> bool:
    """Return whether an operation's time is bound by memory bandwidth, as for elementwise operations and reductions.

    False if the operation, or one in its fusion, multiplies matrices or moves data between lanes.
    """
    if instruction.opcode == "fusion":
        return all(is_bandwidth_bound(i) for i in instruction.called_computations[0].instructions)
    return instruction.opcode not in _NOT_BANDWIDTH_BOUND_OPCODES


def _bytes_in_hbm(array: Shape, part: Shape | None = None) -> float:
    """Return the padded bytes of an array, or of a part of it, if the array is in HBM, else 0."""
    if array.tuple_shapes:
        return sum(_bytes_in_hbm(leaf) for leaf in array.leaves)
    return float((array if part is None else part).padded_bytes) if array.memory_space == HBM else 0.0


def _fusion_bytes(fusion: Instruction) -> float:
    body = fusion.called_computations[0]
    bytes_read = sum(_bytes_read(fusion.operands[n].shape, parameter) for n, parameter in body.parameters.items())
    return bytes_read + _bytes_written(fusion, body)


def map_users(computation: Computation) -> dict[Instruction, list[Instruction]]:
    """Return a dict from each instruction of a computation to the instructions that use it as an operand.

    Unused instructions have no entry.
    """
    users: dict[Instruction, list[Instruction]] = {}
    for i in computation.instructions:
        for operand in i.operands:
            users.setdefault(operand, []).append(i)
    return users


def _bytes_read(operand_shape: Shape, parameter: Instruction) -> float:
    """Return the bytes that a fusion reads from one operand, following its uses in the fusion and in nested fusions."""
    whole_bytes = _bytes_in_hbm(operand_shape)
    if operand_shape.tuple_shapes or not whole_bytes:
        return whole_bytes
    users = map_users(parameter.computation)
    bytes_read = 0.0
    for value in _find_aliases(parameter, users):
        for user in users.get(value, []):
            if user.opcode in _SLICE_OPCODES and user.operands[0] is value:
                bytes_read += _bytes_in_hbm(operand_shape, user.shape)
            elif user.opcode == "fusion":
                nested_parameters = user.called_computations[0].parameters
                bytes_read += sum(
                    _bytes_read(operand_shape, nested_parameters[n]) for n, o in enumerate(user.operands) if o is value
                )
            elif (
                not (user.opcode in _UPDATE_OPERAND_INDEX and user.operands[0] is value)
                and user.opcode not in _PASS_THROUGH_OPCODES
            ):
                return whole_bytes
    return min(bytes_read, whole_bytes)


def _find_aliases(value: Instruction, users: dict[Instruction, list[Instruction]]) -> list[Instruction]:
    aliases = [value]
    for alias in aliases:
        aliases += [user for user in users.get(alias, []) if user.opcode in _PASS_THROUGH_OPCODES]
    return aliases


def _bytes_written(fusion: Instruction, body: Computation) -> float:
    root = body.root
    if root is None:
        return _bytes_in_hbm(fusion.shape)
    roots = root.operands if root.opcode == "tuple" else [root]
    bytes_written = 0.0
    for value, shape in zip(roots, fusion.shape.tuple_shapes or (fusion.shape,), strict=False):
        while value.opcode in _PASS_THROUGH_OPCODES:
            value = value.operands[0]
        part = (
            value.operands[_UPDATE_OPERAND_INDEX[value.opcode]].shape if value.opcode in _UPDATE_OPERAND_INDEX else None
        )
        bytes_written += _bytes_in_hbm(shape, part)
    return bytes_written
