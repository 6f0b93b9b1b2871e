"""Loading a model whose weights never fit in memory: from files to the store, one weight at a time."""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import Tensor, nn

from . import _frames, _sources
from .candidates import Candidate, Roots
from .checkpoint import Checkpoint, MappingCheckpoint, Weights, open_checkpoint
from .config import OffloadConfig
from .construction import construct, rebuilt_buffers
from .errors import LoadError, OffloadError
from .matching import Matching, Place, Target, match
from .named_tensors import NamedTensors
from .offloaded_dict import OffloadedDict
from .offloading import move_rest
from .runtime import registry
from .runtime.engine import Engine
from .runtime.host_engine import HostEngine
from .runtime.layout import WeightSpec
from .session import Session

if TYPE_CHECKING:
    from .program import Program

Model = TypeVar("Model", bound=nn.Module)

_BAR_AFTER_S = 2.0


@overload
def load(
    model: Model,
    weights: Weights,
    config: OffloadConfig | Mapping[str, Any] | None = ...,
    *,
    buffers: Mapping[str, Tensor] | None = ...,
    strict: bool = ...,
    progress: bool = ...,
) -> Model: ...
@overload
def load(
    model: Mapping[str, Any],
    weights: Weights,
    config: OffloadConfig | Mapping[str, Any] | None = ...,
    *,
    buffers: Mapping[str, Tensor] | None = ...,
    strict: bool = ...,
    progress: bool = ...,
) -> OffloadedDict: ...
@overload
def load(
    model: Program,
    weights: Weights,
    config: None = ...,
    *,
    buffers: Mapping[str, Tensor] | None = ...,
    strict: bool = ...,
    progress: bool = ...,
) -> Program: ...
@overload
def load(
    model: Callable[[], Model],
    weights: Weights,
    config: OffloadConfig | Mapping[str, Any] | None = ...,
    *,
    buffers: Mapping[str, Tensor] | None = ...,
    strict: bool = ...,
    progress: bool = ...,
) -> Model: ...
def load(
    model: nn.Module | Callable[[], nn.Module] | Mapping[str, Any] | Program,
    weights: Weights,
    config: OffloadConfig | Mapping[str, Any] | None = None,
    *,
    buffers: Mapping[str, Tensor] | None = None,
    strict: bool = True,
    progress: bool = True,
) -> nn.Module | OffloadedDict | Program:
    """Fills a model from files, with the selected weights going to the store, so that it is never in memory as a whole.

    Everything is checked and planned from headers before a value is read, and the model is changed last: after an error or an
    interrupt it is as it was, and there is no store.

    1. A selected weight that a file has in the model's dtype is served from that file, in place. The file must stay as it is; a
       change is noticed when the weight is next read, and is an error.
    2. One in another dtype is converted piece by piece on its way to the store.
    3. What stays resident is read into memory of its own, so a later change of the file does not reach it.
    4. Buffers that no state dict has are computed by their modules' constructors. A program has none: give their values to
       `Program.fill`.

    Hooks of modules that change a state dict while it is loaded are not called. Of names for one tied weight the last that has
    a value counts. Where the model has values, tensors that were taken from it before keep them.

    Args:
        model: a module on the meta device, or with values, which are replaced; a mapping of names to tensors; or a function that
            makes a module, which is called with parameters on the meta device and real buffers; or a `Program` of an export
            on the meta device.
        weights: a local safetensors file, a list of them, a directory of them, with or without an index, an index, or a mapping.
        config: an `OffloadConfig`, or a mapping of its fields; with a `profile`, patterns and plan come from there. A program has
            its own.
        buffers: values of buffers that are in no state dict, by name; those of a module need be given only where its constructors
            cannot make them.
        strict: whether missing and unexpected names are an error; else they are a warning, and what is missing stays as it is.
        progress: show a bar on stderr if that is a terminal and it takes long.

    Returns:
        The module or the program; for a mapping, an `OffloadedDict`.

    Raises:
        LoadError: the weights and the model do not fit, worded as by `load_state_dict`, or the weights cannot be found.
        OffloadError: (another of its kinds) the configuration, the patterns or the budget cannot work, or the model is offloaded.
        StoreError: a file cannot be read, or the store not written.
    """
    from .program import Program

    if isinstance(model, Program):
        if config is not None:
            raise OffloadError("load: expected no config for a program, which was rewritten with one; leave it out")
        return model.fill(weights, buffers, strict=strict, progress=progress)
    config = OffloadConfig.resolve(config)
    made = _as_module(model)
    root = _frames.unwrap(made)
    if root in registry.sessions:
        raise OffloadError(f"load: {type(root).__name__} is offloaded already; call flextensor_fx.release(model) first")
    with ExitStack() as stack:
        bar = stack.enter_context(Bar(progress))
        checkpoint = open_checkpoint(weights, bar.update)
        stack.callback(checkpoint.close)
        matching = match(root, checkpoint)
        who = "dict" if isinstance(root, NamedTensors) else type(root).__name__
        matching.refuse(who, strict)
        values = given_buffers(matching.unfilled, buffers or {})
        values |= rebuilt_buffers(root, [place for place in matching.unfilled if place not in values])
        session, device = None, torch.device(config.device or "cpu")
        if config.enabled:
            filled = frozenset(matching.parameters)
            session = Session.open(Roots({"": root}), config, None, {}, moves=True, filled=filled)
            device = session.tier.device
        filling = Filling(root, checkpoint, matching, values, session, device)
        bar.total = filling.nbytes
        if matching.warning(who):
            warnings.warn(matching.warning(who), UserWarning, stacklevel=2)
        filling.run()
    return OffloadedDict(root) if isinstance(root, NamedTensors) else made


