"""When each streamed weight is on the device in a call that repeats: the end of one call fetches for the start of the next.

Steps are those of `schedule`, 0..n-1 in every call. Seen from one call, step -1 is the last step of the call before, and step
n the first step of the call after; so a window may reach beyond n-1, and a transfer may be issued before 0.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .schedule import PoolError, Schedule, Transfer, Window, check_uses, format_bytes, format_table, windows_of


@dataclass(frozen=True, slots=True)
class SteadySchedule:
    """The transfers of one call among many equal ones, in the order they are issued, which is the order of `first_use`.

    A transfer with a negative `issue_at` is issued by the call before: its copy may start once step n + issue_at - 1 of that
    call has finished. One with a `last_use` of n or more stays on the device into the call after.

    Fields:
        transfers: one per window; each is repeated by every call.
        steps: n, the compute steps of one call.
        pool: bytes that the transfers of all calls may hold together.
        lookahead: how many transfers may be issued ahead of the one being waited for; None: as many as the pool holds.
    """

    transfers: tuple[Transfer, ...]
    steps: int
    pool: int
    lookahead: int | None = None

    @property
    def wrapping(self) -> tuple[Transfer, ...]:
        """The transfers that are on the device, or on their way to it, while one call ends and the next begins."""
        return tuple(t for t in self.transfers if t.issue_at < 0 or t.last_use >= self.steps)

    @property
    def ahead(self) -> tuple[Transfer, ...]:
        """The transfers that the call before issues, in order: those whose copies may start when it ends, or sooner.

        A lookahead of 0 lets no copy start before the call that waits for it.
        """
        return tuple(t for t in self.transfers if t.issue_at < 0 or (t.issue_at == 0 and self.lookahead != 0))

    @property
    def in_call(self) -> Schedule:
        """The transfers as one call has them, which takes over at its start what is `ahead`; for windows within a call."""
        moves = tuple(replace(t, issue_at=max(t.issue_at, 0)) for t in self.transfers)
        return Schedule(moves, self.pool, self.lookahead)

    @property
    def peak_bytes(self) -> int:
        """Most bytes held together at any step once the calls repeat."""
        return most_together(((t.issue_at, t.last_use, t.nbytes) for t in self.transfers), self.steps)

    def __str__(self) -> str:
        ahead = "as the pool allows" if self.lookahead is None else str(self.lookahead)
        moved = format_bytes(sum(t.nbytes for t in self.transfers))
        title = (
            f"SteadySchedule: {len(self.transfers)} transfers a call of {self.steps} steps, {moved}, "
            f"{len(self.wrapping)} across its end; pool {format_bytes(self.pool)}, peak {format_bytes(self.peak_bytes)}, "
            f"lookahead {ahead}"
        )
        rows = [
            (t.key, format_bytes(t.nbytes), str(t.issue_at), str(t.first_use), str(t.last_use)) for t in self.transfers
        ]
        return title + "\n" + format_table(("key", "bytes", "issue_at", "first_use", "last_use"), rows)


def circular_windows(uses: Sequence[tuple[str, int, tuple[int, ...]]], steps: int) -> tuple[Window, ...]:
    """The windows of one call among many equal ones, all weights in `uses` streamed.

    The rule is that of `windows_of`, applied across the end of the call too: a weight used in the last steps and again in the
    first ones stays in between, unless more bytes than its own begin there. A weight that would never be given up is given up
    where the call ends.

    Args:
        uses: (key, bytes, steps that use it) for each weight; keys differ, every weight has a step.
        steps: n, the compute steps of one call; every use is below it.

    Returns:
        Windows ordered by first_use (0..n-1), those of one step in the order of `uses`; last_use may be n or more.

    Raises:
        ValueError: a key given twice, a weight without steps, a step of n or more, a negative size or step.
    """
    check_uses(uses)
    for key, _, at in uses:
        if max(at) >= steps:
            raise ValueError(f"uses: weight {key!r} is used in step {max(at)}, but a call has {steps} steps")
    if all(len(set(at)) == 1 for _, _, at in uses):
        once = (Window(key, nbytes, at[0], at[0]) for key, nbytes, at in uses)
        return tuple(sorted(once, key=lambda w: w.first_use))
    thrice = [(key, nbytes, tuple(s + call * steps for call in range(3) for s in at)) for key, nbytes, at in uses]
    rank = {key: at for at, (key, _, _) in enumerate(uses)}
    within = windows_of(uses)
    found: dict[str, list[Window]] = {key: [] for key, _, _ in uses}
    for w in windows_of(thrice):
        if steps <= w.first_use < 2 * steps:
            found[w.key].append(Window(w.key, w.nbytes, w.first_use - steps, w.last_use - steps))
    fallback: dict[str, list[Window]] = {}
    for w in within:
        fallback.setdefault(w.key, []).append(w)
    windows: list[Window] = []
    for key, _, at in uses:
        whole = _serves(found[key], set(at), steps)
        windows += found[key] if whole else fallback[key]
    return tuple(sorted(windows, key=lambda w: (w.first_use, rank[w.key])))


def steady_schedule(windows: Sequence[Window], steps: int, pool: int, lookahead: int | None = None) -> SteadySchedule:
    """Issue every copy as early as memory allows, in order of first use, in calls that follow one another without end.

    A transfer is issued at the earliest step at which it fits the pool beside all earlier transfers, those of earlier calls
    included, each held until its last_use has finished; not before its own weight was last given up, nor before the transfer
    ahead of it; with `lookahead` k, not before the wait of the transfer k places before it.

    Args:
        windows: in any order, first_use in 0..steps-1; those of one step are taken in the order given.
        steps: n, the compute steps of one call.
        pool: bytes the transfers may hold together.
        lookahead: transfers ahead of the one being waited for, at least 0; None: no limit but the pool.

    Raises:
        PoolError: `pool` is below `least_steady_pool(windows, steps)`.
        ValueError: a negative lookahead.
    """
    if lookahead is not None and lookahead < 0:
        raise ValueError(f"steady_schedule: lookahead must be at least 0 or None, found {lookahead}")
    ordered = sorted(windows, key=lambda w: w.first_use)
    issues = steady_issue_steps(ordered, steps, pool, lookahead)
    if issues is None:
        least = least_steady_pool(windows, steps)
        raise PoolError(
            f"steady_schedule: expected a pool of at least {least} bytes ({format_bytes(least)}), the weights that one step "
            f"needs together, found {pool}; give a larger pool or keep more weights resident",
            least,
        )
    moves = (Transfer(w.key, w.nbytes, i, w.first_use, w.last_use) for w, i in zip(ordered, issues, strict=True))
    return SteadySchedule(tuple(moves), steps, pool, lookahead)


def least_steady_pool(windows: Iterable[Window], steps: int) -> int:
    """Bytes of the windows that are live together at the worst step: the least pool `steady_schedule` accepts."""
    return most_together(((w.first_use, w.last_use, w.nbytes) for w in windows), steps)


def steady_issue_steps(
    windows: Sequence[Window], steps: int, pool: int, lookahead: int | None = None
) -> list[int] | None:
    """issue_at of every window, ordered by first use, as `steady_schedule` describes it; None where the pool is too small."""
    count = len(windows)
    if pool < 0 or least_steady_pool(windows, steps) > pool:
        return None
    leaves = sorted((w.last_use % steps, w.last_use // steps, at) for at, w in enumerate(windows))
    own_end = _ends_before(windows, steps)
    issues: list[int] = []
    # Two calls give the order of events that repeats; before the first, every weight is taken to be on the device.
    now = -steps
    alive = sum(w.nbytes * (1 + w.last_use // steps) for w in windows)
    gone = -count
    for call in (0, 1):
        issues = []
        for at, window in enumerate(windows):
            alive += window.nbytes
            while alive > pool:
                end, _, leaver = leaves[gone % count]
                alive -= windows[leaver].nbytes
                now = max(now, end + gone // count * steps + 1)
                gone += 1
            now = max(now, own_end[at] + 1 + call * steps)
            if lookahead is not None:
                back, place = divmod(at - lookahead, count)
                now = max(now, windows[place].first_use + (call + back) * steps)
            issues.append(now - call * steps)
    return issues


def most_together(spans: Iterable[tuple[int, int, int]], steps: int) -> int:
    """Most bytes together of (first step, last step, bytes) spans that repeat every `steps` steps."""
    change: dict[int, int] = {}
    always = 0
    for begin, end, nbytes in spans:
        turns, rest = divmod(end + 1 - begin, steps)
        always += turns * nbytes
        if rest:
            head, tail = begin % steps, (end + 1) % steps
            always += nbytes if head > tail else 0
            change[head] = change.get(head, 0) + nbytes
            change[tail] = change.get(tail, 0) - nbytes
    held = most = always
    for step in sorted(change):
        held += change[step]
        most = max(most, held)
    return most


def _serves(windows: Sequence[Window], uses: set[int], steps: int) -> bool:
    """Whether every use of one weight lies in exactly one of its windows, and the weight is given up at least once."""
    if not windows or any(w.last_use - w.first_use >= steps for w in windows):
        return False
    covered = [s % steps for w in windows for s in range(w.first_use, w.last_use + 1) if s % steps in uses]
    return len(covered) == len(uses) and set(covered) == uses


def _ends_before(windows: Sequence[Window], steps: int) -> list[int]:
    """For each window, the last step of its weight's window before it; seen from one call, so usually negative."""
    of_key: dict[str, list[int]] = {}
    for at, w in enumerate(windows):
        of_key.setdefault(w.key, []).append(at)
    ends = [0] * len(windows)
    for places in of_key.values():
        firsts = [windows[p].first_use for p in places]
        for p in places:
            before = bisect_right(firsts, windows[p].first_use) - 2
            ends[p] = windows[places[before]].last_use - (steps if before < 0 else 0)
    return ends
