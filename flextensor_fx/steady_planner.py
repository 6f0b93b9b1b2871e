"""Plan a call that repeats: the steady counterpart of what `planner` does for one cold call."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from flextensor_fx.passes.schedule import PoolError
from flextensor_fx.passes.steady_schedule import (
    SteadySchedule,
    circular_windows,
    least_steady_pool,
    steady_schedule,
)
from flextensor_fx.passes.verify_steady import verify_steady
from flextensor_fx.simulate import Link
from flextensor_fx.steady import SteadyRun, issue_late, simulate_steady
from flextensor_fx.steady_bounds import BoundProblem, steady_lower_bound
from flextensor_fx.steady_search import SteadyProblem, choose_steady

Uses = Sequence[tuple[str, int, tuple[int, ...]]]

_JUDGED = 4  # sets of streamed weights that are scheduled and simulated in full
_JUDGED_WITH_LOOKAHEAD = 12  # the search knows nothing of a lookahead, so more of what it finds is tried
_FEW = 64  # weights up to which that costs nothing to speak of
_OVERLAP_SLACK = 1.02  # without a budget: time allowed, relative to a pool without limit


def plan_steady(
    uses: Uses,
    step_ms: Sequence[float],
    link: Link,
    streamable: Sequence[int],
    budget: int,
    lookahead: int | None,
    least_pool: int,
    known_ms: float,
    late: bool,
) -> tuple[frozenset[int], SteadySchedule, SteadyRun]:
    """The weights to stream, as indices into `uses`, their schedule and its run.

    Args:
        uses: (key, bytes, steps that use it); all of them must fit `budget` with `streamable` streamed.
        step_ms: milliseconds each compute step takes.
        link: what a copy costs.
        streamable: weights that may be streamed; all others are resident.
        budget: bytes for residents and pool, less than all bytes.
        lookahead: as in `steady_schedule`.
        least_pool: the pool is at least this many bytes.
        known_ms: a lower bound, at which the search stops.
        late: issue copies as late as they stay hidden.
    """
    sizes = [nbytes for _, nbytes, _ in uses]
    index = {uses[w][0]: w for w in streamable}
    windows = circular_windows([uses[w] for w in sorted(streamable)], len(step_ms))
    problem = SteadyProblem(
        sizes=sizes,
        copy_ms=[link.copy_ms(nbytes) for nbytes in sizes],
        windows=[(index[w.key], w.first_use, w.last_use) for w in windows],
        clock=[0.0, *accumulate(step_ms)],
        budget=budget,
        least_pool=least_pool,
        lower_bound_ms=known_ms,
    )
    best: tuple[frozenset[int], SteadySchedule, SteadyRun] | None = None
    found = choose_steady(problem, _JUDGED if lookahead is None else _JUDGED_WITH_LOOKAHEAD)
    if len(streamable) <= _FEW and any(len(set(uses[w][2])) > 1 for w in streamable):
        # The search knows one set of windows; with fewer weights streamed those of a weight used twice are others.
        front = sorted(streamable, key=lambda w: (min(uses[w][2]), w))
        found += [frozenset(front[kept:]) for kept in range(len(front))]
    for chosen in found:
        served = circular_windows([uses[w] for w in sorted(chosen)], len(step_ms))
        held = sum(sizes) - sum(sizes[w] for w in chosen)
        pool = min(budget - held, max(sum(w.nbytes for w in served), least_pool))
        if pool < least_pool:
            continue  # the residents that were added to what the search found leave too little
        try:
            made = steady_schedule(served, len(step_ms), pool, lookahead)
        except PoolError:
            continue  # windows of fewer weights are longer, and here they no longer fit
        run = simulate_steady(made, step_ms, link)
        if best is None or run.period_ms < best[2].period_ms:
            best = chosen, made, run
        if lookahead is None and run.period_ms <= known_ms * (1 + 1e-4):
            break
    if best is None:
        chosen = frozenset(streamable)
        made = steady_schedule(windows, len(step_ms), budget - sum(sizes) + sum(sizes[w] for w in chosen), lookahead)
        best = chosen, made, simulate_steady(made, step_ms, link)
    chosen, made, run = best
    if late:
        made = issue_late(made, step_ms, link)
        run = simulate_steady(made, step_ms, link)
    verify_steady(made, circular_windows([uses[w] for w in sorted(chosen)], len(step_ms)))
    return chosen, made, run


def smallest_steady_pool(
    uses: Uses, step_ms: Sequence[float], link: Link, lookahead: int | None, least: int
) -> SteadySchedule:
    """All of `uses` streamed through the smallest pool whose period is at most 2% above that of a pool without limit."""
    windows = circular_windows(uses, len(step_ms))
    low = max(least_steady_pool(windows, len(step_ms)), least)
    high = max(sum(w.nbytes for w in windows), low)

    def period(pool: int) -> float:
        return simulate_steady(steady_schedule(windows, len(step_ms), pool, lookahead), step_ms, link).period_ms

    allowed_ms = _OVERLAP_SLACK * period(high)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if period(middle) <= allowed_ms else (middle + 1, high)
    return steady_schedule(windows, len(step_ms), low, lookahead)


def bound_steady(
    uses: Uses,
    step_ms: Sequence[float],
    link: Link,
    streamable: Sequence[int],
    budget: int,
    known_ms: float,
    reached_ms: float,
) -> float:
    """`steady_lower_bound` of these weights."""
    clock = [0.0, *accumulate(step_ms)]
    movable = [uses[w] for w in streamable if uses[w][1]]
    problem = BoundProblem(
        sizes=[nbytes for _, nbytes, _ in movable],
        copy_ms=[link.copy_ms(nbytes) for _, nbytes, _ in movable],
        busy_ms=[sum(step_ms[s] for s in set(steps)) for _, _, steps in movable],
        starts_ms=[[clock[s] for s in set(steps)] for _, _, steps in movable],
        compute_ms=clock[-1],
        excess=sum(nbytes for _, nbytes, _ in uses) - budget,
        budget=budget,
    )
    return steady_lower_bound(problem, known_ms, reached_ms)
