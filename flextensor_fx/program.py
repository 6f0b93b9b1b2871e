"""Ahead of time: an exported program whose weights are streamed, as a value that runs, compiles and is saved."""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from ._sources import storage_key, strip_wrappers
from .backend import flextensor
from .checkpoint import Checkpoint, Weights, open_checkpoint
from .compilation import Compilation, Weight
from .config import OffloadConfig
from .errors import ConfigError, LoadError, ProgramError, StoreError
from .exported import FlatProgram, held
from .inner import Inner
from .loading import Bar, Filling, given_buffers
from .matching import match
from .named_tensors import NamedTensors
from .program_check import TORCH_NAMESPACES
from .program_file import ProgramRecord, SavedCosts, portable, saved_tensor, write_program
from .runtime import registry
from .runtime.layout import check_storable
from .runtime.parameter import OffloadedParameter
from .session import Session


class Program:
    """An exported program that streams its weights. It runs forward only, and its tensors are its own.

    Attributes:
        graph_module: the rewritten graph, prefetch and wait in plain sight. Its placeholders are the tensors that stay, then the
            leaves of the arguments.
        fingerprint: of the file that it was loaded from or last saved to; "" where there is none.
    """

    graph_module: GraphModule
    fingerprint: str

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
        self.has_values = not any(tensor.is_meta for tensor in (*holder.parameters(), *holder.buffers()))
        self._slots = [holder.place(strip_wrappers(target)) for target in flat.targets]
        with torch.no_grad():
            self._run, self.graph_module = self._interpreted()
        self.fingerprint = ""
        self.record = session.graphs[-1] if session.graphs else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the rewritten graph node by node; what the program returned, equal bit for bit.

        Raises:
            OffloadError: the arguments are not those that were exported; says which.
            GradientError: one of them requires a gradient.
            StoreError: a weight cannot be read, or the program has been closed.
        """
        leaves = self.leaves(args, kwargs)
        with torch.no_grad():
            return self.result(self._run(*self.tensors(), *leaves))

    def compile(self, **options: Any) -> Callable[..., Any]:
        """The program through the inner compiler, by default Inductor; called like the program.

        Args:
            options: `inner_backend`, `inner_mode`, `inner_options` or `dump_dir`, as in `OffloadConfig`; what is not given is
                as in the program's configuration.

        Raises:
            ConfigError: an option that would change the plan.
        """
        if wrong := sorted(options.keys() - COMPILING):
            raise ConfigError(
                f"compile: expected options among {', '.join(sorted(COMPILING))}, found {wrong[0]!r}; what shapes the plan is "
                "given to flextensor_fx.rewrite"
            )
        return CompiledProgram(self, replace(self._config, **options))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the program to one file, with its plan and the values that its weights have now; `load_program` reads it.

        The file is a safetensors file, in which every weight lies so that the program streams it from there. One that exists is
        replaced when the new one is whole.

        Raises:
            ProgramError: something in it has no form in a file, or the program has no values yet.
            StoreError: the file cannot be written, or a weight not be read.
        """
        file = Path(path)
        if not file.parent.is_dir() or file.is_dir():
            raise ProgramError(f"save: expected a file name in a directory that exists, found {str(path)!r}")
        entries: dict[object, str] = {}
        tensors: dict[str, Tensor] = {}
        saved = []
        specs = {str(spec.target): spec for spec in self._exported.graph_signature.input_specs}
        for target, tensor in zip(self._flat.targets, self.tensors(), strict=True):
            if tensor.is_meta:
                raise ProgramError(
                    f"save: tensor {target!r} has no value yet; call flextensor_fx.load(program, files) first"
                )
            kind = specs[target].kind.name.lower()
            # Only tensors of a state dict are read by the names of their ties.
            tied = kind == "parameter" or (kind == "buffer" and specs[target].persistent)
            key = (kind if tied else target, storage_key(tensor))
            entry = entries.setdefault(key, target) if tensor.numel() else ""
            if entry == target:
                tensors[entry] = _dense(tensor)
            saved.append(saved_tensor(target, kind, entry, tensors.get(entry, tensor)))
        session = self.session
        record = ProgramRecord(
            str(torch.__version__),
            session.uid,
            portable(self._config),
            session.plan,
            SavedCosts.of(session.costs),
            session.stays,
            self.record,
            session.packs_small,
            tuple(saved),
            {},
        )
        self.fingerprint = write_program(file, self._exported, record, tensors, self.namespaces)

    def package(self, path: str | os.PathLike[str]) -> None:
        """Compiles the graph by AOTInductor, and writes it with the program to a new directory; `load_package` reads it.

        Raises:
            ProgramError: `path` exists, or as `save`.
            StoreError: as `save`.
        """
        from .packaging import package

        package(self, path)

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors of the program by name, those that are streamed too."""
        return dict(zip(self._flat.targets, (tensor.detach() for tensor in self.tensors()), strict=True))

    def close(self) -> None:
        """Removes the store. The program cannot be called any more; closing it again does nothing."""
        self.session.drop()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a Program holds open files and cannot be pickled or copied; use save and flextensor_fx.load_program"
        )

    def __repr__(self) -> str:
        session = self.session
        return f"Program({session.uid}, {len(session.streamed)} of {len(session.nbytes)} selected weights streamed)"

    @property
    def config(self) -> OffloadConfig:
        """As given to `rewrite`, with the device that was found."""
        return self._config

    def tensors(self) -> list[Tensor]:
        return [held(module, name) for module, name in self._slots]

    def leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        if not self.has_values:
            raise ProgramError(
                f"program {self.session.uid}: expected weights with values, found those of an export on the meta device; call "
                "flextensor_fx.load(program, files)"
            )
        if registry.sessions.get(self._holder) is not self.session:
            raise StoreError(
                f"program {self.session.uid}: expected an open program, found one that was closed or released; rewrite the "
                "exported program, or load its file, once more"
            )
        return self._flat.inputs.flatten(args, kwargs)

    def fill(
        self,
        weights: Weights,
        buffers: Mapping[str, Tensor] | None = None,
        *,
        strict: bool = True,
        progress: bool = True,
    ) -> Program:
        """Gives the weights of a program that was exported on the meta device their values; see `flextensor_fx.load`.

        Args:
            weights: as `load` takes them.
            buffers: values of buffers and constants that are in no state dict, by name.

        Raises:
            LoadError: weights and program do not fit, or a buffer has no value.
            StoreError: a file cannot be read, or the store not written.
        """
        if self.has_values:
            raise ProgramError(
                f"program {self.session.uid}: expected one that was exported on the meta device and is not filled, found one "
                "with values; rewrite the exported program once more for others"
            )
        with Bar(progress) as bar:
            self.fill_from(open_checkpoint(weights, bar.update), buffers or {}, strict=strict, bar=bar)
        return self

    def fill_from(
        self, checkpoint: Checkpoint, buffers: Mapping[str, Tensor], *, strict: bool, bar: Bar | None = None
    ) -> None:
        with contextlib.closing(checkpoint):
            matching = match(self._holder, checkpoint)
            self._fill_empty()
            absent = tuple(name for name in matching.missing if held(*self._holder.place(name)).is_meta)
            matching = replace(matching, missing=absent)
            matching.refuse(self.session.uid, strict)
            if lacking := [place.name for place in matching.unfilled if place.name not in buffers]:
                raise LoadError(
                    f"program {self.session.uid}: expected values of {', '.join(lacking[:5])}, which are in no state dict; give "
                    "them: flextensor_fx.load(program, weights, buffers={name: tensor})"
                )
            values = given_buffers(matching.unfilled, buffers)
            filling = Filling(self._holder, checkpoint, matching, values, self.session, self.session.tier.device)
            if bar is not None:
                bar.total = filling.nbytes
            filling.run()
        self.has_values = True

    def _fill_empty(self) -> None:
        """Tensors without elements are in no file, and have all that they need."""
        device = self.session.tier.device
        for module in self._holder.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta and parameter.numel() == 0:
                    module._parameters[name] = nn.Parameter(
                        torch.empty_like(parameter, device=device), parameter.requires_grad
                    )
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta and buffer.numel() == 0:
                    module._buffers[name] = torch.empty_like(buffer, device=device)

    def laid_out(self, leaves: list[Any]) -> list[Any]:
        """The leaves of a call in the layout that was exported."""
        return self._flat.inputs.laid_out(leaves)

    def result(self, outputs: Any) -> Any:
        flat = self._flat
        made = [_given_out(value) for value in outputs]
        leaves = [c if place is None else made[place] for place, c in zip(flat.outputs, flat.constants, strict=True)]
        return pytree.tree_unflatten(leaves, flat.out_spec)

    def compilation(self, config: OffloadConfig, inner: Inner | None = None) -> Compilation:
        """One more compiling of the graph."""
        return Compilation(
            self._flat.module, config, _weights(self._flat, self._holder, self.session), inner, self.session.costs
        )

    def inputs_by_place(self) -> list[Any]:
        """What the flat graph takes, as far as it is known before a call."""
        return [*self.tensors(), *[None] * len(self._flat.inputs.leaves)]

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Of the operators beside torch's own that it calls; what `load_program` must be told to allow."""
        graphs = (module.graph for module in self._flat.module.modules() if isinstance(module, GraphModule))
        targets = (node.target for graph in graphs for node in graph.nodes)
        return tuple(sorted({t.namespace for t in targets if isinstance(t, OpOverload)} - TORCH_NAMESPACES))

    @property
    def takes_numbers(self) -> bool:
        """Whether any argument is a number that may vary."""
        return any(leaf.kind not in (None, Tensor) for leaf in self._flat.inputs.leaves)

    @property
    def has_free_strides(self) -> bool:
        """Whether any argument that is not contiguous has a stride that may vary."""
        return any(-1 in (leaf.stride or ()) for leaf in self._flat.inputs.leaves)

    def slot(self, target: str) -> tuple[nn.Module, str]:
        """The place that holds a tensor."""
        return self._slots[self._flat.targets.index(target)]

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of its tensors, in the order of the graph."""
        return self._flat.targets

    def _interpreted(self) -> tuple[Callable[..., Any], GraphModule]:
        config = replace(self._config, inner_backend="eager", inner_mode=None, inner_options=None)
        compilation = self.compilation(config)
        return compilation.run_until_it_fits(self.inputs_by_place()), compilation.captured


COMPILING = frozenset(("inner_backend", "inner_mode", "inner_options", "dump_dir"))


class CompiledProgram:
    """A program behind an inner compiler; made by `Program.compile`, called like the program. Compiles at its first call."""

    def __init__(self, program: Program, config: OffloadConfig) -> None:
        self._program = program
        self.session = program.session
        # Dynamo counts the graphs of a code object, and all programs would share one.
        shell = type(_Shell.__name__, (_Shell,), {"forward": _with_own_code(_Shell.forward)})(program)
        options = {name: getattr(config, name) for name in COMPILING}
        self._compiled = torch.compile(shell, backend=flextensor, fullgraph=True, options=options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the program's."""
        program = self._program
        leaves = program._flat.inputs.with_free_sizes(program.leaves(args, kwargs))
        with torch.no_grad():
            return program.result(self._compiled(*leaves))


