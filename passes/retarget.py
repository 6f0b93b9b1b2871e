"""Moves a graph to another device: the devices that nodes are given, and the fake values that they carry.

    arange = torch.ops.aten.arange.default(8, device=device(type='cpu'))
        ->   arange = torch.ops.aten.arange.default(8, device=device(type='cuda', index=0))

For exported programs, which have the device that they were exported on in their factory calls and conversions. Bodies of control
flow are moved with the graph that calls them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree


def retarget(graph: Graph, source: torch.device, target: torch.device) -> None:
    """Rewrites `graph` in place; what its bodies are replaced by are copies.

    Args:
        graph: with an owning module, which may hold bodies.
        source: the device that the graph is on; "cpu" stands for any index.
        target: the device that it moves to.
    """
    if source == target:
        return

    def moved(device: torch.device) -> torch.device:
        same = device.type == source.type and source.index in (None, device.index)
        return target if same else device

    bodies: dict[str, GraphModule] = {}
    _move(graph, moved, _Values(moved), bodies)
    for name, body in bodies.items():
        owner: Any = graph.owning_module
        setattr(owner, name, body)


def _move(
    graph: Graph, moved: Callable[[torch.device], torch.device], values: _Values, bodies: dict[str, GraphModule]
) -> None:
    def argument(value: Any) -> Any:
        return moved(value) if isinstance(value, torch.device) else value

    for node in graph.nodes:
        node.args = map_aggregate(node.args, argument)
        node.kwargs = map_aggregate(node.kwargs, argument)
        for name in ("val", "example_value"):
            if name in node.meta:
                node.meta[name] = pytree.tree_map_only(Tensor, values.moved, node.meta[name])
        body = getattr(graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(body, GraphModule):
            copy = GraphModule(body, Graph())
            copy.graph = Graph()
            output = copy.graph.graph_copy(body.graph, {})
            copy.graph.output(output)
            inner: dict[str, GraphModule] = {}
            _move(copy.graph, moved, values, inner)
            for name, one in inner.items():
                setattr(copy, name, one)
            copy.recompile()
            bodies[str(node.target)] = copy


class _Values:
    """Fake values on their new device; those that shared memory still do."""

    def __init__(self, moved: Callable[[torch.device], torch.device]) -> None:
        self._moved = moved
        self._memories: dict[int, tuple[Tensor, torch.UntypedStorage]] = {}

    def moved(self, value: Tensor) -> Tensor:
        device = self._moved(value.device)
        if device == value.device or not isinstance(value, FakeTensor):
            return value
        with value.fake_mode:
            if value.layout is not torch.strided:
                return value.to(device)
            storage = value.untyped_storage()
            if storage._cdata not in self._memories:
                # The old storage is kept, or another could get its address.
                self._memories[storage._cdata] = (
                    torch.empty(storage.nbytes(), dtype=torch.uint8, device=device),
                    storage,
                )
            memory, _ = self._memories[storage._cdata]
            offset = value.storage_offset()
            return memory.view(value.dtype).as_strided(value.shape, value.stride(), offset)
