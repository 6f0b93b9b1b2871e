"""Lowers fetch nodes to the transfers of a Schedule.

    w = fetch(key)                 token = prefetch(key, after=[...])        copy may start: its memory is there
    y = mm(x, w)            ->     w = wait(token, key, after=[...])         copy has arrived
                                   y = mm(x, w)
                                   done = offload(w, key, after=[y])         last consumer has run: memory given up

1. A prefetch comes after the prefetch before it and after every offload that frees the memory it is to take; where none does,
   after the last realized node before the step that it may not run ahead of.
2. A wait comes after all prefetches that the schedule issues before it (or overlap would be lost) and after the last realized
   node before its consumer (or the compiler could move it ahead of work that the copy should run beside).
3. An offload comes after the nodes that close its consumers' uses.
4. Nodes that work on the weight alone move to the wait; a weight with several windows gets its own copies in each.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from torch.fx import Graph, Node

from . import ops
from .collect_uses import FetchUse, Uses
from .metadata import ValueMaker, inherit_place, is_tensor
from .realized import Realized, last_realized_before
from .schedule import Schedule, Transfer


def insert_transfers(graph: Graph, uses: Uses, schedule: Schedule, realized: Realized) -> None:
    """Rewrites `graph` in place; linear in its nodes.

    Args:
        uses: of this very graph, from `collect_uses`.
        schedule: over `uses.windows`.
        realized: as given to `collect_uses`.
    """
    if schedule.transfers:
        _Rewriter(graph, uses, realized).run(schedule)


class _Rewriter:
    def __init__(self, graph: Graph, uses: Uses, realized: Realized) -> None:
        self.graph = graph
        self.steps = uses.steps
        self.use_of = {use.spec.key: use for use in uses.fetches}
        self.realized_before = last_realized_before(graph, uses.steps, realized)
        self.begin = next(node for node in graph.nodes if node.op != "placeholder")
        self.output = graph.output_node()
        self.values = ValueMaker(use.node for use in uses.fetches)
        self.tokens: dict[Transfer, Node] = {}
        self.weights: dict[Transfer, Node] = {}
        self.last_token: Node | None = None
        self.freed: list[tuple[int, Node]] = []  # (boundary, offload) since the last prefetch

    def run(self, schedule: Schedule) -> None:
        starting, waiting, ending = (defaultdict[int, list[Transfer]](list) for _ in range(3))
        for transfer in schedule.transfers:
            starting[transfer.issue_at].append(transfer)
            waiting[transfer.first_use].append(transfer)
            ending[transfer.last_use + 1].append(transfer)
        windows = Counter(transfer.key for transfer in schedule.transfers)
        for boundary in range(len(self.steps) + 1):
            for transfer in ending[boundary]:
                self._offload(transfer, boundary)
            for transfer in starting[boundary]:
                self._prefetch(transfer, boundary)
            for transfer in waiting[boundary]:
                self._wait(transfer, alone=windows[transfer.key] == 1)
        for use in self.use_of.values():
            if use.node.users:  # copied into several windows: the originals are left over
                for node in reversed(use.weight_work):
                    self.graph.erase_node(node)
            self.graph.erase_node(use.node)

    def _prefetch(self, transfer: Transfer, boundary: int) -> None:
        spec = self.use_of[transfer.key].spec
        after = [self.last_token] if self.last_token is not None else []
        after += [offload for _, offload in self.freed]
        if boundary and not any(freed_at == boundary for freed_at, _ in self.freed):
            after += self.realized_before[boundary]
        place = self.graph.inserting_after(max(after)) if after else self.graph.inserting_before(self.begin)
        with place:
            token = self.graph.call_function(ops.prefetch, (spec.key, spec.device, after))
        inherit_place(token, self.steps[transfer.first_use])
        self.values.set_token(token, spec.device)
        self.tokens[transfer] = self.last_token = token
        self.freed.clear()

    def _wait(self, transfer: Transfer, alone: bool) -> None:
        use = self.use_of[transfer.key]
        reader = self.steps[transfer.first_use]
        token = self.tokens[transfer]
        after = [self.last_token] if self.last_token is not None and self.last_token is not token else []
        after += self.realized_before[transfer.first_use]
        with self.graph.inserting_before(reader):
            weight = self.graph.call_function(ops.wait, (token, *use.spec.arguments, after))
        inherit_place(weight, reader)
        self.values.set_weight(weight, use.spec)
        self.weights[transfer] = weight
        consumers = [c.node for c in use.consumers if transfer.first_use <= c.step <= transfer.last_use]
        if alone:
            for node in use.weight_work:
                reader.prepend(node)
            use.node.replace_all_uses_with(weight)
        else:
            self._copy_work(use, weight, reader, consumers)

    def _copy_work(self, use: FetchUse, weight: Node, reader: Node, consumers: Sequence[Node]) -> None:
        needed = _needed(consumers, set(use.weight_work))
        new = {use.node: weight}
        with self.graph.inserting_before(reader):
            for node in use.weight_work:
                if node in needed:
                    new[node] = self.graph.node_copy(node, lambda n: new.get(n, n))
        for consumer in consumers:
            for old, copied in new.items():
                consumer.replace_input_with(old, copied)

    def _offload(self, transfer: Transfer, boundary: int) -> None:
        use = self.use_of[transfer.key]
        consumers = [c for c in use.consumers if transfer.first_use <= c.step <= transfer.last_use]
        if any(c.node is self.output for c in consumers):
            return  # the weight leaves the graph: its memory is the caller's
        closing = list(dict.fromkeys(node for c in consumers for node in c.closed_by))
        at_end = not all(c.closed_by for c in consumers)
        if at_end:
            closing += [node for node in self.output.all_input_nodes if is_tensor(node) and node.op != "placeholder"]
            closing = list(dict.fromkeys(closing))
        place = self.graph.inserting_before(self.output) if at_end else self.graph.inserting_after(max(closing))
        with place:
            offload = self.graph.call_function(ops.offload, (self.weights[transfer], transfer.key, closing))
        inherit_place(offload, consumers[-1].node)
        self.values.set_token(offload, use.spec.device)
        self.freed.append((boundary, offload))


def _needed(consumers: Sequence[Node], work: set[Node]) -> set[Node]:
    needed: set[Node] = set()
    pending = list(consumers)
    while pending:
        for node in pending.pop().all_input_nodes:
            if node in work and node not in needed:
                needed.add(node)
                pending.append(node)
    return needed
