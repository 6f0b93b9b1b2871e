"""How many bytes of activations are alive at once in a captured graph."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from .metadata import hint_of, value_of


def activation_peak(graph: Graph, *, keeps_all: bool = False) -> int:
    """At most this many bytes: every new memory counts from the node that makes it to its last reader, as if nothing were fused.

    Inputs and parameters are not counted, they are there before. What is a view, and what a conversion returns unchanged, is told
    by the memory of the fake values.

    Args:
        graph: with fake values; sizes that are symbols count as seen at this call.
        keeps_all: for a call with a backward, which may read every result again.
    """
    order = {node: position for position, node in enumerate(graph.nodes)}
    ends: dict[int, int] = {}
    for node in graph.nodes:
        last = max((order[user] for user in node.users), default=order[node])
        for memory in _memories(node):
            ends[memory] = max(last, ends.get(memory, 0))
    there: set[int] = set()
    freed: defaultdict[int, int] = defaultdict(int)
    alive = peak = 0
    for node in graph.nodes:
        new = {memory: nbytes for memory, nbytes in _memories(node).items() if memory not in there}
        there.update(new)
        if node.op not in ("placeholder", "get_attr", "output"):
            for memory, nbytes in new.items():
                alive += nbytes
                freed[ends[memory]] += nbytes
        peak = max(peak, alive)
        if not keeps_all:
            alive -= freed.pop(order[node], 0)
    return peak


def _memories(node: Node) -> dict[int, int]:
    """The bytes of each memory that a node's tensors lie in, as far as they take it; by what tells it from others."""
    found: dict[int, int] = {}
    yielded = value_of(node)
    for value in (yielded,) if isinstance(yielded, torch.Tensor) else pytree.tree_leaves(yielded):
        if isinstance(value, torch.Tensor):
            memory = _memory(value)
            nbytes = math.prod(hint_of(extent) for extent in value.shape) * value.dtype.itemsize
            found[memory] = max(nbytes, found.get(memory, 0))
    return found


def _memory(value: torch.Tensor) -> int:
    try:
        return value.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # sparse tensors and those inside of a vmap have no storage to show
        return id(value)