def _as_module(model: Any) -> nn.Module:
    """A module, or what stands for a mapping."""
    if isinstance(model, OffloadedDict):
        raise OffloadError("load: the mapping is offloaded already; call flextensor_fx.release(weights) first")
    if isinstance(model, Mapping):
        return NamedTensors.of(model)
    if isinstance(_frames.unwrap(model), nn.Module):
        return model
    if callable(model):
        return construct(model)
    raise OffloadError(
        f"load: expected an nn.Module, a function that makes one, or a mapping, found {type(model).__name__}"
    )


class Filling:
    """One load, from the plan to the changed model.

    Args:
        buffers: that no checkpoint has.
        session: opened for the parameters that `matching` has a value for; None where nothing is offloaded.
        device: that computes.
    """

    def __init__(
        self,
        root: nn.Module,
        checkpoint: Checkpoint,
        matching: Matching,
        buffers: Mapping[Place, Tensor],
        session: Session | None,
        device: torch.device,
    ) -> None:
        self.root, self.checkpoint, self.matching, self.buffers = root, checkpoint, matching, buffers
        self.targets = [target for target in matching.targets if target.source is not None]
        self.source_of = matching.parameters
        self.in_place_bytes = 0
        self.session, self.device = session, device

    def nbytes(self) -> int:
        """Bytes that are read; right once it is known what stays in its file."""
        facts = self.checkpoint.facts(target.source for target in self.targets if target.source is not None)
        return sum(f.dtype.itemsize * math.prod(f.shape) for f in facts.values()) - self.in_place_bytes

    def run(self) -> None:
        """Reads everything, then changes the model; all of it or nothing."""
        session = self.session
        undo = ExitStack()
        try:
            # An inference tensor could not be trained, nor be read where gradients are recorded.
            with torch.inference_mode(False), torch.no_grad():
                keys = {} if session is None else session.fill(self._write, self._files)
                values = [
                    (target, self.checkpoint.value(target.source, _spec(target.tensor), self.device))
                    for target in self.targets
                    if target.source is not None and not any(place.name in keys for place in target.places)
                ]
                self.checkpoint.check_unchanged()
                if session is not None:
                    self._put_streamed(session, keys, undo)
                for target, value in values:
                    _put(target, value, isinstance(self.root, NamedTensors), undo)
                for place, value in self.buffers.items():
                    undo.callback(place.put, place.tensor)
                    place.put(value.to(self.device))
                for module, name in self.matching.extra:
                    assert isinstance(self.checkpoint, MappingCheckpoint)
                    module.set_extra_state(self.checkpoint.extra(name))
                move_rest(self.root, self.device)
                if session is not None:
                    undo.callback(registry.forget, session)
                    registry.sessions[self.root] = session
                    session.note_filled()
        except BaseException:
            undo.close()
            if session is not None:
                session.abandon()
            raise
        undo.pop_all()

    def _write(self, candidate: Candidate, key: str, engine: Engine | HostEngine) -> None:
        source = self.source_of.get(candidate.name)
        if source is None:  # nothing is known of it, and it stays what it is
            engine.write(key, candidate.parameter.detach())
        else:
            self.checkpoint.store(source, key, engine)

    def _files(self, pending: Sequence[Candidate]) -> dict[str, tuple[str, str]]:
        known = {source: c for c in pending if (source := self.source_of.get(c.name)) is not None}
        found = self.checkpoint.in_place({source: _spec(c.parameter) for source, c in known.items()})
        if self.session is not None and not self.session.tier.on_host:
            self.in_place_bytes = sum(_sources.nbytes(known[source].parameter) for source in found)
        return {known[source].name: entry for source, entry in found.items()}

    def _put_streamed(self, session: Session, keys: Mapping[str, str], undo: ExitStack) -> None:
        for candidate in session.candidates():
            if candidate.name in keys:
                for slot in candidate.slots:
                    undo.callback(slot.put, slot.parameter)
        session.put_stand_ins(keys)


