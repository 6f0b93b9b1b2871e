"""Each pass as text: a small graph in, its code out, next to the golden text in tests/golden."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from conftest import Golden
from flextensor_fx.passes import ops
from flextensor_fx.passes.collect_uses import collect_uses
from flextensor_fx.passes.drop_unread_fetches import drop_unread_fetches
from flextensor_fx.passes.fetches import FetchSpec
from flextensor_fx.passes.insert_transfers import insert_transfers
from flextensor_fx.passes.pipeline import Pipeline, PoolTooSmall
from flextensor_fx.passes.place_fetches import place_fetches
from flextensor_fx.passes.realized import Realized, all_realized, aten_realized
from flextensor_fx.passes.schedule import schedule
from flextensor_fx.passes.tag_recompute import tag_recompute
from graphs import CPU, code, example, lowered, nodes, trace, weight


def single_use(x: Tensor) -> Tensor:
    return x @ weight("a")


def chain_of_layers(x: Tensor) -> Tensor:
    for name in "abc":
        x = (x @ weight(name)).relu()
    return x


def two_windows(x: Tensor) -> Tensor:
    a = weight("a")
    x = x @ a
    for name in "bcd":
        x = x @ weight(name)
    return x @ a.t()


def tied_within_one_window(x: Tensor) -> Tensor:
    table = weight("table")
    return (x @ table).relu() @ table.t()


def weight_only_work(x: Tensor) -> Tensor:
    a, b, c = weight("a", dtype=torch.bfloat16), weight("b"), weight("c")
    return x @ a.float().t() @ torch.cat([b, c]).t()


def pointwise_consumer(x: Tensor) -> Tensor:
    return (x * weight("scale", 4) + 1) @ weight("a")


def pointwise_fork(x: Tensor) -> Tensor:
    scaled = x * weight("scale", 4)
    return scaled @ weight("a") + (scaled + 1) @ weight("b")


def several_outputs(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x @ weight("a")
    values, places = x.topk(2)
    return values @ weight("b", 2, 4), places


def tuple_consumer(x: Tensor) -> Tensor:
    normed, mean, _ = torch.ops.aten.native_layer_norm(x, [4], weight("scale", 4), weight("shift", 4), 1e-5)
    return normed @ weight("a") + mean


def weight_returned(x: Tensor) -> tuple[Tensor, Tensor]:
    a = weight("a")
    return x @ a, a.t()


def mutation_at_the_end(x: Tensor, cache: Tensor) -> Tensor:
    cache.copy_(cache * weight("scale", 4))
    return x @ weight("a")


def two_stores(x: Tensor) -> Tensor:
    return (x @ weight("a") @ weight("a", store="n")) @ weight("b") @ weight("b", store="n")


GRAPHS = {
    f.__name__: f for f in (single_use, chain_of_layers, two_windows, tied_within_one_window, weight_only_work)
} | {
    f.__name__: f
    for f in (pointwise_consumer, pointwise_fork, several_outputs, tuple_consumer, weight_returned, mutation_at_the_end)
}


@pytest.mark.parametrize("name", GRAPHS)
def test_lower(name: str, golden: Golden) -> None:
    function = GRAPHS[name]
    inputs = [example(), example()] if function is mutation_at_the_end else [example()]
    module = trace(function, *inputs)
    text = str(collect_uses(module.graph, aten_realized))
    module, schedules = lowered(module, pool=160)
    golden(f"{text}\n\n{schedules['m']}\n{code(module)}")


def test_lower_two_stores(golden: Golden) -> None:
    module, schedules = lowered(trace(two_stores), pool={"m": 64, "n": 128})
    golden(f"{schedules['m']}\n\n{schedules['n']}\n{code(module)}")


def trailing_work(x: Tensor) -> Tensor:
    return torch.relu(chain_of_layers(x) @ x) @ x


@pytest.mark.parametrize(
    ("function", "pool", "lookahead"),
    [
        (chain_of_layers, 64, None),
        (chain_of_layers, 128, None),
        (chain_of_layers, 192, 1),
        (two_windows, 160, None),
        (pointwise_consumer, 160, None),
        (trailing_work, 128, None),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_lower_steady(function: Callable[[Tensor], Tensor], pool: int, lookahead: int | None, golden: Golden) -> None:
    module, schedules = lowered(trace(function), pool, lookahead, steady=True)
    golden(f"{schedules['m']}\n{code(module)}")


def test_lower_steady_two_stores(golden: Golden) -> None:
    module, schedules = lowered(trace(two_stores), pool={"m": 64, "n": 128}, steady=True)
    golden(f"{schedules['m']}\n\n{schedules['n']}\n{code(module)}")


@pytest.mark.parametrize("lookahead", [0, 1])
def test_lower_lookahead(lookahead: int, golden: Golden) -> None:
    module, schedules = lowered(trace(chain_of_layers), lookahead=lookahead)
    golden(f"{schedules['m']}\n{code(module)}")


def test_lower_dynamic_shape(golden: Golden) -> None:
    def function(x: Tensor) -> tuple[Tensor, int]:
        rows = x.shape[0]
        return (x @ weight("a")).view(2 * rows, 2) @ weight("b", 2, 2), rows + 1

    module, _ = lowered(trace(function, torch.ones(6, 4), symbolic=True))
    golden(code(module))


def test_lower_interpreted(golden: Golden) -> None:
    """A view of a weight is no value of its own: the weight is given up after what reads the view."""
    module, schedules = lowered(trace(two_windows), pool=160, realized=all_realized)
    golden(f"{schedules['m']}\n{code(module)}")


def captured() -> tuple[GraphModule, dict[str, Any]]:
    """Two linear layers of tied weight, and a placeholder that nothing reads, as Dynamo would capture them."""
    graph, by_name = Graph(), {}
    for name in ("w", "v", "unread", "x"):
        by_name[name] = graph.placeholder(name)
        by_name[name].meta["example_value"] = example()
    linear = torch.nn.functional.linear
    y = graph.call_function(linear, (by_name["x"], by_name["w"]))
    y.meta |= {"stack_trace": "first", "nn_module_stack": {"first": ("first", torch.nn.Linear)}}
    z = graph.call_function(linear, (y, by_name["v"]))
    z.meta["stack_trace"] = "second"
    graph.output((z,))
    return GraphModule({}, graph), by_name


def spec(name: str) -> FetchSpec:
    return FetchSpec(f"m:{name}", (4, 4), (4, 1), torch.float32, CPU)


def test_place_fetches(golden: Golden) -> None:
    module, by_name = captured()
    place_fetches(module.graph, {by_name["w"]: spec("w"), by_name["v"]: spec("v"), by_name["unread"]: spec("unread")})
    module.recompile()
    golden(code(module))
    first, second = nodes(module.graph, ops.fetch)
    assert first.meta["stack_trace"] == "first" and first.meta["nn_module_stack"] == {
        "first": ("first", torch.nn.Linear)
    }
    assert second.meta["stack_trace"] == "second" and "nn_module_stack" not in second.meta


def test_place_fetches_makes_one_of_a_tied_weight(golden: Golden) -> None:
    module, by_name = captured()
    place_fetches(module.graph, {by_name["w"]: spec("w"), by_name["v"]: spec("w")})
    module.recompile()
    golden(code(module))


def test_drop_unread_fetches(golden: Golden) -> None:
    def function(x: Tensor) -> Tensor:
        weight("a").t().float()
        kept = weight("b")
        kept.t()
        x.add_(1)
        return x @ kept

    module = trace(function)
    drop_unread_fetches(module.graph)
    module.recompile()
    golden(code(module))


def test_insert_transfers_alone(golden: Golden) -> None:
    """By a schedule of our own: every copy as late as can be."""
    module = trace(chain_of_layers)
    uses = collect_uses(module.graph, aten_realized)
    insert_transfers(module.graph, uses, schedule(uses.windows, 64, 0), aten_realized)
    module.recompile()
    golden(code(module))


def test_tag_recompute(golden: Golden) -> None:
    def function(x: Tensor) -> Tensor:
        left, right = weight("a").float().chunk(2)
        noise = torch.rand_like(weight("b"))
        return x[:2] * left + x[2:] * right + noise[:2]

    graph = trace(function).graph
    tag_recompute(graph)
    rows = (f"{node.name}: {tag.name}" for node in graph.nodes if (tag := node.meta.get("recompute")))
    golden("\n".join([str(graph), "", *rows, ""]))


# --- nothing to do, metadata, refusals ---------------------------------------------------------------------------------


def untouched(graph: Graph, rewrite: Callable[[], Any]) -> bool:
    before, text = list(graph.nodes), str(graph)
    rewrite()
    return list(graph.nodes) == before and str(graph) == text


def test_graphs_without_weights_are_left_untouched() -> None:
    module = trace(lambda x: x.relu() @ x)
    graph = module.graph
    uses = collect_uses(graph, aten_realized)
    assert uses.fetches == () and uses.steps == () and uses.windows == ()
    assert untouched(graph, lambda: place_fetches(graph, {}))
    assert untouched(graph, lambda: drop_unread_fetches(graph))
    assert untouched(graph, lambda: insert_transfers(graph, uses, schedule((), 0), aten_realized))
    assert untouched(graph, lambda: tag_recompute(graph))
    assert untouched(graph, lambda: lowered(module))


@pytest.mark.parametrize("realized", [aten_realized, all_realized])
def test_inserted_nodes_carry_the_metadata_of_their_source(realized: Realized) -> None:
    module = trace(two_windows)
    for number, node in enumerate(module.graph.nodes):
        node.meta["stack_trace"] = f"line {number}"
        node.meta["nn_module_stack"] = {str(number): (f"layers.{number}", torch.nn.Linear)}
    module, _ = lowered(module, pool=160, realized=realized)
    inserted = [node for op in ops.TRANSFER_OPS for node in nodes(module.graph, op)]
    products = nodes(module.graph, torch.ops.aten.mm.default)
    assert len(inserted) == 3 * 5  # a is fetched again
    for node in inserted:
        if node.target is ops.offload:
            after: Any = node.args[2]
            (source,) = after
        else:
            takers = (user for user in node.users if user.target is ops.wait and user.args[0] is node)
            waited = next(takers, node)
            source = next(later for later in products if later > waited)
        assert node.meta["stack_trace"] == source.meta["stack_trace"]
        assert node.meta["nn_module_stack"] == source.meta["nn_module_stack"]
        value = node.meta["val"]
        expected = ((4, 4), torch.float32) if node.target is ops.wait else ((0,), torch.uint8)
        assert (tuple(value.shape), value.dtype) == expected


def test_an_in_place_method_without_readers_stays() -> None:
    """FX counts methods as pure: its dead-code elimination would drop this one."""
    graph = Graph()
    x = graph.placeholder("x")
    fetch = graph.call_function(ops.fetch, spec("a").arguments)
    graph.call_method("add_", (x, 1))
    y = graph.call_function(torch.matmul, (x, fetch))
    for node in (x, fetch, y):
        node.meta["example_value"] = example()
    graph.output((y,))
    module, _ = lowered(GraphModule({}, graph), realized=all_realized)
    assert "x.add_(1)" in module.code


def test_nothing_is_fetched_ahead_where_that_cannot_be() -> None:
    """With a lookahead of 0, or where a weight leaves the graph, a steady graph is the single one."""
    for function, lookahead in ((chain_of_layers, 0), (weight_returned, None)):
        single, _ = lowered(trace(function), 160, lookahead)
        steady, _ = lowered(trace(function), 160, lookahead, steady=True)
        assert code(steady) == code(single)
    no_weights = trace(lambda x: x.relu() @ x)
    assert untouched(no_weights.graph, lambda: lowered(no_weights, steady=True))


def test_a_pool_that_is_too_small_is_named_before_anything_is_rewritten() -> None:
    module = trace(two_stores)

    def refused() -> None:
        with pytest.raises(PoolTooSmall) as caught:
            lowered(module, pool={"m": 64, "n": 32})
        assert (caught.value.store, caught.value.least) == ("n", 64)

    assert untouched(module.graph, refused)


def test_a_pass_that_breaks_the_graph_is_named(tmp_path: Any) -> None:
    def break_it(graph: Graph) -> None:
        graph.erase_node(nodes(graph, ops.offload)[0])

    module, _ = lowered(trace(single_use))
    with pytest.raises(AssertionError, match="pass break_it on graph 'forward 3' left a broken graph: verify_graph"):
        Pipeline(module, "forward 3", tmp_path).apply(break_it)
    assert [file.name for file in tmp_path.iterdir()] == ["forward_3.00.break_it.before.py"]
