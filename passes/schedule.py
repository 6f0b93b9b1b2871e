"""When each streamed weight is on the device: windows of use, and the transfers that serve them.

Steps are the compute steps of one graph, numbered 0..n-1 in the order they run. Everything here is a deterministic function of
its arguments, because a schedule shapes a compiled graph that is cached.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_HEAD, _TAIL = 8, 4  # rows a printed table keeps at its start and end


class PoolError(ValueError):
    """The pool cannot hold the weights that must be on the device together.

    Attributes:
        least: the least pool that can, in bytes.
    """

    def __init__(self, message: str, least: int) -> None:
        super().__init__(message)
        self.least = least


@dataclass(frozen=True, slots=True)
class Window:
    """One stay of a weight on the device: `nbytes` bytes, needed from step `first_use` to step `last_use` inclusive."""

    key: str
    nbytes: int
    first_use: int
    last_use: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """One copy of a weight to the device.

    The copy may start once step `issue_at - 1` has finished (0: the start of the call), never earlier. Its `nbytes` bytes are
    taken from then until step `last_use` has finished. The wait for it comes right before step `first_use`.
    """

    key: str
    nbytes: int
    issue_at: int
    first_use: int
    last_use: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """The transfers of one call, in the order they are issued, which is the order of `first_use`.

    Fields:
        transfers: one per window.
        pool: bytes that the transfers may hold together.
        lookahead: how many transfers may be issued ahead of the one being waited for; None: as many as the pool holds.
    """

    transfers: tuple[Transfer, ...]
    pool: int
    lookahead: int | None = None

    @property
    def peak_bytes(self) -> int:
        """Most bytes held together at any step."""
        return _most_together((t.issue_at, t.last_use, t.nbytes) for t in self.transfers)

    def __str__(self) -> str:
        ahead = "as the pool allows" if self.lookahead is None else str(self.lookahead)
        moved = format_bytes(sum(t.nbytes for t in self.transfers))
        title = (
            f"Schedule: {len(self.transfers)} transfers, {moved}; pool {format_bytes(self.pool)}, "
            f"peak {format_bytes(self.peak_bytes)}, lookahead {ahead}"
        )
        rows = [
            (t.key, format_bytes(t.nbytes), str(t.issue_at), str(t.first_use), str(t.last_use)) for t in self.transfers
        ]
        return title + "\n" + format_table(("key", "bytes", "issue_at", "first_use", "last_use"), rows)


def windows_of(uses: Sequence[tuple[str, int, tuple[int, ...]]]) -> tuple[Window, ...]:
    """The windows of the weights in `uses`, all of them streamed.

    A weight stays on the device between two consecutive uses unless windows of other weights, of more bytes than itself
    together, begin strictly between them; then it is given up and fetched again.

    Args:
        uses: (key, bytes, steps that use it) for each weight; keys differ, every weight has a step.

    Returns:
        Windows ordered by first_use, those of one step in the order of `uses`.

    Raises:
        ValueError: a key given twice, a weight without steps, a negative size or step.
    """
    check_uses(uses)
    who, first, last = split_stays(use_events(uses), [nbytes for _, nbytes, _ in uses])
    return tuple(Window(uses[w][0], uses[w][1], a, b) for w, a, b in zip(who, first, last, strict=True))


def schedule(windows: Sequence[Window], pool: int, lookahead: int | None = None) -> Schedule:
    """Issue every copy as early as memory allows, in order of first use.

    A transfer is issued at the earliest step at which it fits the pool beside all earlier transfers, each held until its
    last_use has finished. With `lookahead` k it is also not issued before the wait of the transfer k places before it, so k = 0
    issues every copy right before its own first use.

    Args:
        windows: in any order; those of one step are taken in the order given.
        pool: bytes the transfers may hold together.
        lookahead: transfers ahead of the one being waited for, at least 0; None: no limit but the pool.

    Raises:
        PoolError: `pool` is below `least_pool(windows)`.
        ValueError: a negative lookahead.
    """
    if lookahead is not None and lookahead < 0:
        raise ValueError(f"schedule: lookahead must be at least 0 or None, found {lookahead}")
    ordered = sorted(windows, key=lambda w: w.first_use)
    issues = issue_steps(
        [w.first_use for w in ordered], [w.last_use for w in ordered], [w.nbytes for w in ordered], pool, lookahead
    )
    if issues is None:
        least = least_pool(windows)
        raise PoolError(
            f"schedule: expected a pool of at least {least} bytes ({format_bytes(least)}), the weights that one step needs "
            f"together, found {pool}; give a larger pool or keep more weights resident",
            least,
        )
    moves = (Transfer(w.key, w.nbytes, i, w.first_use, w.last_use) for w, i in zip(ordered, issues, strict=True))
    return Schedule(tuple(moves), pool, lookahead)


def least_pool(windows: Iterable[Window]) -> int:
    """Bytes of the windows that are live together at the worst step: the least pool `schedule` accepts."""
    return _most_together((w.first_use, w.last_use, w.nbytes) for w in windows)


# The same rules over plain lists, for callers that try many schedules.


def use_events(uses: Sequence[tuple[str, int, tuple[int, ...]]]) -> list[tuple[int, int]]:
    """Every (step, index into `uses`), in the order they happen."""
    return sorted((step, w) for w, (_, _, steps) in enumerate(uses) for step in steps)


def split_stays(events: Iterable[tuple[int, int]], sizes: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """The windows of `windows_of` as lists (weight, first_use, last_use), ordered by first_use.

    Args:
        events: sorted (step, weight) pairs of the streamed weights alone.
        sizes: bytes by weight.
    """
    who: list[int] = []
    first: list[int] = []
    last: list[int] = []
    stay_of: dict[int, int] = {}
    begun_through: dict[int, int] = {}  # step -> bytes of the windows that began in it or before
    now, begun, begun_before = -1, 0, 0
    for step, weight in events:
        if step != now:
            now, begun_before = step, begun
        stay = stay_of.get(weight)
        if stay is not None and begun_before - begun_through[last[stay]] <= sizes[weight]:
            last[stay] = step
        else:
            stay_of[weight] = len(who)
            who.append(weight)
            first.append(step)
            last.append(step)
            begun += sizes[weight]
        begun_through[step] = begun
    return who, first, last


def issue_steps(
    first: Sequence[int], last: Sequence[int], sizes: Sequence[int], pool: int, lookahead: int | None = None
) -> list[int] | None:
    """issue_at of every window, ordered by first use, as `schedule` describes it; None where the pool is too small."""
    if pool < 0:
        return None
    issues: list[int] = []
    ends: list[tuple[int, int]] = []  # heap of (last_use, bytes) of the transfers still counted in `alive`
    alive = now = 0
    for j, size in enumerate(sizes):
        if lookahead is not None and j >= lookahead:
            now = max(now, first[j - lookahead])
        alive += size
        while alive > pool:
            if not ends or ends[0][0] >= first[j]:
                return None
            end, freed = heapq.heappop(ends)
            alive -= freed
            if end >= now:
                now = end + 1
        heapq.heappush(ends, (last[j], size))
        issues.append(now)
    return issues


def check_uses(uses: Sequence[tuple[str, int, tuple[int, ...]]]) -> None:
    """Raise a ValueError that names the first weight in `uses` that no window can be made of."""
    seen: set[str] = set()
    for key, nbytes, steps in uses:
        if key in seen:
            raise ValueError(f"uses: weight {key!r} is listed twice; list each weight once with all its steps")
        seen.add(key)
        if nbytes < 0:
            raise ValueError(f"uses: weight {key!r} has {nbytes} bytes, expected at least 0")
        if not steps or min(steps) < 0:
            raise ValueError(f"uses: weight {key!r} has steps {steps!r}, expected at least one, each 0 or more")


def format_bytes(nbytes: int) -> str:
    """`nbytes` for people, three significant digits: "812 B", "1.5 MiB", "12.0 GiB"."""
    value, units = float(nbytes), ("B", "KiB", "MiB", "GiB", "TiB")
    unit = 0
    while abs(value) >= 1000 and unit + 1 < len(units):
        value /= 1024
        unit += 1
    return f"{nbytes} B" if unit == 0 else f"{value:.{max(0, 2 - len(str(int(abs(value)))) + 1)}f} {units[unit]}"


def format_table(
    header: tuple[str, ...], rows: Sequence[tuple[str, ...]], left: int = 1, *, whole: bool = False
) -> str:
    """A text table, its first `left` columns aligned left; of many rows only eight and the last four, unless `whole`."""
    cut = 0 if whole else len(rows) - _HEAD - _TAIL
    shown = list(rows) if cut <= 1 else [*rows[:_HEAD], *rows[-_TAIL:]]
    widths = [max(map(len, column)) for column in zip(header, *shown, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(n) if c < left else cell.rjust(n) for c, (cell, n) in enumerate(zip(row, widths, strict=True))
        )
        for row in (header, *shown)
    ]
    if cut > 1:
        lines.insert(1 + _HEAD, f"... {cut} more")
    return "\n".join(line.rstrip() for line in lines)


def _most_together(spans: Iterable[tuple[int, int, int]]) -> int:
    change: defaultdict[int, int] = defaultdict(int)
    for begin, end, nbytes in spans:
        change[begin] += nbytes
        change[end + 1] -= nbytes
    held = most = 0
    for step in sorted(change):
        held += change[step]
        most = max(most, held)
    return most
