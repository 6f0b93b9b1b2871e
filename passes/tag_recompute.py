"""Tags, in a joint forward and backward graph, what the backward must fetch again instead of saving.

    w = fetch(key)        -> recompute = MUST_RECOMPUTE
    t = permute(w)        -> recompute = MUST_RECOMPUTE     (work on weights alone: saving it would save the weight)

The partitioner then puts fetches of its own into the backward graph, and no streamed weight is kept from one to the other.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from . import ops


def tag_recompute(graph: Graph) -> None:
    """Tags in place; a graph without fetches is left untouched."""
    of_weights: set[Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        inputs = [source for source in node.all_input_nodes if isinstance(source.meta.get("val"), torch.Tensor)]
        if node.target is ops.fetch or (inputs and all(source in of_weights for source in inputs) and _repeatable(node)):
            of_weights.add(node)
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def _repeatable(node: Node) -> bool:
    target = node.target
    assert isinstance(target, OpOverload)
    return torch.Tag.nondeterministic_seeded not in target.tags and not target._schema.is_mutable
