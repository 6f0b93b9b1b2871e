"""`verify_graph` against steady graphs whose prefetches ahead are broken on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from torch.fx import Graph, Node

from flextensor_fx.passes import ops
from graphs import CPU, assert_breaks, lowered, nodes, trace, weight

POOL = 192  # three of the weights, 64 bytes each
LAYERS = 5


def layers(x: Tensor) -> Tensor:
    for number in range(LAYERS):
        x = (x @ weight(str(number)) + 1).relu()
    return x


class Parts:
    """A right graph of five layers, the first three of them fetched ahead, and its transfers in order, to break."""

    def __init__(self) -> None:
        self.module, _ = lowered(trace(layers), pool=POOL, steady=True)
        self.graph: Graph = self.module.graph
        self.prefetch, self.wait, self.offload = (nodes(self.graph, op) for op in ops.TRANSFER_OPS)
        self.ahead = nodes(self.graph, ops.prefetch_ahead)
        assert [node.args[0] for node in self.ahead] == ["m:0", "m:1", "m:2"]

    def add_ahead(self, key: str, after: list[Node]) -> None:
        with self.graph.inserting_before(self.graph.output_node()):
            self.graph.call_function(ops.prefetch_ahead, (key, CPU, after))


def drop_after(node: Node, unwanted: Node) -> None:
    after: Any = node.args[2]
    node.update_arg(2, [other for other in after if other is not unwanted])


def of_a_key_without_a_prefetch(p: Parts) -> None:
    p.add_ahead("m:5", [p.ahead[-1], *p.offload])


def of_a_prefetch_in_the_middle(p: Parts) -> None:
    p.add_ahead("m:3", [p.ahead[-1], *p.offload])


def the_same_key_twice(p: Parts) -> None:
    p.add_ahead("m:0", [p.ahead[-1], *p.offload])


def prefetch_that_may_not_run_at_the_begin(p: Parts) -> None:
    x = next(iter(p.graph.nodes))
    p.prefetch[1].update_arg(2, [p.prefetch[0], x])


def keys_exchanged(p: Parts) -> None:
    p.ahead[0].update_arg(0, "m:1")
    p.ahead[1].update_arg(0, "m:0")


def chain_of_those_ahead_broken(p: Parts) -> None:
    drop_after(p.ahead[1], p.ahead[0])


def not_behind_the_last_prefetch(p: Parts) -> None:
    drop_after(p.ahead[0], p.prefetch[-1])


def ahead_without_room(p: Parts) -> None:
    drop_after(p.ahead[0], p.offload[2])


def ahead_of_the_very_last_offload(p: Parts) -> None:
    drop_after(p.ahead[2], p.offload[4])


def a_weight_leaves_the_graph(p: Parts) -> None:
    drop_after(p.ahead[2], p.offload[4])
    p.graph.erase_node(p.offload[4])
    output = p.graph.output_node()
    output.args = ((output.args[0], p.wait[4]),)


def fetch_left(p: Parts) -> None:
    with p.graph.inserting_before(p.wait[0]):
        p.graph.call_function(ops.fetch, ("m:9", [4, 4], [4, 1], p.wait[0].args[4], CPU))


BROKEN = {
    of_a_key_without_a_prefetch: "expected a prefetch of 'm:5' that may run when a call begins",
    of_a_prefetch_in_the_middle: "expected a prefetch of 'm:3' that may run when a call begins",
    the_same_key_twice: "prefetch_ahead_default is ahead for 'm:0' already",
    prefetch_that_may_not_run_at_the_begin: "expected a prefetch of 'm:1' that may run when a call begins",
    keys_exchanged: "it is ahead in another order than the prefetches",
    chain_of_those_ahead_broken: "expected it to come after prefetch_ahead_default, the prefetch before it",
    not_behind_the_last_prefetch: "expected it to come after prefetch_default_4, the prefetch before it",
    ahead_without_room: "the pool has 192 bytes, 256 may be held together: m:2, m:3, m:4, m:0",
    ahead_of_the_very_last_offload: "the pool has 192 bytes, 256 may be held together: m:4, m:0, m:1, m:2",
    a_weight_leaves_the_graph: "'m:4' leaves the graph, but the store has prefetches ahead",
    fetch_left: "a fetch is left beside transfers",
}


@pytest.mark.parametrize("break_it", BROKEN, ids=lambda f: f.__name__)
def test_broken_graphs_are_found(break_it: Callable[[Parts], None]) -> None:
    parts = Parts()
    assert_breaks(parts.graph, {"m": POOL}, lambda: break_it(parts), BROKEN[break_it])
