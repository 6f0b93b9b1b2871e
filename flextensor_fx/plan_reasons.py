"""Why each weight of a plan stays or moves, one line each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from flextensor_fx.passes.schedule import Transfer, format_bytes
from flextensor_fx.simulate import Link, Timing


def reasons(
    uses: Sequence[tuple[str, int, tuple[int, ...]]],
    step_ms: Sequence[float],
    link: Link,
    fixed: frozenset[str],
    fused: frozenset[str],
    threshold: int,
    everything: str | None,
    transfers: Sequence[Transfer],
    timings: Sequence[Timing],
    steady: bool = False,
) -> dict[str, str]:
    """Key to reason, in the order of `uses`.

    Args:
        uses: (key, bytes, steps that use it).
        step_ms: milliseconds each compute step takes.
        link: what a copy costs.
        fixed: keys that must stay.
        fused: keys that stay, unless they must be streamed, so that the loops that read them stay as they are.
        threshold: bytes below which weights are not streamed unless they must be.
        everything: why nothing is streamed at all, if nothing is.
        transfers: the plan's, with the `timings` of a simulated call.
        steady: whether transfers may be issued in the call before.
    """
    clock = [0.0, *accumulate(step_ms)]
    moves: dict[str, list[int]] = {}
    for at, transfer in enumerate(transfers):
        moves.setdefault(transfer.key, []).append(at)

    def name(step: int) -> str:
        return str(step) if step >= 0 else f"{step + len(step_ms)} of the call before"

    def streamed(at: Sequence[int]) -> str:
        times = "streamed" if len(at) == 1 else f"streamed {len(at)} times"
        worst = max(at, key=lambda i: timings[i].stall_ms)
        move, stall = transfers[worst], timings[worst].stall_ms
        if stall > 0:
            return f"{times}: step {move.first_use} waits {stall:.3f} ms for it"
        if move.issue_at == move.first_use:
            return f"{times}: its copy takes no time"
        begin, end = move.issue_at, move.first_use - 1
        if begin == end:
            return f"{times}: hidden behind step {name(end)}"
        return f"{times}: hidden behind steps {name(begin)} to {name(end)}"

    def resident(key: str, nbytes: int, steps: Sequence[int]) -> str:
        if key in fixed:
            return "required to stay"
        if not nbytes:
            return "empty"
        if everything:
            return everything
        if key in fused:
            return "elementwise work alone reads it, and is fused with what comes before"
        if nbytes < threshold:
            return f"{format_bytes(nbytes)} costs more to move than to keep"
        if not steady and link.copy_ms(nbytes) > clock[min(steps)]:
            return f"used in step {min(steps)}, too early for its first copy to hide"
        return f"within the budget, which saves a copy of {link.copy_ms(nbytes):.3f} ms"

    return {
        key: streamed(moves[key]) if key in moves else f"resident: {resident(key, nbytes, steps)}"
        for key, nbytes, steps in uses
    }
