"""Moves prefetches, those ahead too, and offloads back to the earliest place that their inputs allow.

    y = mm(x, w)                         y = mm(x, w)
    z = relu(y)               ->         done = offload(w, key, after=[y])
    done = offload(w, key, after=[y])    token = prefetch(key, after=[done])
    token = prefetch(key, after=[done])  z = relu(y)

For after a compiler's own passes: Inductor's `reorder_for_locality` moves every node down to its first user, so a copy would
start right before the wait for it and run beside nothing.
"""

from __future__ import annotations

from torch.fx import Graph

from . import ops


def hoist_transfers(graph: Graph) -> None:
    """Rewrites `graph` in place; linear in its nodes. Waits stay where they are: they must not come early."""
    begin = next((node for node in graph.nodes if node.op != "placeholder"), None)
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (ops.prefetch, ops.offload, ops.prefetch_ahead):
            continue
        latest = max((source for source in node.all_input_nodes if source.op != "placeholder"), default=None)
        if latest is not None:
            if node.prev is not latest:
                latest.append(node)
        elif node is not begin:
            assert begin is not None
            begin.prepend(node)
