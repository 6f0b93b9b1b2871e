"""CUDA and ROCm as a device of the host tier."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from flextensor_fx.errors import OffloadError
from flextensor_fx.runtime.device import PinError

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


class CudaDevice:
    """One GPU, by way of torch.

    Host memory is pinned where it lies, by the driver: torch's caching allocator of pinned memory rounds to powers of two.

    Raises:
        OffloadError: torch sees no such GPU.
    """

    def __init__(self, device: torch.device) -> None:
        count = torch.cuda.device_count()
        index = torch.cuda.current_device() if device.index is None and count else device.index or 0
        if index >= count:
            advice = (
                f"name one of cuda:0 to cuda:{count - 1}" if count else "name the device that the model computes on"
            )
            raise OffloadError(
                f"device {str(device)!r}: torch {torch.__version__} sees {count} CUDA device{'s' * (count != 1)} here; {advice}, "
                "or leave the option out"
            )
        self.device = torch.device("cuda", index)
        self.shares_memory = False

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=self.device)

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def new_event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def record(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        event.record(stream)

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def copy(self, into: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> None:
        before, here = torch.cuda.current_stream(self.device), torch.cuda.current_device()
        torch.cuda.set_stream(stream)
        try:
            into.copy_(source, non_blocking=True)
        finally:
            torch.cuda.set_stream(before)
            if here != self.device.index:
                # Making a stream current makes its device current as well: what the caller does next is for another one.
                torch.cuda.set_device(here)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def capturing(self) -> bool:
        if torch.cuda.current_device() == self.device.index:
            return torch.cuda.is_current_stream_capturing()
        with torch.cuda.device(self.device):
            return torch.cuda.is_current_stream_capturing()

    def pin(self, address: int, nbytes: int) -> None:
        with torch.cuda.device(self.device):
            error = self._runtime.cudaHostRegister(address, nbytes, _PORTABLE)
            if int(error) == 0:
                return
            with contextlib.suppress(RuntimeError):
                # The runtime keeps the error, and the next kernel of anybody would be blamed for it. This one is.
                torch.empty(1, device=self.device).fill_(0)
        raise PinError(f"the driver would not pin {nbytes} bytes: {self._runtime.cudaGetErrorString(error)}")

    def unpin(self, address: int) -> None:
        self._runtime.cudaHostUnregister(address)

    @property
    def _runtime(self) -> Any:
        return torch.cuda.cudart()

    def mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def ms_between(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end)

    def memory(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self.device)
        stats = torch.cuda.memory_stats(self.device)
        # Parts of blocks that are in use are no use to a larger tensor, but those of whole free segments are.
        unused = stats.get("reserved_bytes.all.current", 0) - stats.get("active_bytes.all.current", 0)
        return free + unused, total

    def peak_allocated(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)
