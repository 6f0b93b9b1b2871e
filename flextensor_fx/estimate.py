"""Rough costs for the first plan: what each step computes, at rates measured in a few milliseconds.

Every number here is an estimate and is called one in reports. It shapes a plan, never a result.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ._json_files import JsonFormat
from .errors import ProfileError
from .link_curve import kept_link
from .machine import Machine
from .machine_cache import keep, kept_file, read_kept
from .passes.collect_uses import Uses
from .simulate import Link

_SIDE = 512
_DISK_BYTES_PER_MS = 1.5e6
_DISK_LATENCY_MS = 0.1


def default_link(store_dir: str | os.PathLike[str] | None = None) -> Link:
    """What is known of the disk under a store directory: its curve if one was measured on this machine, else 1.5 GB/s."""
    kept = kept_link(store_dir)
    return Link(_DISK_LATENCY_MS, _DISK_BYTES_PER_MS, "estimated") if kept is None else kept.link


@dataclass(frozen=True)
class _Compute:
    """What `measure_compute` has found on a machine."""

    machine: Machine
    flops_per_ms: float


_COMPUTE = JsonFormat(_Compute, "compute rate", 1, ProfileError, "compute_rate", "measure again")


def compute_rate() -> float:
    """Floating-point operations per ms of a matrix product on this machine: as measured once, and kept.

    Kept, since a plan must not change from one process to the next because of noise, or no compile cache would hit.
    """
    here, file = Machine.here(), kept_file("compute")
    kept = read_kept(file, _COMPUTE)
    if kept is not None and kept.machine == here and kept.flops_per_ms > 0:
        return kept.flops_per_ms
    found = measure_compute()
    keep(file, _COMPUTE, _Compute(here, found))
    return found


def measure_compute() -> float:
    """Floating-point operations per ms of a matrix product, to the nearest power of the square root of 2.

    Coarse, so that where nothing can be kept, most processes agree all the same.
    """
    with torch.inference_mode():
        a = torch.ones(_SIDE, _SIDE)
        _timed(lambda: a @ a)
        seconds = min(_timed(lambda: a @ a) for _ in range(10))
    return 2.0 ** (round(2 * math.log2(2 * _SIDE**3 / (seconds * 1000))) / 2)


def step_costs(uses: Uses, flops_per_ms: float) -> list[float]:
    """Estimated ms of each step: the products of its weights with what meets them there, at least the reading of its output."""
    costs = [0.0] * len(uses.steps)
    for use in uses.fetches:
        for consumer in use.consumers:
            elements, channels = _output_of(consumer.node)
            matrix = len(use.spec.size) > 1 and _multiplies(consumer.node)
            width = math.prod(use.spec.size) / max(channels, 1) if matrix else 1.0
            # A product of few rows is bound by reading its weight; a core reads some 10 GB/s.
            costs[consumer.step] += max(2 * elements * width / flops_per_ms, use.spec.nbytes / 1e7 if matrix else 0.0)
    return costs


def _timed(call: Any) -> float:
    start = time.perf_counter()
    call()
    return max(time.perf_counter() - start, 1e-6)


def _multiplies(node: Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return "embedding" not in str(name)


def _output_of(node: Node) -> tuple[float, int]:
    """Elements of a node's output, and its channels (the last dimension, of images the second)."""
    value = node.meta.get("val", node.meta.get("example_value"))
    if not isinstance(value, torch.Tensor) or not value.dim():
        return 1.0, 1
    shape = [_hint(extent) for extent in value.shape]
    channels = shape[1] if "conv" in str(node.target) and len(shape) > 2 else shape[-1]
    return float(math.prod(shape)), channels


def _hint(extent: Any) -> int:
    """The size seen at this call; reading it adds no guard."""
    if isinstance(extent, torch.SymInt):
        hint = extent.node.hint
        return 1 if hint is None else int(hint)
    return int(extent)
