"""How many bytes of activations are alive at once in a captured graph."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from torch.fx import Graph, Node

from .aliasing import may_alias
from .metadata import value_of


def activation_peak(graph: Graph, *, keeps_all: bool = False) -> int:
    """At most this many bytes: every node's result counts from the node to its last reader, as if nothing were fused.

    Inputs and parameters are not counted, they are there before. A view keeps what it is a view of.

    Args:
        graph: with fake values; sizes that are symbols count as seen at this call.
        keeps_all: for a call with a backward, which may read every result again.
    """
    order = {node: position for position, node in enumerate(graph.nodes)}
    ends: dict[Node, int] = {}
    for node in reversed(graph.nodes):
        last = max((order[user] for user in node.users), default=order[node])
        views = (ends[user] for user in node.users if may_alias(user))
        ends[node] = max(last, *views, order[node])
    freed: defaultdict[int, int] = defaultdict(int)
    alive = peak = 0
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or may_alias(node):
            continue
        nbytes = _bytes_of(value_of(node))
        alive += nbytes
        peak = max(peak, alive)
        freed[ends[node]] += nbytes
        if not keeps_all:
            alive -= freed.pop(order[node], 0)
    return peak


def _bytes_of(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return math.prod(_hint(extent) for extent in value.shape) * value.dtype.itemsize
    if isinstance(value, (tuple, list)):
        return sum(_bytes_of(part) for part in value)
    return 0


def _hint(extent: Any) -> int:
    if isinstance(extent, torch.SymInt):
        hint = extent.node.hint  # reading it adds no guard
        return 1 if hint is None else int(hint)
    return int(extent)
