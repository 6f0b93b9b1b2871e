"""The torch.compile backend: from a captured graph to a callable that streams its weights."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from . import _frames, _sources
from ._guards import guard_on_stand_ins, other_sources
from ._torch_versions import source_name, source_of
from .candidates import Roots
from .captured import captured_costs
from .compilation import Compilation, Weight
from .config import OffloadConfig
from .device_graphs import wants_graphs, why_no_graphs, without_graphs
from .device_rates import link_for, rates_of
from .errors import SelectionError
from .inner import compile_alone
from .mutations import mutated_placeholders
from .replanning import Replanner
from .runtime import registry
from .runtime.parameter import OffloadedParameter
from .session import AUTO, Session

log = logging.getLogger("flextensor_fx")


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
    compilation = Compilation(graph_module, config, weights)
    try:
        compiled = compilation.run_until_it_fits(example_inputs)
        moved = [pair for session in sessions for pair in session.commit()]
        if config != (config := _with_graphs_if_possible(config, sessions)):
            # Only now is it known that the memory could not be pinned.
            for session in sessions:
                graphs, captured = graphs_before[session.uid]
                del session.graphs[graphs:], session.captured[captured:]
            compilation = Compilation(graph_module, config, weights)
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


# --- which placeholders are weights ------------------------------------------------------------------------------------


def _find_weights(
    module: GraphModule, inputs: Sequence[Any], config: OffloadConfig, streams_all: bool
) -> dict[Node, Weight]:
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
    return {node: Weight(p, session, name) for node, (p, session, name) in found.items() if name is not None}


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
