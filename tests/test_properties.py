"""Random models, budgets and lookaheads: always the resident result, bit for bit, and never more memory than was given."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import flextensor_fx
from compiling import Inner, assert_equal, fresh_compiler, resident, stream
from flextensor_fx.errors import BudgetError

__all__ = ["fresh_compiler"]

SIDE = 32
SIZE = SIDE * SIDE * 4  # one page


@dataclass(frozen=True)
class Op:
    """One operation: on an earlier value, with one or two weights, all by number (taken modulo what there is)."""

    kind: str
    value: int
    weights: tuple[int, int]


def apply(op: Op, values: list[Tensor], weights: Sequence[Tensor]) -> Tensor:
    x = values[op.value % len(values)]
    a, b = (weights[number % len(weights)] for number in op.weights)
    match op.kind:
        case "product":
            return x @ a
        case "transposed":
            return x @ a.t()
        case "pointwise":
            return (x * a).tanh()
        case "cast":
            return (x.double() @ a.double()).float()
        case "weights alone":
            return x @ (a.t() * 0.5 + 1).reshape(SIDE, SIDE)
        case "joined":
            return x @ torch.cat([a, b], 1)[:, :SIDE] + b
        case "chunks":
            left, right = a.chunk(2, 1)
            return torch.cat([x @ left, x @ right], 1)
        case "skip":
            return (x + values[-1]) @ a
        case _:
            raise AssertionError(op.kind)


KINDS = ("product", "transposed", "pointwise", "cast", "weights alone", "joined", "chunks", "skip")


class Random(nn.Module):
    """The operations `ops` on `count` weights of one page each; every value that nothing reads is an output."""

    def __init__(self, ops: tuple[Op, ...], count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ops = ops
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(SIDE, SIDE) / 8, requires_grad=False) for _ in range(count)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.run(x, list(self.weights))

    def run(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The same of other weights."""
        values = [x]
        for op in self.ops:
            values.append(apply(op, values, weights))
        return values[-1], sum(values[1:], x)


operations = st.builds(Op, st.sampled_from(KINDS), st.integers(0, 6), st.tuples(st.integers(0, 5), st.integers(0, 5)))
models = st.builds(Random, st.lists(operations, min_size=1, max_size=8).map(tuple), st.integers(1, 6))
lookaheads = st.sampled_from([None, 0, 1, 2, 3, 4])
budgets = st.integers(0, 6).map(lambda pages: max(1, pages * SIZE))

quick = settings(
    max_examples=12,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to shrink a failure takes minutes of compiling
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def check(model: Random, budget: int, lookahead: int | None, inner: Inner, objective: str = "single") -> None:
    torch._dynamo.reset()
    x = torch.randn(SIDE, SIDE)
    expected = resident(model, inner=inner)(x)
    torch._dynamo.reset()
    compiled, out = stream(model, inner=inner, budget=budget, lookahead=lookahead, objective=objective), None
    try:
        out = compiled(x)
    except torch._dynamo.exc.BackendCompilerFailed as refused:
        error: Any = refused.inner_exception
        assert isinstance(error, BudgetError) and error.least > budget, error
        budget = error.least  # must work, as promised
        del error  # its frames hold the parameters, which would then be taken to be written at any time
    if out is None:
        torch._dynamo.reset()
        compiled = stream(model, inner=inner, budget=budget, lookahead=lookahead, objective=objective)
        out = compiled(x)
    for _ in range(2):
        assert_equal(out, expected)
        out = compiled(x)
    try:
        report = flextensor_fx.report(model)
    except flextensor_fx.OffloadError:  # none of the weights is used
        return
    for graph in report.graphs:
        assert graph.schedule.peak_bytes <= graph.peak_bytes <= graph.schedule.pool
        assert [t.first_use for t in graph.schedule.transfers] == sorted(t.first_use for t in graph.schedule.transfers)
    assert report.peak_bytes <= budget
    if report.stats is not None:
        assert report.stats.overruns == 0
        assert report.resident_bytes + report.stats.peak_pool_bytes <= budget
        ahead = sum(len(graph.steady.ahead) for graph in report.graphs if graph.steady is not None)
        assert report.stats.transfers == ahead + 3 * sum(len(graph.schedule.transfers) for graph in report.graphs)
        assert (report.stats.ahead, report.stats.dropped) == (3 * ahead, 0)
    flextensor_fx.release(model)
    gc.collect()


@quick
@given(models, budgets, lookaheads)
def test_interpreted_as_captured(model: Random, budget: int, lookahead: int | None) -> None:
    check(model, budget, lookahead, "eager")


@quick
@given(models, budgets, lookaheads)
def test_interpreted_as_aten(model: Random, budget: int, lookahead: int | None) -> None:
    check(model, budget, lookahead, "aot_eager")


@pytest.mark.slow
@settings(quick, max_examples=5)
@given(models, budgets, lookaheads)
def test_compiled_by_inductor(model: Random, budget: int, lookahead: int | None) -> None:
    check(model, budget, lookahead, "inductor")
