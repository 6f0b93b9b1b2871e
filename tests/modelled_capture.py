"""A captured graph of the modelled device: what was queued in the capture, to be queued again, from and to the same addresses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from modelled_races import Access, Kind, Line

if TYPE_CHECKING:
    from modelled_core import Core
    from modelled_queue import Copy, Stream


@dataclass(frozen=True)
class _Record:
    line: Line
    place: int


@dataclass(frozen=True)
class _Wait:
    line: Line
    place: int


@dataclass(frozen=True)
class _Copied:
    line: Line
    job: Copy
    reach: int


@dataclass(frozen=True)
class _Launched:
    line: Line
    what: str
    reads: tuple[Any, ...]
    writes: tuple[Any, ...]
    again: Callable[[], None] | None


class Graph:
    """Work on lines of its own, which exist in no other order than that of the events between them.

    Attributes:
        ended: the capture is over.
    """

    def __init__(self, device: Core) -> None:
        self.ended = False
        self._device = device
        self._streams: list[Stream] = []
        self._lines: list[Line] = []
        self._actions: list[_Record | _Wait | _Copied | _Launched] = []
        self._records = 0

    @property
    def copies(self) -> int:
        """That a replay makes."""
        return sum(isinstance(action, _Copied) for action in self._actions)

    def replay(self) -> None:
        """Queues all of it on the current stream, behind what is queued there and behind earlier replays.

        Copies are made anew, from what host memory holds when they run; kernels compute anew what they computed in the capture,
        in the same memory, except those that were named by `launch` only.
        """
        device, snapshots = self._device, {}
        with device.lock:
            assert self.ended, "replay of a graph whose capture goes on"
            stream = device.current_stream()
            self._lines[0].join(stream.line.clock)
            for action in self._actions:
                line = action.line
                match action:
                    case _Record():
                        line.tick()
                        snapshots[action.place] = line.clock.copy()
                    case _Wait():
                        line.tick()
                        line.join(snapshots[action.place])
                        device.land(snapshots[action.place])
                    case _Copied(job=job, reach=reach):
                        self._copy(line, copy.copy(job), reach)
                    case _Launched(what=what, reads=reads, writes=writes, again=again):
                        device.land_all(line)
                        device.kernel(line, what, reads, writes)
                        if again is not None:
                            again()
            stream.line.join(self._lines[0].clock)
            stream.line.tick()
            device.land(self._lines[0].clock)

    # What the device notes here.

    def enter(self, stream: Stream) -> None:
        line = self._device.new_line(f"{stream.own.name} in a capture")
        line.captured = True
        stream.line, stream.graph = line, self
        self._streams.append(stream)
        self._lines.append(line)

    def recorded(self, line: Line) -> int:
        self._actions.append(_Record(line, self._records))
        self._records += 1
        return self._records - 1

    def waited(self, line: Line, place: int) -> None:
        self._actions.append(_Wait(line, place))

    def copied(self, line: Line, job: Copy, reach: int) -> None:
        self._actions.append(_Copied(line, job, reach))

    def launched(self, line: Line, what: str, reads: Any, writes: Any, again: Callable[[], None] | None) -> None:
        self._actions.append(_Launched(line, what, reads, writes, again))

    def let_go(self, low: int, high: int) -> None:
        """The host memory of this range may be unmapped now."""
        for action in self._actions:
            if isinstance(action, _Copied) and action.job.pinned and low <= action.job.source < high:
                action.job.keep = None

    def end(self, *, check: bool) -> None:
        origin = self._lines[0]
        for stream, line in zip(self._streams, self._lines, strict=True):
            if origin.clock[line.index] < line.work:
                line.pending.clear()  # nobody waits for it
                if check:
                    access = Access("last work", line.name, line.name, -1, 0, 0, line.index, line.work)
                    self._device.report(Kind.CAPTURE_UNJOINED, line.name, None, access)
            stream.line, stream.graph = stream.own, None
        self._device.captured(self._lines)
        self.ended = True

    def _copy(self, line: Line, job: Copy, reach: int) -> None:
        device = self._device
        if job.pinned and not device.pinned(job.source, job.source + reach):
            access = device.access("copy of a replay", line, job)
            device.report(Kind.SOURCE_UNPINNED, access.name, None, access)
            job.blank()
            return
        if not job.alive():
            access = device.access("copy of a replay", line, job)
            device.report(Kind.FREED, access.name, None, access)
            return
        device.queue_copy(line, job, reach, sums=device.watched > 0 and job.keep is not None)
