"""What an engine has done, as a value that prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flextensor_fx.passes.schedule import format_bytes


@dataclass(frozen=True)
class DeviceStats:
    """What an engine of the host tier has moved, and where its weights lie.

    Attributes:
        device: such as "cuda:0".
        copied_bytes: from host memory to the device, for calls.
        returned_bytes: from the device to host memory: weights that eager code has written.
        pinned_bytes: of host memory, from which copies run beside the host.
        pageable_bytes: of host memory and of mapped files, from which the host has to copy by itself.
        captured: transfers that a graph of the device repeats by itself; these are counted once, when they are captured.
        peak_allocated: most bytes of all kinds that torch has had allocated on the device.
        unpinned_because: why memory is pageable; "" where all is pinned.
    """

    device: str
    copied_bytes: int
    returned_bytes: int
    pinned_bytes: int
    pageable_bytes: int
    captured: int
    peak_allocated: int
    unpinned_because: str = ""

    def __str__(self) -> str:
        pageable = f", {format_bytes(self.pageable_bytes)} pageable ({self.unpinned_because})"
        return (
            f"{format_bytes(self.copied_bytes)} copied to {self.device}, {format_bytes(self.returned_bytes)} back; "
            f"{format_bytes(self.pinned_bytes)} pinned{pageable if self.pageable_bytes else ''}; "
            f"torch's peak there {format_bytes(self.peak_allocated)}"
        )


@dataclass(frozen=True)
class EngineStats:
    """What an engine has done so far.

    Attributes:
        transfers: started.
        reads: of weights, also those repeated after a write and those on the calling thread.
        disk_bytes: read from the disk.
        cached_bytes: read from the page cache.
        read_seconds: spent in these reads, summed over threads.
        stall_ms: that `finish` waited, in all.
        stall_ms_by_key: the same per weight, for weights that were waited for.
        overruns: times that memory beyond the pool was taken.
        pool_bytes: bytes that transfers may hold together.
        peak_pool_bytes: greatest number of bytes that they did hold.
        touched_bytes: of memory that the pool keeps from the system now.
        ahead: of the transfers, those started at the end of a call for the next one.
        dropped: of these, those that were dropped unread.
        setup_seconds: that it took to move the weights to the store, and to pin it.
        device: of an engine whose weights lie in host memory; None on the disk tier. Reads and stalls are then 0: the device
            waits and not the host, and a recorded call shows for how long.
    """

    transfers: int
    reads: int
    disk_bytes: int
    cached_bytes: int
    read_seconds: float
    stall_ms: float
    stall_ms_by_key: Mapping[str, float]
    overruns: int
    pool_bytes: int
    peak_pool_bytes: int
    touched_bytes: int
    ahead: int = 0
    dropped: int = 0
    setup_seconds: float = 0.0
    device: DeviceStats | None = None

    @property
    def bandwidth(self) -> float:
        """Bytes per ms of reading; 0 before the first read."""
        return (self.disk_bytes + self.cached_bytes) / (self.read_seconds * 1000) if self.read_seconds else 0.0

    def __str__(self) -> str:
        if self.device is not None:
            return (
                f"transfers {self.transfers}, {self.device}, "
                f"pool peak {self.peak_pool_bytes / 1e6:.1f} of {self.pool_bytes / 1e6:.1f} MB"
            )
        return (
            f"transfers {self.transfers}, read {self.disk_bytes / 1e6:.1f} MB from disk and "
            f"{self.cached_bytes / 1e6:.1f} MB from page cache at {self.bandwidth / 1e3:.0f} MB/s, "
            f"stalled {self.stall_ms:.1f} ms, pool peak {self.peak_pool_bytes / 1e6:.1f} of {self.pool_bytes / 1e6:.1f} MB, "
            f"overruns {self.overruns}"
        )
