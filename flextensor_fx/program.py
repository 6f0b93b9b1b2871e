"""Ahead of time: an exported program whose weights are streamed, as a value that runs, compiles and is saved."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from ._sources import storage_key, strip_wrappers
from .backend import flextensor
from .candidates import Roots
from .captured import captured_costs
from .compilation import Compilation, Weight
from .config import OffloadConfig
from .device_rates import link_for, rates_of
from .errors import ConfigError, OffloadError
from .exported import FlatProgram, check_program, flatten, hold
from .mutations import mutated_placeholders
from .named_tensors import NamedTensors
from .offloading import move_rest
from .passes.retarget import retarget
from .runtime import registry
from .runtime.parameter import OffloadedParameter
from .session import AUTO, Session


class Program:
    """An exported program that streams its weights. It runs forward only, and its tensors are its own.

    Attributes:
        graph_module: the rewritten graph, prefetch and wait in plain sight. Its placeholders are the tensors that stay, then the
            leaves of the arguments.
    """

    graph_module: GraphModule

    def __init__(
        self,
        exported: ExportedProgram,
        flat: FlatProgram,
        holder: NamedTensors,
        session: Session,
        config: OffloadConfig,
    ) -> None:
        self._exported = exported
        self._flat = flat
        self._holder = holder
        self._config = config
        self.session = session
        self._slots = [holder.place(strip_wrappers(target)) for target in flat.targets]
        with torch.no_grad():
            self._run, self.graph_module = self._interpreted()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the rewritten graph node by node; what the program returned, equal bit for bit.

        Raises:
            OffloadError: the arguments are not those that were exported; says which.
            GradientError: one of them requires a gradient.
            StoreError: a weight cannot be read, or the program has been closed.
        """
        leaves = self._flat.inputs.flatten(args, kwargs)
        with torch.no_grad():
            return self._result(self._run(*self._tensors(), *leaves))

    def compile(self, **options: Any) -> Callable[..., Any]:
        """The program through the inner compiler, by default Inductor; called like the program.

        Args:
            options: `inner_backend`, `inner_mode`, `inner_options` or `dump_dir`, as in `OffloadConfig`; what is not given is
                as in the program's configuration.

        Raises:
            ConfigError: an option that would change the plan.
        """
        if wrong := sorted(options.keys() - _COMPILING):
            raise ConfigError(
                f"compile: expected options among {', '.join(sorted(_COMPILING))}, found {wrong[0]!r}; what shapes the plan is "
                "given to flextensor_fx.rewrite"
            )
        return CompiledProgram(self, replace(self._config, **options))

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors of the program by name, those that are streamed too."""
        return dict(zip(self._flat.targets, (tensor.detach() for tensor in self._tensors()), strict=True))

    def close(self) -> None:
        """Removes the store. The program cannot be called any more; closing it again does nothing."""
        self.session.drop()

    def __repr__(self) -> str:
        session = self.session
        return f"Program({session.uid}, {len(session.streamed)} of {len(session.nbytes)} selected weights streamed)"

    @property
    def config(self) -> OffloadConfig:
        """As given to `rewrite`, with the device that was found."""
        return self._config

    def _tensors(self) -> list[Tensor]:
        return [_held(module, name) for module, name in self._slots]

    def _result(self, outputs: Any) -> Any:
        flat = self._flat
        leaves = [c if place is None else outputs[place] for place, c in zip(flat.outputs, flat.constants, strict=True)]
        return pytree.tree_unflatten(leaves, flat.out_spec)

    def _interpreted(self) -> tuple[Callable[..., Any], GraphModule]:
        config = replace(self._config, inner_backend="eager", inner_mode=None, inner_options=None)
        compilation = Compilation(self._flat.module, config, _weights(self._flat, self._holder, self.session))
        given = len(self._flat.inputs.leaves)
        run = compilation.run_until_it_fits([*self._tensors(), *[None] * given])
        return run, compilation.captured


_COMPILING = frozenset(("inner_backend", "inner_mode", "inner_options", "dump_dir"))


class CompiledProgram:
    """A program behind an inner compiler; made by `Program.compile`, called like the program. Compiles at its first call."""

    def __init__(self, program: Program, config: OffloadConfig) -> None:
        self._program = program
        self.session = program.session
        shell = _Shell(program)
        options = {name: getattr(config, name) for name in _COMPILING}

        self._compiled = torch.compile(shell, backend=flextensor, fullgraph=True, options=options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the program's."""
        inputs = self._program._flat.inputs
        leaves = inputs.with_free_sizes(inputs.flatten(args, kwargs))
        with torch.no_grad():
            return self._program._result(self._compiled(*leaves))


