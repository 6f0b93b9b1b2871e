"""What an engine did during a call, at the times of the device: the host is far ahead of what it has queued."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from flextensor_fx.runtime.device import Device
from flextensor_fx.runtime.trace import Event, Kind, Recorder

_ON_COPY_STREAM = ("read", "arrived")


class DeviceRecorder(Recorder):
    """Collects events as marks in the streams that they belong to, and reads their times when the device is done.

    Args:
        device: whose marks these are.
        copies: the stream of "read" and "arrived"; all others belong to the stream that is current when they are noted.
    """

    def __init__(self, device: Device, copies: Any) -> None:
        super().__init__()
        self._device, self._copies = device, copies
        device.synchronize()
        self._begin, self._begin_s = device.mark(device.current_stream()), perf_counter()
        self._marks: list[tuple[Any, Kind, str]] = []

    def note(self, kind: Kind, key: str, at_s: float | None = None) -> None:
        """Notes one event, behind all that is queued by now."""
        stream = self._copies if kind in _ON_COPY_STREAM else self._device.current_stream()
        self._marks.append((self._device.mark(stream), kind, key))

    def events(self) -> tuple[Event, ...]:
        """Everything noted so far, in order of time. Waits for the device."""
        self._device.synchronize()
        begin, ms = self._begin, self._device.ms_between
        found = [Event(self._begin_s + ms(begin, mark) / 1000, kind, key) for mark, kind, key in self._marks]
        return tuple(sorted(found, key=lambda event: event.at_s))
