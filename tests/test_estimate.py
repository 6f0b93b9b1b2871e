"""What a captured graph is thought to cost, before anything has run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

from compiling import fresh_compiler
from flextensor_fx.captured import Costs, captured_costs
from flextensor_fx.device_rates import rates_of
from flextensor_fx.estimate import default_link, measure_compute
from flextensor_fx.link_curve import link_of
from flextensor_fx.simulate import Link

__all__ = ["fresh_compiler"]
LINK = Link(0.1, 1e6, "made up")
CPU = torch.device("cpu")


def costs_of(model: nn.Module, *inputs: Tensor) -> Costs:
    """Estimates of the graph that Dynamo captures of `model`."""
    found: list[Costs] = []

    def backend(module: GraphModule, values: list[Any]) -> Callable[..., Any]:
        nodes = module.graph.find_nodes(op="placeholder")
        parameters = {n: v for n, v in zip(nodes, values, strict=True) if isinstance(v, nn.Parameter)}
        name_of = {id(parameter): name for name, parameter in model.named_parameters()}
        found.append(
            captured_costs(
                module.graph, {n: [name_of[id(p)]] for n, p in parameters.items()}, parameters, LINK, rates_of(CPU)
            )
        )
        return module.forward

    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    return found[0]


class Attention(nn.Module):
    """Attention between two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.into(x)
        return self.out(F.scaled_dot_product_attention(q, q, q))


def test_products_count_by_their_operations_and_at_least_their_weight() -> None:
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 512, bias=False))
    flops = rates_of(CPU).flops_per_ms
    many = costs_of(model, torch.zeros(4096, 256))
    assert many.steps_of == {"0.weight": (0,), "1.weight": (1,)}
    assert many.step_ms[1] == pytest.approx(2 * 4096 * 256 * 512 / flops)
    one = costs_of(model, torch.zeros(1, 256))
    assert one.step_ms[1] == pytest.approx(max(2 * 256 * 512 / flops, 256 * 512 * 4 / 1e7))


def test_attention_counts_in_the_step_before_it() -> None:
    short, long = (costs_of(Attention(), torch.zeros(1, 1, length, 64)) for length in (64, 256))
    assert len(short.step_ms) == len(long.step_ms) == 2
    products, scores = 2 * 256 * 64 * 64, 4 * 256 * 64 * 256
    assert long.step_ms[0] == pytest.approx((products + scores) / rates_of(CPU).flops_per_ms)
    assert long.step_ms[0] > 6 * short.step_ms[0]  # four times the rows, sixteen times the scores


def test_elementwise_work_costs_little_and_views_nothing() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(64, 64, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x).reshape(-1, 2).transpose(0, 1)

    class Waves(Views):
        def forward(self, x: Tensor) -> Tensor:
            return self.a(x).sin().cos()

    x = torch.zeros(4096, 64)
    (plain,), (waves,) = costs_of(Views(), x).step_ms, costs_of(Waves(), x).step_ms
    assert plain == pytest.approx(2 * 4096 * 64 * 64 / rates_of(CPU).flops_per_ms)
    assert waves - plain == pytest.approx(2 * 4096 * 64 * 4 * 0.3 / 1e7)


def test_lookups_count_the_rows_alone() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(100_000, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x)

    assert sum(costs_of(Table(), torch.zeros(4, dtype=torch.int64)).step_ms) < 1e-3


def test_the_rate_of_this_machine_is_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = rates_of(CPU).flops_per_ms
    monkeypatch.setattr("flextensor_fx.device_rates.measure_compute", lambda: pytest.fail("measured again"))
    assert rates_of(CPU).flops_per_ms == first
    (kept,) = (tmp_path / "flextensor_fx").glob("compute-*.json")
    kept.write_text("{")
    monkeypatch.setattr("flextensor_fx.device_rates.measure_compute", lambda: 12.5)
    assert rates_of(CPU).flops_per_ms == rates_of(CPU).flops_per_ms == 12.5


def test_where_nothing_can_be_kept_it_is_measured_every_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    assert rates_of(CPU).flops_per_ms > 0
    assert measure_compute() > 0


def test_the_disk_is_taken_as_it_was_measured_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_link(tmp_path).provenance == "estimated"
    curve = link_of(tmp_path, largest=1 << 20)
    assert default_link(tmp_path) == curve.link
