"""Choose which weights to stream in a call that repeats, so that its period is as short as possible.

A pool of p bytes forces at least total - budget + p bytes to be streamed. For each p worth trying, streaming begins with every
weight that fits it and the dearest ones, in time saved per byte kept, are made resident while the budget allows; a token bucket
that spreads the streamed weights along the call gives other beginnings. The best of these are annealed by exchanging streamed
and resident weights. Every trial is exact (see `orbit`). The search spends a fixed amount of work, which grows with the number
of windows; no clock, and no randomness but from a fixed seed: equal arguments give equal results.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from flextensor_fx.orbit import INFEASIBLE, Orbit

# Windows looked at in one search, per window: in a small model up to so many in all, in a large one at least so many each.
_WORK_EACH, _WORK, _LEAST_WORK_EACH = 5_000, 400_000, 60
_CLOSE_ENOUGH = 1e-4  # relative distance to the lower bound at which the search stops
_ANNEALED = 3  # beginnings that are annealed
_HOT, _COLD = 0.2, 0.002  # temperatures of annealing, in copies of average time
_NEAR = 4  # windows to either side that an exchange with a neighbour reaches
_REFRESHED = 2  # windows to either side whose worth is looked at again after a change
_SIZES = 8  # sizes whose sums are tried as pools, at most
_FILLS = 10  # of a token bucket, to find its rate
_SMALL = 64  # weights up to which every number of residents is tried
_LARGE = 1_500  # windows from which on the search begins near its goal, to save work


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyProblem:
    """What the search sees; weights are numbered from 0.

    Fields:
        sizes: bytes by weight.
        copy_ms: milliseconds of one copy by weight.
        windows: (weight, first_use, last_use) of every weight that may be streamed, in order of first_use.
        clock: clock[i] is when step i would start if nothing stalled; one entry more than steps.
        budget: bytes for residents and pool.
        least_pool: bytes that the pool must have.
        lower_bound_ms: no period is shorter.
    """

    sizes: Sequence[int]
    copy_ms: Sequence[float]
    windows: Sequence[tuple[int, int, int]]
    clock: Sequence[float]
    budget: int
    least_pool: int
    lower_bound_ms: float


@dataclass(frozen=True, slots=True)
class _Found:
    period: float
    pool: int
    streamed: frozenset[int]


def choose_steady(problem: SteadyProblem, most: int = 4) -> list[frozenset[int]]:
    """The streamed weights of the best plans found, best first, at most `most`.

    Streaming every weight of `problem.windows` must be possible.
    """
    search = _Search(problem)
    found = search.beginnings()
    found = search.anneal(found[:_ANNEALED], len(found)) + found
    found.sort(key=lambda f: f.period)
    return list(dict.fromkeys(f.streamed for f in found))[:most]


class _Search:
    """One search: what does not change between trials, and the work spent so far."""

    def __init__(self, problem: SteadyProblem) -> None:
        self.problem = problem
        self.windows_of: dict[int, list[int]] = {}
        for at, (weight, _, _) in enumerate(problem.windows):
            self.windows_of.setdefault(weight, []).append(at)
        steps = len(problem.clock) - 1
        # By first use within the call; a stay that began in the call before counts from where it ends in this one.
        begins: dict[int, int] = {}
        for weight, first, last in problem.windows:
            begins[weight] = min(begins.get(weight, first), first, last % steps if last >= steps else first)
        self.order = sorted(begins, key=lambda w: (begins[w], w))
        self.excess = sum(problem.sizes) - problem.budget
        self.goal = problem.lower_bound_ms * (1 + _CLOSE_ENOUGH)
        count = len(problem.windows)
        self.left = max(min(_WORK, _WORK_EACH * count), _LEAST_WORK_EACH * count)
        self.fastest = max(
            (problem.sizes[w] / problem.copy_ms[w] for w in self.order if problem.copy_ms[w] > 0), default=INFEASIBLE
        )

    def beginnings(self) -> list[_Found]:
        """One plan or more for every pool worth trying, while two thirds of the work last; fastest first."""
        found: list[_Found] = []
        best, reserve = INFEASIBLE, self.left // 3
        for pool, streamed, trims in self._starts():
            if found and self.left < reserve:
                break
            if found and (self.excess + pool) / self.fastest >= best:
                continue
            trial = _Trial(self, pool, streamed)
            if trial.orbit.period < INFEASIBLE:
                if trims:
                    trial.keep_dearest()
                found.append(trial.found())
                best = min(best, found[-1].period)
            self.left -= trial.orbit.work
            if best <= self.goal:
                break
        assert found, f"a budget of {self.problem.budget} bytes is below the least; the caller must refuse it"
        return sorted(found, key=lambda f: f.period)

    def anneal(self, starts: Sequence[_Found], seed: int) -> list[_Found]:
        """Better plans with the pools of `starts`."""
        found: list[_Found] = []
        best = starts[0].period
        for left, start in enumerate(starts):
            if best <= self.goal or (self.excess + start.pool) / self.fastest >= best:
                continue
            trial = _Trial(self, start.pool, start.streamed)
            found.append(trial.exchange(random.Random(seed), self.left // (len(starts) - left)))
            self.left -= trial.orbit.work
            best = min(best, found[-1].period)
        return found

    def _starts(self) -> Iterator[tuple[int, frozenset[int], bool]]:
        """(pool, streamed weights, whether more of them may be made resident)."""
        sizes, everything = self.problem.sizes, sum(self.problem.sizes[w] for w in self.order)
        pools = self._pools()
        large = len(self.problem.windows) > _LARGE
        if not large:
            for pool in pools:
                fits = self._fitting(pool)
                if sum(sizes[w] for w in fits) >= self.excess + pool:
                    yield pool, fits, True
        for order in (self.order, self.order[::-1]):  # the front or the back stays
            kept = list(accumulate((sizes[w] for w in order), initial=0))
            for stay in self._stays(order, kept):
                yield everything - kept[stay] - self.excess, frozenset(order[stay:]), False
        for pool in pools:
            fits, need = self._fitting(pool), self.excess + pool
            held = sum(sizes[w] for w in fits)
            for by_bytes in (False, True) if held >= need else ():
                # In a large model most of what is to stay is chosen by the bucket, the last part one by one.
                spread = self._spread(fits, pool, need + (held - need) // 8 if large else need, by_bytes)
                if spread is not None:
                    yield pool, spread, True
        if large:
            yield pools[-1], frozenset(self.order), True

    def _stays(self, order: Sequence[int], kept: Sequence[int]) -> list[int]:
        """How many of the first of `order` may stay: the most, and fewer, for pools of several times the largest."""
        sizes, floor = self.problem.sizes, self.problem.least_pool
        room = kept[-1] - self.excess  # what residents leave of it is the pool

        def fits(stay: int) -> bool:
            return max(self._together(frozenset(order[stay:])), floor) <= room - kept[stay]

        most, over = 0, len(order)  # whatever fits still fits with fewer residents, so bisection finds the most
        while over - most > 1:
            half = (most + over) // 2
            most, over = (half, over) if fits(half) else (most, half)
        if len(order) <= _SMALL:
            return list(range(most, -1, -1))
        largest = list(accumulate((sizes[w] for w in reversed(order)), max, initial=0))[::-1]
        stays = [most]
        for slots in (1, 2, 3, 4, 8):
            while most and kept[most] + slots * largest[most] > room:
                most -= 1
            stays.append(most)
        return list(dict.fromkeys(stays))

    def _pools(self) -> list[int]:
        """Sums of a few sizes, coarse to fine; last the least pool that holds all weights, which always works."""
        sizes = sorted({self.problem.sizes[w] for w in self.order})
        if len(sizes) > _SIZES:
            sizes = [sizes[len(sizes) * (part + 1) // _SIZES - 1] for part in range(_SIZES)]
        sums = {a + b for a in sizes for b in (0, *sizes)} | {a + b + c for a in sizes for b in sizes for c in sizes}
        sums |= {many * a for a in sizes for many in (4, 6, 8, 12, 16, 24)}
        least, total = self.problem.least_pool, sum(self.problem.sizes[w] for w in self.order)
        pools = [p for p in sorted(sums) if least <= p and self.excess + p <= total and p <= self.problem.budget]
        # Pools within 1% of each other are not told apart.
        pools = [p for before, p in pairwise([0, *pools]) if p > 1.01 * before] or pools[:1]
        # Three of the largest is where a large model, for which few pools can be tried, is most often best.
        middle = sorted(range(len(pools)), key=lambda i: abs(pools[i] - 3 * sizes[-1]))[: len(self.order) > _LARGE]
        order = dict.fromkeys([*middle, *_coarse_to_fine(len(pools))])
        return list(dict.fromkeys([*(pools[i] for i in order), max(self._together(), least)]))

    def _together(self, streamed: frozenset[int] | None = None) -> int:
        """Bytes of the windows of `streamed`, or of all, that are live together at the worst step."""
        change = [0] * (2 * len(self.problem.clock) + 1)
        steps = len(self.problem.clock) - 1
        for weight, first, last in self.problem.windows:
            if streamed is None or weight in streamed:
                change[first] += self.problem.sizes[weight]
                change[last + 1] -= self.problem.sizes[weight]
        held = list(accumulate(change))
        return max((held[s] + held[s + steps] for s in range(steps)), default=0)

    def _fitting(self, pool: int) -> frozenset[int]:
        """Weights that may be streamed through `pool`; where those of one step do not fit together, few bytes stay."""
        sizes, steps = self.problem.sizes, len(self.problem.clock) - 1
        fits = {w for w in self.order if sizes[w] <= pool}
        live: list[tuple[int, int, int]] = []  # (bytes, weight, last_use)
        for call in (0, 1):
            for weight, first, last in self.problem.windows:
                if weight not in fits:
                    continue
                live = [x for x in live if x[2] >= first + call * steps and x[1] in fits]
                live.append((sizes[weight], weight, last + call * steps))
                live.sort()
                while (over := sum(x[0] for x in live) - pool) > 0:
                    at = next((i for i, x in enumerate(live) if x[0] >= over), len(live) - 1)
                    fits.discard(live.pop(at)[1])
        return frozenset(fits)

    def _spread(self, fits: frozenset[int], pool: int, need: int, by_bytes: bool) -> frozenset[int] | None:
        """A token bucket of one pool, filled along the call, that pays for at least `need` streamed bytes."""
        sizes, clock = self.problem.sizes, self.problem.clock
        walk = [w for w in self.order if w in fits]
        if by_bytes:
            at = list(accumulate((sizes[w] for w in walk), initial=0))
            length = float(at.pop())
        else:
            at = [clock[self.problem.windows[self.windows_of[w][0]][1]] for w in walk]
            length = clock[-1]

        def fill(rate: float) -> list[int]:
            tokens, streamed = 0.0, []
            for _ in (0, 1):  # twice, so that the bucket's end meets its start
                now, streamed = 0.0, []
                for w, here in zip(walk, at, strict=True):
                    tokens = min(pool, tokens + rate * (here - now))
                    now = here
                    if tokens >= sizes[w]:
                        tokens -= sizes[w]
                        streamed.append(w)
                tokens = min(pool, tokens + rate * (length - now))
            return streamed

        if length <= 0:
            return None
        low, high, best = need / length / 2, need / length * 64, None
        self.left -= _FILLS * len(walk) // 2  # twice around, at a quarter of the price of a window in an orbit
        for _ in range(_FILLS):
            rate = math.sqrt(low * high)
            streamed = fill(rate)
            if sum(sizes[w] for w in streamed) >= need:
                high, best = rate, streamed
            else:
                low = rate
        return None if best is None else frozenset(best)


class _Trial:
    """One pool, and the set of streamed weights that is being improved for it."""

    def __init__(self, search: _Search, pool: int, streamed: frozenset[int]) -> None:
        problem = search.problem
        self.search, self.pool, self.sizes = search, pool, problem.sizes
        self.windows_of = search.windows_of
        windows = problem.windows
        self.orbit = Orbit(
            [first for _, first, _ in windows],
            [last for _, _, last in windows],
            [problem.sizes[w] for w, _, _ in windows],
            [problem.copy_ms[w] for w, _, _ in windows],
            problem.clock,
            pool,
            [w in streamed for w, _, _ in windows],
        )
        self.streamed = set(streamed)
        self.surplus = (
            sum(problem.sizes[w] for w in streamed) - search.excess - pool
        )  # bytes more that could be resident

    def found(self) -> _Found:
        return _Found(self.orbit.period, self.pool, frozenset(self.streamed))

    def toggle(self, weights: Sequence[int], keep: bool) -> float:
        change = self.orbit.toggle([i for w in weights for i in self.windows_of[w]], keep)
        if keep and change < INFEASIBLE:
            for w in weights:
                if w in self.streamed:
                    self.streamed.remove(w)
                    self.surplus -= self.sizes[w]
                else:
                    self.streamed.add(w)
                    self.surplus += self.sizes[w]
        return change

    def keep_dearest(self) -> None:
        """Make streamed weights resident while the budget allows, those that save most time per byte first."""
        sizes = self.sizes

        def worth(w: int) -> tuple[float, int]:
            return self.toggle([w], keep=False) / max(sizes[w], 1), w

        heap = [worth(w) for w in self.search.order if w in self.streamed and sizes[w] <= self.surplus]
        heapq.heapify(heap)
        place = {w: at for at, w in enumerate(self.search.order)}
        while heap:
            _, w = heapq.heappop(heap)
            if w not in self.streamed or sizes[w] > self.surplus:
                continue
            now = worth(w)
            if heap and now > heap[0]:  # it was worth more before its neighbours changed
                heapq.heappush(heap, now)
                continue
            self.toggle([w], keep=True)
            near = self.search.order[max(0, place[w] - _REFRESHED) : place[w] + _REFRESHED + 1]
            for other in near:
                if other in self.streamed and sizes[other] <= self.surplus:
                    heapq.heappush(heap, worth(other))

    def exchange(self, dice: random.Random, work: int) -> _Found:
        """Anneal: exchange one to three weights between streamed and resident, with `work` to spend."""
        search, sizes = self.search, self.sizes
        eligible = [w for w in search.order if sizes[w] <= self.pool]
        average = sum(search.problem.copy_ms[w] for w in eligible) / max(1, len(eligible))
        hot, cooling = _HOT * average, math.log(_COLD / _HOT)
        best, spent = self.found(), self.orbit.work
        count = len(eligible)
        tries = 0
        while (done := self.orbit.work - spent + tries) < work and best.period > search.goal:
            tries += 1  # refused exchanges count too, or a pool without any would never end
            at = dice.randrange(count)
            chosen = {eligible[at]}
            kind = dice.random()
            if kind < 0.25:
                chosen.add(eligible[(at + dice.randint(-_NEAR, _NEAR)) % count])
            elif kind < 0.5:
                chosen.add(eligible[dice.randrange(count)])
            elif kind < 0.8:
                chosen |= {eligible[dice.randrange(count)], eligible[dice.randrange(count)]}
            if self.surplus + sum(-sizes[w] if w in self.streamed else sizes[w] for w in chosen) < 0:
                continue
            weights = sorted(chosen)
            change = self.toggle(weights, keep=False)
            heat = hot * math.exp(cooling * done / work)
            if change <= 0 or (change < INFEASIBLE and dice.random() < math.exp(-change / heat)):
                self.toggle(weights, keep=True)
                if self.orbit.period < best.period * (1 - 1e-12):
                    best = self.found()
        return best


def _coarse_to_fine(count: int) -> list[int]:
    """0..count-1, each next one far from those before."""
    order: list[int] = []
    step = 1 << max(0, count - 1).bit_length()
    while step:
        order += [i for i in range(0, count, step) if i not in order]
        step //= 2
    return order
