"""An exported program as one flat graph: its tensors and its inputs are placeholders, its user's outputs all that it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, InputSpec, OutputKind
from torch.fx import Graph, GraphModule, Node

from . import _sources
from ._torch_versions import graph_module
from .errors import OffloadError
from .mutations import mutated_placeholders
from .named_tensors import NamedTensors
from .passes import ops
from .program_inputs import ProgramInputs
from .runtime.parameter import OffloadedParameter
from .tree import ModuleTree

_TENSORS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
_WRITES = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION, OutputKind.USER_INPUT_MUTATION)


@dataclass(frozen=True)
class FlatProgram:
    """A flat graph and how it is called.

    Fields:
        module: takes the tensors of `targets`, then the leaves of the user's arguments; returns a tuple of `outputs`. What the
            program writes to buffers and inputs it writes in place.
        targets: the name of the tensor that each of the first placeholders stands for.
        inputs: what the others take.
        outputs: per leaf of the result, its place in the tuple, or None for a constant.
        constants: the values of those.
        out_spec: the structure of the result.
    """

    module: GraphModule
    targets: tuple[str, ...]
    inputs: ProgramInputs
    outputs: tuple[int | None, ...]
    constants: tuple[Any, ...]
    out_spec: Any

    @property
    def placeholders(self) -> dict[str, Node]:
        """The placeholder of each tensor, by name."""
        return dict(zip(self.targets, self.module.graph.find_nodes(op="placeholder"), strict=False))

    def values(self, holder: NamedTensors) -> dict[Node, Any]:
        """What a holder has now for the placeholder of each tensor."""
        places = ((node, holder.place(_sources.strip_wrappers(name))) for name, node in self.placeholders.items())
        return {node: held(*place) for node, place in places}


def check_program(program: object, who: str) -> ExportedProgram:
    """`program`, seen to be one that can be rewritten.

    Raises:
        OffloadError: it is no exported program, is rewritten already, or has inputs or outputs that no graph of ours can have.
    """
    if not isinstance(program, ExportedProgram):
        raise OffloadError(
            f"{who}: expected what torch.export.export returns, found {type(program).__name__}; for a module use "
            'torch.compile(model, backend="flextensor")'
        )
    if any(node.target in ops.ALL_OPS for node in program.graph.nodes):
        raise OffloadError(
            f"{who}: expected an exported program that has not been rewritten, found transfers in it; rewrite the program that "
            "it was made of"
        )
    signature = program.graph_signature
    odd = [f"{spec.kind.name.lower()} {spec.target}" for spec in signature.input_specs if not _is_plain(spec)]
    odd += [
        f"{spec.kind.name.lower()} {spec.target}"
        for spec in signature.output_specs
        if spec.kind not in (OutputKind.USER_OUTPUT, *_WRITES)
    ]
    if odd:
        raise OffloadError(
            f"{who}: expected parameters, buffers, tensors and arguments alone, found {', '.join(odd[:3])}; export the model "
            "for inference, without script objects and without a loss"
        )
    return program


def _is_plain(spec: InputSpec) -> bool:
    return spec.kind in (*_TENSORS, InputKind.USER_INPUT)


def flatten(program: ExportedProgram) -> FlatProgram:
    """The flat graph of a checked program, which is changed nowhere."""
    signature = program.graph_signature
    graph, copies = Graph(), {}
    result = graph.graph_copy(program.graph, copies)
    assert isinstance(result, tuple | list)
    by_name = {node.name: copies[node] for node in program.graph.nodes if node in copies}
    specs = signature.input_specs
    tensors = [spec for spec in specs if spec.kind in _TENSORS]
    order = [by_name[spec.arg.name] for spec in tensors]
    given = [node for node in graph.nodes if node.op == "placeholder" and node not in order]
    if list(graph.find_nodes(op="placeholder")) != [*order, *given]:
        raise AssertionError(f"tensors of an exported program come first: {signature}")
    by_target = {spec.target: by_name[spec.arg.name] for spec in tensors}
    ties = _tied_buffers(program)
    returned: list[Any] = []
    places: list[int | None] = []
    constants: list[Any] = []
    for spec, value in zip(signature.output_specs, result, strict=True):
        if spec.kind is OutputKind.USER_OUTPUT:
            is_constant = isinstance(spec.arg, ConstantArgument) or not isinstance(value, Node)
            places.append(None if is_constant else len(returned))
            constants.append(value if is_constant else None)
            if not is_constant:
                returned.append(value)
        elif isinstance(value, Node):
            into = by_name[spec.target] if spec.kind is OutputKind.USER_INPUT_MUTATION else by_target[spec.target]
            if value is not into:
                written = graph.call_function(torch.ops.aten.copy_.default, (into, value))
                written.meta["val"] = into.meta.get("val")
    graph.output(tuple(returned))
    for target, first in ties.items():  # compilers would take two placeholders for two memories
        by_target[target].replace_all_uses_with(by_target[first])
    module = graph_module(program.graph_module, graph)
    return FlatProgram(
        module,
        tuple(str(spec.target) for spec in tensors),
        ProgramInputs.of(program, given),
        tuple(places),
        tuple(constants),
        program.call_spec.out_spec,
    )


def hold(program: ExportedProgram) -> NamedTensors:
    """The tensors of a program, as the modules that their names speak of. They share memory with the program's."""
    signature = program.graph_signature
    named: dict[str, Any] = {**program.state_dict, **program.constants}
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[str, Tensor] = {}
    passing: list[str] = []
    known: dict[object, nn.Parameter] = {}
    for spec in signature.input_specs:
        if spec.kind not in _TENSORS or not isinstance(spec.target, str):
            continue
        value = named[spec.target]
        name = _sources.strip_wrappers(spec.target)
        if spec.kind is InputKind.PARAMETER:
            key = _sources.storage_key(value)
            if key not in known:
                known[key] = nn.Parameter(value.detach(), requires_grad=value.requires_grad)
            parameters[name] = known[key]
        else:
            buffers[name] = value.detach()
            passing += [] if spec.kind is InputKind.BUFFER and spec.persistent else [name]
    for target, first in _tied_buffers(program).items():
        buffers[_sources.strip_wrappers(target)] = buffers[_sources.strip_wrappers(first)]
    tree = ModuleTree.from_exported(program)
    title = next((entry.class_name for entry in tree.modules if not entry.path), "").rpartition(".")[2]
    holder = NamedTensors(parameters, tree, buffers, title or "Program")
    for module, name in map(holder.place, passing):
        module._non_persistent_buffers_set.add(name)
    return holder


