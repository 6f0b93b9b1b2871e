"""What this package takes of torch that torch does not promise: the place to look at when a release breaks something.

What a compiler's interface asks for by its nature is not here: Inductor's is in inner.py and direct_calls.py, Dynamo's guards in
_guards.py, and a parameter's subclass in runtime/parameter.py. tests/test_torch_versions.py holds all others to this module.
For a new release run the tests with it, and add a line:

    2.11  the oldest that is supported. A compiled function is called from a function named "compile_wrapper"; before, from "_fn",
          which now stands between what `torch.compiler.disable` gave and what it was given. `Source.name` is a property; before,
          a method. Dynamo does not guard on whether parameters of a frozen base want gradients (tests/test_gradients.py).
          Once several threads have been in a function compiled with fullgraph=True, whatever its backend, Dynamo compiles no more
          of any other function than comes before its first graph break; results stay right. A package of AOTInductor hands ops in
          Python another dtype than it was compiled with (it numbers dtypes by another table); 2.13 does not. torch.export's
          serializer always writes values too.
    2.12  `compile_fx_inner` takes one more keyword, which inner.py passes on as it comes.
    2.13  `CustomGraphPass.uuid` is that of a new base class; `FakeTensor` is made with other arguments, and is never made here.
    2.14  A guard has one more field. Generated code is laid out differently (tests/test_generated_code.py reads both).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import FrameType, ModuleType
from typing import Any

import torch
import torch._dynamo
from torch import fx, nn
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.exc import BackendCompilerFailed
from torch._guards import TracingContext
from torch.export import ExportedProgram
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes as without_modes

profiler_enabled: Callable[[], bool] = torch.autograd._profiler_enabled
"""Whether autograd's profiler is running on this thread."""

_WRAPPER = "compile_wrapper"


PACKAGES_KEEP_DTYPES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Whether ops that a package of AOTInductor calls get the dtypes that they were compiled with."""


def is_compile_wrapper(frame: FrameType) -> bool:
    """Whether a frame is that of the function which torch.compile returned; its local `fn` is what the user compiled."""
    return frame.f_code.co_name == _WRAPPER and frame.f_globals.get("__name__") == "torch._dynamo.eval_frame"


def root_frame() -> Any:
    """What Dynamo is compiling, with `f_code`, `f_locals` and `f_globals` as a frame has; None outside a compilation."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx().output.root_tx
    except AttributeError:  # there is none on this thread
        return None


def source_of(node: fx.Node) -> Any:
    """Dynamo's source of a placeholder; None where it has none."""
    source = getattr(node, "_dynamo_source", None)
    return source if source is not None else getattr(node.meta.get("grapharg"), "source", None)


def copy_source(node: fx.Node, copy: Any) -> None:
    """Gives `copy`, the copy of a placeholder, its source: AOTAutograd reads it."""
    source = getattr(node, "_dynamo_source", None)
    if source is not None:
        copy._dynamo_source = source


def source_name(source: Any) -> str:
    """The guard expression of a source, such as ``L['self']._modules['layers']``."""
    return str(source.name)


def graph_to_json(program: ExportedProgram) -> bytes:
    """The graph of an exported program and all that describes it, without a value of any tensor.

    Raises:
        Exception: torch has no form for something in it.
    """
    from torch._export.serde.serialize import serialize

    # 2.11 cannot leave them out; on the meta device they are next to nothing.
    values = ("serialize_state_dict", "serialize_constants", "serialize_example_inputs")
    known = inspect.signature(serialize).parameters
    options: dict[str, Any] = {name: False for name in values if name in known}
    data = serialize(program, **options).exported_program
    assert isinstance(data, bytes)
    return data


def graph_from_json(
    data: bytes,
    parse: Callable[[bytes, ModuleType], Any],
    tensors: Callable[[Any], tuple[dict[str, Any], dict[str, Any]]],
) -> ExportedProgram:
    """What `graph_to_json` was given.

    Args:
        parse: makes a program of the schema's classes, and sees to it that its texts are harmless.
        tensors: gives state dict and constants for the schema's signature, on the meta device.

    Raises:
        Exception: the data is damaged, or of a schema that this torch does not read.
    """
    from torch._export.serde import schema
    from torch._export.serde.serialize import ExportedProgramDeserializer

    program = parse(data, schema)
    state, constants = tensors(program.graph_module.signature)
    return ExportedProgramDeserializer().deserialize(program, state, constants)


def load_ahead(file: str) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    """The compiled graph in a package of AOTInductor: takes a list of tensors, which it empties, and returns one.

    Called by its loader, since the callable around that reads the structure of arguments anew at every call.
    """
    from torch._inductor import aoti_load_package

    loader: Any = aoti_load_package(file).loader
    return loader.boxed_run


def graph_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A GraphModule whose code is written when it is first wanted, and not after every pass."""
    return _LazyGraphModule(root, graph)


def mark_free(tensor: torch.Tensor, dims: Sequence[int]) -> None:
    """Has Dynamo take the sizes of these dimensions for symbols where it can."""
    torch._dynamo.maybe_mark_dynamic(tensor, list(dims))


def has_kernel(op: torch._ops.OpOverload) -> bool:
    """Whether the dispatcher serves an operator."""
    return torch._C._dispatch_has_kernel(op.name())


def recompile_limit() -> int:
    """How many graphs Dynamo makes of one code object before it gives up."""
    return torch._dynamo.config.recompile_limit


def is_tracing() -> bool:
    """Whether a graph is being captured or compiled on this thread."""
    return TracingContext.try_get() is not None


def storage_uses(tensor: torch.Tensor) -> int:
    """How many refer to the memory of `tensor`: it, whoever shares it, and the one reference that is made to ask."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)


def storage_again(reference: StorageWeakRef) -> torch.UntypedStorage:
    """The storage that a reference refers to, which must live."""
    return torch.UntypedStorage._new_with_weak_ptr(reference.cdata)


__all__ = [
    "PACKAGES_KEEP_DTYPES",
    "BackendCompilerFailed",
    "compile_lock",
    "copy_source",
    "graph_from_json",
    "graph_module",
    "graph_to_json",
    "has_kernel",
    "is_compile_wrapper",
    "load_ahead",
    "mark_free",
    "profiler_enabled",
    "recompile_limit",
    "root_frame",
    "source_name",
    "source_of",
    "storage_again",
    "storage_uses",
    "without_modes",
]
