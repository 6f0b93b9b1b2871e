"""One weight on its way to a device, and the books that an engine of the host tier keeps of all of them."""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch

from flextensor_fx.runtime.device import Device


class Books:
    """What transfers need of their engine, which they must not keep alive: its events, and the bytes on the device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._events: list[Any] = []
        self._held: dict[int, tuple[int, weakref.ref[torch.Tensor]]] = {}  # by address
        self._pid = os.getpid()
        self.left: list[tuple[Any, Any, torch.Tensor]] = []

    def take_event(self) -> Any:
        try:
            return self._events.pop()
        except IndexError:
            return self.device.new_event()

    def return_event(self, event: Any) -> None:
        """Every wait for what `event` stands for has been queued: it may stand for something else."""
        self._events.append(event)

    def leave(self, stream: Any, event: Any, weight: torch.Tensor, captured: bool) -> None:
        """Lets the memory of `weight`, which nobody will read, go back to `stream` behind the copy that `event` stands for.

        Whatever collects garbage may do this in the middle of a capture, which a wait for what was queued outside would end; nor
        may anything outside wait for what is in a capture.
        """
        self.give_up(weight)
        if self._pid != os.getpid():
            return  # garbage of the process that this one was forked from, to which the device belongs
        capturing = self.device.capturing()
        if capturing and not captured:
            self.left.append((stream, event, weight))
            return
        if capturing or not captured:
            self.device.wait(stream, event)
        self.return_event(event)

    def let_go(self) -> None:
        """Outside of a capture: what was left in one."""
        while self.left:
            self.leave(*self.left.pop(), captured=False)

    def hold(self, weight: torch.Tensor) -> None:
        """Counts `weight` until it is given up or gone, as in a call that fails half-way or returns it."""
        held, address = self._held, weight.data_ptr()
        held[address] = weight.nbytes, weakref.ref(weight, lambda _: held.pop(address, None))

    def give_up(self, weight: torch.Tensor) -> None:
        self._held.pop(weight.data_ptr(), None)

    @property
    def live(self) -> int:
        """Bytes of the weights that are held."""
        return sum([nbytes for nbytes, _ in list(self._held.values())])


class DeviceTransfer:
    """One weight on its way to the device. Made by `HostEngine.start`, ended by `HostEngine.finish` or by being dropped.

    Attributes:
        key: of the weight.
        stream: that was current when it was started.
        captured: whether it is part of a graph of the device.
    """

    __slots__ = ("_books", "captured", "event", "key", "stream", "version", "weight")

    def __init__(
        self, books: Books, key: str, weight: torch.Tensor, stream: Any, event: Any, version: int, captured: bool
    ) -> None:
        self._books, self.captured = books, captured
        self.key, self.stream, self.event, self.version = key, stream, event, version
        self.weight: torch.Tensor | None = weight

    def drop(self) -> None:
        """Gives up the weight, which nobody will read. Its memory goes back to the stream it came from, behind the copy."""
        weight, self.weight = self.weight, None
        if weight is not None:
            self._books.leave(self.stream, self.event, weight, self.captured)

    def __del__(self) -> None:
        self.drop()

    def __repr__(self) -> str:
        return f"DeviceTransfer({self.key!r}, {'over' if self.weight is None else 'on its way'})"
