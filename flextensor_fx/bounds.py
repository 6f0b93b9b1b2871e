"""A lower bound on the time of one call under a budget, whatever the plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_ROUNDS = 24  # of bisection; the lower end is returned, so fewer rounds loosen the bound and never break it
_GROUPED_SIZES = 6_000  # weights times groups of sizes looked at per round


def lower_bound(
    sizes: Sequence[int],
    copy_ms: Sequence[float],
    busy_ms: Sequence[float],
    streamable: Sequence[int],
    budget: int,
    compute_ms: float,
) -> float:
    """Milliseconds below which no call can finish.

    A call of T ms that streams weight j moves it for copy_ms and keeps its bytes for at least copy_ms + busy_ms, so it frees
    at most size * (1 - life / T) bytes on average. T is too short if even the best fractional choice of streamed weights that
    the link can move in T frees too little. The largest streamed weight, h, must also fit beside the residents. So T is tried
    for each h, or for groups of neighbouring sizes where there are many; the least T over all h is the bound.

    Args:
        sizes: bytes by weight.
        copy_ms: milliseconds of one copy by weight.
        busy_ms: by weight, compute of the steps that use it.
        streamable: the weights that may be streamed.
        budget: bytes of residents and pool together.
        compute_ms: sum over all steps.
    """
    excess = sum(sizes) - budget
    if excess <= 0 or not streamable:
        return compute_ms
    groups = _groups(sizes, streamable, excess)

    def feasible(ms: float) -> bool:
        return any(_frees_enough(sizes, copy_ms, busy_ms, group, excess, h, ms) for h, group in groups)

    low, high = compute_ms, max(2 * compute_ms, sum(copy_ms[w] for w in streamable) + compute_ms)
    if feasible(low):
        return low
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        low, high = (low, middle) if feasible(middle) else (middle, high)
    return low


def _groups(sizes: Sequence[int], streamable: Sequence[int], excess: int) -> list[tuple[int, list[int]]]:
    """(h, weights that may be streamed while the largest streamed one is at least h), for every h worth looking at."""
    by_size = sorted(streamable, key=lambda w: sizes[w])
    distinct = sorted({sizes[w] for w in by_size})
    count = max(1, min(len(distinct), _GROUPED_SIZES // len(by_size)))
    found: list[tuple[int, list[int]]] = []
    for g in range(count):
        part = distinct[len(distinct) * g // count : len(distinct) * (g + 1) // count]
        group = [w for w in by_size if sizes[w] <= part[-1]]
        if sum(sizes[w] for w in group) >= excess + part[0]:
            found.append((part[0], group))
    return found or [(0, by_size)]


def _frees_enough(
    sizes: Sequence[int],
    copy_ms: Sequence[float],
    busy_ms: Sequence[float],
    group: Sequence[int],
    excess: int,
    h: int,
    ms: float,
) -> bool:
    """Whether link time `ms` moves excess + h bytes of `group`, and frees `excess` bytes on average over a call of `ms`."""
    moved = _best(((sizes[w], copy_ms[w]) for w in group), ms)
    if moved < excess + h or ms <= 0:
        return False
    freed = ((sizes[w] * (1 - (copy_ms[w] + busy_ms[w]) / ms), copy_ms[w]) for w in group)
    return _best((item for item in freed if item[0] > 0), ms) >= excess


def _best(items: Iterable[tuple[float, float]], capacity: float) -> float:
    """Fractional knapsack: most value of (value, cost) items whose costs sum to at most `capacity`."""
    total = 0.0
    for value, cost in sorted(items, key=lambda item: item[1] / item[0] if item[0] else float("inf")):
        if cost > capacity:
            return total + (value * capacity / cost if cost > 0 else 0.0)
        total += value
        capacity -= cost
    return total
