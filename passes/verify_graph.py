"""Checks a rewritten graph by its edges alone. Shares nothing with the code that rewrites."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Graph, Node

from . import ops


class GraphError(AssertionError):
    """A graph in which a weight could be read too early, or memory be held beyond the pool: a bug in a pass."""


def verify_graph(graph: Graph, pools: Mapping[str, int] | None = None) -> None:
    """Raises unless the order of transfers is safe in every order of execution that the edges allow.

    1. No fetch is left once there is a transfer.
    2. Every wait takes the token of a prefetch of its own key; every prefetch has exactly one wait.
    3. Every weight is given up by one offload of its own key, or leaves the graph.
    4. Prefetches of one store form a chain: their order is fixed.
    5. Whenever a prefetch may run, the weights of its store that are issued and not surely given up fit the store's pool.

    Args:
        pools: bytes by store, the part of a key before ":"; None leaves rule 5 out.

    Raises:
        GraphError: with the node and its neighbours.
    """
    transfers = [node for node in graph.nodes if node.op == "call_function" and node.target in ops.TRANSFER_OPS]
    prefetches = [node for node in transfers if node.target is ops.prefetch]
    if not transfers:
        return
    for node in graph.nodes:
        if node.op == "call_function" and node.target is ops.fetch:
            _fail(node, "a fetch is left beside transfers")
    waits = {prefetch: _wait_of(prefetch) for prefetch in prefetches}
    for node in transfers:
        if node.target is ops.wait and (not isinstance(node.args[0], Node) or node.args[0] not in waits):
            _fail(node, "expected the token of a prefetch")
    offloads = {prefetch: _offload_of(wait) for prefetch, wait in waits.items()}
    stores: dict[str, list[Node]] = {}
    for prefetch in prefetches:
        stores.setdefault(_store(prefetch), []).append(prefetch)
    for chain in stores.values():
        for earlier, later in zip(chain, chain[1:], strict=False):
            if earlier not in later.args[2]:  # pyright: ignore[reportOperatorIssue]
                _fail(later, f"expected it to come after {earlier}, the prefetch before it")
    if pools is not None:
        _check_memory(graph, waits, offloads, pools)


def _wait_of(prefetch: Node) -> Node:
    takers = [user for user in prefetch.users if user.target is ops.wait and user.args[0] is prefetch]
    if len(takers) != 1:
        _fail(prefetch, f"expected one wait to take its token, found {len(takers)}")
    if takers[0].args[1] != prefetch.args[0]:
        _fail(takers[0], f"expected the key of its prefetch, {prefetch.args[0]!r}")
    return takers[0]


def _offload_of(wait: Node) -> Node | None:
    offloads = [user for user in wait.users if user.target is ops.offload]
    if len(offloads) > 1 or any(node.args[1] != wait.args[1] for node in offloads):
        _fail(wait, f"expected one offload of its own key, found {[node.args[1] for node in offloads]}")
    return offloads[0] if offloads else None


def _check_memory(
    graph: Graph, waits: dict[Node, Node], offloads: dict[Node, Node | None], pools: Mapping[str, int]
) -> None:
    """Replays the chains of prefetches; a weight is surely given up when its offload is an ancestor of the prefetch."""
    bit = {offload: 1 << place for place, offload in enumerate(o for o in offloads.values() if o is not None)}
    freed: dict[Node, int] = {}  # the offloads among a node's ancestors, as bits
    held: dict[str, dict[Node, int]] = {store: {} for store in pools}
    for node in graph.nodes:
        ancestors = 0
        for source in node.all_input_nodes:
            ancestors |= freed[source]
        freed[node] = ancestors | bit.get(node, 0)
        if node.op != "call_function" or node.target is not ops.prefetch:
            continue
        store = _store(node)
        alive = {
            prefetch: size
            for prefetch, size in held[store].items()
            if (offload := offloads[prefetch]) is None or not ancestors & bit[offload]
        }
        alive[node] = _nbytes(waits[node])
        held[store] = alive
        if sum(alive.values()) > pools[store]:
            names = ", ".join(str(prefetch.args[0]) for prefetch in alive)
            _fail(node, f"the pool has {pools[store]} bytes, {sum(alive.values())} may be held together: {names}")


def _store(prefetch: Node) -> str:
    return str(prefetch.args[0]).partition(":")[0]


def _nbytes(wait: Node) -> int:
    count = 1
    for extent in wait.args[2]:  # pyright: ignore[reportGeneralTypeIssues, reportOptionalIterable]
        count *= extent  # pyright: ignore[reportOperatorIssue]
    return count * wait.args[4].itemsize  # pyright: ignore


def _fail(node: Node, problem: str) -> None:
    near = [node.prev.prev, node.prev, node, node.next, node.next.next]
    lines = [f"  {'>' if other is node else ' '} {other.format_node()}" for other in near if other.op != "root"]
    raise GraphError("\n".join([f"verify_graph: {node.name}: {problem}", *lines]))
