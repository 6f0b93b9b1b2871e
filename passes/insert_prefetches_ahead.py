"""Lets the end of a call start copies for the next one, as a SteadySchedule says.

    token = prefetch(key_a, after=[])                  unchanged: it takes over the copy that the call before started
    a = wait(token, key_a, after=[...])
    y = mm(x, a)
    done = offload(a, key_a, after=[y])
    ...                                       ->       ...
    last = offload(z, key_z, after=[y])                last = offload(z, key_z, after=[y])
                                                       ahead = prefetch_ahead(key_a, after=[token_z, last])

A prefetch_ahead is hung up as a prefetch is: after the one before it, or the last prefetch, and after every offload that frees
the memory it is to take; where none does, after the last realized node before the step that it may not run ahead of. Waits that
the schedule puts behind it come after it, as after a prefetch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence

from torch._ops import OpOverload
from torch.fx import Graph, Node

from . import ops
from .metadata import ValueMaker, inherit_place
from .realized import Realized, last_realized_before
from .steady_schedule import SteadySchedule


def insert_prefetches_ahead(
    graph: Graph, store: str, steps: Sequence[Node], schedule: SteadySchedule, realized: Realized
) -> None:
    """Rewrites `graph` in place; linear in its nodes.

    Args:
        store: whose transfers are in the graph already, by `schedule.in_call`.
        steps: the node of each step of the schedule.
        schedule: no weight of it leaves the graph.
        realized: as given to `insert_transfers`.
    """
    ahead = schedule.ahead
    if not ahead:
        return
    tokens = [n for n in graph.find_nodes(op="call_function", target=ops.prefetch) if _store(n) == store]
    transfers = schedule.in_call.transfers
    waits = [_taker(token, ops.wait) for token in tokens]
    freed: defaultdict[int, list[Node]] = defaultdict(list)
    for transfer, wait in zip(transfers, waits, strict=True):
        freed[transfer.last_use + 1].append(_taker(wait, ops.offload))
    before = last_realized_before(graph, steps, realized)
    values = ValueMaker(tokens)
    passed, last = transfers[-1].issue_at, tokens[-1]
    boundaries: list[int] = []
    issued: list[Node] = []
    for transfer, first in zip(ahead, tokens, strict=False):  # they are the first of the call
        boundary = transfer.issue_at + schedule.steps
        after = [last, *(node for at in range(passed + 1, boundary + 1) for node in freed[at])]
        if boundary > passed and not freed[boundary]:
            after += before[boundary]
        with graph.inserting_after(max(after)):
            last = graph.call_function(ops.prefetch_ahead, (transfer.key, first.args[1], after))
        inherit_place(last, first)
        values.set_token(last, first.args[1])  # pyright: ignore[reportArgumentType]  # a prefetch's second argument is its device
        passed = boundary
        boundaries.append(boundary)
        issued.append(last)
    for transfer, wait in zip(transfers, waits, strict=True):
        place = bisect_right(boundaries, transfer.first_use)
        if place:
            wait.update_arg(6, [*wait.args[6], issued[place - 1]])  # pyright: ignore[reportGeneralTypeIssues, reportOptionalIterable]  # `after`


def _taker(node: Node, op: OpOverload) -> Node:
    """The call of `op` on `node`; others may have it in their `after`."""
    return next(user for user in node.users if user.target is op and user.args[0] is node)


def _store(prefetch: Node) -> str:
    return str(prefetch.args[0]).partition(":")[0]
