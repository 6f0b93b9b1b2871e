"""Reading fetch and wait nodes: the weight that one names, and its size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from . import ops


@dataclass(frozen=True, slots=True)
class FetchSpec:
    """What a fetch yields: weight `key`, with this shape, stride (in elements), dtype and compute device."""

    key: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Bytes of the weight's elements; its layout is dense."""
        return math.prod(self.size) * self.dtype.itemsize

    @property
    def arguments(self) -> tuple[str, list[int], list[int], torch.dtype, torch.device]:
        """As the ops take them."""
        return self.key, list(self.size), list(self.stride), self.dtype, self.device

    @staticmethod
    def of(node: Node) -> FetchSpec:
        """The spec that a `fetch` or `wait` node carries."""
        if node.target is ops.fetch:
            key, size, stride, dtype, device = node.args
        elif node.target is ops.wait:
            _, key, size, stride, dtype, device, _ = node.args
        else:
            raise AssertionError(f"{node.format_node()}: expected a fetch or a wait")
        return FetchSpec(key, tuple(size), tuple(stride), dtype, device)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, slots=True)
class Packed:
    """The place of a weight in a pack of small ones, which is fetched as a whole.

    Fields:
        pack: what that fetch yields: one flat tensor.
        offset: of the weight's first element in it.
    """

    pack: FetchSpec
    offset: int


def fetch_nodes(graph: Graph) -> Iterator[Node]:
    """The fetch nodes of `graph`, in its order."""
    return (node for node in graph.nodes if node.op == "call_function" and node.target is ops.fetch)