def refuse_shared_writes(flat: FlatProgram, holder: NamedTensors) -> None:
    """Sees that what the graph writes to is no other tensor's memory too: in a store, in a file each has its own.

    Raises:
        OffloadError: it is; ties of parameters and of persistent buffers are not meant.
    """
    values = flat.values(holder)
    names = {node: target for target, node in flat.placeholders.items()}
    written = mutated_placeholders(flat.module.graph, values)
    for node, target in ((node, target) for node, target in names.items() if node in written):
        for other, value in ((names[one], value) for one, value in values.items()):
            if value is not values[node] and _overlap(value, values[node]):
                raise OffloadError(
                    f"rewrite: {target}: expected memory of its own for a tensor that the program writes to, found it shared "
                    f"with {other}; give one of them a clone in the model, then export"
                )


def _tied_buffers(program: ExportedProgram) -> dict[str, str]:
    """Persistent buffers that are another one too: the name of that."""
    first: dict[object, str] = {}
    ties: dict[str, str] = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.BUFFER and spec.persistent and isinstance(spec.target, str):
            name = first.setdefault(_sources.storage_key(program.state_dict[spec.target]), spec.target)
            if name != spec.target:
                ties[spec.target] = name
    return ties


def held(module: nn.Module, name: str) -> Any:
    """The parameter or buffer that a module has under a name."""
    return module._parameters[name] if name in module._parameters else module._buffers[name]


def _overlap(one: Tensor, other: Tensor) -> bool:
    span, other_span = _span(one), _span(other)
    if span is None or other_span is None:
        return False
    (storage, begin, end), (other_storage, other_begin, other_end) = span, other_span
    return storage == other_storage and begin < other_end and other_begin < end


def _span(tensor: Tensor) -> tuple[int, int, int] | None:
    """The storage of a tensor, and from where to where in it elements lie; None if it has none or no elements."""
    if isinstance(tensor, OffloadedParameter) or tensor.layout is not torch.strided or not tensor.numel():
        return None
    try:
        storage = tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # wrappers of other tensors
        return None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin, width = int(tensor.storage_offset()), tensor.element_size()
    return storage, begin * width, (begin + int(last) + 1) * width
