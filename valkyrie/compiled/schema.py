"""Message classes for the fields of XLA's `HloModuleProto` that Valkyrie parses.

Field numbers are from openxla/xla `xla/service/hlo.proto` and `xla/xla_data.proto`. Fields 92 and 93 of an instruction
are not in the published file. They were inferred from the output of libtpu 0.0.50. All other fields are skipped.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "valkyrie.hlo"
_TYPES = {
    "int": descriptor_pb2.FieldDescriptorProto.TYPE_INT64,
    "bool": descriptor_pb2.FieldDescriptorProto.TYPE_BOOL,
    "str": descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    "bytes": descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
}

_MESSAGES = {
    "Tile": "1 dimensions int*",
    "Layout": "1 minor_to_major int*, 6 tiles Tile*, 8 memory_space int",
    "Shape": "2 element_type int, 3 dimensions int*, 4 tuple_shapes Shape*, 5 layout Layout",
    "Metadata": "1 op_type str, 2 op_name str, 3 source_file str, 4 source_line int, 15 stack_frame_id int",
    "Literal": "1 shape Shape, 2 preds bytes, 15 s8s bytes, 3 u8s bytes, 4 s32s int*, 5 s64s int*, 6 u32s int*, "
    "7 u64s int*",
    "WindowDimension": "1 size int, 2 stride int, 3 padding_low int, 4 padding_high int, 5 window_dilation int, "
    "6 base_dilation int",
    "Window": "1 dimensions WindowDimension*",
    "ConvolutionDimensions": "3 kernel_input_feature int, 4 kernel_output_feature int, 6 kernel_spatial int*, "
    "7 input_batch int, 8 input_feature int, 9 output_batch int, 10 output_feature int, 11 input_spatial int*, "
    "12 output_spatial int*",
    "DotDimensions": "1 lhs_contracting int*, 2 rhs_contracting int*, 3 lhs_batch int*, 4 rhs_batch int*",
    "Precision": "1 operands int*",
    "GatherDimensions": "1 offset_dims int*, 4 index_vector_dim int",
    "ScatterDimensions": "1 update_window_dims int*",
    "ReplicaGroup": "1 replica_ids int*",
    "SourceTarget": "1 source int, 2 target int",
    "IotaGroups": "1 groups int, 2 size int, 3 dimensions int*, 4 transpose int*",
    "MeshAxis": "1 name str, 2 size int",
    "MeshIota": "1 dimensions int*, 2 transpose int*",
    "Mesh": "1 axes MeshAxis*, 2 device_ids int*, 3 iota MeshIota",
    "SubAxis": "1 pre_size int, 2 size int",
    "AxisRef": "1 axis int, 2 sub_axis SubAxis",
    "MeshGroups": "1 mesh Mesh, 2 axes AxisRef*",
    "DeviceList": "1 replica_groups ReplicaGroup*, 2 iota IotaGroups",
    "Attributes": "1 map Attribute*",
    "Attribute": "1 key str, 2 value str",
    "Instruction": "1 name str, 2 opcode str, 3 shape Shape, 7 metadata Metadata, 8 literal Literal, "
    "9 parameter_number int, 13 tuple_index int, 14 dimensions int*, 15 window Window, "
    "16 convolution ConvolutionDimensions, 26 channel_id int, 28 custom_call_target str, 30 dot DotDimensions, "
    "33 gather GatherDimensions, 35 id int, 36 operand_ids int*, 38 called_computation_ids int*, "
    "43 backend_config bytes, 48 scatter ScatterDimensions, 49 replica_groups ReplicaGroup*, "
    "50 feature_group_count int, 51 precision Precision, 52 source_target_pairs SourceTarget*, "
    "58 batch_group_count int, 63 comparison_direction str, 68 frontend_attributes Attributes, "
    "71 use_global_device_ids bool, 87 device_list DeviceList, 92 iota_groups IotaGroups, 93 mesh_groups MeshGroups",
    "Computation": "1 name str, 2 instructions Instruction*, 5 id int, 6 root_id int",
    "Sequence": "1 instruction_ids int*",
    "ScheduleEntry": "1 key int, 2 value Sequence",
    "Schedule": "1 sequences ScheduleEntry*",
    "FileLocation": "1 file int, 2 function int, 3 line int",
    "StackFrame": "1 location int, 2 parent int",
    "StackFrames": "1 file_names str*, 2 function_names str*, 3 locations FileLocation*, 4 frames StackFrame*",
    "AssignedDevice": "1 replica_device_ids int*",
    "Assignment": "1 replicas int, 2 partitions int, 3 computation_devices AssignedDevice*",
    "Module": "1 name str, 3 computations Computation*, 6 entry_computation_id int, 7 schedule Schedule, "
    "15 device_assignment Assignment, 17 stack_frames StackFrames",
    "Allocation": "2 size int, 3 thread_local bool, 5 argument bool, 7 output bool, 8 memory_space int",
    "Allocations": "3 allocations Allocation*",
    "Dump": "1 module Module, 3 memory Allocations",
}
"""Fields of each message as `number name type`, with `*` for repeated fields. `Dump` is XLA's `HloProto`."""


def module_class() -> Any:
    """Return the message class of a serialised `HloModuleProto`, limited to the fields in `_MESSAGES`."""
    return _message_class("Module")


def dump_class() -> Any:
    """Return the message class of a serialised `HloProto` (module and memory) from `--xla_dump_hlo_as_proto`."""
    return _message_class("Dump")


def _message_class(name: str) -> Any:
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{_PACKAGE}.{name}"))


@cache
def _pool() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for text in fields.split(", "):
            number, field_name, kind = text.split()
            base = kind.rstrip("*")
            field = message.field.add(name=field_name, number=int(number))
            repeated, single = field.LABEL_REPEATED, field.LABEL_OPTIONAL
            field.label = repeated if kind.endswith("*") else single
            field.type = _TYPES.get(base, field.TYPE_MESSAGE)
            if base not in _TYPES:
                field.type_name = f".{_PACKAGE}.{base}"
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool
