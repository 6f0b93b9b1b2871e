"""The selected weights of live modules: their tensors, the places that hold them, and what cannot be offloaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

import torch
from torch import nn

from . import _sources
from .errors import OffloadError
from .named_tensors import NamedTensors
from .passes.fetches import FetchSpec
from .runtime.layout import check_storable
from .runtime.parameter import OffloadedParameter
from .selection import Selection
from .tree import ModuleTree, walk


@dataclass(frozen=True, slots=True)
class Slot:
    """A place that holds a parameter: attribute `name` of `module`."""

    module: nn.Module
    name: str

    @property
    def parameter(self) -> torch.Tensor:
        parameter = self.module._parameters[self.name]
        assert parameter is not None
        return parameter

    def put(self, parameter: torch.Tensor) -> None:
        """Holds `parameter` from now on. Not by setattr: modules may watch that, and the parameter is the same to them."""
        self.module._parameters[self.name] = parameter  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A selected weight.

    Fields:
        name: its path in the model.
        unit: path of its offload unit.
        slots: every place in the model that holds this very tensor, tied ones included.
        stays: why it cannot be offloaded, as the end of a sentence; None if it can.
    """

    name: str
    unit: str
    slots: tuple[Slot, ...]
    stays: str | None

    @property
    def parameter(self) -> torch.Tensor:
        return self.slots[0].parameter

    def spec(self, key: str) -> FetchSpec:
        """What a fetch of this weight yields."""
        p = self.parameter
        return FetchSpec(key, tuple(p.shape), tuple(p.stride()), p.dtype, p.device)


@dataclass(frozen=True)
class Roots:
    """The modules that one session offloads, by the prefix of their weights' names ("" where there is only one)."""

    modules: Mapping[str, nn.Module]

    def holder(self) -> nn.Module:
        """One module over all of them; names of its parameters are the names that patterns speak of."""
        if "" in self.modules:
            return self.modules[""]
        holder = nn.Module()
        for prefix, module in self.modules.items():
            holder.add_module(prefix, module)
        return holder

    def tree(self) -> ModuleTree:
        holder = self.holder()
        return holder.tree if isinstance(holder, NamedTensors) else ModuleTree.from_module(holder)

    @property
    def title(self) -> str:
        """What the modules are called together: the names of their classes."""
        return "-".join(
            root.title if isinstance(root, NamedTensors) else type(root).__name__ for root in self.modules.values()
        )

    def slots(self) -> dict[str, Slot]:
        """Every parameter's place by its name, tied ones under each of their names."""
        return dict(_slots(self.holder()))


def _slots(root: nn.Module) -> Iterator[tuple[str, Slot]]:
    for path, module in walk(root):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield (f"{path}.{name}" if path else name), Slot(module, name)


def find_candidates(
    roots: Roots, selection: Selection, instance: str = "", filled: Set[str] = frozenset()
) -> tuple[Candidate, ...]:
    """One candidate per selected weight, in the order of the model's parameters.

    Args:
        instance: of the engine that the model is offloaded with; stand-ins of any other engine stay as they are.
        filled: names of parameters that are about to get a value; on the meta device they have none yet.

    Raises:
        OffloadError: the selected weights lie on several devices.
    """
    by_name = roots.slots()
    by_tensor: dict[object, list[Slot]] = {}
    ranges: dict[int, list[tuple[int, int, object]]] = {}
    seen: set[tuple[int, str]] = set()
    for slot in by_name.values():
        if (id(slot.module), slot.name) in seen:
            continue
        seen.add((id(slot.module), slot.name))
        parameter = slot.parameter
        identity = _sources.storage_key(parameter)
        if identity not in by_tensor:
            _note_range(parameter, identity, ranges)
        by_tensor.setdefault(identity, []).append(slot)
    for _, module in walk(roots.holder()):
        for buffer in module._buffers.values():
            if buffer is not None:  # a view of a weight that the model keeps would be cut off from it
                _note_range(buffer, id(buffer), ranges)
    overlapping = _overlapping(ranges)
    coming = {_sources.storage_key(by_name[name].parameter) for name in filled & by_name.keys()}
    found = []
    for name in sorted(selection.weights, key={name: place for place, name in enumerate(by_name)}.__getitem__):
        parameter = by_name[name].parameter
        identity = _sources.storage_key(parameter)
        unit = selection.unit_of(name)
        assert unit is not None
        if isinstance(parameter, OffloadedParameter):
            foreign = parameter.identity[1] != instance
            stays = "it is offloaded already, with another model" if foreign else None
        elif identity in coming and parameter.is_meta:
            stays = check_storable(parameter, filled=True)
            if any(isinstance(slot.module, nn.RNNBase) for slot in by_tensor[identity]):
                stays = "its module keeps a list of its weights of its own, which would go on holding empty ones"
        else:
            stays = check_storable(parameter)
        if stays is None and identity in overlapping:
            stays = "its memory overlaps another parameter's or a buffer's"
        found.append(Candidate(name, unit.path, tuple(by_tensor[identity]), stays))
    devices = {c.parameter.device for c in found if c.stays is None and not c.parameter.is_meta}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise OffloadError(
            f"offload: expected the selected weights on one device, found them on {names}; move the model to one device, "
            "or select the weights of one device only"
        )
    return tuple(found)


def _note_range(parameter: torch.Tensor, identity: object, ranges: dict[int, list[tuple[int, int, object]]]) -> None:
    try:
        storage = parameter.untyped_storage()
        begin = parameter.storage_offset() * parameter.element_size()
    except (RuntimeError, NotImplementedError, ValueError):  # no storage: sparse, wrapper and lazy tensors
        return
    if isinstance(parameter, OffloadedParameter) or parameter.numel() == 0:
        return
    last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    end = begin + (last + 1) * parameter.element_size()
    ranges.setdefault(storage._cdata, []).append((int(begin), int(end), identity))


def _overlapping(ranges: dict[int, list[tuple[int, int, object]]]) -> set[object]:
    """The tensors whose bytes another tensor of the same storage has too."""
    found: set[object] = set()
    for spans in ranges.values():
        reached, owner = -1, None
        for begin, end, identity in sorted(spans, key=lambda span: span[:2]):
            if begin < reached:
                found.update((identity, owner))
            if end > reached:
                reached, owner = end, identity
    return found
