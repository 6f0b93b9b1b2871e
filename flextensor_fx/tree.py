"""What a model's modules and parameters are called, whichever of its forms is at hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx, nn

from . import _sources
from .errors import SelectionError


@dataclass(frozen=True)
class ModuleEntry:
    """A module: its dotted path from the root ("" is the root) and its fully-qualified class, "" when unknown."""

    path: str
    class_name: str = ""


@dataclass(frozen=True)
class ParameterEntry:
    """A parameter tensor: its first name, its bytes (0 when unknown) and every other name of the same tensor."""

    name: str
    nbytes: int = 0
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the tensor, the first one first."""
        return (self.name, *self.aliases)


@dataclass(frozen=True)
class ModuleTree:
    """The modules and parameters of one model, in traversal order.

    Attributes:
        modules: one entry per path; a module reachable by two paths has two.
        parameters: one entry per tensor; a tied tensor has one entry with aliases.
        is_dict: the tree comes from a plain mapping of names to tensors, so no class is known anywhere.
    """

    modules: tuple[ModuleEntry, ...]
    parameters: tuple[ParameterEntry, ...]
    is_dict: bool = False

    @classmethod
    def of(cls, model: object) -> ModuleTree:
        """Return the tree of a module, a compiled module, a Dynamo graph, an exported program or a mapping.

        Raises:
            SelectionError: `model` is none of these, or a mapping with values that are not tensors.
        """
        if isinstance(model, ModuleTree):
            return model
        if isinstance(model, torch.export.ExportedProgram):
            return cls.from_exported(model)
        if isinstance(model, fx.GraphModule) and _sources.is_dynamo_graph(model):
            return cls.from_graph(model)
        if isinstance(model, nn.Module):
            return cls.from_module(model)
        if isinstance(model, Mapping):
            return cls.from_mapping(model)
        raise SelectionError(
            "model: expected an nn.Module, a torch.fx.GraphModule, a torch.export.ExportedProgram or a mapping of "
            f"names to tensors, found {type(model).__name__}; pass one of these"
        )

    @classmethod
    def from_module(cls, module: nn.Module) -> ModuleTree:
        """Return the tree of a module. Bytes are those of the elements, also on the meta device."""
        names: dict[str, torch.Tensor] = {}
        classes: dict[str, str] = {}
        for path, child in walk(module):
            # A torch.compile wrapper and the module in it share one path; the inner class, which comes last, wins.
            classes[path] = _sources.class_name(type(child))
            for name, parameter in child._parameters.items():
                if parameter is not None:
                    names[_join(path, name)] = parameter
        return cls(_modules(classes), _tied((name, tensor, id(tensor)) for name, tensor in names.items()))

    @classmethod
    def from_graph(cls, graph_module: fx.GraphModule) -> ModuleTree:
        """Return the tree of a graph that Dynamo captured; its parameters are those the graph uses.

        Inside a backend call the traced module is at hand and gives every class and every name of a tied tensor.
        Elsewhere the tree knows the modules that own a parameter of the graph or have a node in it, and their
        ancestors, some with an unknown class; a tied tensor then answers only to the name it was traced under.
        A function over several modules has each of them under its own variable's name, less what all share.
        """
        parameters = _sources.graph_parameters(graph_module)
        prefixes = _root_prefixes(parameters)
        traced = {_join(prefixes[p.root], ".".join(p.path)): p for p in parameters}
        live = _live_tree(prefixes, traced)
        if live is not None:
            return live
        classes: dict[str, str] = {}
        for text, class_name in _sources.stack_entries(graph_module.graph):
            path = _stack_path(text, prefixes)
            if path is not None and class_name:
                classes.setdefault(path, class_name)
        sized = ((name, p.value, id(p.node)) for name, p in traced.items())
        return cls(_modules(classes, traced), _tied(sized))

    @classmethod
    def from_exported(cls, program: torch.export.ExportedProgram) -> ModuleTree:
        """Return the tree of an exported program: all its parameters, and the classes its module stacks name."""
        targets = list(program.graph_signature.inputs_to_parameters.values())
        tensors = {_sources.strip_wrappers(target): program.state_dict[target] for target in targets}
        classes: dict[str, str] = {}
        for path, class_name in _sources.stack_entries(program.graph):
            classes[_sources.strip_wrappers(path)] = class_name
        shared = ((name, tensor, _sources.storage_key(tensor)) for name, tensor in tensors.items())
        return cls(_modules(classes, tensors), _tied(shared))

    @classmethod
    def from_mapping(cls, tensors: Mapping[str, torch.Tensor]) -> ModuleTree:
        """Return the tree of a state dict: dotted prefixes are modules without a class, every tensor is a parameter.

        Raises:
            SelectionError: a name is not a string, or a value is not a tensor (a module's extra state is passed over).
        """
        kept: dict[str, torch.Tensor] = {}
        for name, value in tensors.items():
            if not isinstance(name, str):
                raise SelectionError(
                    f"weight {name!r}: expected a name, found {type(name).__name__}; key the mapping by parameter names"
                )
            if isinstance(value, torch.Tensor):
                kept[_sources.strip_wrappers(name)] = value
            elif not name.endswith("_extra_state"):
                raise SelectionError(
                    f"weight {name!r}: expected a tensor, found {type(value).__name__}; pass a flat mapping of names "
                    "to tensors, such as model.state_dict()"
                )
        shared = ((name, tensor, _sources.storage_key(tensor)) for name, tensor in kept.items())
        return cls(_modules({}, kept), _tied(shared), is_dict=True)

    def parameter(self, name: str) -> ParameterEntry:
        """Return the parameter with this name or alias.

        Raises:
            KeyError: no parameter has that name.
        """
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, ParameterEntry]:
        return {name: entry for entry in self.parameters for name in entry.names}


