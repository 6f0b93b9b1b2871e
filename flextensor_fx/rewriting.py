"""Making programs: from exported ones, and from the files that programs were saved to."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from ._sources import storage_key
from .candidates import Roots
from .captured import captured_costs
from .checkpoint import FileCheckpoint
from .config import OffloadConfig
from .device_rates import link_for, rates_of
from .errors import ConfigError, OffloadError, ProgramError
from .exported import FlatProgram, check_program, flatten, hold, refuse_shared_writes
from .graph_record import GraphRecord
from .mutations import mutated_placeholders
from .named_tensors import NamedTensors
from .offloading import move_rest
from .passes.metadata import value_of
from .passes.retarget import retarget
from .passes.schedule import Schedule
from .passes.steady_schedule import SteadySchedule
from .program import COMPILING, Program
from .program_file import ProgramRecord, read_program
from .runtime import registry
from .runtime.device import open_device
from .runtime.parameter import OffloadedParameter
from .session import AUTO, Session

_OF_MACHINE = frozenset(("device", "store_dir", "host_budget", "pin_memory", "read_threads", "direct_io"))


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
    with _without_collector():
        return _rewrite(program, config)


def _rewrite(program: ExportedProgram, config: OffloadConfig | Mapping[str, Any]) -> Program:
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
    flat, config = _moved(flatten(exported), config)
    refuse_shared_writes(flat, holder)
    made = Program(_without_values(exported), flat, holder, _open(flat, holder, config), config)
    if not made.has_values:
        return made
    registry.sessions[holder] = made.session
    made.session.commit(in_place=True)
    move_rest(holder, made.session.tier.device)
    _own(holder)
    return made


def load_program(
    path: str | os.PathLike[str],
    options: Mapping[str, Any] | None = None,
    *,
    verify: bool = True,
    namespaces: Collection[str] = (),
) -> Program:
    """Reads a program that `Program.save` wrote; no code of its model is needed.

    Weights are streamed from the file itself, which must stay as it is: a change is noticed when a weight is next read. What
    stays resident is read now. Plan and schedule are those of the file.

    Args:
        options: fields of `OffloadConfig` that hang on the machine: `device`, `store_dir`, `host_budget`, `pin_memory`,
            `read_threads`, `direct_io`, `dump_dir`, or the inner compiler's.
        verify: compare every tensor with its digest, which reads the whole file once. Without that, damage to the values of
            weights goes unseen.
        namespaces: of operators beside torch's own that the graph may call. A file is never trusted: what it can say is checked
            before anything is made of it.

    Raises:
        ProgramError: the file is no program, is damaged or altered, or does not fit this release.
        ConfigError: an option that would change the plan, or that this machine cannot do.
        OffloadError: the device is not there.
        StoreError: a tensor cannot be read.
    """
    with _without_collector():
        return load_program_as(None, Path(path), options, verify=verify, namespaces=namespaces)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Else the garbage collector looks at all nodes of a graph again and again while more are made: a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def load_program_as(
    store: str | None,
    path: Path,
    options: Mapping[str, Any] | None = None,
    *,
    verify: bool = True,
    namespaces: Collection[str] = (),
) -> Program:
    """As `load_program`, with keys that begin with `store`, which no living program may have; None takes a free name."""
    if wrong := sorted((options or {}).keys() - _OF_MACHINE - COMPILING):
        raise ConfigError(
            f"load_program: expected options among {', '.join(sorted(_OF_MACHINE | COMPILING))}, found {wrong[0]!r}; what shapes "
            "the plan is in the file"
        )
    saved = read_program(path, verify=verify, namespaces=namespaces)
    record, who = saved.record, f"program file {str(path)!r}"
    config = OffloadConfig(**{**saved.config.asdict(), **(options or {})})
    holder = hold(saved.exported)
    flat, config = _moved(flatten(saved.exported), config)
    try:
        session = _open(flat, holder, config, record)
        session.rename(store)
    except OffloadError as error:
        raise ProgramError(f"{who}: its plan cannot be used: {error}") from error
    made = Program(saved.exported, flat, holder, session, config)
    if session.plan is not record.plan or not _same_schedule(made.record, record.graph):
        raise ProgramError(
            f"{who}: expected the schedule that it was saved with, found another; it was written by another release: rewrite the "
            "exported program and save it again"
        )
    made.fingerprint = record.fingerprint
    made.fill_from(FileCheckpoint({Path(saved.path): tuple(saved.entries)}, lambda nbytes: None), {}, strict=True)
    return made


def _same_schedule(found: GraphRecord | None, expected: GraphRecord | None) -> bool:
    """Whether two records have one schedule; the stores that begin their keys may be called otherwise."""
    if found is None or expected is None:
        return found is expected
    steady = [None if record.steady is None else _bare(record.steady) for record in (found, expected)]
    return _bare(found.schedule) == _bare(expected.schedule) and steady[0] == steady[1]


def _bare(schedule: Schedule | SteadySchedule) -> Schedule | SteadySchedule:
    transfers = tuple(replace(t, key=t.key.partition(":")[2]) for t in schedule.transfers)
    return replace(schedule, transfers=transfers)


def _moved(flat: FlatProgram, config: OffloadConfig) -> tuple[FlatProgram, OffloadConfig]:
    """The graph on the device that computes, and the configuration with that device."""
    values = [value_of(node) for node in flat.module.graph.find_nodes(op="placeholder")]
    devices = {value.device for value in values if isinstance(value, Tensor)}
    if len({(device.type, device.index or 0) for device in devices}) > 1:
        raise OffloadError(
            f"rewrite: expected a program on one device, found {', '.join(sorted(map(str, devices)))}; move the model and its "
            "example arguments to one device, then export"
        )
    source = next(iter(devices), torch.device("cpu"))
    if config.device is not None:
        target = torch.device(config.device)
        open_device(target)  # says in clear words where there is none
    else:
        target = torch.device("cpu") if source.type == "meta" else source
    retarget(flat.module.graph, source, target)
    flat.module.recompile()
    given = flat.module.graph.find_nodes(op="placeholder")[len(flat.targets) :]
    written = mutated_placeholders(flat.module.graph, given)
    inputs = flat.inputs.moved(target, [node in written for node in given])
    return replace(flat, inputs=inputs), replace(config, device=target)


def _open(
    flat: FlatProgram, holder: NamedTensors, config: OffloadConfig, record: ProgramRecord | None = None
) -> Session:
    """The session of a program that has still to get its values, or has them; with a record, as that says."""
    roots = Roots({"": holder})
    names: dict[int, list[str]] = {}
    for name, slot in roots.slots().items():
        names.setdefault(id(slot.parameter), []).append(name)
    values = flat.values(holder)
    named = {node: names[id(value)] for node, value in values.items() if id(value) in names}
    graph = flat.module.graph
    stays = {
        name: "the graph changes it in place" for node in mutated_placeholders(graph, named) for name in named[node]
    }
    filled = frozenset(name for name, slot in roots.slots().items() if slot.parameter.is_meta)
    if record is not None:
        costs, plan = record.costs.costs, record.plan
        session = Session.open(roots, config, costs, {**record.stays, **stays}, moves=True, filled=filled, plan=plan)
        _check_plan(session, record)
        session.packs_small = record.packs_small
        return session
    device = torch.device(config.device or "cpu")
    with torch.no_grad():
        costs = captured_costs(graph, named, values, link_for(config, device), rates_of(device))
    return Session.open(roots, config, costs, stays, moves=True, filled=filled)


def _check_plan(session: Session, record: ProgramRecord) -> None:
    """Sees that a saved plan is one for the weights of the session.

    Raises:
        ProgramError: it is not.
    """
    made, steps = record.plan, len(record.costs.step_ms)
    streamed, resident = set(made.streamed), set(made.resident)
    kept = sum(session.nbytes.get(name, 0) for name in resident)
    problems = (
        (streamed & resident or streamed | resident != session.nbytes.keys(), "it speaks of other weights"),
        (streamed & session.stays.keys(), "it streams what cannot be offloaded"),
        (made.pool < 0 or kept + made.pool > made.peak_bytes, "its bytes do not add up"),
        (made.budget is not None and made.peak_bytes > made.budget, "it is beyond its budget"),
        (
            any(step < 0 or step >= steps for used in record.costs.steps_of.values() for step in used),
            "its steps are others",
        ),
    )
    for is_wrong, what in problems:
        if is_wrong:
            raise ProgramError(f"the plan: {what}")


def _without_values(program: ExportedProgram) -> ExportedProgram:
    """The graph of a program and all that describes it; its tensors would stay in memory for as long as this does."""
    light = copy.copy(program)
    light._state_dict = {name: _without_value(value) for name, value in program.state_dict.items()}
    constants = {name: value for name, value in program.constants.items() if isinstance(value, Tensor)}
    light._constants = {name: _without_value(value) for name, value in constants.items()}
    light._example_inputs = None
    return light


def _without_value(tensor: Tensor) -> Tensor:
    value = tensor.detach().to("meta")
    return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


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
