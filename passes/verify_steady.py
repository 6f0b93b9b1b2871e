"""Check a steady schedule by replaying several calls. Shares nothing with the code that makes schedules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .verify_schedule import ScheduleError

if TYPE_CHECKING:
    from .schedule import Window
    from .steady_schedule import SteadySchedule

_CALLS = 4  # no stay is longer than two calls, so by the third the bytes held repeat


def verify_steady(schedule: SteadySchedule, windows: Sequence[Window]) -> SteadySchedule:
    """Return `schedule` if a replay of several calls finds nothing wrong.

    1. Every window has exactly one transfer, with its bytes and steps, and every transfer has a window.
    2. 0 <= first_use < steps; -steps < issue_at <= first_use <= last_use < issue_at + 2 * steps.
    3. Neither first_use nor issue_at ever decreases along the transfers, nor from the last to the first of the next call.
    4. At every step the transfers issued and not yet given up, of all calls, hold at most `pool` bytes.
    5. No weight is on the device twice.
    6. With a lookahead k, at most k issued transfers are still ahead of the step about to run.

    Raises:
        ScheduleError: naming the rule, the transfer and its neighbours.
    """
    n, moves = schedule.steps, schedule.transfers
    wanted = {(w.key, w.first_use, w.last_use): w.nbytes for w in windows}
    if len(wanted) != len(windows):
        raise ScheduleError(f"verify_steady: {len(windows)} windows given, only {len(wanted)} of them differ")
    for at, t in enumerate(moves):
        if (nbytes := wanted.pop((t.key, t.first_use, t.last_use), None)) is None:
            _fail(schedule, at, "no window asks for it, or its window has a transfer already")
        if t.nbytes != nbytes:
            _fail(schedule, at, f"expected {nbytes} bytes, those of its window")
        if not (0 <= t.first_use < n and -n < t.issue_at <= t.first_use <= t.last_use < t.issue_at + 2 * n):
            _fail(schedule, at, f"expected 0 <= first_use < {n} and -{n} < issue_at <= first_use <= last_use")
    for at, t in enumerate(moves):
        ahead = moves[at - 1]
        turn = 0 if at else n
        if t.first_use + turn < ahead.first_use or t.issue_at + turn < ahead.issue_at:
            _fail(schedule, at, "out of order: it is used or issued before the transfer ahead of it")
    if wanted:
        key, first, last = next(iter(wanted))
        raise ScheduleError(f"verify_steady: no transfer serves the window of {key!r}, steps {first} to {last}")
    _replay(schedule)
    return schedule


def _replay(schedule: SteadySchedule) -> None:
    n, moves = schedule.steps, schedule.transfers
    arriving: dict[int, list[int]] = {}
    leaving: dict[int, list[int]] = {}
    used: list[int] = []
    for call in range(_CALLS):
        for at, t in enumerate(moves):
            arriving.setdefault(t.issue_at + call * n, []).append(at)
            leaving.setdefault(t.last_use + 1 + call * n, []).append(at)
            used.append(t.first_use + call * n)
    held: dict[str, int] = {}
    issued = waited = 0
    for step in sorted({*arriving, *leaving}):
        if step >= (_CALLS - 1) * n:  # the calls after the last are not part of the replay
            return
        for at in leaving.get(step, ()):
            del held[moves[at].key]
        for at in arriving.get(step, ()):
            t = moves[at]
            if t.key in held:
                _fail(schedule, at, f"issued before step {step}, while it is still on the device")
            held[t.key] = t.nbytes
            if (together := sum(held.values())) > schedule.pool:
                _fail(
                    schedule, at, f"the transfers hold {together} bytes before step {step}, the pool is {schedule.pool}"
                )
            issued += 1
        while waited < len(used) and used[waited] <= step:
            waited += 1
        if schedule.lookahead is not None and issued - waited > schedule.lookahead:
            at = arriving[step][-1] if step in arriving else 0
            _fail(schedule, at, f"{issued - waited} transfers ahead at step {step}, lookahead is {schedule.lookahead}")


def _fail(schedule: SteadySchedule, at: int, problem: str) -> None:
    near = range(max(0, at - 2), min(len(schedule.transfers), at + 3))
    lines = [f"  {'>' if i == at else ' '} {i}: {schedule.transfers[i]}" for i in near]
    raise ScheduleError(
        "\n".join([f"verify_steady: transfer {at} ({schedule.transfers[at].key!r}): {problem}", *lines])
    )
