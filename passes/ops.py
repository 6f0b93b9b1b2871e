"""The ops of the graph language: schemas and fake implementations.

    fetch(key, spec) -> weight                  the value of this weight on the compute device
    prefetch(key, device, after) -> token       starts the copy; the token is an empty tensor
    wait(token, key, spec, after) -> weight     the only way to a weight is through its wait
    offload(weight, key, after) -> token        the weight's last consumers are done: its memory is given up
    prefetch_ahead(key, device, after) -> token   starts the copy that the next call's prefetch of this weight takes over
    rows(table, indices) -> (rows, places)      the rows that are looked up, and where each lookup finds its own among them

where `spec` stands for `size, stride, dtype, device`. `after` lists tensors that must have been computed before; they are
never read. No op aliases or mutates anything: every weight is fresh memory that the graph owns, so a reader that the
compiler delays can never see overwritten bytes. A weight is named by a string key, never by a tensor argument: the store's
tensor lives on another device, and Inductor would switch device guards for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

NAMESPACE = "flextensor_fx"
_SPEC = "int[] size, int[] stride, ScalarType dtype, Device device"

# flexible_layout: the `after` tensors are never read, so Inductor must not copy one to give it a layout it asked for.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)

_library = torch.library.Library(NAMESPACE, "DEF")
_library.define(f"fetch(str key, {_SPEC}) -> Tensor", tags=_TAGS)
_library.define("prefetch(str key, Device device, Tensor[] after) -> Tensor", tags=_TAGS)
_library.define(f"wait(Tensor token, str key, {_SPEC}, Tensor[] after) -> Tensor", tags=_TAGS)
_library.define("offload(Tensor weight, str key, Tensor[] after) -> Tensor", tags=_TAGS)
_library.define("prefetch_ahead(str key, Device device, Tensor[] after) -> Tensor", tags=_TAGS)
_library.define("rows(Tensor table, Tensor indices) -> (Tensor rows, Tensor places)", tags=_TAGS)

fetch = torch.ops.flextensor_fx.fetch.default
prefetch = torch.ops.flextensor_fx.prefetch.default
wait = torch.ops.flextensor_fx.wait.default
offload = torch.ops.flextensor_fx.offload.default
prefetch_ahead = torch.ops.flextensor_fx.prefetch_ahead.default
rows = torch.ops.flextensor_fx.rows.default

TRANSFER_OPS = (prefetch, wait, offload)
ALL_OPS = (fetch, *TRANSFER_OPS, prefetch_ahead)


def new_token(device: torch.device) -> Tensor:
    """The empty tensor that carries order. Shape (0,), dtype uint8."""
    return torch.empty(0, dtype=torch.uint8, device=device)


@torch.library.register_fake("flextensor_fx::fetch", lib=_library)
def _fetch_fake(
    key: str, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


@torch.library.register_fake("flextensor_fx::prefetch", lib=_library)
def _prefetch_fake(key: str, device: torch.device, after: Sequence[Tensor]) -> Tensor:
    return new_token(device)


@torch.library.register_fake("flextensor_fx::wait", lib=_library)
def _wait_fake(
    token: Tensor,
    key: str,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    after: Sequence[Tensor],
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


@torch.library.register_fake("flextensor_fx::offload", lib=_library)
def _offload_fake(weight: Tensor, key: str, after: Sequence[Tensor]) -> Tensor:
    return new_token(weight.device)


@torch.library.register_fake("flextensor_fx::prefetch_ahead", lib=_library)
def _prefetch_ahead_fake(key: str, device: torch.device, after: Sequence[Tensor]) -> Tensor:
    return new_token(device)


@torch.library.register_fake("flextensor_fx::rows", lib=_library)
def _rows_fake(table: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    return table.new_empty((indices.numel(), *table.shape[1:])), indices.new_empty(indices.shape)


# Without a fall-through, a graph that is interpreted under grad mode would hang a "not implemented" backward on every
# `after` edge. None of the ops carries a gradient: streamed weights are frozen, tokens hold no values.
for _name in ("fetch", "prefetch", "wait", "offload", "prefetch_ahead", "rows"):
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")

# The last offload of a call has no reader; dead-code elimination would drop it and its memory would look used for ever.
has_side_effect(offload)
# Its reader is in the next call.
has_side_effect(prefetch_ahead)
