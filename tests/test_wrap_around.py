"""Models with objective "steady": the end of a call fetches for the next, whatever is done between calls and however they end."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flextensor_fx
from compiling import Inner, assert_equal, fresh_compiler, mlp, reader_threads, resident, session_of, stream
from flextensor_fx.errors import ConfigError
from flextensor_fx.recording import record_call
from flextensor_fx.timeline import Timeline

__all__ = ["fresh_compiler"]

WIDTH = 64
SIZE = WIDTH * WIDTH * 4  # of a weight
BUDGET = 3 * SIZE
_DELAY = "FLEXTENSOR_FX_TEST_DELAY_MS"


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


def layers(depth: int = 6) -> nn.Sequential:
    return mlp(depth, WIDTH, bias=False).requires_grad_(False)


def steady(model: Any, **options: Any) -> Any:
    return stream(model, **{"budget": BUDGET, "objective": "steady", **options})


def engine_of(model: Any) -> Any:
    return session_of(model).engine


def held(model: Any) -> list[str]:
    """Names of the weights that are held for the next call."""
    return [key.partition(":")[2] for key, _ in engine_of(model)._reader.ahead.items()]


def settle(model: Any) -> None:
    """Waits until all that is held has arrived."""
    end = time.monotonic() + 10
    while not all(transfer.arrived for _, transfer in engine_of(model)._reader.ahead.items()):
        assert time.monotonic() < end, "copies did not arrive within 10 s"
        time.sleep(0.001)


def check_memory(model: Any) -> None:
    stats = engine_of(model).stats()
    assert stats.overruns == 0
    assert stats.peak_pool_bytes <= stats.pool_bytes <= BUDGET


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_many_calls_give_the_resident_numbers_within_the_budget(inner: Inner) -> None:
    model = layers()
    inputs = [torch.randn(3, WIDTH) for _ in range(12)]
    expected = [resident(model, inner=inner)(x) for x in inputs]
    torch._dynamo.reset()
    compiled = steady(model, inner=inner)
    for x, y in zip(inputs, expected, strict=True):
        assert_equal(compiled(x), y)
    stats = engine_of(model).stats()
    (graph,) = flextensor_fx.report(model).graphs
    assert graph.steady is not None
    begun = [t.key.partition(":")[2] for t in graph.steady.ahead]
    assert held(model) == begun != []
    assert stats.transfers == 12 * len(graph.schedule.transfers) + len(begun)
    assert (stats.ahead, stats.dropped) == (12 * len(begun), 0)
    check_memory(model)


def test_from_the_second_call_on_the_first_weights_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_DELAY, "20")
    model, x = layers(), torch.randn(3, WIDTH)
    expected = model(x)
    compiled = steady(model)
    assert_equal(compiled(x), expected)
    keys = [key for key, _ in engine_of(model)._reader.ahead.items()]
    before = dict(engine_of(model).stats().stall_ms_by_key)
    settle(model)
    with engine_of(model).trace() as recorder:
        assert_equal(compiled(x), expected)
    after = engine_of(model).stats().stall_ms_by_key
    assert {key: after.get(key) for key in keys} == {key: before.get(key) for key in keys}
    kinds = [event.kind for event in recorder.events() if event.key == keys[0]]
    assert kinds[:5] == ["issued", "taken", "waits", "waited", "offloaded"]
    assert kinds[5:7] == ["issued", "taken"]  # for the third call
    later = [event.kind for event in recorder.events() if event.key not in keys]
    assert later.count("read") == later.count("waited") > 0


def test_a_recorded_call_counts_what_it_began_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_DELAY, "3")
    model, x = layers(), torch.randn(3, WIDTH)
    compiled = steady(model)
    compiled(x)
    settle(model)
    begun = held(model)
    made: Timeline = record_call(compiled, x)
    resident_bytes = made.resident_bytes
    assert made.memory[0].ms == 0 and made.memory[0].nbytes == resident_bytes + len(begun) * SIZE
    assert made.memory[-1].nbytes == resident_bytes + len(begun) * SIZE
    assert resident_bytes < made.peak_bytes <= BUDGET
    streamed = len(session_of(model).moved)
    assert len(made.transfers) <= streamed
    assert not {stall.key for stall in made.stalls} & set(begun)
    predicted = flextensor_fx.report(compiled, measured=made).timeline("predicted")
    plan = session_of(model).plan
    assert predicted is not None and predicted.total_ms == pytest.approx(plan.predicted_ms)
    assert len(predicted.transfers) == streamed
    assert predicted.memory[0].nbytes == predicted.memory[-1].nbytes
    assert predicted.peak_bytes <= BUDGET


def test_a_report_of_a_steady_model_survives_its_text() -> None:
    model = layers()
    steady(model)(torch.randn(3, WIDTH))
    report = flextensor_fx.report(model)
    assert flextensor_fx.Report.from_json(report.to_json()) == report
    assert "begun in the call before" in str(report) and "begun ahead of a call" in str(report)
    assert report.peak_bytes <= BUDGET


# --- between calls -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_write_reaches_the_very_next_call(inner: Inner) -> None:
    model, x = layers(), torch.randn(3, WIDTH)
    compiled = steady(model, inner=inner)
    for factor in (1.0, 2.0, 3.0):
        compiled(x)
        settle(model)
        parameter = model.get_parameter(held(model)[0])
        parameter.copy_(torch.full((WIDTH, WIDTH), factor / WIDTH))
        expected = torch.nn.Sequential(*model)(x)  # eager, from the store
        assert_equal(parameter.detach().clone(), torch.full((WIDTH, WIDTH), factor / WIDTH))
        torch.testing.assert_close(compiled(x), expected)
    check_memory(model)


def test_a_write_through_a_tensor_that_is_held_reaches_every_next_call() -> None:
    """Such a write is not seen by anybody, so the weight is not fetched ahead as long as the tensor lives."""
    model, x = layers(), torch.randn(3, WIDTH)
    compiled = steady(model)
    compiled(x)
    name = held(model)[0]
    alias = model.get_parameter(name).data
    array = alias.numpy()
    for number in range(3):
        array[:] = number / WIDTH
        torch.testing.assert_close(compiled(x), torch.nn.Sequential(*model)(x))
        assert name not in held(model)
    del alias, array
    compiled(x)
    assert held(model)[0] == name
    check_memory(model)


def test_eager_use_and_state_dict_between_calls() -> None:
    model, x = layers(), torch.randn(3, WIDTH)
    expected = model(x)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    compiled = steady(model)
    for _ in range(3):
        assert_equal(compiled(x), expected)
        assert_equal(model(x), expected)
        assert_equal(dict(model.state_dict()), kept)
    new = {name: value * 0.5 for name, value in kept.items()}
    model.load_state_dict(new)
    halved = layers()
    halved.load_state_dict(new)
    assert_equal(compiled(x), halved(x))
    check_memory(model)


class Two(nn.Module):
    """Two graphs over different weights, `first` and `second`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers(4), layers(4)

    def forward(self, x: Tensor, which: str) -> Tensor:
        return self.first(x) if which == "first" else self.second(x)


