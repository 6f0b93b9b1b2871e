"""How fast a device computes, reads its memory and is copied to: measured once on each machine, in some ten ms, and kept."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ._json_files import JsonFormat
from .config import OffloadConfig
from .errors import ProfileError
from .estimate import Rates, default_link, measure_compute
from .machine import Machine
from .machine_cache import keep, kept_file, read_kept
from .simulate import Link

_SIDE = 2048
_COPY_BYTES = 32 << 20
_HOST_LINK = Link(0.005, 5e6, "estimated")  # a copy from memory to memory by one core
_UNKNOWN, _UNKNOWN_LINK = Rates(1e11, 1e9), 2e7  # of a device that has no room for a measurement
_HOST_BYTES_PER_MS = 1e7  # what a core or two read


@dataclass(frozen=True)
class _Measured:
    """What a device of a machine was found to do."""

    machine: Machine
    flops_per_ms: float
    bytes_per_ms: float
    copied_per_ms: float


_FORM = JsonFormat(_Measured, "device rates", 1, ProfileError, "device_rates", "measure again")


def rates_of(device: torch.device) -> Rates:
    """Operations and bytes per ms of a device.

    Kept, since a plan must not change from one process to the next because of noise, or no compile cache would hit.
    """
    measured = _measured(device)
    return Rates(measured.flops_per_ms, measured.bytes_per_ms)


def link_for(config: OffloadConfig, device: torch.device) -> Link:
    """What is known of the link that weights come by: of the disk, or from host memory to `device`."""
    if device.type == "cpu":
        return _HOST_LINK if config.store == "host" else default_link(config.store_dir)
    return Link(0.01, _measured(device).copied_per_ms, "estimated: a pinned copy, timed once")


def _measured(device: torch.device) -> _Measured:
    here, file = Machine.here(str(device)), kept_file(f"compute-{device.type}" if device.type != "cpu" else "compute")
    kept = read_kept(file, _FORM)
    if kept is not None and kept.machine == here and min(kept.flops_per_ms, kept.bytes_per_ms, kept.copied_per_ms) > 0:
        return kept
    if device.type == "cpu":
        found = _Measured(here, measure_compute(), _HOST_BYTES_PER_MS, _HOST_LINK.bytes_per_ms)
    else:
        try:
            found = _Measured(here, *_probe(device))
        except torch.OutOfMemoryError:  # it is so full that a model is about to be offloaded from it
            return _Measured(here, _UNKNOWN.flops_per_ms, _UNKNOWN.bytes_per_ms, _UNKNOWN_LINK)
    keep(file, _FORM, found)
    return found


def _probe(device: torch.device) -> tuple[float, float, float]:
    """Rates of an accelerator: of a matrix product in bfloat16, of reading and writing memory, of a pinned copy."""
    with torch.inference_mode():
        a = torch.ones(_SIDE, _SIDE, dtype=torch.bfloat16, device=device)
        b = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
        host = torch.ones(_COPY_BYTES, dtype=torch.uint8, device="cpu").pin_memory(device)
        flops = 2 * _SIDE**3 / _least_ms(lambda: a @ a, device)
        nbytes = 2 * _COPY_BYTES / _least_ms(b.clone, device)
        copied = _COPY_BYTES / _least_ms(lambda: b.copy_(host, non_blocking=True), device)
    return coarse(flops), coarse(nbytes), coarse(copied)


def coarse(rate: float) -> float:
    """`rate` to the nearest power of the fourth root of 2: most processes agree on it even where nothing can be kept."""
    return 2.0 ** (round(4 * math.log2(rate)) / 4)


def _least_ms(call: Callable[[], object], device: torch.device) -> float:
    def once() -> float:
        begin = time.perf_counter()
        call()
        torch.accelerator.synchronize(device)
        return max(time.perf_counter() - begin, 1e-6) * 1000

    return min(once() for _ in range(6))
