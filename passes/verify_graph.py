"""Checks a rewritten graph by its edges alone. Shares nothing with the code that rewrites."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch.fx import Graph, Node

from . import ops


class GraphError(AssertionError):
    """A graph in which a weight could be read too early, or memory be held beyond the pool: a bug in a pass."""


def verify_graph(graph: Graph, pools: Mapping[str, int] | None = None) -> None:
    """Raises unless the order of transfers is safe in every order of execution that the edges allow.

    1. A store with a transfer has no fetch left.
    2. Every wait takes the token of a prefetch of its own key; every prefetch has exactly one wait.
    3. Every weight is given up by one offload of its own key, or leaves the graph; nothing else is.
    4. Every path from a weight meets, before it ends, a tensor that the weight's offload comes after. Whatever is behind that
       tensor reads the tensor, not the weight.
    5. Prefetches of one store form a chain, and those ahead go on with it: their order is fixed.
    6. Whenever a prefetch, ahead or not, may run, the weights of its store that are issued and not surely given up fit the
       store's pool. A call begins with all that the call before has issued ahead, each until its prefetch takes it over.
    7. A prefetch ahead has, under its key, a prefetch that may run when the call begins. No two are of one key, and they come in
       the order of those prefetches. A store with one lets no weight leave the graph: it would be held into the next call.

    Linear in nodes, apart from one bit per transfer and node.

    Args:
        pools: bytes by store, the part of a key before ":"; None leaves rule 6 out.

    Raises:
        GraphError: with the node and its neighbours.
    """
    found: dict[Any, list[Node]] = {op: [] for op in ops.ALL_OPS}
    for node in graph.nodes:
        if node.op == "call_function" and node.target in found:
            found[node.target].append(node)
    stores = {_store(node) for op in (*ops.TRANSFER_OPS, ops.prefetch_ahead) for node in found[op]}
    for fetch in found[ops.fetch]:
        if _store(fetch) in stores:
            _fail(fetch, "a fetch is left beside transfers")
    waits = {prefetch: _wait_of(prefetch) for prefetch in found[ops.prefetch]}
    for wait in found[ops.wait]:
        if wait.args[0] not in waits:
            _fail(wait, "expected the token of a prefetch")
    offloads = {prefetch: _offload_of(wait) for prefetch, wait in waits.items()}
    for offload in found[ops.offload]:
        if offload not in offloads.values():
            _fail(offload, "expected the weight of a wait")
    _check_chains([*found[ops.prefetch], *found[ops.prefetch_ahead]])
    taken_over = _check_ahead(found[ops.prefetch_ahead], offloads)
    if pools is not None:
        _check_memory(graph, waits, offloads, taken_over, pools)


def _wait_of(prefetch: Node) -> Node:
    takers = [user for user in prefetch.users if user.target is ops.wait and user.args[0] is prefetch]
    if len(takers) != 1:
        _fail(prefetch, f"expected one wait to take its token, found {len(takers)}")
    if _key(takers[0]) != _key(prefetch):
        _fail(takers[0], f"expected the key of its prefetch, {_key(prefetch)!r}")
    return takers[0]


def _offload_of(wait: Node) -> Node | None:
    """The offload of a weight, None for a weight that leaves the graph."""
    offloads = [user for user in wait.users if user.target is ops.offload and user.args[0] is wait]
    if not offloads and _leaves(wait):
        return None
    if [_key(offload) for offload in offloads] != [_key(wait)]:
        _fail(wait, f"expected one offload of its own key, found {[_key(offload) for offload in offloads]}")
    _check_paths(wait, offloads[0])
    return offloads[0]


def _leaves(wait: Node) -> bool:
    """Whether the weight, or what was made of it alone, is an output."""
    own, pending = {wait}, [wait]
    while pending:
        for user in pending.pop().users:
            if user.op == "output":
                return True
            if user not in own and all(source in own for source in user.all_input_nodes):
                own.add(user)
                pending.append(user)
    return False


def _check_paths(wait: Node, offload: Node) -> None:
    ends, pending = {offload, *_nodes(offload.args[2])}, [wait]
    while pending:
        node = pending.pop()
        # An assertion yields no tensor: nothing can be made to come after it.
        if node.op == "output" or (not node.users and _is_tensor(node)):
            _fail(node, f"it may read {_key(wait)!r} after {offload} has given that up")
        behind = [user for user in node.users if user not in ends]
        pending += behind
        ends.update(behind)


def _check_chains(prefetches: Sequence[Node]) -> None:
    chains: dict[str, list[Node]] = {}
    for prefetch in prefetches:
        chains.setdefault(_store(prefetch), []).append(prefetch)
    for chain in chains.values():
        for earlier, later in pairwise(chain):
            if earlier not in _nodes(later.args[2]):
                _fail(later, f"expected it to come after {earlier}, the prefetch before it")


def _check_ahead(ahead: Sequence[Node], offloads: Mapping[Node, Node | None]) -> dict[Node, Node]:
    """For each prefetch that takes over a copy of the call before: the prefetch_ahead that starts that copy."""
    at_begin: dict[Node, int] = {}  # the prefetches that nothing but such prefetches comes before, in order
    first: dict[str, Node] = {}
    for prefetch in offloads:
        first.setdefault(_key(prefetch), prefetch)
        if all(source in at_begin for source in prefetch.all_input_nodes):
            at_begin[prefetch] = len(at_begin)
    taken_over: dict[Node, Node] = {}
    last: dict[str, int] = {}
    for node in ahead:
        prefetch = first.get(_key(node))
        if prefetch is None or prefetch not in at_begin:
            _fail(node, f"expected a prefetch of {_key(node)!r} that may run when a call begins")
        if prefetch in taken_over:
            _fail(node, f"{taken_over[prefetch]} is ahead for {_key(node)!r} already")
        if at_begin[prefetch] < last.get(_store(node), 0):
            _fail(
                node,
                f"it is ahead in another order than the prefetches: {prefetch} comes before the one of the node before",
            )
        taken_over[prefetch] = node
        last[_store(node)] = at_begin[prefetch]
    for prefetch, offload in offloads.items():
        if offload is None and _store(prefetch) in last:
            _fail(
                prefetch,
                f"{_key(prefetch)!r} leaves the graph, but the store has prefetches ahead, which need its memory",
            )
    return taken_over


def _check_memory(
    graph: Graph,
    waits: Mapping[Node, Node],
    offloads: Mapping[Node, Node | None],
    taken_over: Mapping[Node, Node],
    pools: Mapping[str, int],
) -> None:
    """Replays the chains of prefetches; a weight is surely given up when its offload is an ancestor of the prefetch."""
    nbytes = {prefetch: _nbytes(wait) for prefetch, wait in waits.items()}
    nbytes |= {ahead: nbytes[prefetch] for prefetch, ahead in taken_over.items()}
    bit = {offload: 1 << place for place, offload in enumerate(o for o in offloads.values() if o is not None)}
    freed: dict[Node, int] = {}  # the offloads among a node's ancestors, as bits
    held: dict[str, dict[Node, int]] = {store: {} for store in pools}
    for ahead in taken_over.values():
        held[_store(ahead)][ahead] = nbytes[ahead]
    for node in graph.nodes:
        ancestors = 0
        for source in node.all_input_nodes:
            ancestors |= freed[source]
        freed[node] = ancestors | bit.get(node, 0)
        if node not in nbytes:
            continue
        store = _store(node)
        alive = {
            prefetch: size
            for prefetch, size in held[store].items()
            if (offload := offloads.get(prefetch)) is None or not ancestors & bit[offload]
        }
        alive.pop(taken_over.get(node, node), None)
        alive[node] = nbytes[node]
        held[store] = alive
        together = sum(alive.values())
        if together > pools[store]:
            names = ", ".join(_key(prefetch) for prefetch in alive)
            _fail(node, f"the pool has {pools[store]} bytes, {together} may be held together: {names}")


def _key(node: Node) -> str:
    """The key that a node of ours names."""
    return str(node.args[0 if node.target in (ops.fetch, ops.prefetch, ops.prefetch_ahead) else 1])


def _store(node: Node) -> str:
    return _key(node).partition(":")[0]


def _nodes(after: Any) -> list[Node]:
    return list(after)


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val", node.meta.get("example_value")), torch.Tensor)


def _nbytes(wait: Node) -> int:
    size: Any = wait.args[2]
    dtype: Any = wait.args[4]
    return math.prod(size) * dtype.itemsize


def _fail(node: Node, problem: str) -> NoReturn:
    near = [node.prev.prev, node.prev, node, node.next, node.next.next]
    lines = [f"  {'>' if other is node else ' '} {other.format_node()}" for other in near if other.op != "root"]
    raise GraphError("\n".join([f"verify_graph: {node.name}: {problem}", *lines]))
