"""Predict the period of a call that repeats: a discrete-event run until the calls no longer differ."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from flextensor_fx.passes.schedule import Transfer, format_bytes, format_table
from flextensor_fx.passes.steady_schedule import SteadySchedule
from flextensor_fx.simulate import Link, Timing

_MOST_CALLS = 100  # calls that still differ after these take turns; their mean is the period
_SAME = 1e-10  # relative difference at which two calls count as equal
_MARGINS = (1.0, 0.5, 0.25)  # of each copy's time


@dataclass(frozen=True, slots=True)
class SteadyRun:
    """One simulated call among equal ones.

    Fields:
        period_ms: from the start of one call to the start of the next.
        stall_ms: the part of it in which compute waits for copies.
        transfers: one Timing per transfer, in the schedule's order, from the start of the call that uses it: a copy with a
            negative start begins in the call before.
        peak_bytes: most bytes the transfers hold together.
        calls: calls simulated until they repeat, from one that starts with nothing prefetched.
    """

    period_ms: float
    stall_ms: float
    transfers: tuple[Timing, ...]
    peak_bytes: int
    calls: int

    def __str__(self) -> str:
        title = (
            f"SteadyRun: period {self.period_ms:.3f} ms, stalled {self.stall_ms:.3f} ms, "
            f"peak {format_bytes(self.peak_bytes)}, after {self.calls} calls"
        )
        rows = [(t.key, f"{t.start_ms:.3f}", f"{t.end_ms:.3f}", f"{t.stall_ms:.3f}") for t in self.transfers]
        return title + "\n" + format_table(("key", "start_ms", "end_ms", "stall_ms"), rows)


def simulate_steady(schedule: SteadySchedule, step_ms: Sequence[float], link: Link) -> SteadyRun:
    """Run call after call until they repeat: steps in order, copies in the schedule's order on one link.

    The rules are those of `simulate`; a copy issued in the call before starts there.

    Args:
        schedule: the transfers; its steps index `step_ms`.
        step_ms: milliseconds each compute step takes.
        link: what a copy costs.

    Raises:
        ValueError: the schedule has another number of steps than `step_ms`.
    """
    moves = schedule.transfers
    if schedule.steps != len(step_ms):
        raise ValueError(f"simulate_steady: the schedule has {schedule.steps} steps, but step_ms has {len(step_ms)}")
    clock = [0.0, *accumulate(step_ms)]
    copies = [link.copy_ms(t.nbytes) for t in moves]
    starts, stalled, period, calls = _settle(moves, copies, clock)
    timings = tuple(
        Timing(t.key, start, start + copy, after - before)
        for t, start, copy, (before, after) in zip(moves, starts, copies, pairwise(stalled), strict=True)
    )
    return SteadyRun(period, period - clock[-1], timings, schedule.peak_bytes, calls)


def issue_late(schedule: SteadySchedule, step_ms: Sequence[float], link: Link) -> SteadySchedule:
    """Issue each copy as late as it stays hidden: the same period, fewer bytes alive, more room for jitter elsewhere.

    Every copy keeps a margin of its own copy time before it is needed, or half or a quarter of it where that would lengthen
    the period; where even that does, the schedule is returned as it is.
    """
    run = simulate_steady(schedule, step_ms, link)
    for margin in _MARGINS:
        later = _delayed(schedule, run, step_ms, link, margin)
        if simulate_steady(later, step_ms, link).period_ms <= run.period_ms * (1 + _SAME):
            return later
    return schedule


def _settle(
    moves: Sequence[Transfer], copies: Sequence[float], clock: Sequence[float]
) -> tuple[list[float], list[float], float, int]:
    """(start of each copy, stall before each wait and after the last, both from the start of the call; period; calls)."""
    compute, first = clock[-1], [t.first_use for t in moves]
    if not moves:
        return [], [0.0], compute, 1
    # Of a copy: whether this call issues it, the clock there, the transfers waited for by then, its time, its wait.
    rows: list[tuple[bool, float, int, float, float]] = []
    for t, copy in zip(moves, copies, strict=True):
        here = t.issue_at >= 0
        step = t.issue_at if here else t.issue_at + len(clock) - 1
        rows.append(
            (here, clock[step] - (0.0 if here else compute), bisect_left(first, step), copy, clock[t.first_use])
        )
    before = [0.0] * (len(moves) + 1)
    begin = link_free = stall = previous = 0.0
    ends: list[float] = []
    starts: list[float] = []
    for calls in range(1, _MOST_CALLS + 1):
        stalled, starts = [stall], []
        for here, at, passed, copy, use in rows:
            start = max(link_free, begin + at + (stalled[passed] if here else before[passed]))
            starts.append(start)
            link_free = start + copy
            stall = max(stall, link_free - begin - use)
            stalled.append(stall)
        grown, begin = stalled[-1] - stalled[0], begin + compute
        period = compute + grown
        ends.append(begin + stall)
        same = all(abs(new - old - grown) <= _SAME * period for new, old in zip(stalled, before, strict=True))
        # With equal stalls the calls repeat only if the link is as far ahead as it was.
        if same and calls > 1 and abs(starts[0] - previous - period) <= _SAME * period:
            break
        before, previous = stalled, starts[0]
    else:
        period = (ends[-1] - ends[_MOST_CALLS // 2 - 1]) / (_MOST_CALLS - _MOST_CALLS // 2)
        calls = _MOST_CALLS
    origin = begin - compute + stalled[0]
    return [s - origin for s in starts], [s - stalled[0] for s in stalled], period, calls


def _delayed(
    schedule: SteadySchedule, run: SteadyRun, step_ms: Sequence[float], link: Link, margin: float
) -> SteadySchedule:
    moves, n = schedule.transfers, schedule.steps
    begins = [0.0] * (n + 1)  # when each step begins
    waits: dict[int, float] = {}
    for t, timing in zip(moves, run.transfers, strict=True):
        waits[t.first_use] = waits.get(t.first_use, 0.0) + timing.stall_ms
    for step, ms in enumerate(step_ms):
        # A step that waits begins after its wait, and the one before has finished ahead of it.
        begins[step] += waits.get(step, 0.0)
        begins[step + 1] = begins[step] + ms
    finished = [begins[s] + step_ms[s] for s in range(n)]
    latest = float("inf")
    issues = [t.issue_at for t in moves]
    for turn in (1, 0):
        for at in range(len(moves) - 1, -1, -1):
            t, copy = moves[at], link.copy_ms(moves[at].nbytes)
            latest = min(latest - copy, begins[t.first_use] - copy * (1 + margin) + turn * run.period_ms)
            start = max(latest, run.transfers[at].start_ms + turn * run.period_ms)
            if turn == 0:
                issues[at] = max(t.issue_at, min(t.first_use, _boundary(finished, start, run.period_ms)))
    for at in range(1, len(issues)):
        issues[at] = min(max(issues[at], issues[at - 1]), moves[at].first_use)
    if issues and issues[0] + n < issues[-1]:
        return schedule
    return replace(schedule, transfers=tuple(replace(t, issue_at=i) for t, i in zip(moves, issues, strict=True)))


def _boundary(finished: Sequence[float], start: float, period: float) -> int:
    """The last step that may be named as issue_at for a copy to start by `start`: one after the last finished by then."""
    calls = 0
    while start < 0:
        start, calls = start + period, calls + 1
    return bisect_left(finished, start + 1e-9 * period) - calls * len(finished)
