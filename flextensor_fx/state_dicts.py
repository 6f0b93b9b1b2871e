"""What `state_dict` gives for a weight in host memory: the host tensor, since the device may have no room for all of them."""

from __future__ import annotations

from typing import Any

from torch import nn

from .runtime.parameter import OffloadedParameter


def give_host_values(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """A hook that modules call at the end of `state_dict`. With `keep_vars` the parameters themselves stay."""
    for name, parameter in module._parameters.items():
        value = state.get(prefix + name)
        if value is not parameter and isinstance(value, OffloadedParameter):
            state[prefix + name] = value.host_value()
