"""Offloading a model before it is compiled, and bringing it back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from . import _frames
from .candidates import Roots
from .config import OffloadConfig
from .errors import OffloadError
from .runtime import registry
from .runtime.parameter import OffloadedParameter
from .session import Session

_META = torch.device("meta")

Model = TypeVar("Model", bound=nn.Module)


def offload(model: Model, config: OffloadConfig | Mapping[str, Any]) -> Model:
    """Moves the selected weights of `model` to a store, one at a time, before anything is compiled.

    `torch.compile(model, backend="flextensor")` then streams them; its options apart from those of this call are taken from
    there. Eager use of the model goes on giving right numbers, slowly.

    With `device` in the configuration, what stays of the model moves there, so that a model too large for the device need never
    be there whole.

    Args:
        model: changed in place; its selected parameters become `OffloadedParameter`s.
        config: an `OffloadConfig`, or a mapping of its fields.

    Returns:
        `model`.

    Raises:
        OffloadError: (one of its kinds) the configuration, the patterns or the budget cannot work, or the model is offloaded
            already; nothing has been moved then.
        StoreError: the store cannot be written. Weights moved so far stay moved and right.
    """
    root = _frames.unwrap(model)
    if not isinstance(root, nn.Module):
        raise OffloadError(f"offload: expected an nn.Module, found {type(model).__name__}")
    config = OffloadConfig.resolve(config)
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


def move_rest(root: nn.Module, device: torch.device) -> None:
    """Moves the parameters and buffers that stay to the device that computes; the same objects, as `Module.to` does.

    What has no data yet stays where it is.
    """

    def is_elsewhere(tensor: Tensor | None) -> TypeGuard[Tensor]:
        return tensor is not None and not nn.parameter.is_lazy(tensor) and tensor.device not in (device, _META)

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
        model: the module, its compiled wrapper, or a compiled function (then every model that it uses).

    Raises:
        StoreError: a weight cannot be read; those not brought back stay offloaded.
    """
    for session in find_sessions(model):
        session.close()
        registry.forget(session)


def find_sessions(value: Any) -> list[Session]:
    """The sessions of a module, a compiled module, or a compiled function."""
    own = getattr(value, "session", None)
    if isinstance(own, Session):
        return [own] if own in registry.living_sessions() else []
    target = _frames.unwrap(value)
    bound_to = getattr(target, "__self__", None)
    roots = [root for root in (target, bound_to) if isinstance(root, nn.Module)]
    found = [registry.sessions[root] for root in roots if root in registry.sessions]
    found += [session for session in registry.living_sessions() if session.has_callable(target)]
    return list(dict.fromkeys(found))
