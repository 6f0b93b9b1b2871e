"""What tests of the host tier share: models whose device is a modelled one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flextensor_fx
from compiling import Inner
from flextensor_fx import tiers
from modelled_device import ModelledDevice

Install = Callable[..., ModelledDevice]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes a `ModelledDevice`, with these arguments, the device of every session from here on."""

    def put(**options: Any) -> ModelledDevice:
        device = ModelledDevice(**options)
        monkeypatch.setattr(tiers, "open_device", lambda _: device)
        return device

    return put


@pytest.fixture
def device(install: Install) -> ModelledDevice:
    """The device of every session."""
    return install()


def stream_from_host(model: Any, *, inner: Inner = "aot_eager", fullgraph: bool = True, **options: Any) -> Any:
    """`model` compiled to stream every selected weight from host memory."""
    chosen = {"include_patterns": ["**"], "min_stream_bytes": 0, "store": "host", "inner_backend": inner, **options}
    return torch.compile(model, backend=flextensor_fx.flextensor, fullgraph=fullgraph, options=chosen)


__all__ = ["Install", "device", "install", "stream_from_host"]
