"""Training around streamed weights: gradients equal the resident run's, no streamed weight is saved for the backward."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import checkpoint

import flextensor_fx
from compiling import Inner, assert_equal, counts_of, fresh_compiler, mlp, resident, session_of, stream, streamed_names
from flextensor_fx.errors import BudgetError, GradientError
from flextensor_fx.gradients import GradientWarning

__all__ = ["fresh_compiler"]


class Adapted(nn.Module):
    """Frozen layers with a trainable low-rank adapter on each."""

    def __init__(self, depth: int = 3, width: int = 16, recompute: bool = False) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(width, width) for _ in range(depth)).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(width, 2, bias=False) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(2, width, bias=False) for _ in range(depth))
        self.recompute = recompute

    def layer(self, number: int, x: Tensor) -> Tensor:
        return (self.base[number](x) + self.up[number](self.down[number](x))).tanh()

    def forward(self, x: Tensor) -> Tensor:
        for number in range(len(self.base)):
            x = checkpoint(self.layer, number, x, use_reentrant=False) if self.recompute else self.layer(number, x)
        return x


def step(model: nn.Module, x: Tensor) -> Any:
    """One forward and backward: the loss, the gradient of the input and those of the parameters."""

    def use(compiled: Any) -> tuple[Any, ...]:
        given = x.clone().requires_grad_()
        loss = compiled(given).square().sum()
        loss.backward()
        assert given.grad is not None
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return loss.detach(), given.grad, gradients

    return use


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_gradients_of_adapters_equal_the_resident_runs(inner: Inner, recompute: bool) -> None:
    model, x = Adapted(recompute=recompute), torch.randn(4, 16)
    # For training "eager" goes through AOTAutograd, like "aot_eager".
    plain, expected = counts_of(
        lambda: resident(model, inner="aot_eager" if inner == "eager" else inner), step(model, x)
    )
    streamed, actual = counts_of(lambda: stream(model, inner=inner, include=["base"], budget="60%"), step(model, x))
    assert streamed == plain
    assert_equal(actual, expected)
    assert set(actual[2]) == {name for name, p in model.named_parameters() if p.requires_grad}
    assert streamed_names(model) and all(name.startswith("base.") for name in streamed_names(model))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_no_streamed_weight_is_saved_for_the_backward(inner: Inner, recompute: bool) -> None:
    model, x = Adapted(width=24, recompute=recompute), torch.randn(4, 24)
    compiled = stream(model, inner=inner, include=["base"])
    out = compiled(x)
    saved = saved_shapes(out)
    assert (24, 24) not in saved, saved
    session = session_of(model)
    before = session.engine.stats().transfers
    out.sum().backward()
    backwards = [graph for graph in session.graphs if graph.name.startswith("backward")]
    assert len(backwards) == 1
    assert session.engine.stats().transfers - before == len(backwards[0].schedule.transfers) > 0


def saved_shapes(out: Tensor) -> set[tuple[int, ...]]:
    """Shapes of all tensors that the autograd graph behind `out` holds."""
    shapes, pending, seen = set(), [out.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        with contextlib.suppress(AttributeError, RuntimeError):
            shapes |= {tuple(t.shape) for t in node.saved_tensors if isinstance(t, Tensor)}
        pending += [source for source, _ in node.next_functions]
    return shapes


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_the_backward_keeps_to_the_budget(inner: Inner) -> None:
    model, x = Adapted(depth=6, width=64), torch.randn(4, 64)
    total = sum(parameter.nbytes for parameter in model.base.parameters())
    compiled = stream(model, inner=inner, include=["base"], budget="50%")
    for _ in range(3):
        compiled(x).sum().backward()
    report = flextensor_fx.report(model)
    assert report.peak_bytes <= total // 2
    stats = session_of(model).engine.stats()
    assert stats.overruns == 0
    assert stats.peak_pool_bytes <= stats.pool_bytes


def test_training_steps_of_the_adapters_equal_the_resident_runs() -> None:
    model = Adapted()
    twin = copy.deepcopy(model)
    inputs = [torch.randn(4, 16) for _ in range(5)]

    def train(model: nn.Module, compiled: Any) -> list[Tensor]:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        losses = []
        for x in inputs:
            loss = compiled(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    expected = train(twin, resident(twin))
    assert_equal(train(model, stream(model, include=["base"])), expected)
    assert_equal(dict(model.state_dict()), dict(twin.state_dict()))


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_a_trainable_streamed_weight_is_warned_of_and_refused_in_backward(inner: Inner) -> None:
    model, x = mlp(2), torch.randn(3, 16)
    expected = resident(model, inner=inner)(x).detach()
    compiled = stream(model, inner=inner, include=["0"])
    with pytest.warns(
        GradientWarning, match=r"2 streamed weights require a gradient.*'0\.weight'.*requires_grad_\(False\)"
    ):
        out = compiled(x)
    assert_equal(out.detach(), expected)
    assert out.requires_grad
    with pytest.raises(GradientError, match=r"'0\.weight'.*exclude_patterns"):
        out.sum().backward()
    with torch.no_grad():
        assert_equal(compiled(x), expected)


def test_nothing_is_refused_where_no_gradient_is_recorded() -> None:
    model, x = mlp(2), torch.randn(3, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error", GradientWarning)
        with torch.no_grad():
            assert not stream(model)(x).requires_grad


@pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="Dynamo 2.11 has no guard on it: the graph made before goes on refusing a backward",
)
def test_a_streamed_weight_that_is_frozen_later_and_thawed_again() -> None:
    model, x = mlp(2), torch.randn(3, 16, requires_grad=True)
    compiled = stream(model)
    with pytest.warns(GradientWarning):
        compiled(x)
    model.requires_grad_(False)
    compiled(x).sum().backward()
    twin = copy.deepcopy(model)
    expected = torch.autograd.grad(resident(twin)(x).sum(), x)[0]
    assert_equal(x.grad, expected)
    model.requires_grad_(True)
    with pytest.raises(GradientError):
        compiled(x).sum().backward()


def test_gradients_of_the_input_alone_and_twice_through_one_graph() -> None:
    model, x = mlp(3).requires_grad_(False), torch.randn(3, 16, requires_grad=True)
    plain = resident(model)(x)
    expected = [
        torch.autograd.grad(plain.sum(), x, retain_graph=True)[0],
        torch.autograd.grad(plain.square().sum(), x)[0],
    ]
    out = stream(model)(x)
    actual = [torch.autograd.grad(out.sum(), x, retain_graph=True)[0], torch.autograd.grad(out.square().sum(), x)[0]]
    assert_equal(actual, expected)


class Fanned(nn.Module):
    """Forward needs one weight at a time; the gradient of x is one fused sum over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList(torch.randn(64, 64) for _ in range(3)).requires_grad_(False)
        self.heads = nn.ModuleList(nn.Linear(64, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        # pyright takes the start of a sum for a result
        return sum(head(x * w) for head, w in zip(self.heads, self.w, strict=True))  # pyright: ignore[reportReturnType]


def test_a_backward_that_needs_more_weights_at_once_than_the_forward() -> None:
    model, x = Fanned(), torch.randn(64, 64)
    expected = step(model, x)(resident(model, inner="inductor"))
    one = 64 * 64 * 4
    try:
        actual = step(model, x)(stream(model, inner="inductor", include=["w"], budget=one))
    except BackendCompilerFailed as caught:
        error = caught.inner_exception
        assert isinstance(error, BudgetError)
        torch._dynamo.reset()
        actual = step(model, x)(stream(model, inner="inductor", include=["w"], budget=error.least))
        assert flextensor_fx.report(model).peak_bytes <= error.least
    assert_equal(actual, expected)
