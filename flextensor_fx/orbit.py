"""The steady run of a repeating call, kept so that a change of what is streamed costs only its neighbourhood.

An Orbit holds every window that could be streamed, a flag for each, and the state of the run after each: how much compute was
delayed there, how far the link was behind compute, what was alive. All of it is relative, so streaming one window more or less
changes the state from there until the run falls back into step with the old one, most often a few windows later; from then on
the only difference is a shift in time, which is the change of the period. This is exact, not an estimate, and takes some ten
microseconds, where a simulation takes a millisecond for a thousand windows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

INFEASIBLE = float("inf")
_ROUNDS = 40  # calls simulated until they repeat
_SAME = 1e-10  # relative to the period


class Orbit:
    """A steady run with a fixed pool, windows in order of first use; copies as in `steady_schedule` without a lookahead.

    Attributes:
        on: by window, whether it is streamed. Change it through `toggle` alone.
        period: milliseconds of one call; INFEASIBLE if the pool is too small.
        work: windows looked at so far, a measure of time spent that is the same on every machine.
    """

    def __init__(
        self,
        first: Sequence[int],
        last: Sequence[int],
        sizes: Sequence[int],
        copy_ms: Sequence[float],
        clock: Sequence[float],
        pool: int,
        on: Sequence[bool],
    ) -> None:
        """Args: by window its steps, bytes and copy time; clock[i], when step i starts if nothing stalls; bytes of the pool."""
        steps = len(clock) - 1
        self.on = list(on)
        self.work = 0
        self._first, self._sizes, self._copy, self._pool = first, sizes, copy_ms, pool
        self._count, self._steps, self._compute = len(first), steps, clock[-1]
        self._at = [clock[f] for f in first]
        self._wrapped = [at for at, end in enumerate(last) if end >= steps]
        # The windows in the order they are given up. Place p + k * count is the window at p, given up k calls later.
        self._leaves = sorted(range(self._count), key=lambda i: (last[i] % steps, i)) if steps else []
        self._leave_step = [last[i] % steps for i in self._leaves]
        self._leave_at = [clock[step + 1] for step in self._leave_step]
        self._leave_after = [
            bisect_right(first, step) - 1 for step in self._leave_step
        ]  # the last window waited for by then
        self._place = [0] * self._count
        for place, i in enumerate(self._leaves):
            self._place[i] = place + self._count * (last[i] // steps)
        # State after each window: stall added there, link_free minus compute time, next place to leave minus window, bytes.
        self._stall = [0.0] * self._count
        self._lag = [0.0] * self._count
        self._gone = [0] * self._count
        self._alive = [0] * self._count
        self.period = self._settle()

    def toggle(self, windows: Iterable[int], keep: bool = True) -> float:
        """Stream the given windows that are not, stop streaming those that are; return by how much the period changes.

        With `keep` false, or where the pool cannot hold them (INFEASIBLE is returned), everything is left as it was.
        """
        changes = sorted(windows)
        for i in changes:
            self.on[i] = not self.on[i]
        written: list[tuple[int, float, float, int, int]] = []
        change = self._follow(changes, written if keep else None)
        if change is None:
            return self._toggle_all(changes, keep)
        if keep and change < INFEASIBLE:
            for i, stall, lag, gone, alive in written:
                self._stall[i], self._lag[i], self._gone[i], self._alive[i] = stall, lag, gone, alive
            self.period += change
        else:
            for i in changes:
                self.on[i] = not self.on[i]
        return change

    def _toggle_all(self, changes: Sequence[int], keep: bool) -> float:
        """The rest of `toggle` where the change reaches around the whole call."""
        old = self._stall, self._lag, self._gone, self._alive
        period = self._settle()
        change = period - self.period
        if keep and period < INFEASIBLE:
            self.period = period
        else:
            self._stall, self._lag, self._gone, self._alive = old
            for i in changes:
                self.on[i] = not self.on[i]
        return change

    def _settle(self) -> float:
        """Run whole calls until they repeat, and keep their state; the period."""
        count, steps, compute, pool = self._count, self._steps, self._compute, self._pool
        on, sizes, copies, at, first = self.on, self._sizes, self._copy, self._at, self._first
        leaves, leave_step, leave_at, leave_after = self._leaves, self._leave_step, self._leave_at, self._leave_after
        alive = sum(sizes[i] for i in range(count) if on[i]) + sum(sizes[i] for i in self._wrapped if on[i])
        gone = -count
        before = [0.0] * count
        free = stall = begin = 0.0
        period, ahead = compute, 0.0
        stalls, lags, places, held = [0.0] * count, [0.0] * count, [0] * count, [0] * count
        for call in range(_ROUNDS):
            now, at_start = [0.0] * count, stall
            for i in range(count):
                due = at[i] + begin
                stalls[i] = 0.0
                if on[i]:
                    alive += sizes[i]
                    freed = -INFEASIBLE
                    while alive > pool:
                        turn, place = divmod(gone, count)
                        if leave_step[place] + (turn - call) * steps >= first[i]:
                            return INFEASIBLE
                        gone += 1
                        if on[leaves[place]]:
                            alive -= sizes[leaves[place]]
                            after = leave_after[place] + (turn - call) * count
                            waited = now[after] if after >= 0 else before[after] if after >= -count else 0.0
                            freed = leave_at[place] + turn * compute + waited
                    free = max(free, freed) + copies[i]
                    if free - due > stall:
                        stalls[i] = free - due - stall
                        stall = free - due
                now[i] = stall
                lags[i] = free - due - stall
                places[i] = gone - i - call * count
                held[i] = alive
            self.work += count
            begin += compute
            grown = stall - at_start
            period = compute + grown
            lag = lags[-1] if count else 0.0
            repeats = call > 1 and abs(lag - ahead) <= _SAME * period
            if repeats and all(abs(new - old - grown) <= _SAME * period for new, old in zip(now, before, strict=True)):
                break
            ahead, before = lag, now
        self._stall, self._lag, self._gone, self._alive = stalls, lags, places, held
        return period

    def _follow(self, changes: Sequence[int], written: list[tuple[int, float, float, int, int]] | None) -> float | None:
        """Change of the period with the flags of `changes` turned; None where it cannot be told without whole calls."""
        count, steps, compute, pool = self._count, self._steps, self._compute, self._pool
        on, sizes, copies, at, first = self.on, self._sizes, self._copy, self._at, self._first
        leaves, leave_step, leave_at, leave_after = self._leaves, self._leave_step, self._leave_at, self._leave_after
        old_stall, old_lag, old_gone, old_alive = self._stall, self._lag, self._gone, self._alive
        same = _SAME * self.period
        # A stay begun in the call before must be over where the first change begins: its flag has been turned already.
        stays = max(self._place[i] for i in changes) - count
        total, turn_of = 0.0, 0
        while turn_of < len(changes):
            i = changes[turn_of]
            origin = i - 1
            free = at[origin] + old_lag[origin] - (0.0 if i else compute)
            gone, alive = old_gone[origin] + origin, old_alive[origin]
            if gone <= stays:
                return None
            new, back = (
                [0.0],
                [0.0],
            )  # stall since `origin`: after each window from it on, and before it, as far as needed
            stall = was = 0.0
            differs, settled_place = origin, -1
            while True:
                if turn_of < len(changes) and changes[turn_of] == i:
                    settled_place = max(settled_place, self._place[i])
                    turn_of += 1
                call, w = divmod(i, count)
                due = at[w] + call * compute
                added = 0.0
                if on[w]:
                    alive += sizes[w]
                    freed = -INFEASIBLE
                    while alive > pool:
                        turn, place = divmod(gone, count)
                        if leave_step[place] + (turn - call) * steps >= first[w]:
                            return INFEASIBLE
                        gone += 1
                        if on[leaves[place]]:
                            alive -= sizes[leaves[place]]
                            after = leave_after[place] + turn * count - origin
                            if after >= 0:
                                waited = new[after]
                            else:
                                while len(back) <= -after:
                                    back.append(back[-1] - old_stall[(origin + 1 - len(back)) % count])
                                waited = back[-after]
                            freed = leave_at[place] + turn * compute + waited
                    free = max(free, freed) + copies[w]
                    if free - due > stall:
                        added = free - due - stall
                        stall = free - due
                new.append(stall)
                was += old_stall[w]
                if abs(added - old_stall[w]) > same:
                    differs = i
                lag = free - due - stall
                if written is not None:
                    written.append((w, added, lag, gone - i, alive))
                if (
                    gone > settled_place
                    and alive == old_alive[w]
                    and gone - i == old_gone[w]
                    and abs(lag - old_lag[w]) <= same
                    and leave_after[gone % count] + gone // count * count >= differs
                ):
                    break
                i += 1
                if i >= count + changes[0]:
                    return None
            self.work += i - origin
            total += stall - was
        return total
