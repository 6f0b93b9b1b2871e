"""What the ops do on the device: each asks the engine that its key names. See `passes/ops.py` for the ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flextensor_fx._torch_versions import PACKAGES_KEEP_DTYPES
from flextensor_fx.passes import ops
from flextensor_fx.runtime import registry
from flextensor_fx.runtime.transfers import TransferEngine


def fetch(key: str, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Only graphs that no pass has lowered run this: a copy, made while the caller waits."""
    return registry.engine_of(key).read(key)


def prefetch(key: str, device: torch.device, after: Sequence[Tensor]) -> Tensor:
    token = _token(device)
    engine = registry.engine_of(key)
    # The token owns the transfer: when a call fails half-way, its frame drops the token, and the memory comes back.
    token._transfer = engine, engine.start(key)  # pyright: ignore[reportAttributeAccessIssue]
    return token


def wait(
    token: Tensor,
    key: str,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    after: Sequence[Tensor],
) -> Tensor:
    started: tuple[TransferEngine, Any] | None = vars(token).pop("_transfer", None)
    if started is None:
        raise AssertionError(f"wait for {key!r}: its token carries no transfer; a compiler pass has replaced the token")
    engine, transfer = started
    weight = engine.finish(transfer)
    if weight.shape != tuple(size) or (weight.dtype != dtype and PACKAGES_KEEP_DTYPES):
        raise AssertionError(
            f"wait for {key!r}: compiled for {dtype} {tuple(size)}, the store holds {weight.dtype} {tuple(weight.shape)}"
        )
    return weight


def offload(weight: Tensor, key: str, after: Sequence[Tensor]) -> Tensor:
    engine = registry.engine_of(key)
    recorder = engine.recorder
    if recorder is not None:
        recorder.note("offloaded", key)
    engine.give_up((weight,))
    return _token(weight.device)


def prefetch_ahead(key: str, device: torch.device, after: Sequence[Tensor]) -> Tensor:
    registry.engine_of(key).start_ahead(key)
    return _token(device)


def rows(table: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    places = torch.arange(indices.numel(), dtype=indices.dtype, device=indices.device).view(indices.shape)
    return table.index_select(0, indices.flatten()), places


def _token(device: torch.device) -> Tensor:
    # A copy of a token costs half as much as one made from its dtype and device.
    return torch.empty_like(_BLANK) if device == _BLANK.device else ops.new_token(device)


with torch.inference_mode(False):
    _BLANK = ops.new_token(torch.device("cpu"))


# CompositeExplicitAutograd also serves calls without a tensor argument, such as the first prefetch of a graph.
_library = torch.library.Library(ops.NAMESPACE, "IMPL")
for _implementation in (fetch, prefetch, wait, offload, prefetch_ahead, rows):
    _library.impl(_implementation.__name__, _implementation, "CompositeExplicitAutograd")
