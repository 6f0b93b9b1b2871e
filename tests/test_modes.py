"""Streaming in every mode: gradients on and off, look-ahead, random numbers, buffers, several models and graphs."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flextensor_fx
from compiling import Inner, assert_equal, counts_of, fresh_compiler, mlp, resident, session_of, stream, streamed_names
from flextensor_fx.runtime import registry

__all__ = ["fresh_compiler"]


# --- gradients on and off ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["inference no_grad train", "train inference no_grad", "no_grad train inference"])
def test_modes_in_any_order_compile_once_each(order: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8), nn.ReLU())
    x = torch.randn(2, 8)

    def use(compiled: Any) -> list[Tensor]:
        results = []
        for mode in [*order.split(), *order.split()]:
            if mode == "inference":
                with torch.inference_mode():
                    results.append(compiled(x).clone())
            elif mode == "no_grad":
                with torch.no_grad():
                    results.append(compiled(x))
            else:
                loss = compiled(x).sum()
                loss.backward()
                results += [loss.detach(), *(p.grad.clone() for p in model[1].parameters() if p.grad is not None)]
                model.zero_grad()
        return [result.detach() for result in results]

    plain, expected = counts_of(lambda: resident(model), use)
    streamed, actual = counts_of(lambda: stream(model, include=["0"]), use)
    assert streamed == plain
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)
    assert streamed_names(model) == {"0.weight", "0.bias"}


def test_state_dict_is_loaded_inside_inference_mode() -> None:
    model, other, x = mlp().requires_grad_(False), mlp().requires_grad_(False), torch.randn(2, 16)
    compiled = stream(model)
    with torch.inference_mode():
        compiled(x)
        model.load_state_dict(other.state_dict())
        inside = compiled(x).clone()
    with torch.no_grad():
        assert_equal(compiled(x), resident(other)(x))
        assert torch.equal(inside, resident(other)(x))


# --- look-ahead --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(1, 9))
def test_every_look_ahead_gives_equal_numbers(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    widths = [4, 12, 7, 16, 3, 9, 20, 5, 8]
    layers = [nn.Linear(a, b) for a, b in pairwise(widths[: count + 1])]
    model, x = nn.Sequential(*layers).requires_grad_(False), torch.randn(3, 4)
    expected = model(x)
    for lookahead in range(9):
        torch._dynamo.reset()
        flextensor_fx.release(model)
        monkeypatch.setenv("FLEXTENSOR_FX_TEST_DELAY_MS", "1" if lookahead in (1, 3) else "0")
        compiled = stream(model, inner="eager", lookahead=lookahead)
        with torch.no_grad():
            assert_equal([compiled(x), compiled(x)], [expected, expected])
        assert session_of(model).engine.stats().overruns == 0


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_calls_back_to_back_with_late_copies_under_a_tight_budget(
    inner: Inner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXTENSOR_FX_TEST_DELAY_MS", "2")
    model = mlp(5, 32).requires_grad_(False)
    inputs = [torch.randn(2, 32) for _ in range(6)]
    plain = resident(model, inner=inner)
    expected = [plain(x) for x in inputs]
    compiled = stream(model, inner=inner, budget="45%", lookahead=2)
    assert_equal([compiled(x) for x in inputs], expected)
    stats = session_of(model).engine.stats()
    assert stats.overruns == 0
    assert stats.peak_pool_bytes <= stats.pool_bytes


# --- random numbers and buffers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_dropout_is_reproducible(inner: Inner) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16), nn.Dropout(0.5)).requires_grad_(False)
    x = torch.randn(4, 16)

    def run(compiled: Any) -> list[Tensor]:
        torch.manual_seed(7)
        return [compiled(x), compiled(x)]

    expected = run(resident(model, inner=inner))
    compiled = stream(model, inner=inner)
    first, second = run(compiled), run(compiled)
    assert_equal(first, expected)
    assert_equal(second, expected)
    assert not torch.equal(first[0], first[1])


class Cached(nn.Module):
    """Writes its keys into a cache given as an input, and counts steps in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor, cache: Tensor, position: Tensor) -> Tensor:
        cache.index_copy_(0, position, self.key(x))
        self.steps += 1
        self.average.mul_(0.5).add_(x.mean(0), alpha=0.5)
        return self.out(cache.sum(0, keepdim=True)) + self.average


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_caches_and_buffers_that_the_graph_changes(inner: Inner) -> None:
    model = Cached().requires_grad_(False)
    start = copy.deepcopy(model)

    def use(compiled: Any) -> list[Tensor]:
        cache, results = torch.zeros(6, 8), []
        for step in range(6):
            torch.manual_seed(step)
            results += [compiled(torch.randn(1, 8), cache, torch.tensor([step])), cache.clone()]
        return results

    plain, expected = counts_of(lambda: resident(start, inner=inner), use)
    streamed, actual = counts_of(lambda: stream(model, inner=inner), use)
    assert streamed == plain
    assert_equal(actual, expected)
    assert int(model.steps) == 6
    assert_equal(model.average, start.average)


