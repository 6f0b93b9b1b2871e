"""Weights that several modules, functions or places of one forward read: one owner, one copy, counted once, never read early."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import scan

import flextensor_fx
from compiling import (
    Inner,
    assert_equal,
    counts_of,
    fresh_compiler,
    mlp,
    resident,
    session_of,
    stream,
    streamed_names,
)

__all__ = ["fresh_compiler"]


# --- weights read outside their module ---------------------------------------------------------------------------------


class Borrower(nn.Module):
    """The second layer's forward reads the first layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.lender = [self.first]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return self.second(x) @ self.lender[0].weight + self.first.weight.sum()


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_module_that_reads_another_modules_weight(inner: Inner) -> None:
    model, x = Borrower().requires_grad_(False), torch.randn(2, 8)
    expected = resident(model, inner=inner)(x)
    compiled = stream(model, inner=inner, budget="60%")
    assert_equal(compiled(x), expected)
    assert_equal(compiled(x), expected)


class Normalized(nn.Module):
    """A second entry point reads parameters of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(2)
        self.mean = nn.Parameter(torch.randn(16))
        self.std = nn.Parameter(torch.rand(16) + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.body((x - self.mean) / self.std)

    def post_process(self, x: Tensor) -> Tensor:
        return x * self.std + self.mean


def test_a_second_compiled_function_reads_weights_of_an_offloaded_model() -> None:
    model, x = Normalized().requires_grad_(False), torch.randn(3, 16)
    expected = resident(model)(x)
    processed = resident(model.post_process)(expected)
    compiled = stream(model)
    post_process = stream(model.post_process)
    alone = resident(model.post_process)
    assert_equal(compiled(x), expected)
    for process in (post_process, alone, model.post_process):
        assert_equal(process(expected), processed)
    assert_equal(compiled(x), expected)
    assert len(flextensor_fx.runtime.registry.living_sessions()) == 1


def test_the_second_function_is_compiled_first() -> None:
    model, x = Normalized().requires_grad_(False), torch.randn(3, 16)
    expected = resident(model)(x)
    processed = resident(model.post_process)(expected)
    assert_equal(stream(model.post_process)(expected), processed)
    assert_equal(stream(model)(x), expected)
    assert streamed_names(model) == {name for name, _ in model.named_parameters()}


def test_eager_access_after_calls_sees_full_values() -> None:
    model, x = mlp().requires_grad_(False), torch.randn(3, 16)
    copies = [parameter.clone() for parameter in model.parameters()]
    expected = model(x)
    compiled = stream(model)
    compiled(x)
    assert_equal([parameter.clone() for parameter in model.parameters()], copies)
    assert_equal(model(x), expected)
    assert_equal(model[0].weight + 1, copies[0] + 1)
    assert float(model[0].weight.sum()) == float(copies[0].sum())


# --- ties --------------------------------------------------------------------------------------------------------------


class Language(nn.Module):
    """An embedding tied to the head, with layers between."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.layers = mlp(depth)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens)))


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("budget", [None, "75%"])
def test_an_embedding_tied_to_the_head(inner: Inner, budget: str | None) -> None:
    model, tokens = Language().requires_grad_(False), torch.randint(0, 40, (2, 5))
    total = sum(parameter.nbytes for parameter in model.parameters())  # each tensor once
    expected = resident(model, inner=inner)(tokens)
    compiled = stream(model, inner=inner, budget=budget)
    assert_equal(compiled(tokens), expected)
    assert_equal(compiled(tokens), expected)
    report = flextensor_fx.report(model)
    assert report.selection.nbytes == total
    assert model.head.weight is model.embedding.weight
    if budget is not None:
        assert report.peak_bytes <= int(total * 0.75)


def test_three_ties_of_one_tensor_have_one_copy() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).requires_grad_(False)
    model[1].weight = model[2].weight = model[0].weight
    x = torch.randn(2, 8)
    expected = resident(model)(x)
    assert_equal(stream(model)(x), expected)
    assert model[0].weight is model[1].weight is model[2].weight
    store = session_of(model).engine.store
    assert sum(store.spec(key).nbytes for key in store) == sum(p.nbytes for p in model.parameters())


