"""Short steps on a modelled device, for tests of it."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from modelled_device import ModelledDevice
from modelled_races import Kind

PAGE = mmap.PAGESIZE


class Host:
    """Pages of host memory, pinned on `device`, as float32."""

    def __init__(self, device: ModelledDevice, pages: int = 1, pin: bool = True) -> None:
        self.memory = mmap.mmap(-1, pages * PAGE)
        self.tensor = torch.frombuffer(self.memory, dtype=torch.float32)
        self.address = self.tensor.data_ptr()
        if pin:
            device.pin(self.address, pages * PAGE)


def new(device: ModelledDevice, elements: int = 16) -> torch.Tensor:
    """Device memory, float32."""
    return device.empty((elements,), (1,), torch.float32)


def after(device: ModelledDevice, stream: object, other: object) -> None:
    """`stream` waits for all that is on `other`."""
    event = device.new_event()
    device.record(event, other)
    device.wait(stream, event)


def kinds(device: ModelledDevice) -> list[Kind]:
    """Of the races so far."""
    return [race.kind for race in device.races]


@contextmanager
def streams() -> Iterator[tuple[ModelledDevice, object, object]]:
    """(device, compute stream, copy stream), the first with a kernel on it."""
    device = ModelledDevice()
    compute, copies = device.current_stream(), device.new_stream()
    with device.watching():
        torch.add(torch.ones(1000), 1)
        yield device, compute, copies


def transfer(device: ModelledDevice, source: torch.Tensor, copies: object) -> torch.Tensor:
    """A weight, as an engine would bring it."""
    tensor = new(device)
    after(device, copies, device.current_stream())
    device.copy(tensor, source, copies)
    after(device, device.current_stream(), copies)
    return tensor
