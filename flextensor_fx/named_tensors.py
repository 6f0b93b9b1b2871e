"""What stands for a model where no modules are at hand: tensors by dotted names, held like parameters of modules."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ._sources import strip_wrappers
from .errors import SelectionError
from .tree import ModuleTree


class NamedTensors(nn.Module):
    """Modules that are there only to hold tensors under given names: `layers.0.weight` in `layers` in this.

    A name may be that of a tensor and of a module at once, which a mapping allows. The same object under two names is a tie.

    Args:
        parameters: by name.
        tree: what patterns are matched against.
        buffers: by name; they are never selected.
        title: what the whole is called.

    Attributes:
        tree, title: as given.
        names: of the mapping that `of` was given, in order.
        others: what that held beside tensors.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        tree: ModuleTree,
        buffers: Mapping[str, torch.Tensor] | None = None,
        title: str = "Mapping",
    ) -> None:
        super().__init__()
        self.tree, self.title = tree, title
        self.names: tuple[str, ...] = tuple(parameters)
        self.others: Mapping[str, Any] = {}
        self._listener: weakref.ref[Callable[[], None]] | None = None
        for name, parameter in parameters.items():
            holder, last = self.place(name)
            holder._parameters[last] = parameter  # pyright: ignore[reportArgumentType]  # a mapping has plain tensors
        for name, buffer in (buffers or {}).items():
            holder, last = self.place(name)
            holder._buffers[last] = buffer

    @classmethod
    def of(cls, mapping: Mapping[str, Any]) -> NamedTensors:
        """Holds the tensors of a mapping; every one counts as a parameter.

        Raises:
            SelectionError: a name is no string or has an empty part, or a value is no tensor (a module's extra state is kept).
        """
        tree = ModuleTree.from_mapping(mapping)
        tensors = {name: value for name, value in mapping.items() if isinstance(value, torch.Tensor)}
        stripped: dict[str, str] = {}
        for name in tensors:
            if not all(name.split(".")) or stripped.setdefault(strip_wrappers(name), name) != name:
                raise SelectionError(
                    f"weight {name!r}: expected names of parts that are not empty, each of another weight"
                )
        holder = cls(tensors, tree)
        holder.names = tuple(mapping)
        holder.others = {name: value for name, value in mapping.items() if name not in tensors}
        return holder

    def mapping(self) -> dict[str, Any]:
        """What it holds now, under the names that `of` was given."""
        return {name: self.others[name] if name in self.others else self.tensor(name) for name in self.names}

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of this name."""
        module, last = self.place(name)
        tensor = module._parameters[last]
        assert tensor is not None
        return tensor

    def on_release(self, listener: Callable[[], None]) -> None:
        """Has a method called, as long as its object lives, when the weights are plain tensors again."""
        self._listener = weakref.WeakMethod(listener)

    def note_released(self) -> None:
        """The weights are plain tensors again."""
        listener = None if self._listener is None else self._listener()
        if listener is not None:
            listener()

    def place(self, name: str) -> tuple[nn.Module, str]:
        """The module that holds `name`, made if it is not there, and the last part of the name."""
        path, _, last = name.rpartition(".")
        module: nn.Module = self
        for part in path.split(".") if path else ():
            inner = module._modules.get(part)
            if inner is None:
                inner = module._modules[part] = nn.Module()
            module = inner
        return module, last
