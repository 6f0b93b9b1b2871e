"""Decide which weights stay on the device, which are streamed, and how large a pool they stream through.

The planner sees bytes, steps, milliseconds and names; never tensors or graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Literal

from flextensor_fx.bounds import lower_bound
from flextensor_fx.errors import BudgetError
from flextensor_fx.passes.schedule import (
    Schedule,
    Window,
    check_uses,
    format_bytes,
    format_table,
    issue_steps,
    least_pool,
    schedule,
    use_events,
    windows_of,
)
from flextensor_fx.passes.steady_schedule import SteadySchedule, circular_windows, least_steady_pool
from flextensor_fx.passes.verify_schedule import verify_schedule
from flextensor_fx.plan_reasons import reasons
from flextensor_fx.residency import Problem, choose_streamed
from flextensor_fx.simulate import Link, simulate, timeline
from flextensor_fx.steady import SteadyRun, simulate_steady
from flextensor_fx.steady_planner import bound_steady, plan_steady, smallest_steady_pool

Objective = Literal["single", "steady"]
Uses = Sequence[tuple[str, int, tuple[int, ...]]]

_SMALL_BYTES = 64 * 1024  # the automatic threshold is this, or _SMALL_SHARE of all bytes where that is less
_SMALL_SHARE = 0.01
_OVERLAP_SLACK = 1.02  # without a budget: time allowed, relative to a pool without limit


@dataclass(frozen=True, slots=True)
class Plan:
    """What stays, what moves, and what that should cost.

    Fields:
        resident: keys that stay on the device.
        streamed: keys that are copied for each window, in order of first use.
        pool: bytes the streamed weights may hold together, at least any one of them.
        budget: bytes given for residents and pool together; None: none was given.
        lookahead: as in `schedule`.
        peak_bytes: resident bytes plus pool, at most the budget.
        streamed_bytes: sum over the streamed weights.
        predicted_ms: simulated time of one call with nothing prefetched; with objective "steady", the period of calls that
            follow one another.
        predicted_stall_ms: the part of it in which compute waits for copies.
        lower_bound_ms: no plan within the budget (here: within peak_bytes where none was given) is faster.
        least_budget: the least budget that `plan` accepts for these weights.
        why: one line per key.
        activation_bytes: what activations take at their peak, in peak_bytes, budget and least_budget.
        objective: "single" or "steady", what `predicted_ms` and `lower_bound_ms` are about.
        steady: the schedule of one call among equal ones; None with objective "single".
    """

    resident: frozenset[str]
    streamed: tuple[str, ...]
    pool: int
    budget: int | None
    lookahead: int | None
    peak_bytes: int
    streamed_bytes: int
    predicted_ms: float
    predicted_stall_ms: float
    lower_bound_ms: float
    least_budget: int
    why: Mapping[str, str] = field(hash=False)
    objective: Objective = "single"
    steady: SteadySchedule | None = None
    activation_bytes: int = 0

    @property
    def gap(self) -> float:
        """Share by which predicted_ms is above lower_bound_ms: at most this much could be gained by a better plan."""
        return self.predicted_ms / self.lower_bound_ms - 1 if self.lower_bound_ms > 0 else 0.0

    @property
    def wrapping(self) -> tuple[str, ...]:
        """Keys on the device, or on their way to it, while one call ends and the next begins; in order of first use."""
        return () if self.steady is None else tuple(dict.fromkeys(t.key for t in self.steady.wrapping))

    def __str__(self) -> str:
        given = "none" if self.budget is None else format_bytes(self.budget)
        kept, moved, pool = (
            format_bytes(n)
            for n in (self.peak_bytes - self.activation_bytes - self.pool, self.streamed_bytes, self.pool)
        )
        stall, bound = f"{self.predicted_stall_ms:.3f} ms stalled", f"lower bound {self.lower_bound_ms:.3f} ms"
        lines = [
            f"Plan: budget {given}, takes {format_bytes(self.peak_bytes)}; least budget {format_bytes(self.least_budget)}",
            f"  resident   {len(self.resident)} weights, {kept}",
            f"  streamed   {len(self.streamed)} weights, {moved}, through a pool of {pool}",
            f"  predicted  {self.predicted_ms:.3f} ms, of it {stall}; {bound}",
        ]
        if self.activation_bytes:
            lines.append(f"  activations {format_bytes(self.activation_bytes)}, within the budget")
        if self.steady is not None:
            names = ", ".join(self.wrapping[:3]) + (", ..." if len(self.wrapping) > 3 else "")
            lines.append(
                f"  repeating  {self.gap:.1%} above the bound; {len(self.wrapping)} weights across calls"
                + (f": {names}" if names else "")
            )
        return "\n".join(lines) + "\n" + format_table(("key", "why"), list(self.why.items()), left=2)


def plan(
    uses: Uses,
    step_ms: Sequence[float],
    link: Link,
    budget: int | None,
    *,
    fixed: frozenset[str] = frozenset(),
    fused: frozenset[str] = frozenset(),
    lookahead: int | None = None,
    min_stream_bytes: int | None = None,
    least_pool_bytes: int = 0,
    objective: Objective = "single",
    late: bool = False,
    activation_bytes: int = 0,
) -> Plan:
    """Plan one call so that it is as fast as the budget allows.

    Args:
        uses: (key, bytes, steps that use it) for every selected weight; each has at least one step.
        step_ms: milliseconds each compute step takes.
        link: what a copy costs.
        budget: bytes for resident weights and pool together. None: stream every weight above the threshold, through the
            smallest pool with which the call takes at most 2% longer than with a pool without limit.
        fixed: keys that must stay resident; their bytes count.
        fused: keys that elementwise work alone reads. The compiler fuses that into loops with what comes before, and a copy
            that must arrive in between changes the loop, and with it perhaps the last bit of the result. So these too stay
            resident unless the budget cannot be met otherwise.
        lookahead: transfers that may be issued ahead of the one being waited for; None: as many as the pool holds.
        min_stream_bytes: smaller weights stay resident, and all others may be streamed, also fused ones. None: the lesser of
            64 KiB and 1% of all bytes; then smaller ones are streamed after all, largest first and before fused ones, where the
            budget cannot be met otherwise.
        least_pool_bytes: the pool is at least this large if anything is streamed, as a graph with uses of its own may need.
        objective: "single": the time of one call that starts with nothing prefetched. "steady": the period of a call that
            repeats, whose end may fetch for the start of the next.
        late: with objective "steady", issue each copy as late as it stays hidden with a margin, not as early as it may.
        activation_bytes: what activations take of the budget at their peak, and weights may not have.

    Raises:
        BudgetError: the budget is below the least that works, which the error names.
        ValueError: malformed uses, a step beyond `step_ms`, an unknown fixed key or objective, a negative lookahead or
            activation_bytes.
    """
    _check(uses, step_ms, fixed, fused, lookahead)
    if activation_bytes < 0:
        raise ValueError(f"plan: activation_bytes must be at least 0, found {activation_bytes}")
    if activation_bytes:
        for_weights = partial(
            plan, uses, step_ms, link, fixed=fixed, fused=fused, lookahead=lookahead, min_stream_bytes=min_stream_bytes,
            least_pool_bytes=least_pool_bytes, objective=objective, late=late,
        )  # fmt: skip
        return _beside_activations(for_weights, budget, activation_bytes)
    if objective not in ("single", "steady"):
        raise ValueError(f'plan: objective must be "single" or "steady", found {objective!r}')
    steady = objective == "steady"
    steps = len(step_ms) if steady else None
    total = sum(nbytes for _, nbytes, _ in uses)
    threshold = min(_SMALL_BYTES, int(total * _SMALL_SHARE)) if min_stream_bytes is None else min_stream_bytes
    movable = [w for w, (key, nbytes, _) in enumerate(uses) if nbytes and key not in fixed]
    if min_stream_bytes is not None:
        fused = frozenset()
    large = [w for w in movable if uses[w][1] >= threshold and uses[w][0] not in fused]
    small = sorted(set(movable).difference(large), key=lambda w: (uses[w][0] in fused, -uses[w][1], w))
    if min_stream_bytes is not None:
        movable, small = large, []
    least = _least_budget(uses, movable, total, least_pool_bytes, steps)
    if budget is not None and budget < least:
        raise BudgetError(_refusal(uses, movable, budget, least, total), least)

    def bound(within: int) -> float:
        sizes = [nbytes for _, nbytes, _ in uses]
        busy_ms = [sum(step_ms[step] for step in set(steps)) for _, _, steps in uses]
        return lower_bound(sizes, [link.copy_ms(n) for n in sizes], busy_ms, movable, within, sum(step_ms))

    everything = budget is not None and budget >= total
    known_ms = None if budget is None else bound(budget)
    chosen = frozenset(large if budget is None else ())
    transfers = None
    if budget is not None and known_ms is not None and not everything:
        allowed = _allowed(uses, large, small, budget, total, least_pool_bytes, steps)
        if steady:
            chosen, transfers, run = plan_steady(
                uses, step_ms, link, allowed, budget, lookahead, least_pool_bytes, known_ms, late
            )
        else:
            chosen = choose_streamed(
                _problem(uses, step_ms, link, allowed, budget, lookahead, known_ms, least_pool_bytes)
            )
    resident_bytes = total - sum(uses[w][1] for w in chosen)
    served = [uses[w] for w in sorted(chosen)]
    floor = least_pool_bytes if chosen else 0
    if steady:
        if transfers is None:
            transfers = smallest_steady_pool(served, step_ms, link, lookahead, floor)
        run = simulate_steady(transfers, step_ms, link)
    else:
        windows = windows_of(served)
        if budget is None:
            transfers = _smallest_pool(windows, step_ms, link, lookahead, floor)
        else:
            most = max(sum(w.nbytes for w in windows), floor)
            transfers = schedule(windows, min(budget - resident_bytes, most), lookahead)
        run = simulate(verify_schedule(transfers, windows), step_ms, link)
    predicted_ms = run.period_ms if isinstance(run, SteadyRun) else run.total_ms
    peak = resident_bytes + transfers.pool
    if known_ms is None:
        known_ms = bound(peak)
    if steady:
        known_ms = bound_steady(
            uses, step_ms, link, movable, peak if budget is None else budget, known_ms, predicted_ms
        )
    return Plan(
        resident=frozenset(key for w, (key, _, _) in enumerate(uses) if w not in chosen),
        streamed=tuple(uses[w][0] for w in sorted(chosen, key=lambda w: (min(uses[w][2]), w))),
        pool=transfers.pool,
        budget=budget,
        lookahead=lookahead,
        peak_bytes=peak,
        streamed_bytes=total - resident_bytes,
        predicted_ms=predicted_ms,
        predicted_stall_ms=run.stall_ms,
        lower_bound_ms=min(known_ms, predicted_ms),
        least_budget=least,
        why=reasons(
            uses,
            step_ms,
            link,
            fixed,
            fused,
            threshold,
            "the budget holds every weight" if everything else None,
            transfers.transfers,
            run.transfers,
            steady,
        ),
        objective=objective,
        steady=transfers if isinstance(transfers, SteadySchedule) else None,
    )


def _beside_activations(for_weights: Callable[[int | None], Plan], budget: int | None, nbytes: int) -> Plan:
    """Plans weights for what activations leave of the budget; all bytes of the plan count these in."""
    try:
        made = for_weights(None if budget is None else budget - nbytes)
    except BudgetError as error:
        least = error.least + nbytes
        raise BudgetError(
            f"plan: expected a budget of at least {least} bytes ({format_bytes(least)}), found {budget}; activations take "
            f"{nbytes} ({format_bytes(nbytes)}) of it, and for the weights: {error}",
            least,
        ) from None
    return replace(
        made,
        budget=budget,
        peak_bytes=made.peak_bytes + nbytes,
        least_budget=made.least_budget + nbytes,
        activation_bytes=nbytes,
    )


def _check(
    uses: Uses, step_ms: Sequence[float], fixed: frozenset[str], fused: frozenset[str], lookahead: int | None
) -> None:
    check_uses(uses)
    for key, _, steps in uses:
        if max(steps) >= len(step_ms):
            raise ValueError(f"plan: {key!r} is used in step {max(steps)}, but step_ms has {len(step_ms)} steps")
    for name, named in (("fixed", fixed), ("fused", fused)):
        if unknown := named - {key for key, _, _ in uses}:
            raise ValueError(f"plan: {name} names {min(unknown)!r}, which is not among the {len(uses)} weights in uses")
    if lookahead is not None and lookahead < 0:
        raise ValueError(f"plan: lookahead must be at least 0 or None, found {lookahead}")


def _least_budget(
    uses: Uses, streamed: Sequence[int], total: int, least_pool_bytes: int, steady_steps: int | None = None
) -> int:
    # Streaming one weight more frees its bytes and adds at most as many to the pool, so streaming all of them is the least.
    moved = [uses[w] for w in sorted(streamed)]
    if steady_steps is None:
        pool = least_pool(windows_of(moved))
    else:
        pool = least_steady_pool(circular_windows(moved, steady_steps), steady_steps)
    return min(total, total - sum(nbytes for _, nbytes, _ in moved) + max(pool, least_pool_bytes))


def _allowed(
    uses: Uses,
    large: Sequence[int],
    small: Sequence[int],
    budget: int,
    total: int,
    least_pool_bytes: int,
    steady_steps: int | None,
) -> list[int]:
    """`large` and the fewest of `small`, in its order, with which the budget can be met."""
    low, high = 0, len(small)
    while low < high:
        middle = (low + high) // 2
        if _least_budget(uses, [*large, *small[:middle]], total, least_pool_bytes, steady_steps) <= budget:
            high = middle
        else:
            low = middle + 1
    return sorted([*large, *small[:low]])


def _problem(
    uses: Uses,
    step_ms: Sequence[float],
    link: Link,
    streamable: Sequence[int],
    budget: int,
    lookahead: int | None,
    bound_ms: float,
    least_pool_bytes: int,
) -> Problem:
    sizes = [nbytes for _, nbytes, _ in uses]
    return Problem(
        sizes=sizes,
        copy_ms=[link.copy_ms(nbytes) for nbytes in sizes],
        events=use_events(uses),
        clock=[0.0, *accumulate(step_ms)],
        streamable=sorted(streamable, key=lambda w: (min(uses[w][2]), w)),
        budget=budget,
        lookahead=lookahead,
        lower_bound_ms=bound_ms,
        least_pool=least_pool_bytes,
    )


def _smallest_pool(
    windows: Sequence[Window], step_ms: Sequence[float], link: Link, lookahead: int | None, least: int
) -> Schedule:
    first = [w.first_use for w in windows]
    last = [w.last_use for w in windows]
    sizes = [w.nbytes for w in windows]
    copies = [link.copy_ms(nbytes) for nbytes in sizes]
    clock = [0.0, *accumulate(step_ms)]

    def total_ms(pool: int) -> float:
        issues = issue_steps(first, last, sizes, pool, lookahead)
        assert issues is not None, f"a pool of {pool} bytes is not below the least pool"
        return clock[-1] + timeline(issues, first, copies, clock)[1][-1]

    low = max(least_pool(windows), least)
    high = max(sum(sizes), low)
    allowed_ms = _OVERLAP_SLACK * total_ms(high)
    while low < high:
        middle = (low + high) // 2
        if total_ms(middle) <= allowed_ms:
            high = middle
        else:
            low = middle + 1
    return schedule(windows, low, lookahead)


def _refusal(uses: Uses, movable: Sequence[int], budget: int, least: int, total: int) -> str:
    held = total - sum(uses[w][1] for w in movable)
    text = (
        f"plan: expected a budget of at least {least} bytes ({format_bytes(least)}), found {budget} ({format_bytes(budget)}); "
        f"{held} bytes ({format_bytes(held)}) must stay resident and the weights that one step needs together take "
        f"{least - held} ({format_bytes(least - held)})"
    )
    if movable:
        key, nbytes, _ = max((uses[w] for w in movable), key=lambda use: use[1])
        text += f", the largest weight being {key!r} with {nbytes} ({format_bytes(nbytes)})"
    return text + "; raise the budget"
