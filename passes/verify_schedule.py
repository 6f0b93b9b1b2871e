"""Check a schedule against the windows it serves, by replaying it. Shares nothing with the code that makes schedules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .schedule import Schedule, Window


class ScheduleError(AssertionError):
    """A schedule that breaks its own rules: a bug in whatever made it, never the user's mistake."""


def verify_schedule(schedule: Schedule, windows: Sequence[Window]) -> Schedule:
    """Return `schedule` if a replay of one call finds nothing wrong.

    1. Every window has exactly one transfer, with its bytes and steps, and every transfer has a window.
    2. 0 <= issue_at <= first_use <= last_use.
    3. Neither first_use nor issue_at ever decreases along the transfers.
    4. At every step the transfers issued and not yet given up hold at most `pool` bytes.
    5. With a lookahead k, at most k issued transfers are still ahead of the step about to run.

    Raises:
        ScheduleError: naming the rule, the transfer and its neighbours.
    """
    _same_windows(schedule, windows)
    for at, transfer in enumerate(schedule.transfers):
        if not 0 <= transfer.issue_at <= transfer.first_use <= transfer.last_use:
            _fail(schedule, at, "expected 0 <= issue_at <= first_use <= last_use")
        if at and transfer.first_use < schedule.transfers[at - 1].first_use:
            _fail(schedule, at, "out of order: it is used before the transfer ahead of it")
        if at and transfer.issue_at < schedule.transfers[at - 1].issue_at:
            _fail(schedule, at, "out of order: it is issued before the transfer ahead of it")
    _replay(schedule)
    return schedule


def _same_windows(schedule: Schedule, windows: Sequence[Window]) -> None:
    expected = {(w.key, w.first_use, w.last_use): w.nbytes for w in windows}
    if len(expected) != len(windows):
        raise ScheduleError(f"verify_schedule: {len(windows)} windows given, only {len(expected)} of them differ")
    served: set[tuple[str, int, int]] = set()
    for at, transfer in enumerate(schedule.transfers):
        window = (transfer.key, transfer.first_use, transfer.last_use)
        if window not in expected:
            _fail(schedule, at, "no window asks for it")
        if window in served:
            _fail(schedule, at, "its window has a transfer already")
        if transfer.nbytes != expected[window]:
            _fail(schedule, at, f"expected {expected[window]} bytes, those of its window")
        served.add(window)
    for window in expected:
        if window not in served:
            key, first, last = window
            raise ScheduleError(f"verify_schedule: no transfer serves the window of {key!r}, steps {first} to {last}")


def _replay(schedule: Schedule) -> None:
    leaving: dict[int, list[int]] = {}
    arriving: dict[int, list[int]] = {}
    for at, transfer in enumerate(schedule.transfers):
        arriving.setdefault(transfer.issue_at, []).append(at)
        leaving.setdefault(transfer.last_use + 1, []).append(at)
    on_device: set[int] = set()
    held = 0
    waited = issued = 0
    for step in sorted({*leaving, *arriving}):
        for at in leaving.get(step, ()):
            if at in on_device:
                on_device.remove(at)
                held -= schedule.transfers[at].nbytes
        for at in arriving.get(step, ()):
            on_device.add(at)
            held += schedule.transfers[at].nbytes
            if held > schedule.pool:
                _fail(schedule, at, f"the transfers hold {held} bytes before step {step}, the pool is {schedule.pool}")
            issued += 1
            while waited < len(schedule.transfers) and schedule.transfers[waited].first_use <= step:
                waited += 1
            if schedule.lookahead is not None and issued - waited > schedule.lookahead:
                _fail(
                    schedule, at, f"{issued - waited} transfers ahead at step {step}, lookahead is {schedule.lookahead}"
                )
    if on_device:
        _fail(schedule, min(on_device), "never given up")


def _fail(schedule: Schedule, at: int, problem: str) -> None:
    near = range(max(0, at - 2), min(len(schedule.transfers), at + 3))
    lines = [f"  {'>' if i == at else ' '} {i}: {schedule.transfers[i]}" for i in near]
    raise ScheduleError(
        "\n".join([f"verify_schedule: transfer {at} ({schedule.transfers[at].key!r}): {problem}", *lines])
    )
