"""One call on a time axis: what computed, what was copied, what waited, and the memory held; predicted or measured."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from .passes.schedule import Schedule, format_bytes, format_table
from .passes.steady_schedule import SteadySchedule
from .simulate import Link, simulate
from .steady import simulate_steady

Provenance = Literal["predicted", "measured"]

START = "(start)"
"""The label of compute before the first streamed weight was waited for."""


@dataclass(frozen=True, slots=True)
class ComputeSpan:
    """Compute from `start_ms` to `end_ms`; `label` is the unit it belongs to."""

    start_ms: float
    end_ms: float
    label: str


@dataclass(frozen=True, slots=True)
class TransferSpan:
    """The copy of weight `key`, of `nbytes` bytes; `unit` as the labels of compute."""

    start_ms: float
    end_ms: float
    key: str
    unit: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Stall:
    """Compute stood still from `start_ms` to `end_ms` until weight `key` had arrived."""

    start_ms: float
    end_ms: float
    key: str


@dataclass(frozen=True, slots=True)
class Level:
    """From `ms` on, `nbytes` bytes are taken, resident ones included, until the next level."""

    ms: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class UnitTimes:
    """What one unit took in a call, each in ms; copies may run beside compute and beside each other."""

    compute_ms: float = 0.0
    transfer_ms: float = 0.0
    stall_ms: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """One call. Times are in ms from its start.

    Fields:
        name: for people.
        provenance: "predicted" by simulation, or "measured" while the call ran.
        source: where the numbers come from, such as "estimated costs".
        total_ms: until the call returned.
        budget_bytes: for residents and transfers together; None if none was given.
        resident_bytes: of the selected weights that stay in memory.
        compute: in order, without overlap.
        transfers: in the order they started; with several reader threads they overlap.
        stalls: in order, without overlap.
        memory: in order; at least one level.

    Raises:
        ValueError: a time is not finite or below 0, a span ends before it starts, bytes below 0, or no level.
    """

    name: str
    provenance: Provenance
    source: str
    total_ms: float
    budget_bytes: int | None
    resident_bytes: int
    compute: tuple[ComputeSpan, ...]
    transfers: tuple[TransferSpan, ...]
    stalls: tuple[Stall, ...]
    memory: tuple[Level, ...]

    def __post_init__(self) -> None:
        if not (math.isfinite(self.total_ms) and self.total_ms >= 0):
            raise ValueError(f"timeline {self.name!r}: expected total_ms of at least 0, found {self.total_ms}")
        for span in (*self.compute, *self.transfers, *self.stalls):
            if not 0 <= span.start_ms <= span.end_ms < math.inf:
                raise ValueError(f"timeline {self.name!r}: expected 0 <= start_ms <= end_ms, found {span}")
        for nbytes in (self.budget_bytes or 0, self.resident_bytes, *(t.nbytes for t in self.transfers)):
            if nbytes < 0:
                raise ValueError(f"timeline {self.name!r}: expected bytes of at least 0, found {nbytes}")
        for level in self.memory:
            if not (0 <= level.ms < math.inf and level.nbytes >= 0):
                raise ValueError(f"timeline {self.name!r}: expected a level of at least 0 bytes and ms, found {level}")
        if not self.memory:
            raise ValueError(f"timeline {self.name!r}: expected at least one level of memory, found none")

    @property
    def compute_ms(self) -> float:
        """Sum over the compute spans."""
        return math.fsum(span.end_ms - span.start_ms for span in self.compute)

    @property
    def transfer_ms(self) -> float:
        """Sum over the copies."""
        return math.fsum(span.end_ms - span.start_ms for span in self.transfers)

    @property
    def stall_ms(self) -> float:
        """Sum over the stalls."""
        return math.fsum(span.end_ms - span.start_ms for span in self.stalls)

    @property
    def moved_bytes(self) -> int:
        """Sum over the copies."""
        return sum(span.nbytes for span in self.transfers)

    @property
    def peak_bytes(self) -> int:
        """The highest level of memory."""
        return max(level.nbytes for level in self.memory)

    def by_unit(self) -> dict[str, UnitTimes]:
        """What each unit that occurs took, in the order of first occurrence."""
        sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        unit_of = {span.key: span.unit for span in self.transfers}
        for span in self.compute:
            sums[span.label][0] += span.end_ms - span.start_ms
        for span in self.transfers:
            sums[span.unit][1] += span.end_ms - span.start_ms
        for span in self.stalls:
            sums[unit_of.get(span.key, span.key)][2] += span.end_ms - span.start_ms
        return {unit: UnitTimes(*times) for unit, times in sums.items()}

    def __str__(self) -> str:
        given = "no budget" if self.budget_bytes is None else f"budget {format_bytes(self.budget_bytes)}"
        title = (
            f"Timeline: {self.name}, {self.provenance} ({self.source}): {self.total_ms:.3f} ms, computed "
            f"{self.compute_ms:.3f} ms, copied {format_bytes(self.moved_bytes)} in {self.transfer_ms:.3f} ms, stalled "
            f"{self.stall_ms:.3f} ms; peak {format_bytes(self.peak_bytes)}, {given}"
        )
        rows = [
            (unit, f"{times.compute_ms:.3f}", f"{times.transfer_ms:.3f}", f"{times.stall_ms:.3f}")
            for unit, times in self.by_unit().items()
        ]
        return title + "\n" + format_table(("unit", "compute ms", "transfer ms", "stall ms"), rows)


def predicted_timeline(
    schedule: Schedule | SteadySchedule,
    step_ms: Sequence[float],
    link: Link,
    labels: Sequence[str],
    resident_bytes: int,
    budget: int | None,
    *,
    unit_of: Mapping[str, str] | None = None,
    name: str = "plan",
    source: str = "estimated costs",
) -> Timeline:
    """The call that `simulate` predicts, or `simulate_steady` for one among calls that follow one another.

    Args:
        schedule: the transfers; their steps index `step_ms`. A copy is shown in the call in which it ends, and from its start on.
        step_ms: milliseconds each step takes.
        link: what a copy costs.
        labels: by step, the unit it belongs to. Steps that follow each other without a stall, of one label, are one span.
        resident_bytes: of weights that stay in memory.
        budget: bytes for residents and transfers together; None if none was given.
        unit_of: the unit of each key; None takes the label of the step that uses it first.
        name, source: as in `Timeline`.

    Raises:
        ValueError: a transfer is used in a step beyond `step_ms`, or there are not as many labels as steps.
    """
    if len(labels) != len(step_ms):
        raise ValueError(f"predicted_timeline: expected a label for each of {len(step_ms)} steps, found {len(labels)}")
    if isinstance(schedule, SteadySchedule):
        repeated = simulate_steady(schedule, step_ms, link)
        total_ms, timings, calls = repeated.period_ms, repeated.transfers, (-1, 0, 1)
    else:
        run = simulate(schedule, step_ms, link)
        total_ms, timings, calls = run.total_ms, run.transfers, (0,)
    clock = [0.0, *accumulate(step_ms)]
    stall_before = [0.0] * (len(step_ms) + 1)  # by step, what its own waits add
    transfers, stalls = [], []
    stalled = 0.0
    for move, timing in zip(schedule.transfers, timings, strict=True):
        unit = labels[move.first_use] if unit_of is None else unit_of[move.key]
        later = total_ms if timing.end_ms <= 0 < -timing.start_ms else 0.0  # the same copy for the call after
        transfers.append(
            TransferSpan(max(timing.start_ms + later, 0.0), timing.end_ms + later, move.key, unit, move.nbytes)
        )
        if timing.stall_ms > 0:
            begin = clock[move.first_use] + stalled
            stalls.append(Stall(begin, begin + timing.stall_ms, move.key))
            stall_before[move.first_use] += timing.stall_ms
        stalled += timing.stall_ms
    shift = list(accumulate(stall_before))
    spans = [
        ComputeSpan(clock[i] + shift[i], clock[i + 1] + shift[i], label)
        for i, label in enumerate(labels)
        if step_ms[i] > 0
    ]
    ends = [0.0, *(clock[i + 1] + shift[i] for i in range(len(step_ms)))]  # ends[i]: step i - 1 has finished
    steps = len(step_ms)
    changes: list[tuple[float, int]] = []
    for t in schedule.transfers:
        for call in calls:
            begin, end = t.issue_at + call * steps, t.last_use + 1 + call * steps
            if begin <= steps and end > 0:
                changes.append((ends[max(begin, 0)], t.nbytes))
                changes += [(ends[end], -t.nbytes)] if end <= steps else []
    transfers.sort(key=lambda span: span.start_ms)
    return Timeline(
        name, "predicted", source, total_ms, budget, resident_bytes,
        joined(spans), tuple(transfers), tuple(stalls), levels(changes, resident_bytes),
    )  # fmt: skip


def joined(spans: Iterable[ComputeSpan]) -> tuple[ComputeSpan, ...]:
    """Makes one span of those that follow each other directly and have one label."""
    merged: list[ComputeSpan] = []
    for span in spans:
        last = merged[-1] if merged else None
        if last is not None and last.label == span.label and span.start_ms - last.end_ms <= 1e-9 * (1 + span.end_ms):
            merged[-1] = ComputeSpan(last.start_ms, span.end_ms, span.label)
        else:
            merged.append(span)
    return tuple(merged)


def levels(changes: Iterable[tuple[float, int]], resident_bytes: int) -> tuple[Level, ...]:
    """The memory that (ms, bytes taken or, below 0, given back) amount to."""
    by_time: defaultdict[float, int] = defaultdict(int, {0.0: 0})
    for ms, change in changes:
        by_time[ms] += change
    now = resident_bytes
    found: list[Level] = []
    for ms in sorted(by_time):
        now += by_time[ms]
        if not found or now != found[-1].nbytes:
            found.append(Level(ms, now))
    return tuple(found)


def lanes(spans: Sequence[TransferSpan]) -> list[int]:
    """By span, the first lane that is free when it starts: 0 throughout where no two overlap."""
    free: list[float] = []
    found = []
    for span in spans:
        tolerance = 1e-9 * (1 + span.end_ms)  # spans that follow each other may overlap by a rounding error
        lane = next((at for at, end in enumerate(free) if end <= span.start_ms + tolerance), len(free))
        free[lane : lane + 1] = [span.end_ms]
        found.append(lane)
    return found
