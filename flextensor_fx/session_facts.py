"""What a session asks of a model and its parameters, and the values of weights that have been released."""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from ._sources import nbytes as bytes_of
from ._sources import storage_key
from .candidates import Candidate, Roots
from .session_plan import shape_of


def is_plain(parameter: Tensor) -> bool:
    """Whether it is no subclass, whose data could not be exchanged."""
    return type(parameter) is nn.Parameter


def reference(value: Any) -> weakref.ref[Any]:
    """A weak reference to a function, a method or a module."""
    return weakref.WeakMethod(value) if hasattr(value, "__self__") else weakref.ref(value)


def held_elsewhere(candidate: Candidate) -> bool:
    """Whether anything but the model's slots refers to the parameter."""
    ours = len(candidate.slots) + 2  # the local name, and the argument of getrefcount
    parameter = candidate.parameter
    return sys.getrefcount(parameter) > ours


def facts_of(
    candidates: Sequence[Candidate], stays: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, int], dict[str, str]]:
    """By name of each selected weight: its unit, its bytes, and why it stays resident if it must."""
    unit_of = {c.name: c.unit for c in candidates}
    nbytes = {c.name: bytes_of(c.parameter) for c in candidates}
    fixed = {c.name: c.stays for c in candidates if c.stays is not None}
    return unit_of, nbytes, fixed | {name: why for name, why in stays.items() if name in nbytes}


def bytes_elsewhere(roots: Roots, device: torch.device, selected: Set[str], filled: bool = False) -> int:
    """Bytes of what is not selected and has yet to move to `device`: parameters, and buffers.

    Args:
        filled: whether what is on the meta device will get a value there.
    """
    there = (device.type,) if filled else (device.type, "meta")
    slots = {name: slot.parameter for name, slot in roots.slots().items()}
    chosen = {id(p) for name, p in slots.items() if name in selected}
    rest = [*slots.values(), *(b for module in roots.modules.values() for b in module.buffers())]
    elsewhere = {id(t): t for t in rest if id(t) not in chosen and t.device.type not in there}
    return sum(bytes_of(t) for t in elsewhere.values())


def signature_of(roots: Roots) -> object:
    """What a selection and a plan hang on: names, shapes, dtypes and ties; not the tensors themselves."""
    first: dict[object, str] = {}
    return tuple(
        (name, shape_of(p), p.dtype, p.device, first.setdefault(storage_key(p), name))
        for name, slot in roots.slots().items()
        for p in [slot.parameter]
    )


class ReturnedValues:
    """Where the stand-ins of released weights find their values."""

    instance = "released"
    aliases = True

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def mapped(self, key: str) -> Tensor:
        return self.values[key]

    borrowed = mapped

    def note_shown(self, key: str) -> None:
        pass

    note_written = note_shown

    def host_value(self, key: str) -> Tensor:
        return self.values[key].cpu()

    def write(self, key: str, tensor: Tensor) -> None:
        self.values[key].copy_(tensor)


def fingerprint_of(roots: Roots, candidates: Sequence[Candidate]) -> str:
    """The same for the same model in every process, so that a compile cache made by one serves the next."""
    text = "\n".join(f"{c.name} {shape_of(c.parameter)} {c.parameter.dtype}" for c in candidates)
    return f"{roots.title}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
