"""Checks of users' classes: signatures of methods that override Valkyrie's, and types of their results.

Users' modules are not type-checked. `check_hooks` compares every method of a user's class with the method of Valkyrie
that it overrides, and wraps it so that a result of another type raises ValueError with the name of the file.
"""

from __future__ import annotations

import builtins
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from types import FunctionType, NoneType, UnionType
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin

from valkyrie.problems import MisuseError, describe_value

Method = TypeVar("Method", bound=Callable[..., object])

_PACKAGE = __name__.partition(".")[0]
_TYPE_NAMES: dict[Any, str] = {float: "number", int: "whole number", str: "string", bool: "bool"}
_CONTAINER_NAMES: dict[Any, str] = {
    **{kind: kind.__name__ for kind in (list, tuple, dict)},
    Mapping: "dict",
    **{Sequence: "sequence", Collection: "collection", Iterator: "iterable", Iterable: "iterable"},
}


class _Unknown:
    """Type that no value is checked against. Replaces names of annotations that are imported only for type checkers."""

    def __getattr__(self, name: str) -> _Unknown:
        return self

    def __getitem__(self, item: object) -> _Unknown:
        return self

    def __or__(self, other: object) -> _Unknown:
        return self

    __ror__ = __or__


class _Scope(dict[str, Any]):
    """Names in annotations: those of a module, builtins, and `_Unknown` for any other."""

    def __missing__(self, name: str) -> Any:
        return vars(builtins).get(name, _Unknown())


class Expected(NamedTuple):
    """What a method must return: a description, such as `a number of bytes`, and a function that tests a result."""

    text: str
    is_valid: Callable[[Any], bool]


def returns(text: str, is_valid: Callable[[Any], bool]) -> Callable[[Method], Method]:
    """Declare what a method of a base class must return, if its annotation does not say enough (see `Expected`)."""

    def declare(method: Method) -> Method:
        vars(method)["expected_result"] = Expected(text, is_valid)
        return method

    return declare


def is_exit_status(value: object) -> bool:
    """Return whether a value is an exit status from 0 to 255, or None, which means 0."""
    return value is None or (type(value) is int and 0 <= value < 256)


def check_hooks(cls: type, setting: Callable[[Any], str] | None = None, interface: type = object) -> None:
    """Check the methods and properties of a user's class that override Valkyrie's, including inherited ones.

    Later calls of such a method raise ValueError for a result of a wrong type.

    Args:
        cls: The class. Classes of Valkyrie that it derives from are not checked.
        setting: Takes an instance or its class, and returns the setting that selects it, with which messages begin:
            `task=mine`.
        interface: A protocol of Valkyrie that `cls` implements. Declares the methods that no base class declares.

    Raises:
        MisuseError: A method cannot be called with the arguments that Valkyrie passes, or a property is no property.
    """
    for position, owner in enumerate(cls.__mro__):
        for name, member in [] if _is_shipped(owner) else list(vars(owner).items()):
            bases = [base for base in cls.__mro__[position:] if _is_shipped(base) and name in vars(base)]
            bases = bases or [base for base in (interface,) if name in vars(base)]
            is_method = isinstance(member, FunctionType | property | classmethod | staticmethod)
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if name.startswith("_") or not is_method or not bases or hasattr(function, "checks_result"):
                continue
            declared, label = vars(bases[-1])[name], name if owner.__name__ == "Config" else f"{owner.__name__}.{name}"
            file = getattr(sys.modules.get(owner.__module__), "__file__", owner.__module__)
            line = f", line {function.__code__.co_firstlineno}" if isinstance(function, FunctionType) else ""
            _check_kind_and_signature(member, declared, owner, f"{file}{line}: {label}")
            expected = _expected_result(declared)
            if expected is not None and isinstance(function, FunctionType):
                label = f"{label} of {file}" if isinstance(member, property) else f"{label}() of {file}"
                setattr(owner, name, _check_results(member, function, expected, label, setting, cls))