class _Shell(nn.Module):
    """What Dynamo traces: the flat graph, with the tensors that its holder has at the time."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.graph = program._flat.module
        self.tensors = program._holder
        self._slots = [(m._parameters if name in m._parameters else m._buffers, name) for m, name in program._slots]

    def forward(self, *leaves: Any) -> Any:
        return self.graph(*[held[name] for held, name in self._slots], *leaves)


def rewrite(program: ExportedProgram, config: OffloadConfig | Mapping[str, Any]) -> Program:
    """Rewrites an exported program so that the weights its patterns select are streamed under a byte budget.

    The program and the model that it was exported from stay as they are; the result has tensors of its own.

    Args:
        program: from `torch.export.export`, strict or not, with dynamic shapes or without; on the CPU, or on the device that
            `config` names.
        config: an `OffloadConfig`, or a mapping of its fields. With `device` the graph is moved there.

    Raises:
        OffloadError: (one of its kinds) the program, the configuration, the patterns or the budget cannot work; nothing has been
            moved then.
        StoreError: the store cannot be written.
    """
    if isinstance(program, Program):
        raise OffloadError(
            "rewrite: expected what torch.export.export returns, found a program that is rewritten already; rewrite the exported "
            "program again for another configuration"
        )
    exported = check_program(program, "rewrite")
    config = OffloadConfig.resolve(config)
    if config.profile == AUTO:
        raise ConfigError(
            "rewrite: option 'profile': expected a file or None, found 'auto', which measures calls of a compiled model; make a "
            "profile by flextensor_fx.profile(model, args, config) and save it"
        )
    if not config.enabled:
        config = replace(config, budget="100%", enabled=True)  # every weight fits, so none is streamed
    holder = hold(exported)
    flat, config = _moved(flatten(exported), holder, config)
    session = _open(flat, holder, config)
    registry.sessions[holder] = session
    made = Program(_without_values(exported), flat, holder, session, config)
    session.commit(in_place=True)
    move_rest(holder, session.tier.device)
    _own(holder)
    return made


def _moved(flat: FlatProgram, holder: NamedTensors, config: OffloadConfig) -> tuple[FlatProgram, OffloadConfig]:
    """The graph on the device that computes, and the configuration with that device."""
    tensors = [*holder.parameters(), *holder.buffers()]
    devices = {tensor.device for tensor in tensors} | {leaf.device for leaf in flat.inputs.leaves if leaf.device}
    if len({(device.type, device.index or 0) for device in devices}) > 1:
        raise OffloadError(
            f"rewrite: expected a program on one device, found {', '.join(sorted(map(str, devices)))}; move the model and its "
            "example arguments to one device, then export"
        )
    source = next(iter(devices), torch.device("cpu"))
    if config.device is not None:
        target = torch.device(config.device)
    else:
        target = torch.device("cpu") if source.type == "meta" else source
    retarget(flat.module.graph, source, target)
    flat.module.recompile()
    given = flat.module.graph.find_nodes(op="placeholder")[len(flat.targets) :]
    written = mutated_placeholders(flat.module.graph, given)
    inputs = flat.inputs.moved(target, [node in written for node in given])
    return replace(flat, inputs=inputs), replace(config, device=target)


def _open(flat: FlatProgram, holder: NamedTensors, config: OffloadConfig) -> Session:
    roots = Roots({"": holder})
    names: dict[int, list[str]] = {}
    for name, slot in roots.slots().items():
        names.setdefault(id(slot.parameter), []).append(name)
    values = {node: _held(*holder.place(strip_wrappers(target))) for target, node in flat.placeholders.items()}
    named = {node: names[id(value)] for node, value in values.items() if id(value) in names}
    graph = flat.module.graph
    stays = {
        name: "the graph changes it in place" for node in mutated_placeholders(graph, named) for name in named[node]
    }
    device = torch.device(config.device or "cpu")
    with torch.no_grad():
        costs = captured_costs(graph, named, values, link_for(config, device), rates_of(device))
    return Session.open(roots, config, costs, stays, moves=True)


def _weights(flat: FlatProgram, holder: NamedTensors, session: Session) -> dict[Any, Weight]:
    slots = session.roots.slots()
    selected = {id(slots[name].parameter): name for name in session.nbytes}
    values = {node: _held(*holder.place(strip_wrappers(target))) for target, node in flat.placeholders.items()}
    return {
        node: Weight(value, session, selected[id(value)]) for node, value in values.items() if id(value) in selected
    }


def _held(module: nn.Module, name: str) -> Any:
    return module._parameters[name] if name in module._parameters else module._buffers[name]


def _without_values(program: ExportedProgram) -> ExportedProgram:
    """The graph of a program and all that describes it; its tensors would stay in memory for as long as this does."""
    light = copy.copy(program)
    light._state_dict = {name: value.to("meta") for name, value in program.state_dict.items()}
    constants = {name: value for name, value in program.constants.items() if isinstance(value, Tensor)}
    light._constants = {name: value.to("meta") for name, value in constants.items()}
    return light


def _own(holder: NamedTensors) -> None:
    """Gives what stays memory of its own: the source may go on being trained, or be called and change its buffers."""
    copies: dict[object, Tensor] = {}

    def own(tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        if key not in copies:
            copies[key] = tensor.detach().clone()
        return copies[key]

    for module in holder.modules():
        for parameter in module._parameters.values():
            if parameter is not None and not isinstance(parameter, OffloadedParameter):
                parameter.data = own(parameter)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = own(buffer)
