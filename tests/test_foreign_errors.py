"""Tests that `valkyrie.foreign_errors` parses error messages of Python, Hydra, OmegaConf, XLA, JAX and libtpu."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from dataclasses import field, make_dataclass
from typing import Any

import msgspec
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import InstantiationException, OverrideParseException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from valkyrie.config.run import Debug, RunConfig
from valkyrie.foreign_errors import (
    WrongValue,
    allocated_bytes,
    ambiguous_argument,
    blocked_target,
    first_lines,
    flag_refusal_reason,
    is_key_of_null,
    is_out_of_memory,
    missing_field,
    missing_group,
    needs_quotes,
    no_device_reason,
    parse_abstract_class,
    parse_scratch_memory,
    parse_validation_error,
    parse_wrong_value,
    scalar_valued_group,
    topology_reason,
    unknown_option,
    unreadable_option,
    unsupported_type,
)


def test_python_errors_about_abstract_classes_are_parsed():
    for members in (["sizes"], ["sizes", "weights"]):
        abstract = ABCMeta("Own", (), {name: abstractmethod(lambda self: None) for name in members})
        with pytest.raises(TypeError) as error:
            abstract()
        assert parse_abstract_class(str(error.value)) == ("Own", members)
    message = "Can't instantiate abstract class Own without an implementation for abstract methods 'sizes', 'weights'"
    assert parse_abstract_class(message) == ("Own", ["sizes", "weights"])
    assert parse_abstract_class("sizes") is None


@pytest.mark.parametrize(
    ("key", "value", "kind", "words"),
    [
        ("steps", "abc", WrongValue.not_a_number, ["abc", "Integer"]),
        ("temperature", "x", WrongValue.not_a_number, ["x", "Float"]),
        ("force", "maybe", WrongValue.not_a_bool, ["maybe"]),
        ("seq", None, WrongValue.null, []),
        ("debug", "some", WrongValue.not_a_choice, ["some", ", ".join(debug.name for debug in Debug)]),
        ("debug", [1], WrongValue.not_a_choice, ["[1]"]),
        ("modules", "a", WrongValue.not_a_list, []),
        ("name", ["a"], WrongValue.not_a_text, ["['a']"]),
        ("optimizer", 3, WrongValue.not_a_group, ["3"]),
    ],
)
def test_omegaconf_errors_about_values_are_explained(key: str, value: Any, kind: WrongValue, words: list[str]):
    with pytest.raises(OmegaConfBaseException) as error:
        OmegaConf.update(OmegaConf.structured(RunConfig), key, value)
    assert parse_wrong_value(str(error.value).splitlines()[0].rstrip(".")) == (kind, words)
    assert parse_wrong_value("something else") is None


@pytest.mark.parametrize(
    ("field_type", "field_name", "name"),
    [
        (complex, "", "complex"),
        (set[str], "", "set[str]"),
        (list[complex], "", "complex"),
        (int | list[int], "key", "Union[int, list[int]]"),
    ],
)
def test_omegaconf_errors_about_types_are_explained(field_type: Any, field_name: str, name: str):
    with pytest.raises(OmegaConfBaseException) as error:
        OmegaConf.structured(make_dataclass("Config", [("key", field_type, field(default_factory=list))]))
    assert unsupported_type(str(error.value)) == (field_name, name)
    assert unsupported_type("another") is None


def test_omegaconf_errors_about_null_groups_are_explained():
    assert is_key_of_null("Unexpected type for root: NoneType") and is_key_of_null("Unexpected type: None")
    assert not is_key_of_null("another assertion")


def test_hydra_errors_are_explained():
    assert ambiguous_argument("Ambiguous value for argument 'batch=1,2'\n1. To use it") == "batch=1,2"
    assert ambiguous_argument("another") is None
    assert missing_group("In 'experiment/m': Could not override 'mesh@partiton'.\nx") == ("experiment/m", "partiton")
    assert missing_group("another") is None
    composing = "ValidationError raised while composing config:\nMerge error: str is not a subclass. value: gpt_tiny\n"
    assert scalar_valued_group(f"In 'experiment/m': {composing}") == ("experiment/m", "gpt_tiny")
    assert scalar_valued_group("another") is None
    with pytest.raises(OverrideParseException) as error:
        OverridesParser.create().parse_overrides(["modules=[é.txt]"])
    assert needs_quotes(str(error.value)) and not needs_quotes("no viable alternative at input '[3'")


def test_msgspec_errors_about_fields_are_parsed():
    part = make_dataclass("Part", [("size", int)])
    whole = make_dataclass("Whole", [("parts", list[part])])
    for parts, path, field_name in (([{}], "$.parts[0]", "size"), ([{"size": "x"}], "$.parts[0].size", None)):
        with pytest.raises(msgspec.ValidationError) as error:
            msgspec.convert({"parts": parts}, whole)
        reason, error_path = parse_validation_error(str(error.value))
        assert (error_path, missing_field(reason)) == (path, field_name)
    assert parse_validation_error("Expected `object`, got `int`") == ("expected `object`, got `int`", "")


def test_wrong_flags_of_libtpu_are_explained():
    assert flag_refusal_reason("ERROR: Unknown command line flag 'xla_foo'") == "has no flag xla_foo"
    reason = flag_refusal_reason("ERROR: Illegal value 'abc' specified for flag 'xla_b'")
    assert reason is not None and "abc" in reason and "xla_b" in reason
    assert flag_refusal_reason("ERROR: another") is None


@pytest.mark.parametrize(
    ("message", "is_memory", "size"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes.", True, 123),
        ("RESOURCE_EXHAUSTED: CompileTimeHbmOom: needs HBM (37.85G) exceeds available HBM (30.75G)", True, None),
        ("INTERNAL: out of memory while trying to allocate 4096 bytes", True, 4096),
        ("std::bad_alloc", True, None),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem", False, None),
        ("INVALID_ARGUMENT: shapes differ", False, None),
    ],
)
def test_xla_errors_about_memory_are_parsed(message: str, is_memory: bool, size: int | None):
    assert (is_out_of_memory(message), allocated_bytes(message)) == (is_memory, size)


def test_xla_errors_about_scratch_memory_are_parsed():
    text = "Ran out of memory in memory space vmem while allocating on stack for %mha.1 = f32[]. Used 19.55M of 16.00M"
    shortage = parse_scratch_memory(text)
    assert shortage is not None and (shortage.kernel, shortage.limit_mib) == ("mha.1", 16.0)
    assert shortage.needed_mib == pytest.approx(19.55)
    shortage = parse_scratch_memory(text.replace("19.55M", "1.5G"))
    assert shortage is not None and shortage.needed_mib == 1536
    assert parse_scratch_memory("another") is None
    assert first_lines("\n a \n\nb\nc") == "a b"


def test_xla_errors_about_options_are_parsed():
    assert unknown_option("INVALID_ARGUMENT: No such compile option: 'xla_none'") == "xla_none"
    assert unreadable_option("Failed to parse 'x' into flag xla_a: not a number.") == ("xla_a", "x", "not a number")
    assert unknown_option("another") is unreadable_option("another") is None


def test_jax_and_libtpu_errors_about_devices_are_explained():
    error = RuntimeError("Unknown backend: 'gpu' requested. (set JAX_PLATFORMS='' to choose)")
    assert no_device_reason(error) == "Unknown backend: 'gpu' requested"
    assert no_device_reason(AssertionError()) == ""
    assert topology_reason(ValueError("INVALID_ARGUMENT: no such topology.\nmore")) == "no such topology"
    assert topology_reason(KeyError()) == "KeyError"


def test_a_function_that_hydra_refuses_to_call_is_named_with_its_key() -> None:
    config = OmegaConf.create({"hydra": {"callbacks": {"mine": {"_target_": "os.system"}}}})
    with pytest.raises(InstantiationException) as error:
        instantiate(config)
    assert blocked_target(str(error.value)) == ("hydra.callbacks.mine", "os.system")
