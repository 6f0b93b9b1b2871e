"""The torch.compile backend: from a captured graph to a callable that streams its weights."""

from __future__ import annotations

import itertools
import logging
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from . import _frames, _sources
from ._guards import guard_on_stand_ins, other_sources
from ._torch_versions import copy_source, source_name, source_of
from .calls import of_open_stores, runner
from .candidates import Roots
from .captured import CapturedGraph, captured_costs, input_places
from .config import OffloadConfig
from .device_graphs import wants_graphs, why_no_graphs, without_graphs
from .device_rates import link_for, rates_of
from .errors import SelectionError
from .gradients import differentiable_outputs, refuse_gradients
from .graph_record import GraphRecord
from .inner import Kind, compile_alone, compile_inner
from .mutations import mutated_placeholders
from .passes.fetches import FetchSpec, fetch_nodes
from .passes.pipeline import Limit, Pipeline, PoolTooSmall, lower, preview
from .passes.place_fetches import place_fetches
from .passes.realized import Realized
from .passes.schedule import Schedule
from .passes.steady_schedule import SteadySchedule
from .replanning import Replanner
from .runtime import registry
from .runtime.parameter import OffloadedParameter
from .session import AUTO, Session

log = logging.getLogger("flextensor_fx")

_ATTEMPTS = 6  # a graph is planned again when its lowered form needs a larger pool than its captured form showed


