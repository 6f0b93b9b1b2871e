"""Where each fetched weight is used, in numbers that the planner can read.

The nodes that consume fetched weights, in graph order, are the compute steps 0..n-1. Work on one weight alone (views, casts)
belongs to the weight, not to a step: it moves with the wait.

A consumer that the compiler may fuse into later kernels reads its weight until one of them has run, so its use ends
("closes") at a later node: follow its only user until a node is realized. Where the way forks, the node there closes the use:
the order edge to it makes the compiler write it out, for else each branch could read the weight again, at any later time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from .aliasing import ALIASING_NAMES, may_alias
from .fetches import FetchSpec, fetch_nodes
from .metadata import is_tensor, value_of
from .realized import Realized
from .schedule import Window, format_table, windows_of


@dataclass(frozen=True, slots=True)
class Consumer:
    """A node that reads weights.

    Fields:
        node: the node; it runs in step `step`.
        closed_by: tensors; when all of them have been computed the weight is no longer read. Empty where nothing says so before
            the end of the graph.
        closes: the last step that begins before that.
    """

    node: Node
    step: int
    closed_by: tuple[Node, ...]
    closes: int


@dataclass(frozen=True, slots=True)
class FetchUse:
    """One fetch: its weight, the nodes that work on it alone, and its consumers in the order of their steps."""

    node: Node
    spec: FetchSpec
    weight_work: tuple[Node, ...]
    consumers: tuple[Consumer, ...]


@dataclass(frozen=True, slots=True)
class Uses:
    """All fetches of a graph that have a consumer, and the node of each step."""

    fetches: tuple[FetchUse, ...]
    steps: tuple[Node, ...]

    @property
    def by_weight(self) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
        """(key, bytes, steps that use it) for each weight, as the planner takes them."""
        return tuple(
            (use.spec.key, use.spec.nbytes, tuple(sorted({c.step for c in use.consumers}))) for use in self.fetches
        )

    @property
    def windows(self) -> tuple[Window, ...]:
        """The stays of the weights, each until its last consumer's use has closed."""
        closes = {(use.spec.key, c.step): c.closes for use in self.fetches for c in use.consumers}
        steps = {key: steps for key, _, steps in self.by_weight}
        merged: dict[str, list[Window]] = {}
        for w in windows_of(self.by_weight):
            last = max(closes[w.key, step] for step in steps[w.key] if w.first_use <= step <= w.last_use)
            stays = merged.setdefault(w.key, [])
            if stays and stays[-1].last_use >= w.first_use:  # still read when it is used again: one stay
                previous = stays.pop()
                w = Window(w.key, w.nbytes, previous.first_use, w.last_use)
                last = max(last, previous.last_use)
            stays.append(Window(w.key, w.nbytes, w.first_use, last))
        return tuple(sorted((w for stays in merged.values() for w in stays), key=lambda w: w.first_use))

    def __str__(self) -> str:
        rows = [
            (
                use.spec.key,
                c.node.name,
                str(c.step),
                ", ".join(node.name for node in c.closed_by) or "the end",
                str(c.closes),
            )
            for use in self.fetches
            for c in use.consumers
        ]
        title = f"Uses: {len(self.fetches)} weights, {len(self.steps)} steps"
        return title + "\n" + format_table(("key", "consumer", "step", "closed by", "closes"), rows, left=2)


def collect_uses(graph: Graph, realized: Realized, weights: Mapping[Node, FetchSpec] | None = None) -> Uses:
    """The uses of every fetch in `graph`. Reads only; linear in nodes.

    Args:
        graph: with fetch nodes.
        realized: says which nodes get a buffer of their own; see `realized.py`.
        weights: the fetches to look at, or nodes to treat as fetches: placeholders that may become some. None: all fetches.
    """
    if weights is None:
        weights = {fetch: FetchSpec.of(fetch) for fetch in fetch_nodes(graph)}
    fetched = [(fetch, *_follow(fetch, realized)) for fetch in weights]
    position = {node: place for place, node in enumerate(graph.nodes)}
    steps = tuple(sorted({node for _, _, nodes in fetched for node in nodes}, key=position.__getitem__))
    closing = _closing_nodes(graph, realized)
    begun = _steps_begun(graph, steps)
    by_node: dict[Node, Consumer] = {}
    for step, node in enumerate(steps):
        last = max(closing[node], key=position.__getitem__, default=None)
        by_node[node] = Consumer(node, step, closing[node], len(steps) - 1 if last is None else begun[last])
    uses = (
        FetchUse(fetch, weights[fetch], work, tuple(sorted((by_node[n] for n in nodes), key=lambda c: c.step)))
        for fetch, work, nodes in fetched
        if nodes
    )
    return Uses(tuple(uses), steps)


def is_weight_work(node: Node) -> bool:
    """Whether `node` may be run anywhere behind its arguments: it draws no random number and mutates nothing."""
    target = node.target
    if isinstance(target, OpOverload):
        return (
            target.namespace in ("aten", "prims")
            and torch.Tag.nondeterministic_seeded not in target.tags
            and not target._schema.is_mutable
        )
    name = target if node.op == "call_method" else getattr(target, "__name__", "")
    return node.op in ("call_function", "call_method") and name in ALIASING_NAMES


def _follow(fetch: Node, realized: Realized) -> tuple[tuple[Node, ...], set[Node]]:
    """The nodes that work on this weight alone, in order, and the consumers behind them."""
    own, work, consumers = {fetch}, [], set()
    pending = [fetch]
    while pending:
        for user in pending.pop().users:
            if user in own:
                continue
            inputs = {node for node in user.all_input_nodes if not _is_number(node)}
            if is_weight_work(user) and not realized(user) and inputs <= own:
                own.add(user)
                work.append(user)
                pending.append(user)
            else:
                consumers.add(user)
    # A node that joins two branches of one weight is met before its second branch is: it may belong to the weight after all.
    return tuple(sorted(work)), consumers - own


def _is_number(node: Node) -> bool:
    return isinstance(value_of(node), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))


def _closing_nodes(graph: Graph, realized: Realized) -> dict[Node, tuple[Node, ...]]:
    """For each node the tensors that have been computed only once it is no longer needed; see the head of this file."""
    closing: dict[Node, tuple[Node, ...]] = {}
    for node in reversed(graph.nodes):
        tensor = is_tensor(node)
        if realized(node) or (tensor and len(node.users) != 1 and not may_alias(node)):
            closing[node] = (node,)
        else:
            behind = tuple(dict.fromkeys(end for user in node.users for end in closing[user]))
            closing[node] = behind or ((node,) if tensor else ())
    return closing


def _steps_begun(graph: Graph, steps: tuple[Node, ...]) -> dict[Node, int]:
    """For each node the last step whose consumer stands at or before it; -1 before the first."""
    starts, begun, step = set(steps), {}, -1
    for node in graph.nodes:
        step += node in starts
        begun[node] = step
    return begun
