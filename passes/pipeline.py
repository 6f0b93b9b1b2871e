"""Runs passes over one graph: the only place that lints, recompiles, verifies, times and dumps."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch.fx import Graph, GraphModule, Node

from .collect_uses import Uses, collect_uses
from .drop_unread_fetches import drop_unread_fetches
from .fetches import FetchSpec, fetch_nodes
from .gather_rows import gather_rows
from .insert_prefetches_ahead import insert_prefetches_ahead
from .insert_transfers import insert_transfers
from .realized import Realized, aten_realized
from .schedule import PoolError, Schedule, schedule
from .steady_schedule import SteadySchedule, steady_schedule
from .verify_graph import verify_graph
from .verify_schedule import verify_schedule
from .verify_steady import verify_steady

log = logging.getLogger("flextensor_fx.passes")


@dataclass(frozen=True, slots=True)
class Limit:
    """What the transfers of one store must keep to: bytes held together, and transfers ahead (None: as the pool allows)."""

    pool: int
    lookahead: int | None


class PoolTooSmall(Exception):
    """A graph needs `least` bytes of weights of `store` together, more than its pool has."""

    def __init__(self, store: str, least: int) -> None:
        super().__init__(f"store {store!r}: a graph needs a pool of at least {least} bytes")
        self.store = store
        self.least = least


class Pipeline:
    """Applies passes to `module` one by one.

    Args:
        module: changed in place.
        name: of the graph, in dumps and log lines ("forward 0").
        dump_dir: where numbered before/after texts of every pass go; None writes none.
    """

    def __init__(self, module: GraphModule, name: str, dump_dir: Path | None = None) -> None:
        self.module = module
        self.name = name
        self.dump_dir = dump_dir
        self.seconds = 0.0
        self._number = 0

    def apply(self, rewrite: Callable[[Graph], None], pools: Mapping[str, int] | None = None) -> None:
        """Runs `rewrite`; then the graph is linted, verified and recompiled.

        Args:
            rewrite: a pass, or a `functools.partial` of one.
            pools: bytes by store, of the stores whose transfers are in the graph afterwards.

        Raises:
            AssertionError: the pass left a broken graph; the message names the pass.
        """
        name = getattr(rewrite.func if isinstance(rewrite, partial) else rewrite, "__name__", str(rewrite))
        start = time.perf_counter()
        counts = log.isEnabledFor(logging.DEBUG)
        before = _op_counts(self.module.graph) if counts else Counter[str]()
        self._dump(name, "before")
        rewrite(self.module.graph)
        try:
            self.module.graph.lint()
            verify_graph(self.module.graph, pools)
        except (AssertionError, RuntimeError) as error:
            raise AssertionError(f"pass {name} on graph {self.name!r} left a broken graph: {error}") from error
        self.module.recompile()
        self._dump(name, "after")
        self._number += 1
        elapsed = time.perf_counter() - start
        self.seconds += elapsed
        if counts:
            difference = _difference(before, _op_counts(self.module.graph))
            log.debug("%s: %s: %s (%.1f ms)", self.name, name, difference, elapsed * 1e3)

    def _dump(self, name: str, when: str) -> None:
        if self.dump_dir is None:
            return
        self.dump_dir.mkdir(parents=True, exist_ok=True)
        file = self.dump_dir / f"{self.name.replace(' ', '_')}.{self._number:02d}.{name}.{when}.py"
        file.write_text(self.module.print_readable(print_output=False))


def lower(
    pipeline: Pipeline, realized: Realized, limits: Mapping[str, Limit], *, steady: bool = False
) -> dict[str, Schedule | SteadySchedule]:
    """Turns the fetches of the pipeline's graph into the transfers of a schedule per store.

    Args:
        realized: says which nodes get a buffer of their own.
        limits: by store, the part of a key before ":".
        steady: calls of the graph follow one another, so that the end of each may start the first copies of the next. Not so
            where a weight leaves the graph: only the caller knows when its memory is free.

    Returns:
        The schedules that were written into the graph, by store; of stores that the graph fetches from.

    Raises:
        PoolTooSmall: a store's pool cannot hold what must be live together; no transfer has been written then.
    """
    pipeline.apply(drop_unread_fetches)
    if realized is aten_realized:  # only this one is of a compiler that repeats lookups
        pipeline.apply(gather_rows)
    start = time.perf_counter()
    uses, schedules = _schedules(pipeline.module.graph, realized, limits, steady)
    pipeline.seconds += time.perf_counter() - start
    pools: dict[str, int] = {}
    for store, used in uses.items():
        pools[store] = limits[store].pool
        made = schedules[store]
        in_call = made.in_call if isinstance(made, SteadySchedule) else made
        pipeline.apply(partial(insert_transfers, uses=used, schedule=in_call, realized=realized), pools)
        if isinstance(made, SteadySchedule) and made.ahead:
            last = partial(insert_prefetches_ahead, store=store, steps=used.steps, schedule=made, realized=realized)
            pipeline.apply(last, pools)
    return schedules


def preview(
    graph: Graph, realized: Realized, limits: Mapping[str, Limit], *, steady: bool = False
) -> dict[str, Schedule | SteadySchedule]:
    """The schedules that `lower` would write into `graph`, which is changed nowhere: for a graph that is lowered later.

    Raises:
        PoolTooSmall: a store's pool cannot hold what must be live together.
    """
    _, schedules = _schedules(graph, realized, limits, steady)
    return schedules


def _schedules(
    graph: Graph, realized: Realized, limits: Mapping[str, Limit], steady: bool
) -> tuple[dict[str, Uses], dict[str, Schedule | SteadySchedule]]:
    fetches: dict[str, dict[Node, FetchSpec]] = {}
    for node in fetch_nodes(graph):
        spec = FetchSpec.of(node)
        fetches.setdefault(spec.key.partition(":")[0], {})[node] = spec
    uses = {store: collect_uses(graph, realized, weights) for store, weights in fetches.items()}
    schedules: dict[str, Schedule | SteadySchedule] = {}
    for store, used in uses.items():
        try:
            schedules[store] = _schedule(used, limits[store], steady and bool(used.windows) and not _leaves(used))
        except PoolError as error:
            raise PoolTooSmall(store, error.least) from error
    return uses, schedules


def _schedule(uses: Uses, limit: Limit, steady: bool) -> Schedule | SteadySchedule:
    if steady:
        # Windows that end with the call: a compiler may reuse the memory of a weight that a graph has given up.
        repeated = steady_schedule(uses.windows, len(uses.steps), limit.pool, limit.lookahead)
        return verify_steady(repeated, uses.windows)
    return verify_schedule(schedule(uses.windows, limit.pool, limit.lookahead), uses.windows)


def _leaves(uses: Uses) -> bool:
    return any(consumer.node.op == "output" for use in uses.fetches for consumer in use.consumers)


def _op_counts(graph: Graph) -> Counter[str]:
    return Counter(str(node.target) if node.op == "call_function" else node.op for node in graph.nodes)


def _difference(before: Counter[str], after: Counter[str]) -> str:
    changed = [f"{op} {before[op]} -> {after[op]}" for op in sorted(before | after) if before[op] != after[op]]
    return ", ".join(changed) or "no change"
