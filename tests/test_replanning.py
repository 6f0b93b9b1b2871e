"""`profile="auto"`: one further plan and compilation after the first calls, right numbers, and the budget kept throughout."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import flextensor_fx
from compiling import assert_equal, fresh_compiler, mlp, registry, session_of, stream, streamed_names, values
from flextensor_fx import backend, replanning
from flextensor_fx.captured import Costs, captured_costs
from flextensor_fx.graph_profile import StepProfile
from flextensor_fx.link_profile import LinkProfile
from flextensor_fx.profile import Profile
from flextensor_fx.recording import record_call
from flextensor_fx.runtime.engine import Engine
from flextensor_fx.runtime.host_engine import HostEngine
from flextensor_fx.runtime.parameter import OffloadedParameter
from flextensor_fx.session import Session
from flextensor_fx.session_profile import profile_of
from flextensor_fx.simulate import Link

assert fresh_compiler

WIDTH = 64
NBYTES = 4 * WIDTH * WIDTH
SLOW = Link(0.0, NBYTES / 30, "made up: 30 ms for a weight")
CALLS = 7
"""From the end of this call on the new plan is in force."""


@pytest.fixture
def shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step is thought to take long, so that what comes after it is streamed. Measured, it is the last step but one."""

    def thought(*arguments: Any) -> Costs:
        found = captured_costs(*arguments)
        return replace(found, step_ms=[100.0, *(0.01 for _ in found.step_ms[1:])], link=SLOW)

    def measured(session: Session, *given: Any) -> Profile:
        found = profile_of(session, *given)
        graphs = tuple(replace(graph, steps=tuple(map(_long, graph.steps, range(99)))) for graph in found.graphs)
        return replace(found, graphs=graphs, link=LinkProfile.of(SLOW))

    monkeypatch.setattr(backend, "captured_costs", thought)
    monkeypatch.setattr(replanning, "profile_of", measured)


def _long(step: StepProfile, number: int) -> StepProfile:
    return StepProfile(step.unit, 100.0 if number == 6 else 0.01, 0.0, "measured")


def eight(**options: Any) -> tuple[nn.Sequential, Any]:
    """A model of eight weights, five of which the budget can hold beside a pool, and what is compiled of it."""
    torch.manual_seed(0)
    model = mlp(8, WIDTH, bias=False)
    return model, stream(model, profile="auto", budget=6 * NBYTES, **options)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, WIDTH)


