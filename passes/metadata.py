"""What nodes carry about themselves: the value seen while tracing, and their place in the user's code."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch.fx import Node

from . import ops
from .fetches import FetchSpec

_PLACE = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "source_fn_stack", "seq_nr", "partitioner_tag")


def value_of(node: Node) -> Any:
    """The fake value of `node`: "val" in ATen graphs, "example_value" in graphs as Dynamo captured them; None if unknown."""
    return node.meta.get("val", node.meta.get("example_value"))


def hint_of(extent: Any) -> int:
    """A size, which may be a symbol, as seen at this call; reading it adds no guard. 1 where it is not known."""
    if isinstance(extent, torch.SymInt):
        hint = extent.node.hint
        return 1 if hint is None else int(hint)
    return int(extent)


def function_name(node: Node) -> str:
    """The name of the function, method or op that `node` calls, without namespace and overload; "" of other nodes."""
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    if isinstance(node.target, OpOverload):
        return node.target._schema.name.split("::")[1]
    return getattr(node.target, "__name__", "")


def is_tensor(node: Node) -> bool:
    """Whether `node` yields one tensor."""
    return isinstance(value_of(node), Tensor)


def inherit_place(node: Node, source: Node) -> None:
    """Gives an inserted node the place in the user's code of the node that it was inserted for."""
    node.meta.update({name: source.meta[name] for name in _PLACE if name in source.meta})


class ValueMaker:
    """Makes the fake values of inserted nodes, in the fake mode and under the name that the graph uses.

    Args:
        nodes: of the graph, some with a value. Where none has one, inserted nodes get none either.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        nodes = list(nodes)
        self._name = "val" if any("val" in node.meta for node in nodes) else "example_value"
        self._mode = detect_fake_mode([value_of(node) for node in nodes])

    def set_weight(self, node: Node, spec: FetchSpec) -> None:
        """`node` yields the weight of `spec`."""
        if self._mode is not None:
            with self._mode:
                node.meta[self._name] = ops.fetch(*spec.arguments)

    def set_token(self, node: Node, device: torch.device) -> None:
        """`node` yields a token."""
        if self._mode is not None:
            with self._mode:
                node.meta[self._name] = ops.new_token(device)
