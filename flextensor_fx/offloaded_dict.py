"""A mapping of names to tensors of which the selected ones are in a store."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .named_tensors import NamedTensors
from .runtime.engine import Engine
from .runtime.host_engine import HostEngine
from .runtime.parameter import OffloadedParameter


class OffloadedDict(dict[str, Any]):
    """A dict of weights by name, for models that are functions of one. Weights in the store are `OffloadedParameter`s.

    A compiled function that is given it streams them, with `backend="flextensor"`. Elsewhere each use reads the value. A copy is
    a plain dict of the same tensors; the store lives as long as this object.

    Args:
        holder: has the tensors, under the names that they have in what it was made of.

    Attributes:
        holder: stands for a module where one is expected.
    """

    def __init__(self, holder: NamedTensors) -> None:
        super().__init__(holder.mapping())
        self.holder = holder
        holder.on_release(self._take_back)

    def fetch(self, name: str) -> Tensor:
        """The value of a weight as a plain tensor, in memory of its own on the device that computes.

        Raises:
            KeyError: there is no weight of this name.
            StoreError: it cannot be read.
        """
        value = self[name]
        source = value.source if isinstance(value, OffloadedParameter) else None
        return source.read(value.key) if isinstance(source, (Engine, HostEngine)) else value.detach().clone()

    def _take_back(self) -> None:
        """Plain tensors in the place of those that were in the store, unless the user has put in others."""
        for name, value in self.items():
            if isinstance(value, OffloadedParameter):
                plain = self.holder.tensor(name)
                super().__setitem__(name, plain.detach().requires_grad_(plain.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)
