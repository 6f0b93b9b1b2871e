"""Generated code calls the ops' implementations, and the dispatcher where it is wanted."""

from __future__ import annotations

import torch
from torch._inductor.utils import run_and_get_code

import flextensor_fx
from compiling import assert_equal, fresh_compiler, mlp, resident, stream

__all__ = ["fresh_compiler"]


def test_generated_code_calls_the_implementations() -> None:
    model, x = mlp().requires_grad_(False), torch.randn(2, 16)
    expected = resident(model, inner="inductor")(x)
    found, (code,) = run_and_get_code(stream(model, inner="inductor"), x)
    assert_equal(found, expected)
    transfers = len(flextensor_fx.report(model).graphs[0].schedule.transfers)
    for op in ("prefetch", "wait", "offload"):
        assert code.count(f"torch.ops.flextensor_fx.{op}.default.direct(") == transfers
        assert f"torch.ops.flextensor_fx.{op}.default(" not in code


def test_a_profiler_sees_every_op() -> None:
    model, x = mlp().requires_grad_(False), torch.randn(2, 16)
    compiled = stream(model, inner="inductor")
    expected = compiled(x)
    transfers = len(flextensor_fx.report(model).graphs[0].schedule.transfers)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        assert_equal(compiled(x), expected)
    seen = {event.key: event.count for event in profiler.key_averages()}
    for op in ("prefetch", "wait", "offload"):
        assert seen[f"flextensor_fx::{op}"] == transfers


def test_a_wrapper_in_cpp_goes_through_the_dispatcher() -> None:
    model, x = mlp().requires_grad_(False), torch.randn(2, 16)
    expected = resident(model, inner="inductor")(x)
    compiled = stream(model, inner="inductor", inner_options={"cpp_wrapper": True})
    for _ in range(2):
        assert_equal(compiled(x), expected)
    stats = flextensor_fx.report(model).stats
    assert stats is not None and stats.transfers and not stats.overruns
