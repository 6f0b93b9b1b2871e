"""Choose which weights stay resident under a budget, so that one cold call is as fast as possible.

Whatever the residents leave of the budget is the pool: a larger pool never makes a call slower. So the choice is a set of
streamed weights, and a set is judged by simulating the call it gives.

Method: token-bucket candidates over pool sizes and size thresholds, a few plain policies, then a hill climb with a fixed number
of simulations. No clock and no unseeded randomness: equal arguments give equal results.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from flextensor_fx.passes.schedule import issue_steps, split_stays
from flextensor_fx.simulate import timeline

_SIMULATED_TRANSFERS = 150_000  # work of one search, which bounds its time whatever the size of the model
_MOST_TRIALS = 1_500
_CLOSE_ENOUGH = 1e-4  # relative distance to the lower bound at which the search stops


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What the search sees; weights are numbered from 0.

    Fields:
        sizes: bytes by weight.
        copy_ms: milliseconds of one copy by weight.
        events: every (step, weight) use, sorted.
        clock: clock[i] is when step i would start if nothing stalled; one entry more than steps.
        streamable: the weights that may be streamed, in order of first use; all others are resident.
        budget: bytes for residents and pool.
        lookahead: as in `schedule`.
        lower_bound_ms: no call is faster.
        least_pool: bytes that the pool must have if anything is streamed.
    """

    sizes: Sequence[int]
    copy_ms: Sequence[float]
    events: Sequence[tuple[int, int]]
    clock: Sequence[float]
    streamable: Sequence[int]
    budget: int
    lookahead: int | None
    lower_bound_ms: float
    least_pool: int = 0


@dataclass(frozen=True, slots=True)
class Trial:
    """A set of streamed weights, judged: the time of the call and, per transfer, its weight and the stall it adds."""

    streamed: frozenset[int]
    total_ms: float
    who: Sequence[int]
    first: Sequence[int]
    stalls: Sequence[float]


def judge(problem: Problem, streamed: frozenset[int]) -> Trial | None:
    """Simulate one cold call that streams `streamed`; None where the budget cannot hold it."""
    sizes = problem.sizes
    pool = problem.budget - sum(sizes) + sum(sizes[w] for w in streamed)
    if pool < (problem.least_pool if streamed else 0):
        return None
    who, first, last = split_stays([event for event in problem.events if event[1] in streamed], sizes)
    issues = issue_steps(first, last, [sizes[w] for w in who], pool, problem.lookahead)
    if issues is None:
        return None
    _, stalled = timeline(issues, first, [problem.copy_ms[w] for w in who], problem.clock)
    stalls = [after - before for before, after in pairwise(stalled)]
    return Trial(streamed, problem.clock[-1] + stalled[-1], who, first, stalls)


