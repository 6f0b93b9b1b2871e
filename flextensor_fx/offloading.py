"""Offloading a model before it is compiled, and bringing it back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard, TypeVar, overload

import torch
from torch import Tensor, nn

from . import _frames
from .candidates import Candidate, Roots
from .config import OffloadConfig
from .errors import OffloadError
from .named_tensors import NamedTensors
from .offloaded_dict import OffloadedDict
from .runtime import registry
from .runtime.engine import Engine
from .runtime.host_engine import HostEngine
from .runtime.parameter import OffloadedParameter
from .session import Session

_META = torch.device("meta")

Model = TypeVar("Model", bound=nn.Module)


@overload
def offload(model: Model, config: OffloadConfig | Mapping[str, Any]) -> Model: ...
@overload
def offload(model: Mapping[str, Any], config: OffloadConfig | Mapping[str, Any]) -> OffloadedDict: ...
def offload(
    model: nn.Module | Mapping[str, Any], config: OffloadConfig | Mapping[str, Any]
) -> nn.Module | OffloadedDict:
    """Moves the selected weights of `model` to a store, one at a time, before anything is compiled.

    `torch.compile(model, backend="flextensor")` then streams them; its options apart from those of this call are taken from
    there. Eager use of the model goes on giving right numbers, slowly.

    With `device` in the configuration, what stays of the model moves there, so that a model too large for the device need never
    be there whole.

    Args:
        model: changed in place; its selected parameters become `OffloadedParameter`s. A mapping of names to tensors, such as a
            state dict, is left as it is, and so are its tensors.
        config: an `OffloadConfig`, or a mapping of its fields.

    Returns:
        `model`; for a mapping, an `OffloadedDict` with the values of this moment.

    Raises:
        OffloadError: (one of its kinds) the configuration, the patterns or the budget cannot work, or the model is offloaded
            already; nothing has been moved then.
        StoreError: the store cannot be written. Weights moved so far stay moved and right.
    """
    config = OffloadConfig.resolve(config)
    if isinstance(model, Mapping):
        return _offload_mapping(model, config)
    root = _frames.unwrap(model)
    if not isinstance(root, nn.Module):
        raise OffloadError(f"offload: expected an nn.Module or a mapping, found {type(model).__name__}")
    if not config.enabled:
        return model
    if root in registry.sessions:
        raise OffloadError(
            f"offload: {type(root).__name__} is offloaded already; call flextensor_fx.release(model) first"
        )
    session = Session.open(Roots({"": root}), config, None, {}, moves=True)
    registry.sessions[root] = session
    try:
        session.commit(in_place=True)
        move_rest(root, session.tier.device)
    except Exception:
        if (
            session.engine is None
        ):  # nothing has been moved: the model is not offloaded, and may be with another store_dir
            registry.forget(session)
        raise
    return model


def _offload_mapping(mapping: Mapping[str, Any], config: OffloadConfig) -> OffloadedDict:
    if isinstance(mapping, OffloadedDict):
        raise OffloadError("offload: the mapping is offloaded already; call flextensor_fx.release(weights) first")
    holder = NamedTensors.of(mapping)
    if not config.enabled:
        return OffloadedDict(holder)
    session = Session.open(Roots({"": holder}), config, None, {}, moves=True)

    def write(candidate: Candidate, key: str, engine: Engine | HostEngine) -> None:
        engine.write(key, candidate.parameter.detach())

    try:
        session.put_stand_ins(session.fill(write, session.files_of))
        move_rest(holder, session.tier.device)
        session.note_filled()
    except BaseException:
        session.abandon()
        raise
    registry.sessions[holder] = session
    return OffloadedDict(holder)


def move_rest(root: nn.Module, device: torch.device) -> None:
    """Moves the parameters and buffers that stay to the device that computes; the same objects, as `Module.to` does.

    What has no data yet stays where it is. Tensors of a mapping are not changed; others take their places.
    """

    def is_elsewhere(tensor: Tensor | None) -> TypeGuard[Tensor]:
        return tensor is not None and not nn.parameter.is_lazy(tensor) and tensor.device not in (device, _META)

    if isinstance(root, NamedTensors):
        for place in Roots({"": root}).slots().values():
            if is_elsewhere(place.parameter):
                place.put(place.parameter.detach().to(device))
        return
    for module in root.modules():
        for parameter in module._parameters.values():
            if is_elsewhere(parameter) and not isinstance(parameter, OffloadedParameter):
                parameter.data = parameter.data.to(device)
                if parameter.grad is not None:
                    parameter.grad.data = parameter.grad.data.to(device)
        for name, buffer in module._buffers.items():
            if is_elsewhere(buffer):
                module._buffers[name] = buffer.to(device)


def release(model: Any) -> None:
    """Brings all weights of `model` back as plain parameters, and removes its store.

    A model that is not offloaded is left as it is. Compiled code that streamed its weights is not used again: the next call of
    a compiled model compiles, and offloads, anew.

    Args:
        model: the module, its compiled wrapper, a compiled function (then every model that it uses), an `OffloadedDict`, which
            then has plain tensors, or a program, which can still be saved but not be called.

    Raises:
        StoreError: a weight cannot be read; those not brought back stay offloaded.
    """
    for session in find_sessions(model):
        roots = session.roots.modules.values()
        session.close()
        registry.forget(session)
        for root in roots:
            if isinstance(root, NamedTensors):
                root.note_released()


def find_sessions(value: Any) -> list[Session]:
    """The sessions of a module, a compiled module, a compiled function, an `OffloadedDict`, or a program."""
    own = getattr(value, "session", None)
    if isinstance(own, Session):
        return [own] if own in registry.living_sessions() else []
    target = value.holder if isinstance(value, OffloadedDict) else _frames.unwrap(value)
    bound_to = getattr(target, "__self__", None)
    roots = [root for root in (target, bound_to) if isinstance(root, nn.Module)]
    found = [registry.sessions[root] for root in roots if root in registry.sessions]
    found += [session for session in registry.living_sessions() if session.has_callable(target)]
    return list(dict.fromkeys(found))
