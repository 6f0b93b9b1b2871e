"""What tests of the host tier share: models whose device is a modelled one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import flextensor_fx
from compiling import Inner
from flextensor_fx import tiers
from flextensor_fx.runtime.host_engine import HostEngine
from flextensor_fx.runtime.host_store import HostStore
from flextensor_fx.runtime.layout import spec_of
from flextensor_fx.runtime.store import Store
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


def host_engine(device: ModelledDevice, weights: Mapping[str, Tensor], pool_bytes: int = 1 << 20) -> HostEngine:
    """An engine of the host tier that holds `weights`."""
    store = HostStore(device, _no_files)
    store.add([spec_of(key, weight) for key, weight in weights.items()])
    for key, weight in weights.items():
        store.write(key, weight)
    engine = HostEngine("test", store, device, pool_bytes)
    engine.seal()
    return engine


def _no_files() -> Store:
    raise AssertionError("without a limit nothing lies in files")


__all__ = ["Install", "device", "host_engine", "install", "stream_from_host"]
