"""What the host tier asks of a device: memory, streams, events and pinned pages, and nothing else.

One class per kind of device. The engine above it knows no more of CUDA than these methods, so another accelerator costs one
file and a line in `open_device`, and a model of streams can stand in for all of them in tests.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from flextensor_fx.errors import OffloadError


class PinError(OSError):
    """The system would not pin a range of pages."""


class Device(Protocol):
    """One device. Streams and events are values of its own kind, which callers only pass back.

    Attributes:
        device: with its index.
        shares_memory: whether code on the device reads and writes host memory as it is.
    """

    device: torch.device
    shares_memory: bool

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory from torch's allocator, on the stream that is current: with its last reference it goes back to that stream."""
        ...

    def current_stream(self) -> Any:
        """The stream that is current on this thread. Equal streams compare equal."""
        ...

    def new_stream(self) -> Any:
        """A stream beside the others."""
        ...

    def new_event(self) -> Any:
        """An event; it may be recorded again as soon as every wait for its last record has been queued."""
        ...

    def record(self, event: Any, stream: Any) -> None:
        """`event` now stands for all that has been queued on `stream` so far."""
        ...

    def wait(self, stream: Any, event: Any) -> None:
        """What is queued on `stream` from now on runs after what `event` stands for at this moment. The host does not wait."""
        ...

    def copy(self, into: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Queues a copy of `source`, in host memory, on `stream`. It is beside the host only where `source` is pinned."""
        ...

    def synchronize(self) -> None:
        """The host waits until nothing is queued on the device any more."""
        ...

    def capturing(self) -> bool:
        """Whether what is queued on the current stream is being captured into a graph and not run."""
        ...

    def pin(self, address: int, nbytes: int) -> None:
        """Pins pages of the process, so that copies from them run beside the host.

        Raises:
            PinError: the driver refuses; the device is as before.
        """
        ...

    def unpin(self, address: int) -> None:
        """Ends what `pin` began for the range that starts at `address`."""
        ...

    def mark(self, stream: Any) -> Any:
        """A point in `stream`, behind all that is queued there, whose time can be told."""
        ...

    def ms_between(self, begin: Any, end: Any) -> float:
        """Milliseconds from one mark to another, both of which the device has reached."""
        ...

    def memory(self) -> tuple[int, int]:
        """(bytes that torch could still have, all bytes) of the device's memory: what is free, and what torch keeps unused."""
        ...

    def peak_allocated(self) -> int:
        """Most bytes that torch had allocated on the device at any time since the start, or since the peak was last reset."""
        ...


def open_device(device: torch.device) -> Device:
    """The kind of device that `device` names.

    Raises:
        OffloadError: there is no such kind, or no such device here.
    """
    if device.type == "cpu":
        return HostDevice()
    if device.type == "cuda":
        from flextensor_fx.runtime.cuda_device import CudaDevice

        return CudaDevice(device)
    raise OffloadError(
        f"device {str(device)!r}: expected 'cuda', 'cuda:<index>' or 'cpu', found {device.type!r}, which no transfer engine "
        "serves yet"
    )


class HostDevice:
    """The CPU as a device: everything is done at once, so streams and events have nothing to say.

    It is how the host tier runs where there is no accelerator, with the same numbers.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.shares_memory = True

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device="cpu")

    def current_stream(self) -> None:
        return None

    def new_stream(self) -> None:
        return None

    def new_event(self) -> None:
        return None

    def record(self, event: None, stream: None) -> None:
        pass

    def wait(self, stream: None, event: None) -> None:
        pass

    def copy(self, into: torch.Tensor, source: torch.Tensor, stream: None) -> None:
        into.copy_(source)

    def synchronize(self) -> None:
        pass

    def capturing(self) -> bool:
        return False

    def pin(self, address: int, nbytes: int) -> None:
        pass

    def unpin(self, address: int) -> None:
        pass

    def mark(self, stream: None) -> float:
        return time.perf_counter()

    def ms_between(self, begin: float, end: float) -> float:
        return (end - begin) * 1000

    def memory(self) -> tuple[int, int]:
        return _available_memory()

    def peak_allocated(self) -> int:
        return 0


def _available_memory() -> tuple[int, int]:
    """(bytes that this process could have without swapping, all that it may have): of the machine, or of its control group."""
    page, free, total = (os.sysconf(name) for name in ("SC_PAGE_SIZE", "SC_AVPHYS_PAGES", "SC_PHYS_PAGES"))
    free, total = page * free, page * total
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        # Free pages alone leave out what the system would give up for the asking, such as the page cache.
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    for limit_file, used_file in _GROUP_FILES:
        with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
            limit = int(Path(limit_file).read_text())
            if limit < total:
                free, total = min(free, max(0, limit - int(Path(used_file).read_text()))), limit
    return free, total


_GROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