def given_buffers(unfilled: Iterable[Place], buffers: Mapping[str, Tensor]) -> dict[Place, Tensor]:
    """The values that are given for buffers that no checkpoint has.

    Raises:
        LoadError: one is not like its buffer.
    """
    values = {place: buffers[place.name] for place in unfilled if place.name in buffers}
    for place, value in values.items():
        check_buffer(place.name, place.tensor, value)
    return values


def check_buffer(name: str, expected: Tensor, found: Any) -> None:
    """Sees that a value is one that the graph was traced with; another may broadcast, and give wrong numbers.

    Raises:
        LoadError: it is not.
    """

    def told(tensor: Any) -> str:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return f"{dtype}{list(tensor.shape)}"

    if not isinstance(found, Tensor):
        raise LoadError(f"buffer {name!r}: expected a tensor, found {type(found).__name__}")
    if found.is_meta or (found.shape, found.dtype) != (expected.shape, expected.dtype):
        raise LoadError(
            f"buffer {name!r}: expected {told(expected)} with a value, found {told(found)} on {found.device}; give what the "
            "model has there"
        )


def _spec(tensor: Tensor) -> WeightSpec:
    return WeightSpec("", tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def _put(target: Target, value: Tensor, replaces: bool, undo: ExitStack) -> None:
    """Gives a tensor of the model its value.

    Args:
        replaces: whether another tensor takes its place also where it has memory.
    """
    for old in {id(place.tensor): place.tensor for place in target.places}.values():
        if old.is_meta or replaces:
            new = value
            if isinstance(old, nn.Parameter):
                new = nn.Parameter(value, requires_grad=old.requires_grad)
                vars(new).update(vars(old))  # marks that libraries leave on parameters
            for place in target.places:
                if place.tensor is old:
                    undo.callback(place.put, old)
                    place.put(new)
        elif type(old) in (Tensor, nn.Parameter) and old.untyped_storage().nbytes() == old.nbytes:
            undo.callback(_set_data, old, old.data)
            old.data = value
        else:  # others have parts of its memory, or it is more than its memory
            undo.callback(old.data.copy_, old.data.clone())
            old.data.copy_(value)


def _set_data(tensor: Tensor, data: Tensor) -> None:
    tensor.data = data


class Bar:
    """A progress bar on stderr, from the moment on at which that seems worth it."""

    def __init__(self, wanted: bool) -> None:
        self.total: Callable[[], int] = lambda: 0
        self._wanted = wanted and sys.stderr.isatty()
        self._begin = time.monotonic()
        self._done = 0
        self._bar: Any = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, nbytes: int) -> None:
        """So many more bytes have been read."""
        self._done += nbytes
        if self._bar is not None:
            self._bar.update(nbytes)
        elif self._wanted and time.monotonic() - self._begin > _BAR_AFTER_S:
            from torch.hub import tqdm  # that of the package of this name, where it is installed

            self._bar = tqdm(total=self.total(), desc="load", unit="B", unit_scale=True)
            self._bar.update(self._done)
