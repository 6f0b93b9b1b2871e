"""Which small weights travel as one: those of one unit and one dtype, for which a copy each would cost more than their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from .candidates import Candidate
from .passes.fetches import FetchSpec, Packed
from .runtime.host_store import Pack
from .runtime.layout import WeightSpec, physical_order

SMALL_BYTES = 64 * 1024
"""A copy of fewer bytes takes about as long to start as to run."""


def find_packs(
    candidates: Iterable[Candidate], key_of: Callable[[str], str], pack_key: Callable[[str], str]
) -> tuple[Pack, ...]:
    """Packs of two weights and more.

    Args:
        candidates: about to move to host memory.
        key_of: the key of a weight, by its name.
        pack_key: the key of a pack, by its unit and dtype.
    """
    groups: dict[tuple[str, torch.dtype], list[WeightSpec]] = {}
    for c in candidates:
        p = c.parameter
        if 0 < p.nbytes < SMALL_BYTES and physical_order(p.shape, p.stride()) is not None:
            spec = WeightSpec(key_of(c.name), tuple(p.shape), tuple(p.stride()), p.dtype)
            groups.setdefault((c.unit, p.dtype), []).append(spec)
    return tuple(
        Pack.of(pack_key(f"{unit}.{str(dtype).removeprefix('torch.')}"), members)
        for (unit, dtype), members in groups.items()
        if len(members) > 1
    )


def places(packs: Iterable[Pack], device: torch.device) -> Mapping[str, Packed]:
    """Where each packed weight lies, by its key."""
    return {
        member.key: Packed(
            FetchSpec(pack.spec.key, pack.spec.shape, pack.spec.stride, pack.spec.dtype, device), element
        )
        for pack in packs
        for member, element in pack.members
    }
