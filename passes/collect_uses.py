"""Where each fetched weight is used, in numbers that the planner can read.

The nodes that consume fetched weights, in graph order, are the compute steps 0..n-1. Work on one weight alone (views, casts)
belongs to the weight, not to a step: it moves with the wait. A consumer that the compiler may fuse into later kernels reads
its weight until the first realized node behind it has run, so its use ends ("closes") there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from .fetches import FetchSpec, fetch_nodes
from .realized import Realized
from .schedule import Window, windows_of

# Captured graphs speak of torch functions; only these are known to draw no random number and to mutate nothing.
_WEIGHT_WORK = frozenset(
    "t T mT view reshape transpose permute to float half bfloat16 double type contiguous unsqueeze squeeze flatten detach "
    "narrow chunk split unbind getitem getattr swapaxes movedim unflatten".split()
)


@dataclass(frozen=True, slots=True)
class Consumer:
    """A node that reads weights.

    Fields:
        node: the node; it runs in step `step`.
        closed_by: the realized node after which the weight is no longer read, None for the end of the graph.
        closes: the last step that begins before `closed_by` has run.
    """

    node: Node
    step: int
    closed_by: Node | None
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


def collect_uses(graph: Graph, realized: Realized, weights: Mapping[Node, FetchSpec] | None = None) -> Uses:
    """The uses of every fetch in `graph`. Reads only; linear in nodes.

    Args:
        graph: with fetch nodes.
        realized: says which nodes get a buffer of their own; see `realized.py`.
        weights: nodes to treat as fetches instead: placeholders that may become fetches.
    """
    if weights is None:
        weights = {fetch: FetchSpec.of(fetch) for fetch in fetch_nodes(graph)}
    fetched = [(fetch, *_follow(fetch, realized)) for fetch in weights]
    consumers = {node for _, _, nodes in fetched for node in nodes}
    position = {node: place for place, node in enumerate(graph.nodes)}
    steps = tuple(sorted(consumers, key=position.__getitem__))
    closing = _closing_nodes(graph, realized, position)
    begun = _steps_begun(graph, consumers)
    by_node = {
        node: Consumer(node, step, end := closing[node], len(steps) - 1 if end is None else begun[end])
        for step, node in enumerate(steps)
    }
    uses = (
        FetchUse(fetch, weights[fetch], work, tuple(sorted((by_node[n] for n in nodes), key=lambda c: c.step)))
        for fetch, work, nodes in fetched
        if nodes
    )
    return Uses(tuple(uses), steps)


def _follow(fetch: Node, realized: Realized) -> tuple[tuple[Node, ...], set[Node]]:
    """The nodes that work on this weight alone, in order, and the consumers behind them."""
    own, work, consumers = {fetch}, [], set()
    pending = [fetch]
    while pending:
        for user in pending.pop().users:
            if user in own:
                continue
            tensors = {node for node in user.all_input_nodes if _is_tensor(node)}
            if _is_weight_work(user) and not realized(user) and tensors <= own:
                own.add(user)
                work.append(user)
                pending.append(user)
            else:
                consumers.add(user)
    # A node that joins two branches of one weight is met before its second branch is: it may belong to the weight after all.
    return tuple(sorted(work)), consumers - own


def _is_tensor(node: Node) -> bool:
    value = node.meta.get("val", node.meta.get("example_value"))
    return not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))


def _is_weight_work(node: Node) -> bool:
    target = node.target
    if node.op == "call_method":
        return target in _WEIGHT_WORK
    if node.op != "call_function":
        return False
    if isinstance(target, OpOverload):
        return (
            target.namespace in ("aten", "prims")
            and torch.Tag.nondeterministic_seeded not in target.tags
            and not target._schema.is_mutable
        )
    return getattr(target, "__name__", "") in _WEIGHT_WORK


def _closing_nodes(graph: Graph, realized: Realized, position: dict[Node, int]) -> dict[Node, Node | None]:
    """For each node the first realized node among itself and what depends on it; None: the end of the graph."""
    closing: dict[Node, Node | None] = {}
    for node in reversed(graph.nodes):
        if realized(node):
            closing[node] = node
        else:
            behind = (closing[user] for user in node.users if user.op != "output")
            closing[node] = min((end for end in behind if end is not None), key=position.__getitem__, default=None)
    return closing


def _steps_begun(graph: Graph, consumers: Iterable[Node]) -> dict[Node, int]:
    """For each node the last step whose consumer stands at or before it; -1 before the first."""
    starts, begun, step = set(consumers), {}, -1
    for node in graph.nodes:
        step += node in starts
        begun[node] = step
    return begun