@pytest.mark.parametrize("delay", ["0", "2"])
def test_another_graph_runs_next(delay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_DELAY, delay)
    model, x = Two(), torch.randn(3, WIDTH)
    expected = {name: model(x, name) for name in ("first", "second")}
    compiled = steady(model, budget=2 * SIZE)
    for name in 4 * ("first", "second") + 4 * ("second",):
        assert_equal(compiled(x, name), expected[name])
    stats = engine_of(model).stats()
    assert len(flextensor_fx.report(model).graphs) == 2
    assert stats.overruns == 0 and stats.peak_pool_bytes <= stats.pool_bytes <= 2 * SIZE
    assert stats.dropped > 0


def test_alternating_graphs_soon_read_next_to_nothing_in_vain() -> None:
    model, x = Two(), torch.randn(3, WIDTH)
    compiled = steady(model, budget=SIZE)
    for name in 40 * ("first", "second"):
        compiled(x, name)
    stats = engine_of(model).stats()
    streamed = len(session_of(model).moved)
    assert streamed == 8
    assert stats.transfers - 40 * streamed == stats.dropped + len(held(model))
    assert 0 < stats.dropped <= 12


def test_prefill_and_decode_hand_over_what_they_share() -> None:
    """Two graphs over the same weights, as long inputs and short ones make them."""
    model = layers()
    long, short = torch.randn(32, WIDTH), torch.randn(1, WIDTH)
    expected = [resident(model)(x) for x in (long, short)]
    torch._dynamo.reset()
    compiled = steady(model, dynamic=False)
    for x in (long, short):
        compiled(x)  # to compile looks at the weights, which drops what is held
    before = engine_of(model).stats()
    for _ in range(2):
        assert_equal(compiled(long), expected[0])
        for _ in range(3):
            assert_equal(compiled(short), expected[1])
    assert len(flextensor_fx.report(model).graphs) == 2
    after = engine_of(model).stats()
    assert after.ahead > before.ahead and after.dropped == before.dropped
    check_memory(model)


