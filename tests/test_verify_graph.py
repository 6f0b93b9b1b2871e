"""`verify_graph` against graphs that are broken on purpose, each in one edge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from flextensor_fx.passes import ops
from flextensor_fx.passes.verify_graph import GraphError, verify_graph
from graphs import CPU, assert_breaks, lowered, nodes, trace, weight

POOL = 128  # two of the weights, 64 bytes each
LAYERS = 4


def layers(x: Tensor) -> Tensor:
    for number in range(LAYERS):
        x = (x @ weight(str(number)) + 1).relu()
    return x


class Parts:
    """A right graph of four layers, and its transfers in order, to break."""

    def __init__(self, function: Callable[[Tensor], Any] = layers) -> None:
        self.module, _ = lowered(trace(function), pool=POOL)
        self.graph: Graph = self.module.graph
        self.prefetch, self.wait, self.offload = (nodes(self.graph, op) for op in ops.TRANSFER_OPS)
        self.mm = nodes(self.graph, torch.ops.aten.mm.default)


def set_argument(node: Node, place: int, value: Any) -> None:
    node.update_arg(place, value)


def drop_after(node: Node, place: int, unwanted: Node) -> None:
    after: Any = node.args[place]
    node.update_arg(place, [other for other in after if other is not unwanted])


def no_wait(p: Parts) -> None:
    p.wait[1].replace_all_uses_with(p.wait[0])
    drop_after(p.offload[1], 2, p.offload[1])
    p.graph.erase_node(p.wait[1])


def two_waits(p: Parts) -> None:
    with p.graph.inserting_after(p.wait[1]):
        again = p.graph.node_copy(p.wait[1])
    p.mm[1].replace_input_with(p.wait[1], again)


def wait_for_another_prefetch(p: Parts) -> None:
    set_argument(p.wait[1], 0, p.prefetch[0])


def wait_for_no_prefetch(p: Parts) -> None:
    set_argument(p.wait[1], 0, p.offload[0])


def wait_of_another_key(p: Parts) -> None:
    set_argument(p.wait[1], 1, "m:0")


def offload_of_another_key(p: Parts) -> None:
    set_argument(p.offload[1], 1, "m:0")


def offload_dropped(p: Parts) -> None:
    p.graph.erase_node(p.offload[3])


def offload_twice(p: Parts) -> None:
    with p.graph.inserting_after(p.offload[3]):
        p.graph.node_copy(p.offload[3])


def offload_of_an_activation(p: Parts) -> None:
    with p.graph.inserting_after(p.offload[3]):
        p.graph.call_function(ops.offload, (p.mm[3], "m:3", []))


def offload_before_the_reader(p: Parts) -> None:
    drop_after(p.offload[0], 2, p.mm[0])


def second_reader_behind_the_offload(p: Parts) -> None:
    with p.graph.inserting_after(p.offload[1]):
        late = p.graph.call_function(torch.ops.aten.mul.Tensor, (p.mm[1], p.wait[1]))
        late.meta["val"] = p.mm[1].meta["val"]


def view_read_behind_the_offload(p: Parts) -> None:
    with p.graph.inserting_before(p.mm[1]):
        view = p.graph.call_function(torch.ops.aten.t.default, (p.wait[1],))
    view.meta["val"] = p.wait[1].meta["val"]
    with p.graph.inserting_after(p.offload[1]):
        late = p.graph.call_function(torch.ops.aten.mul.Tensor, (p.mm[1], view))
        late.meta["val"] = p.mm[1].meta["val"]


def returned_and_given_up(p: Parts) -> None:
    output = p.graph.output_node()
    output.args = ((output.args[0], p.wait[1]),)


def chain_of_prefetches_broken(p: Parts) -> None:
    drop_after(p.prefetch[2], 2, p.prefetch[1])


def prefetch_without_room(p: Parts) -> None:
    drop_after(p.prefetch[2], 2, p.offload[0])


def fetch_left(p: Parts) -> None:
    with p.graph.inserting_before(p.mm[0]):
        fetch = p.graph.call_function(ops.fetch, ("m:0", [4, 4], [4, 1], torch.float32, CPU))
    p.mm[0].replace_input_with(p.wait[0], fetch)


BROKEN = {
    no_wait: "expected one wait to take its token, found 0",
    two_waits: "expected one wait to take its token, found 2",
    wait_for_another_prefetch: "expected one wait to take its token, found 2",
    wait_for_no_prefetch: "expected one wait to take its token, found 0",
    wait_of_another_key: "expected the key of its prefetch, 'm:1'",
    offload_of_another_key: "expected one offload of its own key, found ['m:0']",
    offload_dropped: "expected one offload of its own key, found []",
    offload_twice: "expected one offload of its own key, found ['m:3', 'm:3']",
    offload_of_an_activation: "expected the weight of a wait",
    offload_before_the_reader: "may read 'm:0' after",
    second_reader_behind_the_offload: "may read 'm:1' after",
    view_read_behind_the_offload: "may read 'm:1' after",
    returned_and_given_up: "may read 'm:1' after",
    chain_of_prefetches_broken: "expected it to come after prefetch_default_1, the prefetch before it",
    prefetch_without_room: "the pool has 128 bytes, 192 may be held together: m:0, m:1, m:2",
    fetch_left: "a fetch is left beside transfers",
}


@pytest.mark.parametrize("break_it", BROKEN, ids=lambda f: f.__name__)
def test_broken_graphs_are_found(break_it: Callable[[Parts], None]) -> None:
    parts = Parts()
    assert_breaks(parts.graph, {"m": POOL}, lambda: break_it(parts), BROKEN[break_it])


def test_the_neighbourhood_is_printed() -> None:
    parts = Parts()
    prefetch_without_room(parts)
    with pytest.raises(GraphError) as caught:
        verify_graph(parts.graph, {"m": POOL})
    head, *lines = str(caught.value).splitlines()
    assert head.startswith("verify_graph: prefetch_default_2: the pool has")
    assert [line[2] for line in lines] == [" ", " ", ">", " ", " "]
    assert "%prefetch_default_2 : " in lines[2]


def test_without_pools_memory_is_not_checked() -> None:
    parts = Parts()
    prefetch_without_room(parts)
    verify_graph(parts.graph)


def test_every_store_is_held_to_its_own_pool() -> None:
    def function(x: Tensor) -> Tensor:
        for number in range(LAYERS):
            x = x @ weight(str(number)) @ weight(str(number), store="n")
        return x

    module, _ = lowered(trace(function), pool={"m": 64, "n": 192})
    verify_graph(module.graph, {"m": 64, "n": 192})
    with pytest.raises(GraphError, match="the pool has 128 bytes, 192 may be held together: n:0, n:1, n:2"):
        verify_graph(module.graph, {"m": 64, "n": 128})


def test_a_weight_that_leaves_the_graph_is_held_to_the_end() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        kept = weight("kept")
        return x @ kept @ weight("a"), kept.t()

    module, _ = lowered(trace(function), pool=POOL)
    verify_graph(module.graph, {"m": POOL})
    assert [node.args[1] for node in nodes(module.graph, ops.offload)] == ["m:a"]
    with pytest.raises(GraphError, match="128 may be held together"):
        verify_graph(module.graph, {"m": 64})


def test_a_graph_without_transfers_is_right() -> None:
    verify_graph(trace(layers).graph, {"m": 0})
    verify_graph(GraphModule({}, trace(lambda x: x.relu()).graph).graph, {})


def test_an_assertion_on_a_weight_needs_no_order() -> None:
    """It yields no tensor that an offload could come after."""

    def function(x: Tensor) -> Tensor:
        a = weight("a")
        torch.ops.aten._assert_async.default((x > a).all())
        return x @ a

    module, _ = lowered(trace(function), pool=POOL)
    verify_graph(module.graph, {"m": POOL})