def choose_streamed(problem: Problem) -> frozenset[int]:
    """The streamed weights of the fastest cold call found.

    Streaming all of `problem.streamable` must be possible; the result is never slower than that, nor than keeping the front of
    the model resident.
    """
    best = judge(problem, frozenset(problem.streamable))
    if best is None:
        raise AssertionError(
            f"choose_streamed: budget {problem.budget} is below the least budget; the caller must refuse it"
        )
    trials = max(60, min(_MOST_TRIALS, _SIMULATED_TRANSFERS // max(1, len(problem.streamable))))
    goal = problem.lower_bound_ms * (1 + _CLOSE_ENOUGH)
    seen = {best.streamed}
    for streamed in _candidates(problem, combinations=max(24, trials // 2)):
        if streamed not in seen:
            seen.add(streamed)
            trial = judge(problem, streamed)
            if trial is not None and _cost(problem, trial, goal) < _cost(problem, best, goal):
                best = trial
    return _climb(problem, best, goal, trials, seen).streamed


def _cost(problem: Problem, trial: Trial, goal: float) -> tuple[float, float]:
    """Time first; among calls as fast as can be, the one that moves least, since other graphs stream the same weights."""
    return max(trial.total_ms, goal), sum(problem.copy_ms[w] for w in trial.who)


def _candidates(problem: Problem, combinations: int) -> Iterator[frozenset[int]]:
    by_size = sorted(problem.streamable, key=lambda w: (problem.sizes[w], w))
    yield from _prefixes(problem, problem.streamable)
    yield from _prefixes(problem, by_size)
    yield from _prefixes(problem, by_size[::-1])
    yield from _buckets(problem, by_size, combinations)


def _prefixes(problem: Problem, order: Sequence[int]) -> Iterator[frozenset[int]]:
    """Keep the first weights of `order` resident: as many as can be, and fewer, for pools of several times the largest."""
    most, over = 0, len(order) + 1  # whatever fits still fits with fewer residents, so bisection finds the most
    while over - most > 1:
        middle = (most + over) // 2
        most, over = (most, middle) if judge(problem, frozenset(order[middle:])) is None else (middle, over)
    yield frozenset(order[most:])
    sizes = [problem.sizes[w] for w in order]
    kept = list(accumulate(sizes, initial=0))
    largest = list(accumulate(reversed(sizes), max, initial=0))[::-1]  # of the weights that are not kept
    room = problem.budget - sum(problem.sizes) + kept[-1]
    for slots in (1, 2, 3, 4, 8):
        while most and kept[most] + slots * largest[most] > room:
            most -= 1
        yield frozenset(order[most:])


def _buckets(problem: Problem, by_size: Sequence[int], combinations: int) -> Iterator[frozenset[int]]:
    """Token-bucket fills for pools of several sizes and several least sizes worth streaming."""
    if not by_size:
        return
    sizes = problem.sizes
    room = problem.budget - sum(sizes) + sum(sizes[w] for w in by_size)
    lows = sorted({sizes[by_size[len(by_size) * part // 8]] for part in (0, 2, 4, 6)})
    begin: dict[int, float] = {}
    for step, w in problem.events:
        begin.setdefault(w, problem.clock[step])
    pool = min(room, sum(sizes[w] for w in by_size))
    smallest = sizes[by_size[0]]
    steps = max(3, min(20, combinations // (2 * len(lows))))
    shrink = max(0.5, min(0.8, (smallest / pool) ** (1 / steps))) if pool > 0 else 1.0
    for _ in range(steps):
        if pool < smallest:
            return
        brimful = problem.copy_ms[by_size[-1]] * pool / sizes[by_size[-1]]
        for low in lows:
            walk = [(begin[w], problem.copy_ms[w], sizes[w], w) for w in problem.streamable if low <= sizes[w] <= pool]
            kept = sum(sizes[w] for w in by_size) - sum(item[2] for item in walk)
            for start in (0.0, brimful):
                streamed = _least_fill(walk, brimful, start, room - pool - kept)
                if streamed is not None:
                    yield streamed
        pool = int(pool * shrink)


def _least_fill(
    walk: Sequence[tuple[float, float, int, int]], capacity: float, start: float, room: int
) -> frozenset[int] | None:
    """The slowest rate of link time per compute time at which what the bucket cannot pay for fits `room` bytes.

    Args:
        walk: (start of its step, link time, bytes, weight) in order of use.
        capacity: link time the bucket holds.
        start: link time in it at the start of the call.
    """

    def fill(rate: float) -> tuple[int, list[int]]:
        tokens, now, kept, streamed = start, 0.0, 0, []
        for begin, cost, nbytes, w in walk:
            tokens = min(capacity, tokens + rate * (begin - now))
            now = begin
            if tokens >= cost:
                tokens -= cost
                streamed.append(w)
            else:
                kept += nbytes
        return kept, streamed

    low, high = -7.0, 14.0  # log2 of the rate
    kept, streamed = fill(2.0**high)
    if kept > room:
        return None
    for _ in range(12):
        middle = (low + high) / 2
        kept, found = fill(2.0**middle)
        if kept <= room:
            high, streamed = middle, found
        else:
            low = middle
    return frozenset(streamed)


def _climb(problem: Problem, best: Trial, goal: float, trials: int, seen: set[frozenset[int]]) -> Trial:
    """Promote stalled weights, demote others, swap; keep what is no slower."""
    dice = random.Random(0)
    for _ in range(trials):
        if best.total_ms <= goal:
            break
        streamed = _neighbour(problem, best, dice)
        if streamed in seen:
            continue
        seen.add(streamed)
        trial = judge(problem, streamed)
        if trial is not None and trial.total_ms <= best.total_ms:
            best = trial
    return best


def _neighbour(problem: Problem, at: Trial, dice: random.Random) -> frozenset[int]:
    streamed = set(at.streamed)
    resident = [w for w in problem.streamable if w not in streamed]
    move = dice.random()
    if at.who and move < 0.8:
        j = dice.choices(range(len(at.who)), weights=[s + 1e-9 for s in at.stalls])[0]
        j = max(0, j - int(dice.expovariate(0.5)))
        streamed.discard(at.who[j])
    if resident and move > 0.2:
        streamed.add(dice.choice(resident))
        if dice.random() < 0.2:
            streamed.add(dice.choice(resident))
    return frozenset(streamed)