def _is_shipped(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == _PACKAGE


def _check_kind_and_signature(member: Any, declared: Any, owner: type, label: str) -> None:
    """Raise MisuseError if `member` cannot replace `declared`, the same member of a class of Valkyrie."""
    if isinstance(declared, property) and not isinstance(member, property):
        raise MisuseError(f"{label} must be a property. Write @property before it.")
    if not isinstance(declared, FunctionType):
        return
    if isinstance(member, property):
        raise MisuseError(f"{label} must be a method, not a property. Remove @property.")
    signature = inspect.signature(declared)
    _, *parameters = signature.parameters.values()
    try:
        inspected = inspect.signature(member.__get__(object(), owner))
        for is_passed in (lambda p: True, lambda p: p.default is p.empty):  # with and without optional arguments
            passed = [p for p in parameters if is_passed(p)]
            positional = [p.name for p in passed if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
            inspected.bind(*positional, **{p.name: None for p in passed if p.kind is p.KEYWORD_ONLY})
    except (TypeError, ValueError) as error:
        wrong = inspect.signature(getattr(member, "__func__", member))
        raise MisuseError(f"{label} must take {_arguments_text(signature)}, not {_arguments_text(wrong)}.") from error


def _arguments_text(signature: inspect.Signature) -> str:
    parameters = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(inspect.Signature(parameters))


def _check_results(
    member: Any,
    function: FunctionType,
    expected: Expected,
    label: str,
    setting: Callable[[Any], str] | None,
    cls: type,
) -> Any:
    """Return a copy of a member of `cls` with the function `function` that raises ValueError for unexpected results."""

    @wraps(function)
    def checked(*arguments: Any, **named_arguments: Any) -> Any:
        result = function(*arguments, **named_arguments)
        if not expected.is_valid(result):
            config = cls if isinstance(member, staticmethod) else arguments[0]
            prefix = f"{setting(config)}: " if setting is not None else ""
            raise ValueError(f"{prefix}{label} returned {describe_value(result)}, not {expected.text}.")
        return result

    vars(checked)["checks_result"] = True
    if isinstance(member, property):
        return member.getter(checked)
    return type(member)(checked) if isinstance(member, classmethod | staticmethod) else checked


def _expected_result(declared: Any) -> Expected | None:
    """Return the declared result of a method or property of Valkyrie, or None if its type is not declared."""
    function = declared.fget if isinstance(declared, property) else declared
    if not isinstance(function, FunctionType) or "return" not in function.__annotations__:
        return None
    if "expected_result" in vars(function):
        return vars(function)["expected_result"]
    annotation = function.__annotations__["return"]
    if isinstance(annotation, str):
        # Annotations of Valkyrie only. `typing.get_type_hints` refuses names imported under TYPE_CHECKING.
        annotation = eval(annotation, {}, _Scope(function.__globals__))
    text = _type_text(annotation)
    return Expected(text, lambda value: _matches(value, annotation)) if text else None


def _matches(value: Any, annotation: Any) -> bool:
    """Return whether a value has the type of an annotation. Unknown types match all values.

    Lists and tuples are interchangeable. Any object that converts to a number counts as a number.
    """
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return any(_matches(value, part) for part in parts)
    if annotation in (None, NoneType):
        return value is None
    if annotation is Any:
        return True
    if annotation is float or annotation is int:
        return hasattr(value, "__float__" if annotation is float else "__index__")
    if annotation is bool:
        return value is not None
    if origin in (Iterator, Iterable):
        return isinstance(value, Iterable)
    if origin is tuple and parts[1:] != (...,):
        return isinstance(value, tuple) and len(value) == len(parts) and all(map(_matches, value, parts))
    if origin in (list, tuple, Sequence, Collection):
        kinds = (list, tuple) if origin in (list, tuple) else origin
        is_valid = isinstance(value, kinds) and not isinstance(value, str | bytes)
        return is_valid and all(_matches(item, parts[0]) for item in value)
    if origin in (dict, Mapping):
        return isinstance(value, Mapping) and all(
            _matches(key, parts[0]) and _matches(item, parts[1]) for key, item in value.items()
        )
    kind = origin or annotation
    is_checked = isinstance(kind, type) and not getattr(kind, "_is_protocol", False)
    return isinstance(value, kind) if is_checked else True


def _type_text(annotation: Any, article: str = "a ") -> str:
    """Return a description of a type, such as `a list of strings`, or an empty string for unknown types.

    Without an article, the names of builtin types are plural.
    """
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        texts = [_type_text(part, article) for part in parts]
        return " or ".join(texts) if all(texts) else ""
    if annotation in (None, NoneType):
        return "None"
    kind = origin or annotation
    if kind in (object, Any):
        return ""
    name = _CONTAINER_NAMES.get(origin) or _TYPE_NAMES.get(kind)
    name = f"{name}{'s' * (not article)}" if name else kind.__name__ if isinstance(kind, type) else ""
    item = _type_text(parts[-1 if origin in (dict, Mapping) else 0], "") if origin in _CONTAINER_NAMES else ""
    if origin is tuple and parts[1:] != (...,):
        item = f"{len(parts)} values"
    article = "an " if article and name[:1] in "aeiouAEIOU" else article
    return f"{article}{name}{f' of {item}' if item else ''}" if name else ""
