"""The smallest engine that moves weights right over a `Device`: what the model of a device is developed against."""

from __future__ import annotations

import mmap
from collections.abc import Mapping

import torch

from flextensor_fx.runtime.device import Device


class Transfer:
    """A copy under way. One that is dropped unread gives its memory back behind the copy.

    Attributes:
        stream: whose memory it is.
    """

    def __init__(self, engine: ReferenceEngine, key: str, tensor: torch.Tensor, event: object, stream: object) -> None:
        self.engine, self.key, self.event, self.stream = engine, key, event, stream
        self.tensor: torch.Tensor | None = tensor

    def __del__(self) -> None:
        if self.tensor is not None:
            self.engine.device.wait(self.stream, self.event)
            self.engine.events.append(self.event)


class ReferenceEngine:
    """Weights in one pinned slab; a stream of its own for the copies.

    Args:
        weights: dense; copied.
    """

    def __init__(self, device: Device, weights: Mapping[str, torch.Tensor]) -> None:
        self.device = device
        self.stream = device.new_stream()
        self.events: list[object] = []
        self.ahead: dict[str, Transfer] = {}
        self.sources: dict[str, torch.Tensor] = {}
        places, end = {}, 0
        for key, weight in weights.items():
            places[key] = end
            end += -(-weight.nbytes // 256) * 256
        self._memory = mmap.mmap(-1, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE)
        slab = torch.frombuffer(self._memory, dtype=torch.uint8)
        for key, weight in weights.items():
            source = slab[places[key] : places[key] + weight.nbytes].view(weight.dtype).view(weight.shape)
            self.sources[key] = source.copy_(weight)
        self._address = slab.data_ptr()
        device.pin(self._address, slab.nbytes)

    def start(self, key: str) -> Transfer:
        # A copy from before a capture is none of its nodes.
        ahead = None if self.device.capturing() else self.ahead.pop(key, None)
        # One on another stream is in memory that goes back to that stream, whatever still reads it on this one.
        return ahead if ahead is not None and ahead.stream == self.device.current_stream() else self._start(key)

    def start_ahead(self, key: str) -> None:
        if not self.device.capturing() and key not in self.ahead:  # nothing in the capture would wait for it
            self.ahead[key] = self._start(key)

    def finish(self, transfer: Transfer) -> torch.Tensor:
        current = self.device.current_stream()
        if transfer.stream != current:
            transfer = self._start(transfer.key)
        self.device.wait(current, transfer.event)
        self.events.append(transfer.event)
        tensor, transfer.tensor = transfer.tensor, None
        assert tensor is not None, "a transfer was finished twice"
        return tensor

    def write(self, key: str, value: torch.Tensor) -> None:
        self.ahead.pop(key, None)
        self.device.synchronize()
        self.sources[key].copy_(value)

    def close(self) -> None:
        self.ahead.clear()
        self.device.synchronize()
        self.device.unpin(self._address)
        self.sources.clear()

    def _start(self, key: str) -> Transfer:
        device, source = self.device, self.sources[key]
        current = device.current_stream()
        tensor = device.empty(source.shape, source.stride(), source.dtype)
        event = self.events.pop() if self.events else device.new_event()
        device.record(event, current)
        device.wait(self.stream, event)
        device.copy(tensor, source, self.stream)
        device.record(event, self.stream)
        return Transfer(self, key, tensor, event, current)
