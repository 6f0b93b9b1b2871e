"""Streaming adds no graph, no graph break and no recompile to those of the inner backend, and no work to a call but reads."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flextensor_fx
from compiling import (
    Counts,
    Inner,
    assert_equal,
    counting,
    counts_of,
    fresh_compiler,
    mlp,
    resident,
    session_of,
    stream,
    streamed_names,
)

__all__ = ["fresh_compiler"]


class Attention(nn.Module):
    """Self-attention over tokens, with an embedding in front."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).squeeze(1))


class Branches(nn.Module):
    """An optional argument decides which of two layers runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor, use_second: bool = False) -> Tensor:
        return self.second(x) if use_second else self.first(x)


def in_all_modes(model: nn.Module, x: Tensor) -> Any:
    """20 calls: with and without gradients, training and evaluating."""

    def use(compiled: Any) -> list[Tensor]:
        results = []
        for _ in range(5):
            for training in (True, False):
                model.train(training)
                results.append(compiled(x))
                with torch.no_grad():
                    results.append(compiled(x))
        return results

    return use


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_one_graph_without_breaks_for_a_wholly_streamed_model(inner: Inner) -> None:
    model, x = mlp().requires_grad_(False), torch.randn(3, 16)
    expected = resident(model, inner=inner)(x)
    counts, actual = counts_of(lambda: stream(model, inner=inner), lambda compiled: compiled(x))
    assert counts == Counts(graphs=1, breaks=0)
    assert streamed_names(model) == {name for name, _ in model.named_parameters()}
    assert_equal(actual, expected)
    torch.testing.assert_close(actual, mlp_eagerly(model, x))


def mlp_eagerly(model: nn.Module, x: Tensor) -> Tensor:
    flextensor_fx.release(model)
    return model(x)


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_calls_in_every_mode_compile_as_often_as_the_inner_backend(inner: Inner) -> None:
    model, x = mlp().requires_grad_(False), torch.randn(3, 16)
    use = in_all_modes(model, x)
    plain, expected = counts_of(lambda: resident(model, inner=inner), use)
    streamed, actual = counts_of(lambda: stream(model, inner=inner, budget="30%"), use)
    assert streamed == plain
    assert_equal(actual, expected)


def test_trainable_weights_compile_as_often_as_the_inner_backend() -> None:
    model, x = mlp(), torch.randn(3, 16)
    use = in_all_modes(model, x)
    plain, expected = counts_of(lambda: resident(model), use)
    with pytest.warns(flextensor_fx.gradients.GradientWarning):
        streamed, actual = counts_of(lambda: stream(model), use)
    assert streamed == plain
    assert_equal([a.detach() for a in actual], [e.detach() for e in expected])


@pytest.mark.parametrize("dynamic", [None, True])
def test_sizes_of_batch_and_sequence_change_without_more_graphs(dynamic: bool | None) -> None:
    model = Attention().requires_grad_(False)
    batches = [torch.randint(0, 20, shape) for shape in ((2, 5), (3, 5), (3, 7), (6, 9), (4, 30))]

    def use(compiled: Any) -> list[Tensor]:
        return [compiled(batch) for batch in batches]

    plain, expected = counts_of(lambda: resident(model, dynamic=dynamic), use)
    streamed, actual = counts_of(lambda: stream(model, dynamic=dynamic), use)
    assert streamed == plain
    assert_equal(actual, expected)


def test_sizes_change_under_inductor() -> None:
    model = Attention().requires_grad_(False)
    batches = [torch.randint(0, 20, shape) for shape in ((2, 5), (3, 7), (4, 30))]

    def use(compiled: Any) -> list[Tensor]:
        return [compiled(batch) for batch in batches]

    plain, expected = counts_of(lambda: resident(model, inner="inductor", dynamic=True), use)
    streamed, actual = counts_of(lambda: stream(model, inner="inductor", dynamic=True), use)
    assert streamed == plain
    assert_equal(actual, expected)


def test_a_weight_that_the_first_graph_does_not_use() -> None:
    model, x = Branches().requires_grad_(False), torch.randn(2, 8)

    def use(compiled: Any) -> list[Tensor]:
        return [compiled(x), compiled(x, use_second=True), compiled(x), compiled(x, use_second=True)]

    plain, expected = counts_of(lambda: resident(model), use)
    streamed, actual = counts_of(lambda: stream(model), use)
    assert streamed == plain
    assert_equal(actual, expected)
    assert streamed_names(model) == {name for name, _ in model.named_parameters()}


def test_a_graph_break_makes_two_graphs_of_one_session() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = mlp(2), mlp(2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.before(x)
            torch._dynamo.graph_break()
            return self.after(x)

    model, x = Broken().requires_grad_(False), torch.randn(2, 16)

    def use(compiled: Any) -> list[Tensor]:
        return [compiled(x), compiled(x)]

    plain, expected = counts_of(lambda: resident(model, fullgraph=False), use)
    streamed, actual = counts_of(lambda: stream(model, fullgraph=False, budget="50%"), use)
    assert streamed == plain == Counts(graphs=2, breaks=1)
    assert_equal(actual, expected)
    report = flextensor_fx.report(model)
    assert len([graph for graph in report.graphs if graph.schedule.transfers]) == 2
    assert report.budget is not None
    assert report.peak_bytes <= report.budget


def test_inference_writes_nothing_to_the_store() -> None:
    model, x = mlp().requires_grad_(False), torch.randn(3, 16)
    compiled = stream(model)
    compiled(x)
    store = session_of(model).engine.store
    before = [(file.stat().st_mtime_ns, file.stat().st_size) for file in store.files]
    for _ in range(5):
        compiled(x)
    assert [(file.stat().st_mtime_ns, file.stat().st_size) for file in store.files] == before
    assert {store.version(key) for key in store} == {1}  # the write that moved it there


def test_thousands_of_small_weights_share_one_file_and_are_moved_quickly() -> None:
    model = nn.ModuleList([nn.Linear(4, 8) for _ in range(1000)])
    begin = time.perf_counter()
    flextensor_fx.offload(model, {"include_patterns": ["*"], "min_stream_bytes": 0})
    seconds = time.perf_counter() - begin
    session = session_of(model)
    assert len(streamed_names(model)) == 2000
    assert len(session.engine.store.files) == 1
    assert seconds < 10


def test_thousands_of_small_weights_stay_where_nothing_asks_for_them() -> None:
    model = nn.ModuleList([nn.Linear(4, 8) for _ in range(50)])
    large = nn.Linear(512, 512)
    model.append(large)
    flextensor_fx.offload(model, {"include_patterns": ["*"]})
    assert streamed_names(model) == {"50.weight"}


def test_models_compiled_anew_after_a_reset_are_not_moved_again() -> None:
    model, x = mlp().requires_grad_(False), torch.randn(3, 16)
    first = stream(model)(x)
    store = session_of(model).engine.store
    with counting() as read:
        assert_equal(stream(model)(x), first)
        assert read() == Counts(graphs=1, breaks=0)
    assert session_of(model).engine.store is store