def walk(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each path and its module, parents first, a shared module under all its paths.

    As ``named_modules(remove_duplicate=False)``, which never ends on a module that contains itself.
    """
    stack: list[tuple[str, nn.Module, frozenset[int]]] = [("", module, frozenset())]
    while stack:
        path, current, above = stack.pop()
        yield path, current
        inside = above | {id(current)}
        for name, child in reversed(current._modules.items()):
            if child is not None and id(child) not in inside:
                stack.append((_sources.strip_wrappers(_join(path, name)), child, inside))


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _modules(classes: Mapping[str, str], parameters: Iterable[str] = ()) -> tuple[ModuleEntry, ...]:
    """Return an entry for each path of `classes` and each owner of a parameter, with all their ancestors."""
    known: dict[str, str] = {"": classes.get("", "")}
    owners = (name.rpartition(".")[0] for name in parameters)
    for path in (*owners, *classes):
        missing = []
        while path and path not in known:
            missing.append(path)
            path = path.rpartition(".")[0]
        known.update((ancestor, classes.get(ancestor, "")) for ancestor in reversed(missing))
    return tuple(ModuleEntry(path, class_name) for path, class_name in known.items())


def _tied(named: Iterable[tuple[str, torch.Tensor | None, object]]) -> tuple[ParameterEntry, ...]:
    """Return one entry per identity; `named` gives (name, tensor, identity) in order."""
    groups: dict[object, tuple[torch.Tensor | None, list[str]]] = {}
    for name, tensor, identity in named:
        groups.setdefault(identity, (tensor, []))[1].append(name)
    return tuple(
        ParameterEntry(names[0], 0 if tensor is None else _sources.nbytes(tensor), tuple(names[1:]))
        for tensor, names in groups.values()
    )


def _root_prefixes(parameters: Iterable[_sources.GraphParameter]) -> dict[str, str]:
    """Return, per root expression, the path its names start with: what sets it apart from the other roots."""
    parts = {parameter.root: parameter.root_parts for parameter in parameters}
    shared = 0
    for column in zip(*parts.values(), strict=False):
        if len(set(column)) > 1:
            break
        shared += 1
    prefixes: dict[str, str] = {}
    for root, names in parts.items():
        prefix = ".".join(names[shared:])
        # A local and a global of one name would give one name to two weights.
        prefixes[root] = f"{prefix}_{len(prefixes)}" if prefix in prefixes.values() else prefix
    return prefixes


def _stack_path(text: str, prefixes: Mapping[str, str]) -> str | None:
    """Translate a stack entry such as ``L['self'].layers.0`` to a path; None when it is under no known root."""
    for root in sorted(prefixes, key=len, reverse=True):
        rest = text[len(root) :]
        if text.startswith(root) and (not rest or rest[0] == "."):
            return _sources.strip_wrappers(_join(prefixes[root], rest[1:]))
    return None


def _live_tree(prefixes: Mapping[str, str], traced: Mapping[str, _sources.GraphParameter]) -> ModuleTree | None:
    """Return the tree of the modules being compiled, cut down to the traced parameters; None if others are."""
    modules: list[ModuleEntry] = []
    tensors: dict[str, torch.Tensor] = {}
    for root, prefix in prefixes.items():
        module = _sources.live_root(root)
        if module is None:
            return None
        for path, child in walk(module):
            modules.append(ModuleEntry(_join(prefix, path), _sources.class_name(type(child))))
            own = ((name, value) for name, value in child._parameters.items() if value is not None)
            tensors.update((_join(_join(prefix, path), name), value) for name, value in own)
    # By identity: a frame that is not this graph's would give right-looking names to the wrong weights.
    if not prefixes or any(tensors.get(name) is not parameter.value for name, parameter in traced.items()):
        return None
    used = {id(parameter.value) for parameter in traced.values()}
    classes = {entry.path: entry.class_name for entry in modules}
    kept = ((name, tensor, id(tensor)) for name, tensor in tensors.items() if id(tensor) in used)
    return ModuleTree(_modules(classes), _tied(kept))
