"""What an engine did during a call, as events with times, for timelines of what happened."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Literal

Kind = Literal[
    "issued", "taken", "read", "arrived", "waits", "waited", "offloaded", "dropped", "enters", "leaves"
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Event:
    """One moment in the life of a transfer, or of a call.

    Fields:
        at_s: seconds on the clock of `time.perf_counter`.
        kind: "issued", its prefetch ran; "taken", it got its memory; "read" and "arrived", its read began and ended; "waits"
            and "waited", compute came to its wait and went on; "offloaded", its last consumer had run; "dropped", a copy
            ahead of the next call gave up its memory unread; "enters" and "leaves", a compiled graph began and ended.
        key: of the weight; of a graph its name, ": " and the class of its input shapes.
    """

    at_s: float
    kind: Kind
    key: str


class Recorder:
    """Collects events from any thread; made by `Engine.trace`."""

    def __init__(self) -> None:
        self._notes: list[tuple[float, Kind, str]] = []

    def note(self, kind: Kind, key: str, at_s: float | None = None) -> None:
        """Notes one event, now if `at_s` is None."""
        # Appending a tuple is one step of the interpreter: threads need no lock, and no value is built during the call.
        self._notes.append((perf_counter() if at_s is None else at_s, kind, key))

    def events(self) -> tuple[Event, ...]:
        """Everything noted so far, in order of time."""
        return tuple(Event(*note) for note in sorted(self._notes, key=lambda note: note[0]))
