"""Predict how long one call takes under a schedule: a discrete-event run of compute steps and copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from flextensor_fx.passes.schedule import Schedule, format_bytes, format_table


@dataclass(frozen=True, slots=True)
class Link:
    """What a copy costs: `latency_ms` plus bytes / `bytes_per_ms`.

    Fields:
        latency_ms: milliseconds each copy costs whatever its size, at least 0.
        bytes_per_ms: bandwidth in bytes per millisecond, above 0.
        provenance: where the numbers come from, such as "measured while computing" or "estimated".

    Raises:
        ValueError: a latency below 0 or a bandwidth that is not above 0.
    """

    latency_ms: float
    bytes_per_ms: float
    provenance: str

    def __post_init__(self) -> None:
        if not (self.latency_ms >= 0 and self.bytes_per_ms > 0):
            raise ValueError(f"Link: expected latency_ms >= 0 and bytes_per_ms > 0, found {self!r}")

    def copy_ms(self, nbytes: int) -> float:
        """Milliseconds of one copy of `nbytes` bytes."""
        return self.latency_ms + nbytes / self.bytes_per_ms


@dataclass(frozen=True, slots=True)
class Timing:
    """One transfer of a run: its copy ran from `start_ms` to `end_ms`, and compute stood still `stall_ms` for it."""

    key: str
    start_ms: float
    end_ms: float
    stall_ms: float


@dataclass(frozen=True, slots=True)
class Run:
    """One simulated call.

    Fields:
        total_ms: from the start of the call to the end of its last step.
        stall_ms: the part of it in which compute waited for copies.
        transfers: one Timing per transfer, in the schedule's order.
        peak_bytes: most bytes the transfers held together.
    """

    total_ms: float
    stall_ms: float
    transfers: tuple[Timing, ...]
    peak_bytes: int

    def __str__(self) -> str:
        title = f"Run: {self.total_ms:.3f} ms, stalled {self.stall_ms:.3f} ms, peak {format_bytes(self.peak_bytes)}"
        rows = [(t.key, f"{t.start_ms:.3f}", f"{t.end_ms:.3f}", f"{t.stall_ms:.3f}") for t in self.transfers]
        return title + "\n" + format_table(("key", "start_ms", "end_ms", "stall_ms"), rows)


def simulate(schedule: Schedule, step_ms: Sequence[float], link: Link) -> Run:
    """Run one call: steps in order, copies in the schedule's order on one link.

    A copy starts when step issue_at - 1 has finished and the link is free. A step starts when the one before it has finished
    and every copy first used in it has arrived. Where a step waits for several copies, each is charged what it adds.

    Args:
        schedule: the transfers; their steps index `step_ms`.
        step_ms: milliseconds each compute step takes.
        link: what a copy costs.

    Raises:
        ValueError: a transfer is used in a step beyond `step_ms`.
    """
    moves = schedule.transfers
    if moves and max(t.last_use for t in moves) >= len(step_ms):
        late = max(moves, key=lambda t: t.last_use)
        raise ValueError(f"simulate: {late.key!r} is used in step {late.last_use}, but there are {len(step_ms)} steps")
    clock = [0.0, *accumulate(step_ms)]
    copies = [link.copy_ms(t.nbytes) for t in moves]
    starts, stalled = timeline([t.issue_at for t in moves], [t.first_use for t in moves], copies, clock)
    timings = tuple(
        Timing(t.key, start, start + copy, after - before)
        for t, start, copy, before, after in zip(moves, starts, copies, stalled[:-1], stalled[1:], strict=True)
    )
    return Run(clock[-1] + stalled[-1], stalled[-1], timings, schedule.peak_bytes)


def timeline(
    issues: Sequence[int], first: Sequence[int], copies: Sequence[float], clock: Sequence[float]
) -> tuple[list[float], list[float]]:
    """The run of `simulate` over plain lists, for callers that try many schedules.

    Args:
        issues: issue_at by transfer, not decreasing.
        first: first_use by transfer, not decreasing.
        copies: milliseconds of each copy.
        clock: clock[i] is when step i would start if nothing stalled; one entry more than steps.

    Returns:
        (when each copy starts, stall accumulated before each transfer's wait and, one entry more, after the last).
    """
    starts: list[float] = []
    stalled = [0.0]
    stall = link_free = 0.0
    passed = 0  # transfers waited for before the step at which the current copy is issued
    for issue, use, copy in zip(issues, first, copies, strict=True):
        while first[passed] < issue:
            passed += 1
        start = max(link_free, clock[issue] + stalled[passed])
        starts.append(start)
        link_free = start + copy
        if link_free > clock[use] + stall:
            stall = link_free - clock[use]
        stalled.append(stall)
    return starts, stalled
