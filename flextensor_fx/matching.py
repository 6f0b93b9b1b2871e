"""Which tensor of a checkpoint goes where in a model, and what does not fit, in the words of `load_state_dict`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from . import _sources
from .checkpoint import Checkpoint, Facts, MappingCheckpoint
from .errors import LoadError
from .tree import walk

_EXTRA = "_extra_state"
_PLAIN = (Tensor, nn.Parameter)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a module holds a tensor."""

    name: str
    module: nn.Module
    attribute: str
    is_buffer: bool

    @property
    def tensor(self) -> Tensor:
        table = self.module._buffers if self.is_buffer else self.module._parameters
        tensor = table[self.attribute]
        assert tensor is not None
        return tensor

    def put(self, tensor: Tensor) -> None:
        """Holds `tensor` from now on."""
        if self.is_buffer:
            self.module._buffers[self.attribute] = tensor
        elif isinstance(self.module, nn.RNNBase):
            setattr(self.module, self.attribute, tensor)  # it keeps a list of its weights, which follows this only
        else:
            self.module._parameters[self.attribute] = tensor  # pyright: ignore[reportArgumentType]  # plain ones in NamedTensors


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of a model, with every place that holds it, and the name of its value in the checkpoint; None if that has none."""

    places: tuple[Place, ...]
    source: str | None

    @property
    def name(self) -> str:
        return self.places[0].name

    @property
    def tensor(self) -> Tensor:
        return self.places[0].tensor


@dataclass(frozen=True)
class Matching:
    """What of a checkpoint goes where.

    Fields:
        targets: parameters and persistent buffers, each tensor once; other buffers where the checkpoint has them.
        missing, unexpected: as `load_state_dict` returns them, though a name whose tied partner is there is not missing.
        mismatches: lines about tensors that do not fit.
        extra: (module, name) of state that a module reads itself.
        unfilled: buffers that are no part of a state dict, and have no value.
    """

    targets: tuple[Target, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatches: tuple[str, ...]
    extra: tuple[tuple[nn.Module, str], ...]
    unfilled: tuple[Place, ...]

    @property
    def parameters(self) -> dict[str, str]:
        """By name of each parameter that there is a value for, tied names too: what the checkpoint calls it."""
        return {p.name: t.source for t in self.targets for p in t.places if t.source is not None and not p.is_buffer}

    def refuse(self, model: str, strict: bool) -> None:
        """Raises what `load_state_dict` would.

        Raises:
            LoadError: something does not fit; with `strict`, also something is missing or not expected.
        """
        lines = [*self._lines(), *self.mismatches] if strict else list(self.mismatches)
        if lines:
            raise LoadError(f"Error(s) in loading state_dict for {model}:\n\t" + "\n\t".join(lines))

    def _lines(self) -> list[str]:
        named = (("Missing", self.missing), ("Unexpected", self.unexpected))
        return [f"{kind} key(s) in state_dict: {_quoted(names)}. " for kind, names in named if names]

    def warning(self, model: str) -> str:
        """What is missing or not expected; "" if nothing is."""
        lines = self._lines()
        if empty := [p.name for t in self.targets if t.source is None for p in t.places if p.tensor.is_meta]:
            lines.append(f"Still on the meta device, without a value: {_quoted(empty)}. ")
        return "\n\t".join([f"flextensor_fx.load, {model}:", *lines]) if lines else ""


def match(root: nn.Module, checkpoint: Checkpoint) -> Matching:
    """Finds the value of every tensor of a model. Reads headers only.

    Raises:
        LoadError, StoreError: a tensor that is wanted cannot be used, or a parameter has no shape yet.
    """
    there = dict.fromkeys(checkpoint.names)
    groups: dict[object, list[Place]] = {}
    passing: list[Place] = []  # buffers that are no part of a state dict
    extra: list[tuple[nn.Module, str]] = []
    for place, persistent in _places(root):
        if nn.parameter.is_lazy(place.tensor):
            raise LoadError(f"load: {place.name} has no shape yet; call the model once before, or give it its sizes")
        if place.tensor.is_meta and (type(place.tensor) not in _PLAIN or place.tensor.layout != torch.strided):
            raise LoadError(
                f"load: {place.name}: expected a plain tensor, found a {type(place.tensor).__name__} of layout "
                f"{place.tensor.layout} on the meta device; make it when the model is loaded"
            )
        if persistent:
            groups.setdefault((place.is_buffer, _sources.storage_key(place.tensor)), []).append(place)
        else:
            passing.append(place)
    for path, module in walk(root):
        if type(module).set_extra_state is not nn.Module.set_extra_state:
            extra.append((module, f"{path}.{_EXTRA}" if path else _EXTRA))
    expected = {place.name for places in groups.values() for place in places}
    facts = checkpoint.facts(name for name in there if name in expected or name in {p.name for p in passing})
    targets, missing, mismatches = [], [], []
    for places in groups.values():
        present = [place.name for place in places if place.name in there]
        mismatches += [line for name in present if (line := _mismatch(name, facts[name], places[0].tensor))]
        missing += [] if present else [place.name for place in places]
        targets.append(Target(tuple(places), present[-1] if present else None))
    unfilled = []
    for place in passing:
        found = facts.get(place.name)
        if found is not None and (found.shape, found.dtype) == (tuple(place.tensor.shape), place.tensor.dtype):
            targets.append(Target((place,), place.name))
            expected.add(place.name)
        elif place.tensor.is_meta:
            unfilled.append(place)
    states = {name for _, name in extra}
    missing += [name for _, name in extra if name not in there]
    unread = [name for name in there if name in states and not isinstance(checkpoint, MappingCheckpoint)]
    if unread:
        raise LoadError(f"load: {unread[0]} is state that its module reads itself; give the weights as a mapping")
    return Matching(
        tuple(targets),
        tuple(missing),
        tuple(name for name in there if name not in expected | states),
        tuple(mismatches),
        tuple((module, name) for module, name in extra if name in there),
        tuple(unfilled),
    )


def _places(root: nn.Module) -> Iterable[tuple[Place, bool]]:
    """Every place, and whether it is in a state dict."""
    for path, module in walk(root):
        for table, is_buffer in ((module._parameters, False), (module._buffers, True)):
            for attribute, tensor in table.items():
                if tensor is not None:
                    name = f"{path}.{attribute}" if path else attribute
                    persistent = not is_buffer or attribute not in module._non_persistent_buffers_set
                    yield Place(name, module, attribute, is_buffer), persistent


def _mismatch(name: str, found: Facts, tensor: Tensor) -> str:
    shape = tuple(tensor.shape)
    if found.shape == shape or (shape == () and found.shape == (1,)):  # torch 0.3 wrote scalars so
        return ""
    return (
        f"size mismatch for {name}: copying a param with shape {torch.Size(found.shape)} from checkpoint, the shape in "
        f"current model is {tensor.shape}."
    )


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
