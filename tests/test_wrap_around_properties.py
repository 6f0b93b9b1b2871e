"""Random graphs, pools and lookaheads whose calls follow one another: right numbers, one copy a call, never beyond the pool."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compiling import Inner, fresh_compiler
from flextensor_fx.passes.pipeline import PoolTooSmall
from flextensor_fx.passes.realized import all_realized, aten_realized
from flextensor_fx.passes.steady_schedule import SteadySchedule
from flextensor_fx.runtime import op_implementations, registry
from flextensor_fx.runtime.engine import Engine
from flextensor_fx.runtime.layout import spec_of
from flextensor_fx.runtime.session_dir import SessionDir
from flextensor_fx.runtime.store import Store
from graphs import lowered, trace, weight
from test_properties import SIDE, SIZE, Random, budgets, check, lookaheads, models, operations, quick

__all__ = ["fresh_compiler"]

assert op_implementations  # importing it registers the ops
COUNT = 5
CALLS = 3


def value(number: int) -> Tensor:
    return torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(number)) / 8


@settings(quick, max_examples=60)
@given(
    st.lists(operations, min_size=1, max_size=8).map(tuple),
    st.integers(1, COUNT),
    st.integers(1, COUNT + 1),
    lookaheads,
    st.sampled_from([aten_realized, all_realized]),
    st.sampled_from([0.0, 0.5]),
)
def test_calls_of_a_lowered_graph(ops, count, pages, lookahead, realized, delay_ms) -> None:
    model = Random(ops, count)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return model.run(x, [weight(str(number), SIDE, SIDE) for number in range(count)])

    x = value(99)
    expected = model.run(x, [value(number) for number in range(count)])
    module = trace(function, x)
    pool = pages * SIZE
    try:
        module, schedules = lowered(module, pool, lookahead, realized, steady=True)
    except PoolTooSmall as error:
        pool = error.least
        module, schedules = lowered(module, pool, lookahead, realized, steady=True)
    with tempfile.TemporaryDirectory() as folder:
        weights = {f"m:{number}": value(number) for number in range(count)}
        store = Store.create(SessionDir(Path(folder)), [spec_of(key, w) for key, w in weights.items()])
        for key, w in weights.items():
            store.write(key, w)
        engine = Engine("m", store, pool, delay_ms=delay_ms)
        registry.register(engine)
        try:
            for _ in range(CALLS):
                assert all(map(torch.equal, module(x), expected))
            stats = engine.stats()
        finally:
            registry.unregister(engine)
            engine.close()
    assert (stats.overruns, stats.dropped) == (0, 0)
    assert stats.peak_pool_bytes <= pool
    if schedules:
        made = schedules["m"]
        begun = len(made.ahead) if isinstance(made, SteadySchedule) else 0
        assert begun > 0 or lookahead == 0 or not isinstance(made, SteadySchedule)
        assert stats.ahead == CALLS * begun
        assert stats.transfers == CALLS * len(made.transfers) + begun


@quick
@given(models, budgets, lookaheads)
def test_compiled_models(model: Random, budget: int, lookahead: int | None) -> None:
    check(model, budget, lookahead, "aot_eager", objective="steady")


@pytest.mark.slow
@settings(quick, max_examples=5)
@given(models, budgets, lookaheads, st.sampled_from(["eager", "inductor"]))
def test_compiled_models_by_the_other_compilers(
    model: Random, budget: int, lookahead: int | None, inner: Inner
) -> None:
    check(model, budget, lookahead, inner, objective="steady")
