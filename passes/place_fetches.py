"""Replaces the placeholders of streamed weights by fetch nodes.

    def forward(self, w, x):              def forward(self, x):
        y = linear(x, w)           ->         w = fetch('m:0.weight', [8, 8], [8, 1], float32, cpu)
                                              y = linear(x, w)

One fetch per weight, right before its first reader and with that reader's module stack. Placeholders of one key (a tied
weight) become one fetch. A placeholder without readers is dropped. Of a weight in a pack, the pack is fetched:

    pack = fetch('m:0 together', [96], [1], float32, cpu)
    w = as_strided(pack, [8, 8], [8, 1], 32)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from . import ops
from .fetches import FetchSpec, Packed
from .metadata import ValueMaker, inherit_place


def place_fetches(
    graph: Graph,
    weights: Mapping[Node, FetchSpec],
    trainable: Collection[Node] = (),
    packed: Mapping[str, Packed] | None = None,
) -> None:
    """Rewrites `graph` in place.

    Args:
        graph: as Dynamo captured it; weights are placeholders.
        weights: the placeholders to replace.
        trainable: those whose fetch shall say that it requires a gradient, as its weight does. Only for calls that record none.
            `matmul` becomes one `mm` for a weight that requires a gradient and a `bmm` for another, which rounds otherwise.
        packed: by key, the weights that are in a pack.
    """
    if not weights:
        return
    order = {node: position for position, node in enumerate(graph.nodes)}
    packed = packed or {}
    readers: dict[str, list[Node]] = {}
    for placeholder, spec in weights.items():
        for key in {spec.key, packed[spec.key].pack.key} if spec.key in packed else {spec.key}:
            readers.setdefault(key, []).extend(placeholder.users)
    values = ValueMaker(weights)
    fetches: dict[str, Node] = {}
    for spec in {place.pack.key: place.pack for place in packed.values()}.values():
        if readers.get(spec.key):
            first = min(readers[spec.key], key=order.__getitem__)
            fetches[spec.key] = _before(first, spec, values, ops.fetch, spec.arguments)
    for placeholder, spec in weights.items():
        if spec.key not in fetches and readers[spec.key]:
            first = min(readers[spec.key], key=order.__getitem__)
            place = packed.get(spec.key)
            if place is None:
                fetch = _before(first, spec, values, ops.fetch, spec.arguments)
            else:
                view = fetches[place.pack.key], list(spec.size), list(spec.stride), place.offset
                fetch = _before(first, spec, values, torch.as_strided, view)
            fetches[spec.key] = _requiring_grad(fetch, spec, values) if placeholder in trainable else fetch
        if placeholder.users:
            placeholder.replace_all_uses_with(fetches[spec.key])
        graph.erase_node(placeholder)


def _before(reader: Node, spec: FetchSpec, values: ValueMaker, target: Any, arguments: tuple[Any, ...]) -> Node:
    with reader.graph.inserting_before(reader):
        node = reader.graph.call_function(target, arguments)
    inherit_place(node, reader)
    values.set_weight(node, spec)
    return node


def _requiring_grad(fetch: Node, spec: FetchSpec, values: ValueMaker) -> Node:
    with fetch.graph.inserting_after(fetch):
        marked = fetch.graph.call_method("requires_grad_", (fetch,))
    inherit_place(marked, fetch)
    values.set_weight(marked, spec)
    return marked