def test_two_parameters_over_one_storage_are_tied_too() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)
    model[1].weight = nn.Parameter(model[0].weight.data, requires_grad=False)
    x = torch.randn(2, 8)
    expected = resident(model)(x)
    compiled = stream(model)
    assert_equal(compiled(x), expected)
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert_equal(model[1].weight.clone(), model[0].weight.clone())
    flextensor_fx.release(model)
    assert model[0].weight.data_ptr() == model[1].weight.data_ptr()


def test_weights_that_overlap_in_part_stay_resident() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)
    memory = torch.randn(12, 8)
    model[0].weight = nn.Parameter(memory[:8], requires_grad=False)
    model[1].weight = nn.Parameter(memory[4:], requires_grad=False)
    x = torch.randn(2, 8)
    expected = resident(model)(x)
    compiled = stream(model)
    assert_equal(compiled(x), expected)
    assert {name for name, _ in flextensor_fx.report(model).stays} == {"0.weight", "1.weight"}
    memory.zero_()
    assert_equal(compiled(x), resident(model)(x))


def test_slices_of_one_storage_that_do_not_overlap_are_streamed() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)
    memory = torch.randn(16, 8)
    model[0].weight = nn.Parameter(memory[:8], requires_grad=False)
    model[1].weight = nn.Parameter(memory[8:], requires_grad=False)
    x = torch.randn(2, 8)
    expected = resident(model)(x)
    assert_equal(stream(model)(x), expected)
    assert {"0.weight", "1.weight"} <= streamed_names(model)


# --- the same weights several times, or in part of the calls only ------------------------------------------------------


class Shared(nn.Module):
    """One block runs three times, with another between."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.between = mlp(2), mlp(1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        x = self.block(self.between(x))
        return self.block(x)


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_a_block_called_three_times(inner: Inner) -> None:
    model, x = Shared().requires_grad_(False), torch.randn(2, 16)
    expected = resident(model, inner=inner)(x)
    compiled = stream(model, inner=inner)
    assert_equal(compiled(x), expected)
    assert_equal(compiled(x), expected)


class Optional(nn.Module):
    """An optional argument enables a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.project = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        x = self.main(x)
        return x if extra is None else x + self.project(extra)


def test_an_optional_argument_that_enables_a_projection() -> None:
    model, x, extra = Optional().requires_grad_(False), torch.randn(2, 8), torch.randn(2, 4)

    def use(compiled: Any) -> list[Tensor]:
        return [compiled(x, extra), compiled(x), compiled(x, extra), compiled(x)]

    plain, expected = counts_of(lambda: resident(model), use)
    streamed, actual = counts_of(lambda: stream(model), use)
    assert streamed == plain
    assert_equal(actual, expected)
    assert [len(graph.schedule.transfers) for graph in flextensor_fx.report(model).graphs] == [4, 2]


class Conditional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.yes, self.no, self.last = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = torch.cond(x.sum() > 0, lambda x: self.yes(x).relu(), lambda x: self.no(x).sin(), (x,))
        return self.last(x)


class While(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.step = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        def more(count: Tensor, x: Tensor) -> Tensor:
            return count > 0

        def body(count: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return count - 1, self.step(x).tanh()

        return torch._higher_order_ops.while_loop(more, body, (torch.tensor(3), self.first(x)))[1]


class Scan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        def combine(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            new = self.step(carry).tanh() + x
            return new, new.clone()

        return self.last(scan(combine, x[0], x)[1])


@pytest.mark.parametrize("model_class", [Conditional, While, Scan])
@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_weights_inside_cond_while_and_scan(model_class: type[nn.Module], inner: Inner) -> None:
    model = model_class().requires_grad_(False)
    inputs = [torch.randn(2, 8), torch.randn(2, 8) - 3, torch.randn(2, 8) + 3]

    def use(compiled: Any) -> list[Tensor]:
        with torch.no_grad():
            return [compiled(x) for x in inputs]

    plain, expected = counts_of(lambda: resident(model, inner=inner), use)
    streamed, actual = counts_of(lambda: stream(model, inner=inner), use)
    assert streamed == plain
    assert_equal(actual, expected)
