"""One checker per kind of configuration value: who asks, what was found -> the value as it is stored."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, NoReturn

import torch

from .errors import ConfigError
from .patterns import Role, parse_all

_BUDGET = re.compile(
    r"(?P<number>\d+(?:\.\d+)?)\s*(?:(?P<prefix>[kmgt]?)(?P<binary>i?)b|(?P<percent>%))?", re.IGNORECASE
)
_BUDGET_FORMS = (
    "None, bytes as an int, a size such as '2GiB' or '300MB', a share such as '25%' or a float in (0, 1], a share of the "
    "device's memory such as '80% of device', or 'auto'"
)
_OF_DEVICE = re.compile(r"(?P<share>.*%)\s*of\s+(?:the\s+)?device", re.IGNORECASE)
OF_DEVICE = " of device"
"""Ends the stored text of a budget that is a share of the device's memory."""
AUTO = "auto"
"""The budget that is what the device has free."""


def refuse(who: str, expected: str, found: object, change: str) -> NoReturn:
    """Raise the error that every bad value ends in.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(f"{who}: expected {expected}, found {type(found).__name__} {found!r}; {change}")


class Options(Mapping[str, Any]):
    """An immutable, hashable mapping of names to JSON values, with lists as tuples and mappings as Options."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Any], who: str = "options") -> None:
        frozen = {}
        for name, value in items.items():
            if not isinstance(name, str):
                refuse(f"{who}: the name {name!r}", "a string", name, "key the options by name")
            frozen[name] = _freeze(value, f"{who}[{name!r}]")
        self._items = frozen

    def __getitem__(self, name: str) -> Any:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self.plain())

    def plain(self) -> dict[str, Any]:
        """Return a new dict with lists and dicts inside, fit for JSON and for the inner compiler."""
        return {name: _thaw(value) for name, value in self._items.items()}


def patterns(role: Role, who: str, value: Any) -> tuple[str, ...]:
    """Check a list of patterns; raises PatternError, which is a ConfigError."""
    try:
        return tuple(pattern.text for pattern in parse_all(value, role))
    except ConfigError as error:
        raise type(error)(f"{who}: {error}") from None


def budget(who: str, value: Any) -> int | str | None:
    """Check a budget and return bytes as an int, a share as exact percent text, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        refuse(who, _BUDGET_FORMS, value, "write one of these")
    if isinstance(value, float):
        if not math.isfinite(value) or not 0 < value <= 1:
            refuse(who, "a share in (0, 1]", value, "write bytes as an int, or a size such as '2GiB'")
        return _percent(Decimal(repr(value)))
    if isinstance(value, str):
        return _budget_text(who, value)
    if value < 1:
        refuse(who, "at least 1 byte", value, "write None for no limit of your own, or a size such as '2GiB'")
    return value


def optional_size(who: str, value: Any) -> int | None:
    """Check bytes as an int or a size such as "2GiB", or None; returned as bytes."""
    if value is None:
        return None
    found = budget(who, value) if isinstance(value, (int, str)) else None
    if not isinstance(found, int):
        refuse(who, "None, bytes as an int, or a size such as '2GiB'", value, "write None for no limit, or a size")
    return found


def optional_one_of(values: tuple[str, ...], who: str, value: Any) -> str | None:
    """Check one of a few names, or None."""
    return None if value is None else one_of(values, who, value)


def count(least: int, who: str, value: Any) -> int:
    """Check a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        refuse(who, f"a whole number of at least {least}", value, f"write {least} or more")
    return value


