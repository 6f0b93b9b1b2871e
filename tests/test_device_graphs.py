"""Graphs that a device captures and replays: copies are part of them, with the values of now; and why there are none."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flextensor_fx
from compiling import assert_equal, fresh_compiler, mlp, resident, session_of
from flextensor_fx import backend
from flextensor_fx.calls import of_open_stores
from flextensor_fx.config import OffloadConfig
from flextensor_fx.device_graphs import wants_graphs, why_no_graphs, without_graphs
from flextensor_fx.errors import OffloadError, StoreError
from modelled_device import ModelledDevice
from modelled_session import Install, device, host_engine, install, stream_from_host

__all__ = ["device", "fresh_compiler", "install"]
X = torch.ones(3, 16)


def test_a_replayed_call_copies_the_weights_of_now(device: ModelledDevice) -> None:
    model = mlp(4)
    compiled = stream_from_host(model, lookahead=1)
    with torch.no_grad():
        compiled(X)
        with device.watching():
            x = device.adopt(X.clone())
            want = compiled(x).clone()
            before = device.copies
            with device.capture() as graph:
                assert device.capturing()
                result = compiled(x)
            assert device.copies - before == 4
            graph.replay()
            assert_equal(result, want)
            model[2].weight.mul_(2)
            model.load_state_dict(model.state_dict() | {"4.weight": torch.full((16, 16), 0.25)})
            session_of(model).engine.settle()  # as a call does before it replays
            graph.replay()
            with device.on_host():
                assert_equal(result, copy.deepcopy(model)(X))
            assert device.copies - before == 4
    device.assert_no_race()
    stats = flextensor_fx.report(compiled).stats
    assert stats is not None and stats.device is not None and stats.device.captured == 4


def test_a_write_reaches_a_graph_that_the_user_replays_by_himself(device: ModelledDevice) -> None:
    model = mlp(2)
    compiled = stream_from_host(model)
    with torch.no_grad(), device.watching():
        x = device.adopt(X.clone())
        compiled(x)
        with device.capture() as graph:
            result = compiled(x)
        for write in (lambda p: p.mul_(2), lambda p: p.copy_(torch.full_like(p, 0.5))):
            write(model[0].weight)
            write(model[2].weight)
            graph.replay()
            with device.on_host():
                assert_equal(result, copy.deepcopy(model)(X))
    device.assert_no_race()


def test_a_capture_leaves_copies_ahead_alone(device: ModelledDevice) -> None:
    model = mlp(4)
    compiled = stream_from_host(model, objective="steady", budget="60%")
    with torch.no_grad(), device.watching():
        x = device.adopt(X.clone())
        for _ in range(3):
            want = compiled(x).clone()
        held = len(session_of(model).engine._ahead)
        assert held > 0
        with device.capture() as graph:
            result = compiled(x)
        assert len(session_of(model).engine._ahead) == held
        graph.replay()
        assert_equal(result, want)
        assert_equal(compiled(x), want)
    device.assert_no_race()


def test_a_transfer_that_is_collected_in_a_capture_does_not_touch_it(device: ModelledDevice) -> None:
    """As when the failure of an earlier call held it in a cycle."""
    engine = host_engine(device, {"a": torch.full((64,), 1.0), "b": torch.full((64,), 2.0)})
    with device.watching():
        started = [engine.start("a")]
        with device.capture() as graph:
            weight = engine.finish(engine.start("b"))
            started.clear()
            found = weight * 3
        assert engine._books.left and engine._books.live == weight.nbytes
        graph.replay()
        assert bool((found == 6).all())
        assert bool((engine.finish(engine.start("a")) == 1).all())
        assert not engine._books.left
    device.assert_no_race()


def test_a_captured_transfer_that_is_collected_behind_its_capture_waits_for_nothing(device: ModelledDevice) -> None:
    engine = host_engine(device, {"a": torch.full((64,), 1.0)})
    started = []
    with device.watching():
        with contextlib.suppress(OffloadError), device.capture():
            started.append(engine.start("a"))
            engine.start("missing")
        started.clear()
        assert engine._books.live == 0
        assert bool((engine.finish(engine.start("a")) == 1).all())
    device.assert_no_race()


def test_an_engine_that_is_collected_in_a_capture_does_not_wait_in_it(device: ModelledDevice) -> None:
    other = host_engine(device, {"a": torch.full((64,), 1.0)})
    engine = host_engine(device, {"b": torch.full((64,), 2.0)})
    before = device.pinned_bytes
    with device.watching(), device.capture():
        del other
        weight = engine.finish(engine.start("b"))
        del weight
    device.assert_no_race()
    assert device.pinned_bytes == before  # until exit


def test_what_is_not_pinned_cannot_be_captured() -> None:
    device = ModelledDevice(fail_pin_at=1)
    with pytest.warns(UserWarning, match="stay pageable"):
        engine = host_engine(device, {"w": torch.ones(8)})
    with pytest.raises(OffloadError, match=r"is not pinned .* switch CUDA graphs off"), device.capture():
        engine.start("w")
    assert bool((engine.finish(engine.start("w")) == 1).all())
    engine.close()


def test_memory_that_a_captured_backward_reads_stays() -> None:
    device = ModelledDevice()
    for serves_backwards in (False, True):
        engine = host_engine(device, {"w": torch.ones(8)})
        engine.serves_backwards = serves_backwards
        with device.watching(), device.capture():
            weight = engine.finish(engine.start("w"))
            del weight
        engine.close()
        assert (device.pinned_bytes > 0) is serves_backwards


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, False),
        ({"inner_mode": "reduce-overhead"}, True),
        ({"inner_mode": "max-autotune"}, True),
        ({"inner_mode": "max-autotune-no-cudagraphs"}, False),
        ({"inner_options": {"triton.cudagraphs": True}}, True),
        ({"inner_mode": "reduce-overhead", "inner_options": {"triton.cudagraphs": False}}, False),
        ({"inner_mode": "reduce-overhead", "inner_backend": "aot_eager"}, False),
    ],
)
def test_when_graphs_are_wanted(options: dict[str, Any], wanted: bool) -> None:
    config = OffloadConfig(**options)
    assert wants_graphs(config) is wanted
    assert not wants_graphs(without_graphs(config))


def session_like(device: str = "cuda:0", objective: str = "single", engine: Any = None) -> Any:
    return SimpleNamespace(
        tier=SimpleNamespace(device=torch.device(device)), config=OffloadConfig(objective=objective), engine=engine
    )


def test_why_there_are_none() -> None:
    pinned = host_engine(ModelledDevice(), {"w": torch.ones(8)})
    with pytest.warns(UserWarning, match="stay pageable"):
        pageable = host_engine(ModelledDevice(fail_pin_at=1), {"w": torch.ones(8)})
    assert why_no_graphs([session_like(), session_like(engine=pinned)]) is None
    assert "on the CPU" in (why_no_graphs([session_like("cpu")]) or "")
    assert "steady" in (why_no_graphs([session_like(objective="steady")]) or "")
    assert "not pinned" in (why_no_graphs([session_like(engine=pageable)]) or "")


def test_one_line_says_why_on_the_cpu() -> None:
    model = mlp(2)
    want = resident(model, inner="inductor")(X).detach()
    torch._dynamo.reset()
    compiled = stream_from_host(model, inner="inductor", inner_mode="reduce-overhead")
    with (
        torch.no_grad(),
        pytest.warns(UserWarning, match="no CUDA graphs for .*: the model computes on the CPU") as caught,
    ):
        assert_equal(compiled(X), want)
    assert len([one for one in caught if "CUDA graphs" in str(one.message)]) == 1


def test_memory_that_could_not_be_pinned_makes_the_graph_anew(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_if_on_a_gpu(sessions: Iterable[Any]) -> str | None:
        return why_no_graphs([session_like(engine=session.engine) for session in sessions])

    monkeypatch.setattr(backend, "why_no_graphs", as_if_on_a_gpu)
    install(fail_pin_at=1)
    model = mlp(3)
    want = resident(model, inner="inductor")(X).detach()
    torch._dynamo.reset()
    compiled = stream_from_host(model, inner="inductor", inner_mode="reduce-overhead")
    with torch.no_grad():
        with pytest.warns(UserWarning, match="no CUDA graphs for .*: weights lie in memory that is not pinned"):
            assert_equal(compiled(X), want)
        assert_equal(compiled(X), want)
    assert [graph.name for graph in flextensor_fx.report(compiled).graphs] == ["forward 0"]


def test_nothing_is_replayed_from_a_store_that_is_closed(install: Install) -> None:
    install()
    calls: list[Any] = []
    model = mlp(2)
    with torch.no_grad():
        stream_from_host(model)(X)
    uid = session_of(model).uid
    run = of_open_stores(calls.append, (uid,))
    run(1)
    flextensor_fx.release(model)
    with pytest.raises(StoreError, match="to be open, found it released"):
        run(2)
    assert calls == [1]
