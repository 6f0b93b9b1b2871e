"""Which nodes the inner compiler will give a buffer of their own.

Order in the rewritten graph hangs on such nodes only. An `after` edge to any other node would force the compiler to write out
a value that it would have kept in a fused kernel's registers, and fusion would be lost.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, Node

from . import ops
from .aliasing import may_alias
from .metadata import function_name, is_tensor

Realized = Callable[[Node], bool]

aten = torch.ops.aten

_MATRIX_OPS = frozenset(
    packet
    for name in (
        "mm addmm bmm baddbmm addbmm addmv mv linear matmul convolution _convolution convolution_backward conv1d conv2d "
        "conv3d _grouped_mm _scaled_mm _int_mm _weight_int8pack_mm _weight_int4pack_mm "
        "scaled_dot_product_attention _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_flash_attention_backward"
    ).split()
    if (packet := getattr(aten, name, None)) is not None
)
# The compiler repeats a gather in every kernel that reads its result. One from a streamed table is made to be written out, or
# the table would be kept for all of them; any other is left to the compiler.
_GATHERS = frozenset((aten.embedding, aten.index, aten.gather, aten.index_select))
_FUNCTION_NAMES = frozenset(
    "linear matmul mm addmm bmm baddbmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d bilinear "
    "scaled_dot_product_attention embedding embedding_bag index_select multi_head_attention_forward einsum dot mv".split()
)


def aten_realized(node: Node) -> bool:
    """For an ATen graph that Inductor will lower: matrix products, convolutions, attention, gathers from streamed tables, ops of
    other libraries, outputs."""
    if node.op != "call_function" or not is_tensor(node):
        return False
    maker = node.args[0] if node.target is operator.getitem else node  # one result of several
    if not isinstance(maker, Node):
        return False
    target = maker.target
    if isinstance(target, HigherOrderOperator):
        return True
    if not isinstance(target, OpOverload):
        return False
    if target.namespace not in ("aten", "prims"):
        return True
    packet = target.overloadpacket
    return packet in _MATRIX_OPS or (packet in _GATHERS and _is_streamed(maker.args[0])) or _is_output(node)


def captured_realized(node: Node) -> bool:
    """For a graph as Dynamo captured it: by the function's name, an estimate of what `aten_realized` will find."""
    if node.op not in ("call_function", "call_method"):
        return False
    return function_name(node) in _FUNCTION_NAMES or isinstance(node.target, HigherOrderOperator) or _is_output(node)


def captured_elementwise(node: Node) -> bool:
    """For a graph as Dynamo captured it: whether the function is an elementwise one, by the op of its name."""
    name = function_name(node)
    packet = getattr(aten, "div" if name == "truediv" else name.strip("_"), None) if name else None
    return packet is not None and any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
    )


def all_realized(node: Node) -> bool:
    """For a graph that is interpreted node by node: every tensor that is not memory of an argument.

    A view of a weight keeps the weight's memory: were it counted as a value of its own, the weight would be given up while the
    view is still read, and more memory be held than the pool has.
    """
    return node.op in ("call_function", "call_method") and is_tensor(node) and not may_alias(node)


def last_realized_before(graph: Graph, steps: Sequence[Node], realized: Realized) -> list[list[Node]]:
    """For each step the last realized node before its consumer, as a list of one or none; transfers are none."""
    index = {node: step for step, node in enumerate(steps)}
    before: list[list[Node]] = [[]] * len(steps)
    last: list[Node] = []
    for node in graph.nodes:
        if node in index:
            before[index[node]] = last
        if node.target not in ops.ALL_OPS and realized(node):
            last = [node]
    return before


def _is_streamed(value: object) -> bool:
    """Whether `value` is a fetched weight, or made from one weight alone."""
    while isinstance(value, Node) and value.target not in (ops.fetch, ops.wait):
        sources = value.all_input_nodes
        value = sources[0] if len(sources) == 1 else None
    return value is not None


def _is_output(node: Node) -> bool:
    """Whether `node` is written out for the caller. A view is not: were that of a weight, the caller would hold the weight."""
    return any(user.op == "output" for user in node.users) and not may_alias(node)
