"""Frozen dataclasses to JSON values and back, strictly: what comes back has the types that the fields declare."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_LARGEST = 1 << 63
_MOST_MS = 1e15
_BASIC = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


class ValueMismatch(ValueError):
    """A JSON value that does not fit a field; the message names the field, what it expects and what was found."""


def encode(value: Any) -> Any:
    """Dataclasses become objects by field name, tuples and frozensets lists (those of a frozenset sorted)."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, frozenset):
        return [encode(item) for item in sorted(value)]
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise AssertionError(f"{value!r} has no place in a JSON file")


def decode(hint: Any, value: Any, where: str) -> Any:
    """The value that `encode` made `value` from.

    Args:
        hint: its type: a dataclass, tuple, frozenset, Mapping[str, X], Literal, union with None, or a basic one.
        value: from `json.loads`.
        where: the field's path, for messages.

    Raises:
        ValueMismatch: `value` is not of that type, lacks a field, has one too many, or its class refuses it.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _object(hint, value, where)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return decode(inner, value, where)
    if origin is typing.Literal:
        if not (isinstance(value, str) and value in arguments):
            raise _mismatch(where, "one of " + ", ".join(map(repr, arguments)), value)
        return value
    if origin is tuple and arguments[-1] is not Ellipsis:
        items = _list(value, where)
        if len(items) != len(arguments):
            raise _mismatch(where, f"a list of {len(arguments)}", value)
        return tuple(decode(a, item, f"{where}[{n}]") for n, (a, item) in enumerate(zip(arguments, items, strict=True)))
    if origin in (tuple, frozenset):
        return origin(decode(arguments[0], item, f"{where}[{n}]") for n, item in enumerate(_list(value, where)))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise _mismatch(where, "an object", value)
        return MappingProxyType(
            {_text(key, where): decode(arguments[1], item, f"{where}[{key!r}]") for key, item in value.items()}
        )
    return _basic(hint, value, where)


def _object(cls: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _mismatch(where, f"an object ({cls.__name__})", value)
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    if missing := [name for name in names if name not in value]:
        raise ValueMismatch(f"{where}: expected the fields {', '.join(names)}, found no {missing[0]!r}")
    if unknown := sorted(value.keys() - set(names)):
        raise ValueMismatch(f"{where}: expected the fields {', '.join(names)}, found also {unknown[0]!r}")
    fields = {name: decode(hints[name], value[name], f"{where}.{name}") for name in names}
    try:
        return cls(**fields)
    except ValueError as error:
        raise ValueMismatch(f"{where}: {error}") from error


def _basic(hint: Any, value: Any, where: str) -> Any:
    if hint is str and isinstance(value, str):
        return _text(value, where)
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST:
        return value
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        # Beyond that, sums and differences of times are no longer exact to a millisecond, and drawing them overflows.
        if math.isfinite(value) and abs(value) <= _MOST_MS:
            return float(value)
        raise _mismatch(where, f"a number of at most {_MOST_MS:g}", value)
    if hint not in _BASIC:
        raise AssertionError(f"{where}: no JSON form is known for {hint!r}")
    raise _mismatch(where, _BASIC[hint], value)


def _text(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:  # half a character: it can be neither printed nor written
        raise _mismatch(where, "a text", value) from None
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise _mismatch(where, "a list", value)
    return value


def _mismatch(where: str, expected: str, value: Any) -> ValueMismatch:
    found = ascii(value) if not isinstance(value, int) or abs(value) < _LARGEST else "a number beyond 64 bits"
    return ValueMismatch(f"{where}: expected {expected}, found {found if len(found) <= 60 else found[:57] + '...'}")
