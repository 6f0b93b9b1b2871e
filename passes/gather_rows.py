"""Takes the rows that are looked up out of a streamed table, so that the table can be given up at once.

    table = fetch(key)                       table = fetch(key)
    y = embedding(table, indices)     ->     rows, places = rows(table, indices)
                                             y = embedding(rows, places)

A fusing compiler repeats a lookup in every kernel that reads its result, and would keep the table for all of them. Were `y`
written out instead, it would choose other values to write out behind it; those of 16 bits are rounded then, so bits would change.
This way its kernels are those that it makes of a resident table: `rows` stands for the table, `places` for the indices.

Indices that no input feeds, such as positions counted from 0, are left alone: the compiler computes them where they are used and
reads the table only, just as it reads the one value written out.
"""

from __future__ import annotations

import operator

import torch
from torch._guards import detect_fake_mode
from torch.fx import Graph, Node

from . import ops
from .metadata import inherit_place, is_tensor, value_of


def gather_rows(graph: Graph) -> None:
    """Rewrites an ATen graph in place; linear in its nodes."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default):
        table, indices = node.args[:2]
        if (
            isinstance(table, Node)
            and table.target is ops.fetch
            and isinstance(indices, Node)
            and _reads_input(indices)
        ):
            with graph.inserting_before(node):
                both = graph.call_function(ops.rows, (table, indices))
                results = tuple(graph.call_function(operator.getitem, (both, place)) for place in (0, 1))
            for new in (both, *results):
                inherit_place(new, node)
            _set_values(both, results)
            node.args = results  # what is left out, such as padding_idx, concerns gradients of the table: it has none


def _reads_input(node: Node) -> bool:
    seen, pending = {node}, [node]
    while pending:
        source = pending.pop()
        if source.op != "call_function" and is_tensor(source):
            return True
        more = [before for before in source.all_input_nodes if before not in seen]
        seen.update(more)
        pending += more
    return False


def _set_values(both: Node, results: tuple[Node, ...]) -> None:
    table, indices = (value_of(source) for source in both.all_input_nodes)
    mode = detect_fake_mode((table, indices))
    if mode is not None:
        with mode:
            values = ops.rows(table, indices)
        both.meta["val"] = values
        for result, value in zip(results, values, strict=True):
            result.meta["val"] = value
