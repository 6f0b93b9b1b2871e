"""Faults of a transfer engine, each as a device that does not do quite what the engine asks of it.

So the same faults serve for any engine. A device's `phase` says what the engine was asked to do: start, finish, drop, ahead,
write or close; `Stream.user` tells the user's streams from the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from modelled_device import ModelledDevice
from modelled_queue import Event, Stream
from modelled_races import Kind


class DroppedWait(ModelledDevice):
    def wait(self, stream: Stream, event: Event) -> None:
        if self.phase != "finish" or not stream.user:
            super().wait(stream, event)


class SwappedEvents(ModelledDevice):
    """A transfer's reader waits for the copy before it."""

    last: tuple[Event | None, Event | None] = (None, None)

    def record(self, event: Event, stream: Stream) -> None:
        super().record(event, stream)
        if not stream.user:
            _, newest = self.last
            self.last = newest, _same(self.new_event(), event)

    def wait(self, stream: Stream, event: Event) -> None:
        older, newest = self.last
        swap = stream.user and older is not None and newest is not None and newest.clock == event.clock
        super().wait(stream, older if swap else event)


class RecordedBeforeCopy(ModelledDevice):
    held: tuple[torch.Tensor, torch.Tensor, Stream] | None = None

    def copy(self, into: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        self.held = into, source, stream

    def record(self, event: Event, stream: Stream) -> None:
        super().record(event, stream)
        if self.held is not None:
            held, self.held = self.held, None
            super().copy(*held)


class ComputeNotRecorded(ModelledDevice):
    def record(self, event: Event, stream: Stream) -> None:
        if not stream.user:
            super().record(event, stream)


class CopyStreamDoesNotWait(ModelledDevice):
    def wait(self, stream: Stream, event: Event) -> None:
        if stream.user:
            super().wait(stream, event)


class AllocatedOnCopyStream(ModelledDevice):
    def new_stream(self) -> Stream:
        self.theirs = super().new_stream()
        return self.theirs

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with self.stream(self.theirs):
            return super().empty(size, stride, dtype)


class AllocatedOnOtherStream(ModelledDevice):
    other: Stream | None = None

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self.other = self.other or self.user_stream()
        with self.stream(self.other):
            return super().empty(size, stride, dtype)


class EventReturnedEarly(ModelledDevice):
    """A transfer's event is back in the pool, and stands for the next one's allocation, before the wait for it is queued."""

    early: Event | None = None

    def record(self, event: Event, stream: Stream) -> None:
        super().record(event, stream)
        if not stream.user:
            self.early = event
        elif self.early is not None:
            super().record(self.early, stream)


class DroppedInFlight(ModelledDevice):
    """A transfer that is dropped gives its memory back at once."""

    def wait(self, stream: Stream, event: Event) -> None:
        if self.phase != "drop":
            super().wait(stream, event)


class SharedDestination(ModelledDevice):
    before: torch.Tensor | None = None

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        before = self.before
        if before is not None and (before.shape, before.stride()) == (tuple(size), tuple(stride)):
            return before.detach()
        self.before = super().empty(size, stride, dtype)
        return self.before


class WrittenUnsynchronized(ModelledDevice):
    def synchronize(self) -> None:
        if self.phase != "write":
            super().synchronize()


class UnpinnedUnsynchronized(ModelledDevice):
    def synchronize(self) -> None:
        if self.phase != "close":
            super().synchronize()


class CaptureNotJoined(ModelledDevice):
    def wait(self, stream: Stream, event: Event) -> None:
        if not (stream.user and stream.graph is not None):
            super().wait(stream, event)


class CaptureNotForked(ModelledDevice):
    """The copy stream does not enter the capture."""

    def wait(self, stream: Stream, event: Event) -> None:
        if stream.user or event.graph is None:
            super().wait(stream, event)


class _LikeAnyOther(Stream):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0


class StaleAhead(ModelledDevice):
    """A copy ahead is used on whatever stream is current: all of the user's look alike to the engine."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.default_stream.__class__ = _LikeAnyOther

    def user_stream(self) -> Stream:
        stream = super().user_stream()
        stream.__class__ = _LikeAnyOther
        return stream


class WrongCurrentStream(ModelledDevice):
    """The engine always works for the default stream."""

    def current_stream(self) -> Stream:
        return super().current_stream() if self.phase == "" else self.default_stream


class NotPinned(ModelledDevice):
    def pin(self, address: int, nbytes: int) -> None:
        pass

    def unpin(self, address: int) -> None:
        pass


@dataclass(frozen=True)
class Fault:
    """What must be found.

    Attributes:
        kind: of the race that it leads to; others may come with it.
        wrong: whether it always leads to wrong numbers too.
    """

    device: type[ModelledDevice]
    kind: Kind
    wrong: bool = False

    def __str__(self) -> str:
        return self.device.__name__


FAULTS = (
    Fault(DroppedWait, Kind.UNARRIVED, wrong=True),
    Fault(SwappedEvents, Kind.UNARRIVED, wrong=True),
    Fault(RecordedBeforeCopy, Kind.UNARRIVED, wrong=True),
    Fault(ComputeNotRecorded, Kind.UNALLOCATED),
    Fault(CopyStreamDoesNotWait, Kind.UNALLOCATED),
    Fault(AllocatedOnCopyStream, Kind.FREED),
    Fault(AllocatedOnOtherStream, Kind.FREED),
    Fault(EventReturnedEarly, Kind.UNARRIVED, wrong=True),
    Fault(DroppedInFlight, Kind.FREED),
    Fault(SharedDestination, Kind.UNARRIVED, wrong=True),
    Fault(WrittenUnsynchronized, Kind.SOURCE_WRITTEN),
    Fault(UnpinnedUnsynchronized, Kind.SOURCE_UNPINNED),
    Fault(CaptureNotJoined, Kind.CAPTURE_UNJOINED, wrong=True),
    Fault(CaptureNotForked, Kind.CAPTURE_ISOLATION, wrong=True),
    Fault(StaleAhead, Kind.FREED),
    Fault(WrongCurrentStream, Kind.UNARRIVED),
    Fault(NotPinned, Kind.CAPTURE_PAGEABLE, wrong=True),
)


def _same(copy: Event, event: Event) -> Event:
    copy.clock, copy.line, copy.graph, copy.place = event.clock, event.line, event.graph, event.place
    return copy