def flextensor(
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | OffloadConfig | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compiles a captured graph so that the weights its model's patterns select are streamed under a byte budget.

    Use it by name, `torch.compile(model, backend="flextensor", options={...})`, or as the callable itself.

    Args:
        options: fields of `OffloadConfig`.
        mode: the inner compiler's mode; the same as `options={"inner_mode": ...}`.

    Raises:
        OffloadError: (one of its kinds) the options, the patterns or the budget cannot work; nothing has been moved then.
        StoreError: the store cannot be written.
    """
    return _compile(graph_module, example_inputs, options, mode, streams_all=False)


def stream_all(
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | OffloadConfig | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """As `flextensor`, for measuring: streams all weights that it would stream without a budget, if the budget allows that."""
    return _compile(graph_module, example_inputs, options, mode, streams_all=True)


def _compile(
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    options: Mapping[str, Any] | OffloadConfig | None,
    mode: str | None,
    streams_all: bool,
) -> Callable[..., Any]:
    if mode is not None:
        given = options.asdict() if isinstance(options, OffloadConfig) else dict(options or {})
        options = given | {"inner_mode": mode}
    config = OffloadConfig.resolve(options)
    if not config.enabled:
        return compile_alone(graph_module, example_inputs, config)
    weights = _find_weights(graph_module, example_inputs, config, streams_all)
    sessions = list(dict.fromkeys(weight.session for weight in weights.values()))
    for session in sessions:
        session.note_callable(_frames.compiled_callable())
        session.note_compilation(_frames.compiled_code())
        config = session.config.overlaid(options, session.uid)
    graphs_before = {session.uid: (len(session.graphs), len(session.captured)) for session in sessions}
    config = _with_graphs_if_possible(config, sessions)
    compilation = _Compilation(graph_module, config, weights)
    try:
        compiled = compilation.run_until_it_fits(example_inputs)
        moved = [pair for session in sessions for pair in session.commit()]
        if config != (config := _with_graphs_if_possible(config, sessions)):
            # Only now is it known that the memory could not be pinned.
            for session in sessions:
                graphs, captured = graphs_before[session.uid]
                del session.graphs[graphs:], session.captured[captured:]
            compilation = _Compilation(graph_module, config, weights)
            compiled = compilation.run_until_it_fits(example_inputs)
    except Exception:
        for session in sessions:
            if session.engine is None:  # nothing has been moved: what would refuse other options must not stay behind
                registry.forget(session)
        raise
    sources = [source for node in weights if node in compilation.fetched and (source := source_of(node)) is not None]
    for session in sessions:
        if session.config.profile == AUTO and session.watcher is None and not session.replanned:
            session.watcher = Replanner()
    guard_on_stand_ins({id(old): stand_in for old, stand_in in moved}, sources)
    return compiled


def _with_graphs_if_possible(config: OffloadConfig, sessions: Sequence[Session]) -> OffloadConfig:
    """`config`, with CUDA graphs off where they cannot be had, which one line says."""
    if not wants_graphs(config):
        return config
    reason = why_no_graphs(sessions)
    if reason is None:
        return config
    warnings.warn(f"flextensor: no CUDA graphs for {sessions[0].uid}: {reason}", UserWarning, stacklevel=2)
    return without_graphs(config)


@dataclass(frozen=True, slots=True)
class _Weight:
    """A placeholder that stands for a selected weight: the value given for it, its session, and its name there."""

    value: nn.Parameter
    session: Session
    name: str


# --- which placeholders are weights ------------------------------------------------------------------------------------


def _find_weights(
    module: GraphModule, inputs: Sequence[Any], config: OffloadConfig, streams_all: bool
) -> dict[Node, _Weight]:
    """The placeholders that are weights of a session; opens the session of a model that has none."""
    placeholders = zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True)
    parameters = {node: value for node, value in placeholders if isinstance(value, nn.Parameter)}
    owners = _owners()
    for session in dict.fromkeys(owners[id(p)][0] for p in parameters.values() if id(p) in owners):
        session.refresh()
    owners = _owners()
    strangers = {
        node: p for node, p in parameters.items() if id(p) not in owners and not isinstance(p, OffloadedParameter)
    }
    if strangers:
        known = bool(owners.keys() & {id(p) for p in parameters.values()}) or any(
            isinstance(p, OffloadedParameter) for p in parameters.values()
        )
        try:
            _open(module, strangers, config, streams_all)
        except SelectionError:
            # Another part of what the user compiled is offloaded already; this part simply has nothing selected.
            if not known and not any(s.has_callable(_frames.compiled_callable()) for s in registry.living_sessions()):
                raise
        owners = _owners()
    found = {node: (p, *owners[id(p)]) for node, p in parameters.items() if id(p) in owners}
    return {node: _Weight(p, session, name) for node, (p, session, name) in found.items() if name is not None}


def _owners() -> dict[int, tuple[Session, str | None]]:
    """By id of every parameter of every offloaded model: its session, and its name if it is selected."""
    owners: dict[int, tuple[Session, str | None]] = {}
    for session in registry.living_sessions():
        moved = {id(parameter) for parameter in session.moved.values()}
        for name, slot in session.roots.slots().items():
            key = id(slot.parameter)
            if isinstance(slot.parameter, OffloadedParameter) and key not in moved:
                continue  # of another session, whose name and key for it count
            if name in session.nbytes or key not in owners:
                owners[key] = session, name if name in session.nbytes else None
    return owners


def _open(
    module: GraphModule, parameters: Mapping[Node, nn.Parameter], config: OffloadConfig, streams_all: bool
) -> None:
    """Opens a session for the modules that hold `parameters`, and enters it for each of them."""
    roots = _roots_of(module, parameters)
    if not roots.modules:
        return
    names: dict[int, list[str]] = {}
    for name, slot in roots.slots().items():
        names.setdefault(id(slot.parameter), []).append(name)
    named = {node: names[id(p)] for node, p in parameters.items() if id(p) in names}
    changed = mutated_placeholders(module.graph, named)
    stays = {name: "the graph changes it in place" for node in changed for name in named[node]}
    stays |= {
        name: "the graph reads it from outside its module too" for node in _read_outside(named) for name in named[node]
    }
    device = next(iter(parameters.values())).device
    costs = captured_costs(module.graph, named, parameters, link_for(config, device), rates_of(device))
    session = Session.open(roots, config, costs, stays, streams_all)
    for root in roots.modules.values():
        registry.sessions[root] = session


def _read_outside(placeholders: Iterable[Node]) -> list[Node]:
    """Those of `placeholders` that some list, dict or variable gives to the graph: it would go on giving the old parameter."""
    others = other_sources()
    found = []
    for node in placeholders:
        source = source_of(node)
        if source is None:
            continue
        sources = [source, *others.get(source_name(source), ())]
        if not all(_sources.names_a_slot(one) for one in sources):
            found.append(node)
    return found


def _roots_of(module: GraphModule, parameters: Mapping[Node, nn.Parameter]) -> Roots:
    """The outermost modules of the running compilation that hold `parameters`, with a prefix each if there are several."""
    missing = {id(p) for p in parameters.values()}
    found: dict[int, tuple[nn.Module, str]] = {}
    sources = {p.root: p for p in _sources.graph_parameters(module)}
    by_source = ((_sources.live_root(root), p.root_parts[-1] if p.root_parts else "") for root, p in sources.items())
    outer = [(root, type(root).__name__) for root in _frames.outer_modules()]
    for root, prefix in [*outer, *((root, prefix) for root, prefix in by_source if root is not None)]:
        held = missing & {id(p) for p in root.parameters()}
        if held and id(root) not in found:
            found[id(root)] = root, prefix.replace(".", "_")
            missing -= held
    if len(found) == 1:
        return Roots({"": next(iter(found.values()))[0]})
    return Roots(_distinct(found.values()))


def _distinct(roots: Any) -> dict[str, nn.Module]:
    named: dict[str, nn.Module] = {}
    for root, prefix in roots:
        named[prefix if prefix not in named else f"{prefix}_{len(named)}"] = root
    return named


# --- one compilation ---------------------------------------------------------------------------------------------------


class _Compilation:
    """The compiling of one captured graph; it is changed nowhere, a copy is."""

    def __init__(self, module: GraphModule, config: OffloadConfig, weights: Mapping[Node, _Weight]) -> None:
        self.module = module
        self.config = config
        self.weights = weights
        self.sessions = {weight.session.uid: weight.session for weight in weights.values()}
        self.fetched: set[Node] = set()

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
        captured = GraphModule(self.module, graph)
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
        compiled = compile_inner(captured, examples, self.config, self._lower, self._check)
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
    def _dump_dir(self) -> Any:
        from pathlib import Path

        return None if self.config.dump_dir is None else Path(self.config.dump_dir)


class _Lowering:
    """The lowering of one graph of a compilation; see `inner.Lowering`."""

    def __init__(
        self, compilation: _Compilation, module: GraphModule, realized: Realized, name: str, steady: bool
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


def _offloaded(weight: _Weight) -> bool:
    return weight.name in weight.session.streamed


def _spec(weight: _Weight) -> FetchSpec:
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