def optional_count(least: int, who: str, value: Any) -> int | None:
    """Check a whole number of at least `least`, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        refuse(
            who,
            f"None or a whole number of at least {least}",
            value,
            f"write None to let it be chosen, or {least} or more",
        )
    return value


def flag(who: str, value: Any) -> bool:
    """Check a boolean; 0 and 1 are numbers here."""
    if not isinstance(value, bool):
        refuse(who, "True or False", value, "write True or False")
    return value


def one_of(choices: Sequence[str], who: str, value: Any) -> str:
    """Check a word against the words allowed."""
    if not isinstance(value, str) or value not in choices:
        refuse(who, f"one of {', '.join(map(repr, choices))}", value, "write one of these")
    return value


def optional_text(who: str, value: Any) -> str | None:
    """Check a non-empty string, or None."""
    if value is not None and (not isinstance(value, str) or not value.strip()):
        refuse(who, "None or a non-empty string", value, "write a name or leave it out")
    return value


def optional_path(who: str, value: Any) -> str | None:
    """Check a path, or None; returned as text."""
    if value is None:
        return None
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not path.strip():
        refuse(who, "None or a path", value, "write the path of a directory")
    return path


def optional_device(who: str, value: Any) -> str | None:
    """Check a device name or torch.device, or None; returned as text."""
    if value is None:
        return None
    if not isinstance(value, (str, torch.device)):
        refuse(who, "None, a device name or a torch.device", value, "write 'cpu', or leave it out")
    try:
        return str(torch.device(value))
    except RuntimeError:
        refuse(who, "a device name that torch knows", value, "write 'cpu', or leave it out")


def optional_options(who: str, value: Any) -> Options | None:
    """Check a mapping of option names to JSON values, or None."""
    if value is None or isinstance(value, Options):
        return value
    if not isinstance(value, Mapping):
        refuse(
            who, "None or a mapping of option names to values", value, "write a mapping such as {'max_autotune': True}"
        )
    return Options(value, who)


def share_of(budget_value: int | str | None, selected_bytes: int) -> int | None:
    """Return the bytes that a checked budget stands for, rounded down; None stays None."""
    if isinstance(budget_value, str):
        if budget_value == AUTO or budget_value.endswith(OF_DEVICE):
            refuse(
                "budget", "bytes or a share of the weights where no device is known", budget_value, "write one of these"
            )
        return int(Decimal(budget_value.rstrip("%")) / 100 * selected_bytes)
    return budget_value


def _budget_text(who: str, text: str) -> int | str:
    if text.strip().lower() == AUTO:
        return AUTO
    of_device = _OF_DEVICE.fullmatch(text.strip())
    if of_device is not None:
        return f"{_budget_text(who, of_device['share'])}{OF_DEVICE}"
    match = _BUDGET.fullmatch(text.strip())
    if match is None:
        refuse(who, _BUDGET_FORMS, text, "give the unit in full: kB, MB, GB, TB or KiB, MiB, GiB, TiB")
    number = Decimal(match["number"])
    if match["percent"]:
        if not 0 < number <= 100:
            refuse(who, "a share above 0% and up to 100%", text, "write a smaller share, or a size such as '2GiB'")
        return _percent(number / 100)
    if match["prefix"] is None:  # a bare number, as environment variables give it
        return _checked_number(who, text, number)
    if match["binary"] and not match["prefix"]:
        refuse(who, _BUDGET_FORMS, text, "give the unit in full: kB, MB, GB, TB or KiB, MiB, GiB, TiB")
    size = int(number * (1024 if match["binary"] else 1000) ** _unit_power(match["prefix"]))
    if size < 1:
        refuse(who, "at least 1 byte", text, "write a larger size, or None for no limit of your own")
    return size


def _checked_number(who: str, text: str, number: Decimal) -> int | str:
    value = budget(who, float(number) if "." in text else int(number))
    assert value is not None
    return value


def _unit_power(prefix: str) -> int:
    return " kmgt".index(prefix.lower()) if prefix else 0


def _percent(share: Decimal) -> str:
    # Exact, so that a share survives a trip through text, and 1 (byte) never equals 1.0 (all of it).
    return f"{(share * 100).normalize():f}%"


def _freeze(value: Any, who: str) -> Any:
    if isinstance(value, Mapping):
        return value if isinstance(value, Options) else Options(value, who)
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(item, f"{who}[{index}]") for index, item in enumerate(value))
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        refuse(who, "a string, number, boolean, None, list or mapping", value, "write a plain value")
    return value


def _thaw(value: Any) -> Any:
    if isinstance(value, Options):
        return value.plain()
    return [_thaw(item) for item in value] if isinstance(value, tuple) else value
