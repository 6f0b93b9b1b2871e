"""Small graphs for the tests of the passes: traced to ATen with fake tensors, weights named by fetch nodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from flextensor_fx.passes import ops
from flextensor_fx.passes.pipeline import Limit, Pipeline, lower
from flextensor_fx.passes.realized import Realized, aten_realized
from flextensor_fx.passes.schedule import Schedule
from flextensor_fx.passes.steady_schedule import SteadySchedule
from flextensor_fx.passes.verify_graph import GraphError, verify_graph
from flextensor_fx.runtime.layout import contiguous_stride

CPU = torch.device("cpu")
SIDE = 4


def weight(name: str, *size: int, store: str = "m", dtype: torch.dtype = torch.float32) -> Tensor:
    """The fetch of weight `name`; of shape (4, 4), 64 bytes, where no size is given."""
    size = size or (SIDE, SIDE)
    return ops.fetch(f"{store}:{name}", size, contiguous_stride(size), dtype, CPU)


def example() -> Tensor:
    """An input, shape (4, 4)."""
    return torch.ones(SIDE, SIDE)


def trace(function: Callable[..., Any], *inputs: Tensor, symbolic: bool = False) -> GraphModule:
    """`function` as an ATen graph; of one input from `example` where none is given."""
    return make_fx(function, tracing_mode="symbolic" if symbolic else "fake")(*(inputs or (example(),)))


def lowered(
    module: GraphModule,
    pool: int | Mapping[str, int] = 1 << 20,
    lookahead: int | None = None,
    realized: Realized = aten_realized,
    *,
    steady: bool = False,
) -> tuple[GraphModule, dict[str, Schedule | SteadySchedule]]:
    """`module` with its fetches lowered within `pool` bytes per store."""
    pools = pool if isinstance(pool, Mapping) else dict.fromkeys(("m", "n"), pool)
    limits = {store: Limit(nbytes, lookahead) for store, nbytes in pools.items()}
    return module, lower(Pipeline(module, "test"), realized, limits, steady=steady)


def code(module: GraphModule) -> str:
    """The code of `module`, without what differs between versions of torch."""
    lines = (re.sub(r";  [\w, =]+ = None$", "", line.rstrip()) for line in module.code.splitlines())
    kept = "\n".join(line for line in lines if line)
    return kept.replace("torch.ops.", "").replace("flextensor_fx.", "").replace("device(type='cpu')", "cpu") + "\n"


def nodes(graph: Graph, target: Any) -> list[Node]:
    """The calls of `target`, in order."""
    return list(graph.find_nodes(op="call_function", target=target))


def assert_breaks(graph: Graph, pools: Mapping[str, int], break_it: Callable[[], None], message: str) -> None:
    """`verify_graph` finds nothing wrong with `graph`, and `message` once `break_it` has been called."""
    verify_graph(graph, pools)
    break_it()
    with pytest.raises(GraphError) as caught:
        verify_graph(graph, pools)
    assert message in str(caught.value)