class TestTheSwitch:
    @pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
    def test_numbers_are_the_same_before_and_after_and_one_graph_more_is_compiled(
        self, shifted: None, x: Tensor, inner
    ):
        model, compiled = eight(inner=inner)
        with torch.no_grad():
            expected = torch.compile(mlp_like(model), backend=inner)(x)
            counters.clear()
            before: set[str] = set()
            for number in range(1, CALLS + 6):
                assert_equal(compiled(x), expected)
                assert graphs() == (1 if number <= CALLS else 2)
                assert session_of(model).replanned == (number >= CALLS)
                before = before or streamed_names(model)
        after = streamed_names(model)
        assert after != before and after == set(session_of(model).plan.streamed)
        assert "0.weight" not in after and "14.weight" in after  # what comes after the long step is hidden behind it

    def test_promoted_weights_are_plain_parameters_again_and_demoted_ones_are_in_the_store(self, x: Tensor):
        model, compiled = eight()
        originals, full = dict(model.named_parameters()), values(model)
        with torch.no_grad():
            expected = model(x)
            compiled(x)
            session, before, after = swapped(model)
            assert before - after and after - before
            for _ in range(3):
                assert_equal(compiled(x), expected)
        held = dict(model.named_parameters())
        assert streamed_names(model) == after and graphs() == 2
        for name in full.keys() - after:
            assert held[name] is originals[name] and type(held[name]) is nn.Parameter
        for name in after:
            stand_in = held[name]
            assert isinstance(stand_in, OffloadedParameter) and stand_in is session.moved[name]
            assert stand_in.key in engine_of(session).store
        assert_equal(values(model), full)

    def test_the_budget_holds_throughout(self, x: Tensor, monkeypatch: pytest.MonkeyPatch):
        model, compiled = eight()
        held: list[int] = []
        moved, read = Session._move, Engine.read

        def note(session: Session) -> None:
            plain = (p for p in model.parameters() if not isinstance(p, OffloadedParameter))
            held.append(sum(p.nbytes for p in plain) + engine_of(session).stats().touched_bytes)

        def noted_read(engine: Engine, key: str) -> Tensor:
            note(session_of(model))
            held[-1] += NBYTES  # what is about to be read
            return read(engine, key)

        monkeypatch.setattr(Session, "_move", lambda s, *a: (note(s), moved(s, *a))[1])
        monkeypatch.setattr(Engine, "read", noted_read)
        with torch.no_grad():
            compiled(x)
            assert record_call(compiled, x).peak_bytes <= 6 * NBYTES
            held.clear()
            session, before, after = swapped(model)
            assert len(held) == len(before ^ after) and max(held) <= 6 * NBYTES
            compiled(x)
            assert record_call(compiled, x).peak_bytes <= 6 * NBYTES
        stats = engine_of(session).stats()
        assert stats.overruns == 0 and stats.pool_bytes == session.plan.pool

    def test_it_happens_once(self, shifted: None, x: Tensor, monkeypatch: pytest.MonkeyPatch):
        calls: list[int] = []
        taken = replanning.replan
        monkeypatch.setattr(replanning, "replan", lambda *a: calls.append(1) or taken(*a))
        model, compiled = eight()
        with torch.no_grad():
            repeat(compiled, x, 4 * CALLS)
            compiled(torch.randn(5, WIDTH))
            repeat(compiled, torch.randn(6, WIDTH), 4 * CALLS)
        assert calls == [1] and session_of(model).watcher is None

    def test_release_gives_everything_back(self, shifted: None, x: Tensor):
        model, compiled = eight()
        originals, full = dict(model.named_parameters()), values(model)
        with torch.no_grad():
            expected = model(x)
            repeat(compiled, x)
            flextensor_fx.release(model)
            assert all(p is originals[name] for name, p in model.named_parameters())
            assert_equal(values(model), full)
            assert not registry.living_sessions()
            assert_equal(model(x), expected)
            repeat(compiled, x)  # offloads anew, and plans once more
        assert session_of(model).replanned
        flextensor_fx.release(model)

    def test_a_released_model_can_be_collected(self, shifted: None, x: Tensor):
        model, compiled = eight()
        with torch.no_grad():
            repeat(compiled, x)
        flextensor_fx.release(model)
        del model, compiled
        torch._dynamo.reset()
        gc.collect()
        assert not registry.living_sessions()

    def test_state_dicts_are_right(self, shifted: None, x: Tensor):
        model, compiled = eight()
        full = values(model)
        with torch.no_grad():
            repeat(compiled, x)
            assert_equal({k: v.clone() for k, v in model.state_dict().items()}, full)
            doubled = {name: 2 * value for name, value in full.items()}
            model.load_state_dict(doubled)
            assert_equal(values(model), doubled)
            assert_equal(compiled(x), mlp_like(model)(x))
            assert graphs() == 2

    def test_other_shapes_afterwards(self, shifted: None, x: Tensor):
        model, compiled = eight()
        plain = mlp_like(model)
        with torch.no_grad():
            repeat(compiled, x)
            for rows in (5, 9, 2):
                wide = torch.randn(rows, WIDTH)
                assert_equal(compiled(wide), plain(wide))
        assert graphs() == 3  # of them one that serves all shapes

    def test_with_frozen_weights_gradients_reach_the_inputs(self, shifted: None):
        model, compiled = eight()
        model.requires_grad_(False)
        plain = mlp_like(model)
        given, other = (torch.ones(2, WIDTH, requires_grad=True) for _ in range(2))
        for _ in range(CALLS + 2):
            given.grad = None
            compiled(given).sum().backward()
        assert session_of(model).replanned
        plain(other).sum().backward()
        assert_equal(given.grad, other.grad)
        assert not any(p.requires_grad for p in model.parameters())
        flextensor_fx.release(model)
        assert not any(p.requires_grad for p in model.parameters())

    def test_a_backward_that_spans_the_switch(self, shifted: None):
        model, compiled = eight()
        model.requires_grad_(False)
        other = torch.ones(2, WIDTH, requires_grad=True)
        mlp_like(model)(other).sum().backward()
        inputs = [torch.ones(2, WIDTH, requires_grad=True) for _ in range(CALLS + 1)]
        for given, loss in [(given, compiled(given).sum()) for given in inputs]:
            loss.backward()
            assert_equal(given.grad, other.grad)
        assert session_of(model).replanned

    def test_a_tied_weight_moves_as_one(self, shifted: None, x: Tensor):
        torch.manual_seed(0)
        model = mlp(8, WIDTH, bias=False)
        model[14].weight = model[0].weight
        expected = mlp_like(model)(x).detach()
        compiled = stream(model, profile="auto", budget=5 * NBYTES)
        with torch.no_grad():
            for _ in range(CALLS + 2):
                assert_equal(compiled(x), expected)
        assert session_of(model).replanned and model[14].weight is model[0].weight

    def test_everything_may_come_back(self, x: Tensor, monkeypatch: pytest.MonkeyPatch):
        model, compiled = eight()
        plain = mlp_like(model)
        with torch.no_grad():
            compiled(x)
            session = session_of(model)
            everything = replace(session.plan, streamed=(), resident=frozenset(session.nbytes), pool=0)
            session.watcher = None
            session.adopt(session.costs, everything)
            for _ in range(3):
                assert_equal(compiled(x), plain(x))
        assert not streamed_names(model) and all(type(p) is nn.Parameter for p in model.parameters())
        flextensor_fx.release(model)


