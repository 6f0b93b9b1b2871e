"""Tags, in a joint forward and backward graph, what the backward must fetch again instead of saving.

    w = fetch(key)        -> recompute = MUST_RECOMPUTE
    t = permute(w)        -> recompute = MUST_RECOMPUTE     (work on weights alone: saving it would save the weight)

The partitioner then puts fetches of its own into the backward graph, and no streamed weight is kept from one to the other.
"""

from __future__ import annotations

import operator

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from . import ops
from .metadata import value_of


def tag_recompute(graph: Graph) -> None:
    """Tags in place; a graph without fetches is left untouched."""
    of_weights: set[Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and (node.target is ops.fetch or _is_of_weights(node, of_weights)):
            of_weights.add(node)
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def _is_of_weights(node: Node, of_weights: set[Node]) -> bool:
    """Whether `node` works on weights alone, and would do the same again. Sizes and other numbers are no inputs here."""
    target = node.target
    if isinstance(target, OpOverload):
        if torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable:
            return False
    elif target is not operator.getitem:
        return False
    inputs = [source for source in node.all_input_nodes if not isinstance(value_of(source), (int, torch.SymInt))]
    return bool(inputs) and of_weights.issuperset(inputs)