class _Shell(nn.Module):
    """What Dynamo traces: the flat graph, with the tensors that its holder has at the time."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.graph = program._flat.module
        assert self.graph.code  # has it written: Dynamo does not trace a module that has yet to write its own
        self.tensors = program._holder
        self._slots = [(m._parameters if name in m._parameters else m._buffers, name) for m, name in program._slots]

    def forward(self, *leaves: Any) -> Any:
        return self.graph(*[held[name] for held, name in self._slots], *leaves)


def _with_own_code(function: Any) -> Any:
    return types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def _weights(flat: FlatProgram, holder: NamedTensors, session: Session) -> dict[Any, Weight]:
    slots = session.roots.slots()
    selected = {id(slots[name].parameter): name for name in session.nbytes}
    return {
        node: Weight(value, session, selected[id(value)])
        for node, value in flat.values(holder).items()
        if id(value) in selected
    }


def _given_out(value: Any) -> Any:
    if isinstance(value, OffloadedParameter):
        return value.clone()  # Dynamo returns what it was given for a placeholder, which would lead into the store
    # A weight that leaves the graph has the flag that its products need.
    return value.detach() if isinstance(value, Tensor) and value.requires_grad else value


def _dense(tensor: Tensor) -> Tensor:
    """A tensor whose bytes are its elements: an expanded buffer, or a lazily conjugated one, as a file has it."""
    if isinstance(tensor, OffloadedParameter) or check_storable(tensor) is None:
        return tensor
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()
