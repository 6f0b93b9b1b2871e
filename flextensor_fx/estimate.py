"""Rough costs for the first plan: what each step computes, at rates measured in a few milliseconds.

Every number here is an estimate and is called one in reports. It shapes a plan, never a result.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from .link_curve import kept_link
from .passes.aliasing import may_alias
from .passes.collect_uses import Uses
from .passes.metadata import function_name, hint_of, is_tensor, value_of
from .simulate import Link

_SIDE = 512
_DISK_BYTES_PER_MS = 1.5e6
_DISK_LATENCY_MS = 0.1
_WRITTEN = 0.3  # share of the elementwise results that are written out, and not fused into what reads them
_PRODUCTS = frozenset("matmul __matmul__ bmm mm baddbmm einsum".split())


def default_link(store_dir: str | os.PathLike[str] | None = None) -> Link:
    """What is known of the disk under a store directory: its curve if one was measured on this machine, else 1.5 GB/s."""
    kept = kept_link(store_dir)
    return Link(_DISK_LATENCY_MS, _DISK_BYTES_PER_MS, "estimated") if kept is None else kept.link


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device does per ms: floating-point operations of a matrix product, and bytes that it reads or writes."""

    flops_per_ms: float
    bytes_per_ms: float


def measure_compute() -> float:
    """Floating-point operations per ms of a matrix product, to the nearest power of the square root of 2.

    Coarse, so that where nothing can be kept, most processes agree all the same.
    """
    with torch.inference_mode():
        a = torch.ones(_SIDE, _SIDE, device="cpu")
        _timed(lambda: a @ a)
        seconds = min(_timed(lambda: a @ a) for _ in range(10))
    return 2.0 ** (round(2 * math.log2(2 * _SIDE**3 / (seconds * 1000))) / 2)


def step_costs(graph: Graph, uses: Uses, rates: Rates) -> list[float]:
    """Estimated ms of each step of a captured graph, from the nodes' shapes.

    1. A product with a weight takes its floating-point operations, at least the reading of the weight.
    2. Of the work up to the next step, attention and products of activations count by their operations, views not at all, and
       all else by the bytes that it writes, as far as these are not fused away. What comes before the first step counts there.
    """
    costs = [0.0] * len(uses.steps)
    if not costs:
        return costs
    for use in uses.fetches:
        for consumer in use.consumers:
            elements, channels = _output_of(consumer.node)
            matrix = len(use.spec.size) > 1 and _multiplies(consumer.node)
            width = math.prod(use.spec.size) / max(channels, 1) if matrix else 1.0
            # A product of few rows is bound by reading its weight.
            least = use.spec.nbytes / rates.bytes_per_ms if matrix else 0.0
            costs[consumer.step] += max(2 * elements * width / rates.flops_per_ms, least)
    starts = {node: step for step, node in enumerate(uses.steps)}
    of_weights = {node for use in uses.fetches for node in use.weight_work}
    step = 0
    for node in graph.nodes:
        step = starts.get(node, step)
        if node.op in ("call_function", "call_method") and node not in starts and node not in of_weights:
            costs[step] += _work_ms(node, rates)
    return costs


def _work_ms(node: Node, rates: Rates) -> float:
    """Estimated ms of a node that reads no weight."""
    if may_alias(node) or not is_tensor(node):
        return 0.0
    if not (value_of(node).is_floating_point() or value_of(node).is_complex()):
        return 0.0  # positions and masks are little, and torch.export writes them otherwise than Dynamo does
    name = function_name(node)
    elements, _ = _output_of(node)
    inputs = (*node.args, *node.kwargs.values())  # one may come twice
    given = [value for value in inputs if isinstance(value, Node) and is_tensor(value)]
    shapes = [[hint_of(extent) for extent in value_of(source).shape] for source in given]
    if name == "scaled_dot_product_attention" and len(shapes) > 1 and len(shapes[1]) > 1:
        return 4 * math.prod(shapes[0]) * shapes[1][-2] / rates.flops_per_ms  # queries by keys, and scores by values
    if name in _PRODUCTS and shapes and shapes[0]:
        return 2 * elements * shapes[0][-1] / rates.flops_per_ms
    return elements * value_of(node).dtype.itemsize * _WRITTEN / rates.bytes_per_ms


def _timed(call: Any) -> float:
    start = time.perf_counter()
    call()
    return max(time.perf_counter() - start, 1e-6)


def _multiplies(node: Node) -> bool:
    name = function_name(node)
    return "embedding" not in str(name)


def _output_of(node: Node) -> tuple[float, int]:
    """Elements of a node's output, and its channels (the last dimension, of images the second)."""
    value = node.meta.get("val", node.meta.get("example_value"))
    if not isinstance(value, torch.Tensor) or not value.dim():
        return 1.0, 1
    shape = [hint_of(extent) for extent in value.shape]
    channels = shape[1] if "conv" in str(node.target) and len(shape) > 2 else shape[-1]
    return float(math.prod(shape)), channels
