"""Removes fetches that nothing reads, with what is made of them and read by nothing either.

    w = fetch(key)
    t = permute(w)        ->
    y = mm(x, v)                y = mm(x, v)

Earlier passes may have dropped what read a weight; its transfer would be for nothing. Only pure nodes behind fetches go: FX's own
dead-code elimination also takes calls that write to their argument, such as a method `add_`.
"""

from __future__ import annotations

from torch.fx import Graph

from .collect_uses import is_weight_work
from .fetches import fetch_nodes


def drop_unread_fetches(graph: Graph) -> None:
    """Rewrites `graph` in place; linear in its nodes."""
    behind = dict.fromkeys(fetch_nodes(graph))
    pending = list(behind)
    while pending:
        more = [user for user in pending.pop().users if user not in behind and is_weight_work(user)]
        behind.update(dict.fromkeys(more))
        pending += more
    for node in sorted(behind, reverse=True):
        if not node.users:
            graph.erase_node(node)
