"""Which nodes the inner compiler will give a buffer of their own.

Order in the rewritten graph hangs on such nodes only. An `after` edge to any other node would force the compiler to write out
a value that it would have kept in a fused kernel's registers, and fusion would be lost.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Node

Realized = Callable[[Node], bool]

aten = torch.ops.aten

_MATRIX_OPS = frozenset(
    packet
    for name in (
        "mm addmm bmm baddbmm addbmm addmv mv linear matmul convolution _convolution convolution_backward conv1d conv2d "
        "conv3d _grouped_mm _scaled_mm _int_mm _weight_int8pack_mm _weight_int4pack_mm "
        "scaled_dot_product_attention _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_flash_attention_backward "
        # Gathers from a table: written out, so that the table is not kept for every kernel that reads the result.
        "embedding index gather index_select"
    ).split()
    if (packet := getattr(aten, name, None)) is not None
)
_FUNCTION_NAMES = frozenset(
    "linear matmul mm addmm bmm baddbmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d bilinear "
    "scaled_dot_product_attention embedding embedding_bag index_select multi_head_attention_forward einsum dot mv".split()
)


def aten_realized(node: Node) -> bool:
    """For an ATen graph that Inductor will lower: matrix products, convolutions, attention, gathers, fallback ops, outputs."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    target = node.target
    if isinstance(target, HigherOrderOperator):
        return True
    if not isinstance(target, OpOverload):
        return False
    if target.namespace not in ("aten", "prims"):
        return True
    return target.overloadpacket in _MATRIX_OPS or _is_output(node)


def captured_realized(node: Node) -> bool:
    """For a graph as Dynamo captured it: by the function's name, an estimate of what `aten_realized` will find."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name in _FUNCTION_NAMES or isinstance(node.target, HigherOrderOperator) or _is_output(node)


def all_realized(node: Node) -> bool:
    """For a graph that is interpreted node by node."""
    value = node.meta.get("val", node.meta.get("example_value"))
    return node.op in ("call_function", "call_method") and isinstance(value, torch.Tensor)


def _is_output(node: Node) -> bool:
    return any(user.op == "output" for user in node.users)
