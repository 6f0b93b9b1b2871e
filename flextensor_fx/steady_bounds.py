"""A lower bound on the period of a call that repeats, tighter than `lower_bound`, whatever the plan.

A plan with a pool of p bytes streams at least total - budget + p bytes. What it streams must keep, in a period of P ms:

1. link: its copies together take at most P.
2. memory: each weight takes its bytes for its copy and its steps. For f with the property that f(x1) + f(x2) + ... <= 1 wherever
   x1 + x2 + ... <= 1, the sum of f(bytes / p) * that time is at most P. f(x) = x counts bytes; f(x) = [x > 1/2] says that two
   weights of more than half a pool are never on the device together; others lie between. (Dual feasible functions, known from
   bounds for bin packing; see Fekete and Schepers, 2001.)
3. stretches: in a stretch of compute that uses no weight that fits p, the link can move p bytes and no more: what it copies is
   alive when the stretch ends. So what is copied outside of such stretches has only the rest of P.

The most bytes that can be streamed under each of these alone, or a mix of two of them, is a fractional knapsack. A period P is
refuted if for every p one of them is too small. The pools are looked at in ever smaller ranges until each one is refuted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_MOST_WORK = 3_000_000  # items looked at, and so many more for each knapsack; beyond it the bound given is returned
_PER_KNAPSACK = 100
_HOPELESS = 1.3  # times what is needed; where the tightest limit holds more than that, no mix is tried
_NARROW = 1.01  # ratio of a range of pools that is not split again
_MIXED = 1.1  # ratio of a range of pools below which mixes of limits are worth their time
_MIXES = 6  # steps of the search for the best mix of two limits
_BISECTIONS = 14
_CLOSE_ENOUGH = 3e-4  # relative; what the bound may lose by it
_FEW_SIZES = 12
_SIZES_WEIGHED = 5  # sizes up to which small weights are left out of a limit on memory
_LIFE_GRID = 200.0  # lives within 1/200 of each other count as equal


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundProblem:
    """What the bound is made of; all sequences by weight that may be streamed.

    Fields:
        sizes: bytes, above 0.
        copy_ms: milliseconds of one copy.
        busy_ms: compute of the steps that use it.
        starts_ms: when the steps that use it start if nothing stalls.
        compute_ms: sum over all steps.
        excess: bytes of all weights, those that may not be streamed included, less the budget.
        budget: bytes for residents and pool.
    """

    sizes: Sequence[int]
    copy_ms: Sequence[float]
    busy_ms: Sequence[float]
    starts_ms: Sequence[Sequence[float]]
    compute_ms: float
    excess: int
    budget: int


def steady_lower_bound(problem: BoundProblem, known_ms: float, reached_ms: float) -> float:
    """Milliseconds below which no period can be.

    Args:
        problem: the weights and the budget.
        known_ms: a lower bound already known; the result is no less.
        reached_ms: the period of some plan; the result is no more.
    """
    if problem.excess <= 0 or not problem.sizes or known_ms >= reached_ms * (1 - _CLOSE_ENOUGH):
        return min(known_ms, reached_ms)
    search = _Refuter(problem)
    bound = search.least(known_ms, reached_ms)
    return min(max(known_ms, bound), reached_ms)


class _Refuter:
    def __init__(self, problem: BoundProblem) -> None:
        self.problem = problem
        sizes, copy = np.array(problem.sizes, dtype=float), np.array(problem.copy_ms, dtype=float)
        self.per_byte = float((copy / sizes).min())  # ms, at the least; a stretch moves no more for a pool
        self.distinct = np.unique(sizes)
        # Weights of one size and nearly one life are one item, for speed; rounding a life down only loosens the bound.
        grid = np.exp(np.floor(np.log(np.maximum(copy + np.array(problem.busy_ms), 1e-12)) * _LIFE_GRID) / _LIFE_GRID)
        items, many = np.unique(np.stack([sizes, copy, np.maximum(copy, grid)]), axis=1, return_counts=True)
        self.unit = items[0]
        self.sizes, self.copy, self.life = items * many
        self.each = sizes
        self.work = 0
        self._gaps: dict[int, Any] = {}

    def least(self, low: float, high: float) -> float:
        """The least period that is not refuted for some pool, `low` if work runs out before it is known."""
        best = high
        top = float(self.problem.budget)
        if self.per_byte > 0:
            top = min(top, high / self.per_byte - self.problem.excess)
        smallest = float(self.distinct[0])
        ranges = [(smallest, max(top, smallest) * 1.0001)]
        breaks = self._breaks()
        while ranges:
            if self.work > _MOST_WORK:
                return low
            begin, end = ranges.pop()
            if self.refuted(begin, end, best * (1 - _CLOSE_ENOUGH)):
                continue
            if end / begin > _NARROW:
                middle = math.sqrt(begin * end)
                inside = breaks[(breaks > begin * 1.001) & (breaks < end / 1.001)]
                if len(inside):
                    middle = float(inside[np.argmin(np.abs(np.log(inside / middle)))])
                ranges += [(middle, end), (begin, middle)]
                continue
            below, above = low, best
            for _ in range(_BISECTIONS):
                half = (below + above) / 2
                below, above = (half, above) if self.refuted(begin, end, half) else (below, half)
                if above - below <= _CLOSE_ENOUGH * above:
                    break
            best = below
            if best <= low:
                break
        return best

    def refuted(self, begin: float, end: float, period: float) -> bool:
        """Whether no plan with a pool of at least `begin` and less than `end` bytes has this period."""
        fits = self.unit < end
        sizes, copy, life = self.sizes[fits], self.copy[fits], self.life[fits]
        self.work += len(sizes)
        need = self.problem.excess + begin
        if sizes.sum() < need:
            return True
        limits = [copy / period]
        share = self.unit[fits] / end
        weighed = [
            share,
            np.where(share > 0.5, 1.0, 0.0),
            np.where(share > 2 / 3, 1.0, np.where(share > 1 / 3, 0.5, 0.0)),
        ]
        for small in self.distinct[self.distinct < end / 2][-_SIZES_WEIGHED:]:
            edge = small / end * (1 + 1e-9)
            weighed.append(np.where(share > 1 - edge, 1.0, np.where(share < edge, 0.0, share)))
        limits += [f * life / period for f in weighed]
        moved = np.minimum(copy, self.per_byte * sizes)
        gaps = self._stretches(end)
        idle = np.maximum(gaps - self.per_byte * end, 0.0).sum()
        for lost in (idle, gaps[0] - self.per_byte * end):
            if lost > 0:
                if period <= lost:
                    return True
                limits.append(moved / (period - lost))
        return self._too_little(sizes, limits, need, end / begin <= _MIXED)

    def _too_little(self, sizes: Any, limits: Sequence[Any], need: float, mixes: bool) -> bool:
        """Whether one of the limits or, if `mixes`, a mix of them, holds less than `need` bytes."""
        most = [self._most(sizes, limit) for limit in limits]
        if min(most) < need:
            return True
        if not mixes or min(most) > _HOPELESS * need:
            return False
        order = sorted(range(len(limits)), key=lambda k: most[k])
        mix, best = limits[order[0]], most[order[0]]
        for k in order[1:]:
            low, high = 0.0, 1.0
            for _ in range(_MIXES):
                left, right = low + 0.382 * (high - low), low + 0.618 * (high - low)
                at_left = self._most(sizes, (1 - left) * mix + left * limits[k])
                at_right = self._most(sizes, (1 - right) * mix + right * limits[k])
                if min(at_left, at_right) < need:
                    return True
                low, high = (low, right) if at_left <= at_right else (left, high)
            mixed = (1 - (low + high) / 2) * mix + (low + high) / 2 * limits[k]
            if (value := self._most(sizes, mixed)) < best:
                mix, best = mixed, value
        return False

    def _most(self, sizes: Any, costs: Any) -> float:
        """Fractional knapsack: most bytes of items whose costs sum to at most 1."""
        self.work += len(sizes) + _PER_KNAPSACK
        order = np.argsort(costs / sizes, kind="stable")
        spent = np.cumsum(costs[order])
        whole = int(np.searchsorted(spent, 1.0, side="right"))
        total = float(sizes[order[:whole]].sum())
        if whole < len(order):
            item = order[whole]
            total += float(sizes[item] * (1.0 - (spent[whole - 1] if whole else 0.0)) / costs[item])
        return total

    def _stretches(self, end: float) -> Any:
        """Lengths of the stretches from the start of one step that uses a weight that fits to that of the next; longest first."""
        fits = self.each < end
        count = int(fits.sum())
        if count not in self._gaps:
            starts = sorted({s for w in np.flatnonzero(fits) for s in self.problem.starts_ms[int(w)]})
            self._gaps[count] = np.sort(np.diff([*starts, starts[0] + self.problem.compute_ms]))[::-1]
        return self._gaps[count]

    def _breaks(self) -> Any:
        """Pools at which something begins to fit beside something else."""
        if len(self.distinct) > _FEW_SIZES:
            return self.distinct
        pairs = (self.distinct[:, None] + self.distinct[None, :]).ravel()
        return np.unique(np.concatenate([self.distinct, pairs, 3 * self.distinct]))