def test_a_weight_that_the_graph_changes_in_place_stays_resident() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8), requires_grad=False)
            self.linear = nn.Linear(8, 8).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            self.weight.mul_(0.5)
            return self.linear(x @ self.weight)

    model, x = Changing(), torch.randn(2, 8)
    twin = copy.deepcopy(model)
    plain, compiled = resident(twin), stream(model)
    for _ in range(3):
        assert_equal(compiled(x), plain(x))
    assert dict(flextensor_fx.report(model).stays) == {"weight": "the graph changes it in place"}


# --- several graphs ----------------------------------------------------------------------------------------------------


def test_graphs_of_one_model_share_one_budget() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(mlp(2, 32) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.parts[0](x)
            torch._dynamo.graph_break()
            x = self.parts[1](x)
            torch._dynamo.graph_break()
            return self.parts[2](x)

    model, x = Broken().requires_grad_(False), torch.randn(2, 32)
    total = sum(parameter.nbytes for parameter in model.parameters())
    expected = resident(model, fullgraph=False)(x)
    compiled = stream(model, fullgraph=False, budget="40%")
    assert_equal(compiled(x), expected)
    assert_equal(compiled(x), expected)
    assert len(registry.living_sessions()) == 1
    report = flextensor_fx.report(compiled)
    assert report.peak_bytes <= int(total * 0.4)
    assert len({name.partition(".")[0] for name in streamed_names(model)}) == 1  # names are the user's: parts.0...


def test_models_of_one_class_with_equal_options_keep_their_own_weights() -> None:
    models = [mlp(2).requires_grad_(False) for _ in range(3)]
    x = torch.randn(2, 16)
    expected = [resident(model)(x) for model in models]
    torch._dynamo.reset()
    compiled = [stream(model) for model in models]
    for _ in range(2):
        assert_equal([each(x) for each in compiled], expected)
    assert_equal([each(x) for each in reversed(compiled)], expected[::-1])
    assert len({session_of(model).uid for model in models}) == 3


def test_a_second_model_of_the_same_class_after_the_first_is_gone() -> None:
    x = torch.randn(2, 16)
    for _ in range(3):
        model = mlp(2).requires_grad_(False)
        expected = model(x)
        assert_equal(stream(model, inner="inductor")(x), expected)
        del model
        # no reset: what was compiled for the first is still in the compiler's caches


def test_a_function_that_calls_two_modules() -> None:
    first, second = mlp(2).requires_grad_(False), nn.Linear(16, 4).requires_grad_(False)
    x = torch.randn(2, 16)

    def both(x: Tensor) -> Tensor:
        return second(first(x).sin())

    expected = resident(both)(x)
    compiled = stream(both)
    assert_equal(compiled(x), expected)
    assert_equal(compiled(x), expected)
    report = flextensor_fx.report(compiled)
    assert len(report.selection.weights) == 6
    assert report.stats is not None
    flextensor_fx.release(compiled)
    assert type(first[0].weight) is type(second.weight) is nn.Parameter


@pytest.mark.parametrize("way", ["forward", "compile()", "replaced forward", "submodule"])
def test_other_ways_of_compiling_a_model(way: str) -> None:
    class Model(nn.Module):  # Dynamo compiles no frame of torch.nn itself, as model.compile() would ask for
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

    model, x = Model().requires_grad_(False), torch.randn(2, 16)
    expected = resident(model)(x)
    options = {"include_patterns": ["**"], "min_stream_bytes": 0, "inner_backend": "aot_eager"}
    torch._dynamo.reset()
    if way == "forward":
        call = stream(model.forward)
    elif way == "compile()":
        model.compile(backend=flextensor_fx.flextensor, fullgraph=True, options=options)
        call = model
    elif way == "replaced forward":
        model.forward = stream(model.forward)
        call = model
    else:
        model.layers[2] = stream(model.layers[2], include=["*"])
        call = model
    assert_equal(call(x), expected)
    assert_equal(call(x), expected)
    if way == "submodule":
        assert streamed_names(model.layers[2]) == {"weight", "bias"}
    else:
        assert streamed_names(model) == {
            f"layers.{layer}.{name}" for layer in (0, 2, 4, 6) for name in ("weight", "bias")
        }