class TestWhetherToSwitch:
    def test_a_small_gain_is_left(self, shifted: None, x: Tensor, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(replanning, "_WORTH_IT", 0.9)
        model, compiled = eight()
        with torch.no_grad():
            compiled(x)
            before, plan = streamed_names(model), session_of(model).plan
            repeat(compiled, x)
        session = session_of(model)
        assert not session.replanned and session.watcher is None
        assert streamed_names(model) == before and session.plan is plan and graphs() == 1

    def test_a_shape_that_comes_later_does_not_start_it_again(self, shifted: None, x: Tensor, monkeypatch):
        monkeypatch.setattr(replanning, "_WORTH_IT", 0.9)
        model, compiled = eight()
        with torch.no_grad():
            repeat(compiled, x)
            repeat(compiled, torch.randn(5, WIDTH))
        assert session_of(model).watcher is None

    def test_without_auto_nothing_is_watched(self, shifted: None, x: Tensor):
        model = mlp(8, WIDTH, bias=False)
        compiled = stream(model, budget=6 * NBYTES)
        with torch.no_grad():
            repeat(compiled, x)
        assert session_of(model).watcher is None and not session_of(model).replanned

    def test_calls_of_ever_new_shapes_end_the_watching_too(self, shifted: None):
        model, compiled = eight(dynamic=True)
        with torch.no_grad():
            for rows in range(2, 60):
                compiled(torch.randn(rows, WIDTH))
        assert session_of(model).watcher is None and session_of(model).replanned

    def test_a_call_that_fails_is_no_matter(self, shifted: None, x: Tensor, monkeypatch: pytest.MonkeyPatch):
        model, compiled = eight()
        with torch.no_grad():
            repeat(compiled, x, 4)
            session = session_of(model)
            name = session.plan.streamed[0]
            read = session.engine.store.read_slab
            broken: Callable[..., Any] = lambda *_: (_ for _ in ()).throw(flextensor_fx.StoreError(f"{name} is gone"))  # noqa: E731
            monkeypatch.setattr(session.engine.store, "read_slab", broken)
            monkeypatch.setattr(session.engine.store, "read_cached_slab", broken)
            with pytest.raises(flextensor_fx.StoreError, match="is gone"):
                compiled(x)
            monkeypatch.undo()
            assert session.engine.store.read_slab == read
            plain = mlp_like(model)
            for _ in range(CALLS):
                assert_equal(compiled(x), plain(x))

    def test_offloaded_before_it_is_compiled(self, shifted: None, x: Tensor):
        torch.manual_seed(0)
        model = mlp(8, WIDTH, bias=False)
        expected = model(x).detach()
        options = {"include_patterns": ["**"], "min_stream_bytes": 0, "inner_backend": "aot_eager", "profile": "auto"}
        flextensor_fx.offload(model, options | {"budget": 6 * NBYTES})
        compiled = torch.compile(model, backend=flextensor_fx.flextensor, options={"inner_backend": "aot_eager"})
        with torch.no_grad():
            for _ in range(CALLS + 2):
                assert_equal(compiled(x), expected)
        assert session_of(model).replanned
        flextensor_fx.release(model)


def repeat(compiled: Callable[[Tensor], Tensor], x: Tensor, calls: int = CALLS + 2) -> None:
    for _ in range(calls):
        compiled(x)


def mlp_like(model: nn.Module) -> nn.Sequential:
    """A plain copy of a model that `mlp` made."""
    depth = len(list(model.children())) // 2
    other = mlp(depth, WIDTH, bias=False)
    other.load_state_dict(values(model))
    return other


def engine_of(session: Session) -> Engine | HostEngine:
    assert session.engine is not None
    return session.engine


def swapped(model: nn.Module) -> tuple[Session, set[str], set[str]]:
    """The session after it has taken a plan that streams as many weights, but others; what it streamed before and does now."""
    session = session_of(model)
    before = streamed_names(model)
    after = set(sorted(session.nbytes.keys() - before) + sorted(before)[: 2 * len(before) - len(session.nbytes)])
    session.watcher = None
    made = replace(session.plan, streamed=tuple(sorted(after)), resident=frozenset(session.nbytes.keys() - after))
    session.adopt(session.costs, made)
    return session, before, after


@pytest.mark.parametrize("objective", ["single", "steady"])
def test_the_plan_in_force_takes_what_it_was_predicted_to_take(objective: str, x: Tensor) -> None:
    model, compiled = eight(objective=objective)
    compiled(x)
    session = session_of(model)
    assert session.plan.streamed
    assert replanning.time_in_force(session, session.costs) == pytest.approx(session.plan.predicted_ms)
    slower = replace(session.costs, link=Link(1000.0, 1e9, "made up"))
    assert replanning.time_in_force(session, slower) > 1000


def test_calls_that_repeat_are_planned_once_more_as_such(shifted: None, x: Tensor) -> None:
    model, compiled = eight(objective="steady")
    expected = model(x)
    for _ in range(CALLS + 4):
        assert_equal(compiled(x), expected)
    session = session_of(model)
    assert session.replanned and session.plan.steady is not None
    stats = session.engine.stats()
    assert stats.overruns == 0 and stats.peak_pool_bytes <= session.plan.pool