def test_graph_breaks() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = layers(3), layers(3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)

    model, x = Broken(), torch.randn(3, WIDTH)
    expected = model(x)
    compiled = steady(model, fullgraph=False)
    for _ in range(6):
        assert_equal(compiled(x), expected)
    check_memory(model)


def test_calls_from_several_threads_take_turns() -> None:
    model = layers()
    inputs = [torch.randn(3, WIDTH) for _ in range(3)]
    compiled = steady(model)
    expected = [compiled(x) for x in inputs]
    wrong: list[int] = []

    def call(number: int) -> None:
        with torch.no_grad():
            for _ in range(20):
                if not torch.equal(compiled(inputs[number]), expected[number]):
                    wrong.append(number)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    check_memory(model)


# --- calls that end early, and the end of it all ------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 3, 5])
def test_a_call_that_raises_half_way(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = layers(), torch.randn(3, WIDTH)
    compiled = steady(model)
    expected = compiled(x)
    engine = engine_of(model)
    finish, calls = engine.finish, []

    def fail(transfer: Any) -> Tensor:
        calls.append(transfer.key)
        if len(calls) == at + 1:
            raise KeyboardInterrupt
        return finish(transfer)

    for _ in range(3):
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(engine, "finish", fail)
            if at < len(session_of(model).moved):
                with pytest.raises(KeyboardInterrupt):
                    compiled(x)
            else:
                assert_equal(compiled(x), expected)
        assert_equal(compiled(x), expected)
    check_memory(model)


def test_a_call_that_ends_before_its_last_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = layers(), torch.randn(3, WIDTH)
    compiled = steady(model)
    expected = compiled(x)
    begun = held(model)
    engine = engine_of(model)

    def fail(key: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine, "start_ahead", fail)
        with pytest.raises(KeyboardInterrupt):
            compiled(x)
    assert held(model) == []
    for _ in range(2):
        assert_equal(compiled(x), expected)
        assert held(model) == begun
    check_memory(model)


def test_release_with_copies_held() -> None:
    model, x = layers(), torch.randn(3, WIDTH)
    expected = model(x)
    compiled = steady(model)
    compiled(x)
    assert held(model)
    flextensor_fx.release(model)
    assert reader_threads() == []
    assert_equal(model(x), expected)
    again = steady(model)
    for _ in range(2):
        assert_equal(again(x), expected)
    check_memory(model)


def test_a_model_is_collected_with_copies_held() -> None:
    compiled = steady(layers())
    compiled(torch.randn(3, WIDTH))
    del compiled
    torch._dynamo.reset()
    gc.collect()
    end = time.monotonic() + 10
    while reader_threads():
        assert time.monotonic() < end, "the reader threads did not end within 10 s"
        time.sleep(0.001)


# --- where nothing is fetched ahead -------------------------------------------------------------------------------------


def ahead_of(model: Any) -> list[bool]:
    return [graph.steady is not None for graph in flextensor_fx.report(model).graphs]


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_training_graphs_fetch_nothing_ahead(inner: Inner) -> None:
    model = layers(4)
    x = torch.randn(3, WIDTH, requires_grad=True)
    compiled = steady(model, inner=inner)
    with torch.enable_grad():
        for _ in range(2):
            compiled(x).sum().backward()
    names = [graph.name.split()[0] for graph in flextensor_fx.report(model).graphs]
    assert names == ["forward", "backward"] and ahead_of(model) == [False, False]
    assert engine_of(model).stats().ahead == 0


def test_a_graph_without_a_backward_fetches_ahead_under_grad_mode_too() -> None:
    model, x = layers(4), torch.randn(3, WIDTH)
    compiled = steady(model)
    with torch.enable_grad():
        compiled(x)
    assert ahead_of(model) == [True] and held(model)


def test_the_objective_single_fetches_nothing_ahead() -> None:
    model, x = layers(), torch.randn(3, WIDTH)
    compiled = steady(model, objective="single")
    for _ in range(2):
        compiled(x)
    assert ahead_of(model) == [False] and engine_of(model).stats().ahead == 0
    torch._dynamo.reset()
    changed = steady(model)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        changed(x)
    assert isinstance(caught.value.inner_exception, ConfigError)


def test_the_objective_shapes_the_graph(tmp_path: Any) -> None:
    """Compile caches are keyed by the graph: what differs must be in its text."""
    texts = {}
    for objective in ("single", "steady"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        folder = tmp_path / objective
        steady(layers(), objective=objective, dump_dir=str(folder))(torch.randn(3, WIDTH))
        texts[objective] = sorted(folder.glob("*.after.py"))[-1].read_text()
    assert "prefetch_ahead" in texts["steady"] and "prefetch_ahead" not in texts["single"]
