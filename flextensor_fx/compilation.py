"""The compiling of one captured graph: placeholders of streamed weights become fetches, and an inner compiler gets the rest."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from ._torch_versions import copy_source, graph_module
from .calls import of_open_stores, runner
from .captured import CapturedGraph, Costs, captured_costs, input_places
from .config import OffloadConfig
from .device_graphs import wants_graphs
from .device_rates import rates_of
from .gradients import differentiable_outputs, refuse_gradients
from .graph_record import GraphRecord
from .inner import Inner, Kind, compile_alone, compile_inner
from .mutations import mutated_placeholders
from .passes.fetches import FetchSpec, fetch_nodes
from .passes.pipeline import Limit, Pipeline, PoolTooSmall, lower, preview
from .passes.place_fetches import place_fetches
from .passes.realized import Realized
from .passes.schedule import Schedule
from .passes.steady_schedule import SteadySchedule
from .runtime import registry
from .runtime.parameter import OffloadedParameter
from .session import Session

_ATTEMPTS = 6  # a graph is planned again when its lowered form needs a larger pool than its captured form showed


@dataclass(frozen=True, slots=True)
class Weight:
    """A placeholder that stands for a selected weight: the value given for it, its session, and its name there."""

    value: nn.Parameter
    session: Session
    name: str


class Compilation:
    """The compiling of one captured graph; it is changed nowhere, a copy is.

    Args:
        inner: the inner compiler; None takes the configured one.
        costs: what is known of the graph; None estimates it.

    Attributes:
        fetched: the placeholders that became fetches.
        captured: the copy, with fetches, or with what an inner compiler that works in place has made of them.
    """

    def __init__(
        self,
        module: GraphModule,
        config: OffloadConfig,
        weights: Mapping[Node, Weight],
        inner: Inner | None = None,
        costs: Costs | None = None,
    ) -> None:
        self.inner, self.costs = inner or compile_inner, costs
        self.module = module
        self.config = config
        self.weights = weights
        self.sessions = {weight.session.uid: weight.session for weight in weights.values()}
        self.fetched: set[Node] = set()
        self.captured = module

    def run_until_it_fits(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        for attempt in range(_ATTEMPTS):
            try:
                return self.run(inputs)
            except PoolTooSmall as error:
                self.sessions[error.store].require_pool(error.least, again=attempt > 0)
        raise AssertionError(f"no pool was found in {_ATTEMPTS} plans for {self.module.graph!r}")

    def run(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        placeholders = self.module.graph.find_nodes(op="placeholder")
        changed = mutated_placeholders(self.module.graph, self.weights)
        streamed = {
            node: weight
            for node, weight in self.weights.items()
            if weight.name in weight.session.streamed and node not in changed
        }
        if not streamed and not any(isinstance(value, OffloadedParameter) for value in inputs):
            return compile_alone(self.module, inputs, self.config)
        self.fetched = set(streamed)
        graph, copies = _copy_graph(self.module.graph)
        self.captured = captured = graph_module(self.module, graph)
        captured.meta.update(self.module.meta)
        pipeline = Pipeline(captured, self._name("captured"), self._dump_dir)
        specs = {copies[node]: _spec(weight) for node, weight in streamed.items()}
        if specs:
            # A call that records gradients is refused its backward; a leaf inside its graph would only make one be compiled.
            flagged = [] if torch.is_grad_enabled() else [n for n, w in streamed.items() if w.value.requires_grad]
            trainable = frozenset(copies[node] for node in flagged)
            packed = {key: place for session in self.sessions.values() for key, place in session.packed().items()}
            pipeline.apply(partial(place_fetches, weights=specs, trainable=trainable, packed=packed))
        kept = [place for place, node in enumerate(placeholders) if node not in streamed]
        # An offloaded weight that is no fetch (the graph changes it) comes in as a tensor over the store's file.
        examples = [v.plain() if isinstance(v := inputs[place], OffloadedParameter) else v for place in kept]
        compiled = self.inner(captured, examples, self.config, self._lower, self._check)
        mapped = any(isinstance(inputs[p], OffloadedParameter) for p in kept)
        if wants_graphs(self.config):
            compiled = of_open_stores(compiled, tuple(self.sessions))
        run = runner(compiled, kept, mapped, self.sessions, self._note_captured(), input_places(placeholders))
        trainable = [w.name for w in self.weights.values() if w.value.requires_grad and _offloaded(w)]
        if torch.is_grad_enabled() and trainable:
            written = mutated_placeholders(self.module.graph, (n for n in placeholders if n not in self.weights))
            inputs_written = [place for place, node in enumerate(placeholders) if node in written]
            return refuse_gradients(run, trainable, differentiable_outputs(self.module.graph), inputs_written)
        return run

    def _note_captured(self) -> str:
        """Notes the graph with every session whose weights it uses; the name that it goes by there."""
        taken = {graph.name for session in self.sessions.values() for graph in session.captured}
        name = next(name for number in itertools.count() if (name := f"graph {number}") not in taken)
        for session in self.sessions.values():
            if self.costs is not None:
                session.captured.append(CapturedGraph(name, self.costs))
                continue
            own = {node: weight for node, weight in self.weights.items() if weight.session is session}
            costs = captured_costs(
                self.module.graph,
                {n: [w.name] for n, w in own.items()},
                {n: w.value for n, w in own.items()},
                session.costs.link,
                rates_of(session.tier.device),
            )
            session.captured.append(CapturedGraph(name, costs))
        return name

    def _lower(self, module: GraphModule, realized: Realized, kind: Kind) -> _Lowering:
        # A forward with a backward is followed by that, and what it fetched ahead would have to make room.
        steady = kind == "inference" and self.config.objective == "steady"
        return _Lowering(self, module, realized, self._name("backward" if kind == "backward" else "forward"), steady)

    def _check(self, module: GraphModule, realized: Realized) -> None:
        for uid in self.sessions:
            registry.retain(uid)
        preview(module.graph, realized, self._limits)

    @property
    def _limits(self) -> dict[str, Limit]:
        return {uid: Limit(session.pool, session.config.lookahead) for uid, session in self.sessions.items()}

    def _name(self, kind: str) -> str:
        number = sum(len(session.graphs) for session in self.sessions.values())
        return f"{kind} {number}"

    @property
    def _dump_dir(self) -> Path | None:
        return None if self.config.dump_dir is None else Path(self.config.dump_dir)


class _Lowering:
    """The lowering of one graph of a compilation; see `inner.Lowering`."""

    def __init__(
        self, compilation: Compilation, module: GraphModule, realized: Realized, name: str, steady: bool
    ) -> None:
        self.module, self.realized, self.name, self.steady = module, realized, name, steady
        self.sessions, self.limits, self.dump_dir = compilation.sessions, compilation._limits, compilation._dump_dir
        self.schedules: Mapping[str, Schedule | SteadySchedule] = {}
        self.seconds = 0.0

    def preview(self) -> str:
        begin = time.perf_counter()
        self.schedules = preview(self.module.graph, self.realized, self.limits, steady=self.steady)
        self.seconds += time.perf_counter() - begin
        return "\n".join([f"steady {self.steady}", *(f"{uid} {limit}" for uid, limit in sorted(self.limits.items()))])

    def run(self, module: GraphModule) -> None:
        if any(fetch_nodes(module.graph)):
            pipeline = Pipeline(module, self.name, self.dump_dir)
            self.schedules = lower(pipeline, self.realized, self.limits, steady=self.steady)
            self.seconds += pipeline.seconds

    def record(self) -> None:
        for uid, schedule in self.schedules.items():
            self.sessions[uid].record(GraphRecord.of(self.name, schedule, self.seconds))


def _offloaded(weight: Weight) -> bool:
    return weight.name in weight.session.streamed


def _spec(weight: Weight) -> FetchSpec:
    p = weight.value
    device = weight.session.tier.device
    return FetchSpec(weight.session.key(weight.name), tuple(p.shape), tuple(p.stride()), p.dtype, device)


def _copy_graph(graph: Graph) -> tuple[Graph, dict[Node, Node]]:
    """A copy to rewrite: Dynamo goes on using the graph that it handed over."""
    copy, copies = Graph(tracer_cls=graph._tracer_cls), {}
    result = copy.graph_copy(graph, copies)
    output = copy.output(result)
    output.meta.update(graph.output_node().meta)
    for node in graph.find_nodes(op="placeholder"):
        copy_source(node, copies[node])
    return copy, copies
