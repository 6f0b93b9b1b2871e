"""Everything this package reads of torch's internals to name the weights of a graph.

A Dynamo graph has no submodules. Each placeholder carries a source, a chain such as
``L['self']._modules['layers']._modules['0']._parameters['weight']``, and each call node a stack of entries
``(path text, class)``. Neither is public, so both are read here and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from ._torch_versions import root_frame, source_name, source_of
from .runtime.parameter import OffloadedParameter

_WRAPPER = "_orig_mod"
# Of a module whose forward sets attributes, Dynamo reads `module.__dict__['_parameters']`.
_SLOT = re.compile(r"""(\._parameters|\.__dict__\[['"]_parameters['"]\])\[['"][^'"]*['"]\]$""")


@dataclass(frozen=True)
class GraphParameter:
    """A placeholder of a Dynamo graph that stands for a parameter of a module.

    Attributes:
        node: the placeholder.
        root: the source text of the outermost module that the chain goes through, such as ``L['self']``.
        root_parts: the same as names, such as ``("self",)`` or ``("holder", "encoder")``.
        path: names from that module down to the parameter, without ``_orig_mod``.
        value: the traced tensor, or None when the graph no longer holds it.
    """

    node: fx.Node
    root: str
    root_parts: tuple[str, ...]
    path: tuple[str, ...]
    value: torch.Tensor | None


def strip_wrappers(path: str) -> str:
    """Remove the segments that a torch.compile wrapper adds to a dotted path."""
    return ".".join(part for part in path.split(".") if part != _WRAPPER) if _WRAPPER in path else path


def class_name(cls: type | str | None) -> str:
    """Return the fully-qualified name of a class; an exported stack holds it as text already, None gives ""."""
    if cls is None or isinstance(cls, str):
        return cls or ""
    return f"{cls.__module__}.{cls.__qualname__}"


def is_dynamo_graph(graph_module: fx.GraphModule) -> bool:
    """Tell whether the placeholders carry Dynamo sources."""
    return any(source_of(node) is not None for node in graph_module.graph.find_nodes(op="placeholder"))


def graph_parameters(graph_module: fx.GraphModule) -> tuple[GraphParameter, ...]:
    """Return the parameter placeholders of a Dynamo graph in placeholder order; buffers and inputs are left out."""
    found = (_graph_parameter(node) for node in graph_module.graph.find_nodes(op="placeholder"))
    return tuple(parameter for parameter in found if parameter is not None)


def stack_entries(graph: fx.Graph) -> Iterator[tuple[str, str]]:
    """Yield (path text, class name) for each entry of each node's module stack, outermost first, with repeats."""
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
        for path, cls in stack.values():
            yield path, class_name(cls)


def live_root(root: str) -> nn.Module | None:
    """Return the module that a source text stands for in the frame being compiled, or None outside a compilation.

    Only this module knows the classes of containers, the root's class and the second name of a tied weight: the
    graph has lost them. The caller checks the parameters by identity before it believes the answer.
    """
    frame = root_frame()
    if frame is None:
        return None
    try:
        # The text is Dynamo's own guard expression over the frame's locals (L) and globals (G).
        value = eval(root, {"L": frame.f_locals, "G": frame.f_globals})
    except (AttributeError, NameError, LookupError, TypeError, SyntaxError):
        return None
    return value if isinstance(value, nn.Module) else None


def storage_key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that two tensors share exactly when they are one view of one storage, on any device, meta too.

    ``state_dict()`` detaches, so the two names of a tied weight are two tensor objects there. Valid only while the
    tensors live: an address can be reused afterwards.
    """
    if isinstance(tensor, OffloadedParameter):
        return tensor.identity
    try:
        storage = tensor.untyped_storage()._cdata
        return (storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
    except (RuntimeError, NotImplementedError, ValueError):  # sparse, wrapper and lazy tensors have no storage
        return (id(tensor),)


def nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements; 0 when the shape is not known yet (lazy or symbolic)."""
    if nn.parameter.is_lazy(tensor):
        return 0
    count = tensor.numel()
    # int() of a symbolic count would add a guard to the graph being compiled.
    return count * tensor.element_size() if type(count) is int else 0


def names_a_slot(source: Any) -> bool:
    """Whether a source reads a parameter from its module, and not from a list, a dict or a variable that holds it too."""
    return source is not None and _SLOT.search(source_name(source)) is not None


def _graph_parameter(node: fx.Node) -> GraphParameter | None:
    source = source_of(node)
    chain: list[Any] = []
    while source is not None:
        chain.append(source)
        source = getattr(source, "base", None)
    chain.reverse()
    root, root_parts, path, container = None, (), (), ""
    parts: tuple[str, ...] = ()
    is_parameter = False
    holder = None  # a module whose __dict__ is read
    for link in chain:
        step = _step(link)
        if step is None:
            continue
        is_attribute, text = step
        if is_attribute and text == "__dict__":
            holder = link.base
            continue
        is_attribute, base, holder = is_attribute or holder is not None, holder or getattr(link, "base", None), None
        if is_parameter:
            return None  # an attribute or an element of a parameter
        if container:
            is_parameter = container == "_parameters"
            path, container = (*path, text), ""
        elif is_attribute and text in ("_modules", "_parameters"):
            root = root or source_name(base)
            root_parts = root_parts or parts
            container = text
        elif not (is_attribute and text == _WRAPPER):
            # A module kept in a plain attribute or list: named_modules() of the outer module does not know it.
            parts = (*root_parts, *path, *parts, text) if root else (*parts, text)
            root, root_parts, path = None, (), ()
    if not is_parameter or root is None:
        return None
    return GraphParameter(node, root, root_parts, path, _traced_value(node))


def _step(link: Any) -> tuple[bool, str] | None:
    if hasattr(link, "member"):
        return True, link.member
    if hasattr(link, "index"):
        return False, str(link.index)
    for field in ("local_name", "global_name"):
        if hasattr(link, field):
            return False, getattr(link, field)
    return None


def _traced_value(node: fx.Node) -> torch.Tensor | None:
    graph_argument = node.meta.get("grapharg")
    example = getattr(graph_argument, "example", None) if graph_argument is not None else None
    value = example if example is not None else node.meta.get("example_value")
    return value if isinstance(value, torch.Tensor) else None
