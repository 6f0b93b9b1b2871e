"""Budgets that hang on the memory of the device, and what is refused with which numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flextensor_fx
from compiling import assert_equal, fresh_compiler, mlp, resident, session_of
from flextensor_fx import session
from flextensor_fx.candidates import Roots
from flextensor_fx.config import OffloadConfig
from flextensor_fx.errors import BudgetError, ConfigError, OffloadError
from flextensor_fx.passes.activation_peak import activation_peak
from flextensor_fx.session import Session
from flextensor_fx.simulate import Link
from graphs import trace
from modelled_device import ModelledDevice
from modelled_session import Install, device, install, stream_from_host

__all__ = ["device", "fresh_compiler", "install"]
MIB = 1 << 20
WIDTH = 256
LAYER = 4 * WIDTH * WIDTH
X = torch.ones(2, WIDTH)


def model_of(depth: int = 8) -> nn.Sequential:
    return mlp(depth, WIDTH, bias=False)


def test_a_share_of_the_device(install: Install) -> None:
    install(total_bytes=8 * MIB)
    compiled = stream_from_host(model_of(), budget="12.5% of device")
    with torch.no_grad():
        compiled(X)
    report = flextensor_fx.report(compiled)
    assert report.budget == MIB
    assert report.peak_bytes <= MIB


def test_auto_is_what_is_free_beside_activations_and_a_margin(install: Install) -> None:
    device = install(total_bytes=4 * MIB)
    model = model_of(14)  # 3.5 MiB
    taken = device.empty([MIB], [1], torch.uint8)
    want = resident(model)(X).detach()
    torch._dynamo.reset()
    compiled = stream_from_host(model, budget="auto")
    with torch.no_grad():
        assert_equal(compiled(X), want)
    memory = session_of(model).memory
    assert memory.total == 4 * MIB and memory.margin == 4 * MIB // 20
    assert memory.activation_bytes is not None and 2 * X.nbytes <= memory.activation_bytes <= 30 * X.nbytes
    # The modelled device does not hold the model's own parameters: they count as what becomes free all the same.
    assert memory.free == 3 * MIB + 14 * LAYER
    assert flextensor_fx.report(compiled).budget == memory.room == memory.free - memory.margin - memory.activation_bytes
    del taken


def test_auto_without_a_graph_leaves_half_for_activations(install: Install) -> None:
    install(total_bytes=4 * MIB)
    model = model_of(14)
    flextensor_fx.offload(
        model, {"include_patterns": ["*"], "store": "host", "budget": "auto", "inner_backend": "eager"}
    )
    memory = session_of(model).memory
    assert memory.activation_bytes is None
    assert session_of(model).plan.budget == memory.room == (memory.free - memory.margin) // 2


def test_auto_leaves_room_for_what_moves_there_unselected(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    device = install(total_bytes=4 * MIB)
    device.device = torch.device("cuda", 0)  # the model is elsewhere
    monkeypatch.setattr(session, "link_for", lambda config, device: Link(0.01, 1e7, "of a test"))
    model = nn.ModuleDict({"layers": model_of(8), "table": nn.Embedding(1024, WIDTH)})  # 2 MiB and 1 MiB
    model.register_buffer("cache", torch.zeros(MIB // 4))
    roots, config = Roots({"": model}), OffloadConfig(include_patterns=["layers.*"], budget="auto")
    memory = Session.open(roots, config, None, {}, moves=True).memory
    assert memory.free == 4 * MIB - MIB - MIB
    assert Session.open(roots, replace(config, include_patterns=["*"]), None, {}, moves=True).memory.free == 3 * MIB


def test_a_device_that_is_too_full_is_refused_with_the_numbers(install: Install) -> None:
    device = install(total_bytes=2 * MIB)

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model_of(2)

        def forward(self, x: Tensor) -> Tensor:
            wide = x.repeat(1, 1024).sin()  # 2 MiB
            return self.layers(x) + wide[:, :WIDTH]

    model = Large()
    before = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(Exception, match="The budget is 'auto'") as caught, torch.no_grad():
        stream_from_host(model, budget="auto")(X)
    text = str(caught.value)
    assert re.search(r"BudgetError: plan: expected a budget of at least \d+ bytes", text)
    assert "free of 2.00 MiB on cpu" in text and "that activations may take" in text and "5% of the device" in text
    assert [p.data_ptr() for p in model.parameters()] == before
    assert device.pinned_bytes == 0


def test_the_peak_stands_beside_the_promise(device: ModelledDevice) -> None:
    compiled = stream_from_host(model_of(), budget="50%")
    with torch.no_grad():
        compiled(X)
        compiled(X)
    report = flextensor_fx.report(compiled)
    assert report.stats is not None and report.stats.device is not None
    assert report.stats.peak_pool_bytes <= report.peak_bytes - report.resident_bytes
    # Residents of the modelled device are not in its memory: what it had at its peak are streamed weights.
    assert report.stats.device.peak_allocated <= report.peak_bytes - report.resident_bytes
    text = str(report)
    assert "held" in text and "torch's peak there" in text


def test_activations_count_from_their_making_to_their_last_reader() -> None:
    def function(x: Tensor) -> Tensor:
        a = x + 1  # 64 bytes, until c
        b = a.view(-1)  # none
        c = b * 2
        d = c.sum()  # 4
        return d + c

    graph = trace(function).graph
    assert activation_peak(graph) == 64 + 64 + 4
    assert activation_peak(graph, keeps_all=True) == 64 + 64 + 4 + 64


def test_conversions_count_where_they_make_memory() -> None:
    def function(x: Tensor) -> Tensor:
        wide = x.to(torch.float64)  # 128 bytes
        turned = wide.reshape(4, 4).t()
        straight = turned.contiguous()  # 128
        greatest, places = straight.contiguous().to(torch.float64).max(0)  # 32 + 32
        return greatest + places

    found = []

    def note(module: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        found.append(activation_peak(module.graph))
        return module.forward

    torch.compile(function, backend=note, fullgraph=True)(torch.ones(4, 4))
    assert found == [128 + 128]


@pytest.mark.parametrize("name", ["cuda", "cuda:1", "cuda:0"])
def test_a_device_that_is_not_there_is_named(name: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    model = model_of(2)
    with pytest.raises(OffloadError, match=rf"device '{name}': torch .* sees 0 CUDA devices here"):
        flextensor_fx.offload(model, {"include_patterns": ["*"], "device": name})
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_other_accelerators_are_refused_by_name() -> None:
    with pytest.raises(OffloadError, match=r"expected 'cuda', 'cuda:<index>' or 'cpu', found 'mps'"):
        flextensor_fx.offload(model_of(2), {"include_patterns": ["*"], "device": "mps"})


def test_files_serve_the_cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ModelledDevice()
    made.device = torch.device("cuda", 0)
    monkeypatch.setattr(flextensor_fx.tiers, "open_device", lambda _: made)
    with pytest.raises(
        ConfigError, match=r"option 'store': expected 'host' or None for weights .* on cuda:0, found 'disk'"
    ):
        flextensor_fx.offload(model_of(2), {"include_patterns": ["*"], "device": "cuda", "store": "disk"})


def test_a_plain_model_elsewhere_is_told_to_be_offloaded_first(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ModelledDevice()
    made.device = torch.device("cuda", 0)
    monkeypatch.setattr(flextensor_fx.tiers, "open_device", lambda _: made)
    with pytest.raises(
        Exception, match=r"expected the weights on cuda:0, found 0.weight on cpu; call\s+flextensor_fx.offload"
    ):
        stream_from_host(model_of(2), device="cuda")(X)


def test_the_cpu_as_a_device_has_the_same_numbers() -> None:
    model = model_of(4)
    with torch.no_grad():
        want = resident(model)(X)
        torch._dynamo.reset()
        compiled = stream_from_host(model, budget="auto")
        assert_equal(compiled(X), want)
        flextensor_fx.release(model)
        torch._dynamo.reset()
        compiled = stream_from_host(model, device="cpu", budget="50%", objective="steady")
        for _ in range(3):
            assert_equal(compiled(X), want)
        stats = flextensor_fx.report(compiled).stats
        assert stats is not None and stats.ahead > 0
    flextensor_fx.release(model)
    with pytest.raises(BudgetError):
        flextensor_fx.offload(model, {"include_patterns": ["*"], "store": "host", "budget": 100})
