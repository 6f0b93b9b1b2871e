"""What stands for a model where no modules are at hand: tensors by dotted names, held like parameters of modules."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

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
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        tree: ModuleTree,
        buffers: Mapping[str, torch.Tensor] | None = None,
        title: str = "Mapping",
    ) -> None:
        super().__init__()
        self.tree, self.title = tree, title
        for name, parameter in parameters.items():
            holder, last = self.place(name)
            holder._parameters[last] = parameter
        for name, buffer in (buffers or {}).items():
            holder, last = self.place(name)
            holder._buffers[last] = buffer

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
