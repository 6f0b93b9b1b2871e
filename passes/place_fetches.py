"""Replaces the placeholders of streamed weights by fetch nodes.

    def forward(self, w, x):              def forward(self, x):
        y = linear(x, w)           ->         w = fetch('m:0.weight', [8, 8], [8, 1], float32, cpu)
                                              y = linear(x, w)

One fetch per weight, right before its first reader and with that reader's module stack. Placeholders of one key (a tied
weight) become one fetch. A placeholder without readers is dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch.fx import Graph, Node

from . import ops
from .fetches import FetchSpec
from .metadata import ValueMaker, inherit_place


def place_fetches(graph: Graph, weights: Mapping[Node, FetchSpec], trainable: Collection[Node] = ()) -> None:
    """Rewrites `graph` in place.

    Args:
        graph: as Dynamo captured it; weights are placeholders.
        weights: the placeholders to replace.
        trainable: those whose fetch shall say that it requires a gradient, as its weight does. Only for calls that record none.
            `matmul` becomes one `mm` for a weight that requires a gradient and a `bmm` for another, which rounds otherwise.
    """
    if not weights:
        return
    order = {node: position for position, node in enumerate(graph.nodes)}
    readers: dict[str, list[Node]] = {}
    for placeholder, spec in weights.items():
        readers.setdefault(spec.key, []).extend(placeholder.users)
    values = ValueMaker(weights)
    fetches: dict[str, Node] = {}
    for placeholder, spec in weights.items():
        if spec.key not in fetches and readers[spec.key]:
            first = min(readers[spec.key], key=order.__getitem__)
            with graph.inserting_before(first):
                fetch = graph.call_function(ops.fetch, spec.arguments)
            inherit_place(fetch, first)
            values.set_weight(fetch, spec)
            fetches[spec.key] = _requiring_grad(fetch, spec, values) if placeholder in trainable else fetch
        if placeholder.users:
            placeholder.replace_all_uses_with(fetches[spec.key])
        graph.erase_node(placeholder)


def _requiring_grad(fetch: Node, spec: FetchSpec, values: ValueMaker) -> Node:
    with fetch.graph.inserting_after(fetch):
        marked = fetch.graph.call_method("requires_grad_", (fetch,))
    inherit_place(marked, fetch)
    values.set_weight(marked, spec)
    return marked
