"""What the host tier asks of torch and of the driver for CUDA, with both of them pretended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flextensor_fx.errors import OffloadError
from flextensor_fx.runtime.cuda_device import CudaDevice
from flextensor_fx.runtime.device import HostDevice, PinError, open_device

Pretend = Callable[..., list[tuple[Any, ...]]]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Two GPUs and a driver that notes what it is asked for."""

    def make(refuses: bool = False) -> list[tuple[Any, ...]]:
        calls: list[tuple[Any, ...]] = []

        def register(*arguments: int) -> int:
            calls.append(("register", *arguments))
            return 2 if refuses else 0

        runtime = SimpleNamespace(
            cudaHostRegister=register,
            cudaHostUnregister=lambda address: calls.append(("unregister", address)),
            cudaGetErrorString=lambda error: f"error {error}",
        )

        class Current:
            def __init__(self, device: torch.device) -> None:
                calls.append(("device", device.index))

            def __enter__(self) -> None: ...
            def __exit__(self, *error: object) -> None: ...

        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        monkeypatch.setattr(torch.cuda, "device", Current)
        return calls

    return make


def test_the_index_is_kept(pretend: Pretend) -> None:
    pretend()
    assert CudaDevice(torch.device("cuda:0")).device == torch.device("cuda:0")
    assert CudaDevice(torch.device("cuda:1")).device == torch.device("cuda:1")
    assert CudaDevice(torch.device("cuda")).device == torch.device("cuda:1")  # the current one
    with pytest.raises(OffloadError, match="sees 2 CUDA devices here"):
        CudaDevice(torch.device("cuda:2"))


def test_pages_are_registered_for_every_device_and_given_back(pretend: Pretend) -> None:
    calls = pretend()
    device = CudaDevice(torch.device("cuda:1"))
    device.pin(4096, 8192)
    device.unpin(4096)
    assert calls == [("device", 1), ("register", 4096, 8192, 1), ("unregister", 4096)]


def test_a_refusal_is_cleared_and_told(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(refuses=True)
    blamed: list[str] = []

    def empty(*size: int, device: torch.device) -> Any:
        def fill(value: int) -> None:
            blamed.append("a kernel")
            raise RuntimeError("CUDA error: the one before")

        return SimpleNamespace(fill_=fill)

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(PinError, match="would not pin 8192 bytes: error 2"):
        CudaDevice(torch.device("cuda:0")).pin(4096, 8192)
    assert blamed == ["a kernel"]


def test_free_memory_counts_what_torch_keeps_unused(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend()
    stats = {"reserved_bytes.all.current": 700, "active_bytes.all.current": 300}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    assert CudaDevice(torch.device("cuda:0")).memory() == (1400, 5000)


class Switchboard:
    """Which device is current, and which stream on each, as `torch.cuda` keeps them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: int) -> None:
        self.device = device
        self.streams = [SimpleNamespace(device_index=index, name="default") for index in range(2)]
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.device)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.streams[device.index])
        monkeypatch.setattr(torch.cuda, "set_stream", self.set_stream)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(self, "device", device))

    def set_stream(self, stream: Any) -> None:
        self.device = stream.device_index  # as torch does
        self.streams[stream.device_index] = stream


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("fails", [False, True])
def test_a_copy_leaves_the_current_device_and_its_streams(
    monkeypatch: pytest.MonkeyPatch, current: int, fails: bool
) -> None:
    board = Switchboard(monkeypatch, current)
    before = list(board.streams)
    copies = SimpleNamespace(device_index=1, name="copies")
    seen: list[Any] = []

    def copy_(source: Any, non_blocking: bool) -> None:
        seen.append((board.streams[1], non_blocking))
        if fails:
            raise RuntimeError("the device is gone")

    into: Any = SimpleNamespace(copy_=copy_)
    with pytest.raises(RuntimeError, match="is gone") if fails else contextlib.nullcontext():
        CudaDevice(torch.device("cuda:1")).copy(into, torch.ones(1), copies)  # pyright: ignore[reportArgumentType]  # a stream of the board
    assert seen == [(copies, True)]
    assert board.streams == before and board.device == current


def test_the_cpu_is_a_device_too() -> None:
    device = open_device(torch.device("cpu"))
    assert isinstance(device, HostDevice)
    free, total = device.memory()
    assert 0 < free <= total
