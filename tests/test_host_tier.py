"""Whole models on a modelled device: numbers as resident, no race, and nothing copied that need not be."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import flextensor_fx
from compiling import assert_equal, fresh_compiler, mlp, resident, session_of, values
from flextensor_fx.errors import StoreError
from flextensor_fx.recording import record_call
from flextensor_fx.runtime.host_store import HostStore
from modelled_device import ModelledDevice
from modelled_session import Install, device, host_engine, install, stream_from_host

__all__ = ["device", "fresh_compiler", "install"]

OBJECTIVES = ["single", "steady"]
X = torch.ones(3, 16)


class Tied(nn.Module):
    """An embedding that is also the head, beside a block that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 16)
        self.block, self.other = mlp(6), nn.Linear(16, 16)
        self.head = nn.Linear(16, 64, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.block(self.table(tokens))
        return self.head(self.block(self.other(x)))


def expected(model: Any, *inputs: Any) -> Any:
    with torch.no_grad():
        result = resident(model)(*inputs)
    torch._dynamo.reset()
    return result


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("budget", ["100%", "85%", "75%", None])
def test_numbers_are_those_of_the_resident_model_without_a_race(
    device: ModelledDevice, objective: str, budget: str | None
) -> None:
    model, tokens = Tied(), torch.arange(12).view(3, 4)
    want = expected(model, tokens)
    compiled = stream_from_host(model, budget=budget, objective=objective)
    with torch.no_grad(), device.watching():
        for _ in range(4):
            assert_equal(compiled(tokens), want)
    device.assert_no_race()
    stats = flextensor_fx.report(compiled).stats
    assert (stats is None) == (budget == "100%")
    if stats is not None:
        assert stats.peak_pool_bytes <= stats.pool_bytes
        assert stats.device is not None and stats.device.returned_bytes == 0


@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize("units", [2, 5, 8])
def test_every_lookahead_gives_the_same_numbers(device: ModelledDevice, units: int, lookahead: int) -> None:
    sizes = [16, *(8 * (1 + n % 3) for n in range(units - 1)), 16]
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))
    want = expected(model, X)
    compiled = stream_from_host(model, lookahead=lookahead)
    with torch.no_grad(), device.watching():
        assert_equal(compiled(X), want)
        assert_equal(compiled(X), want)
    device.assert_no_race()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_calls_on_other_streams_are_in_order_with_our_copies(device: ModelledDevice, objective: str) -> None:
    model = mlp(5)
    want = expected(model, X)
    compiled = stream_from_host(model, budget="40%", objective=objective)
    with torch.no_grad(), device.watching():
        x = device.adopt(X.clone())
        assert_equal(compiled(x), want)
        for _ in range(2):
            side, ready = device.new_stream(), device.new_event()
            device.record(ready, device.current_stream())
            device.wait(side, ready)  # the user's part: the input is made elsewhere
            with device.stream(side):
                assert_equal(compiled(x), want)
        assert_equal(compiled(x), want)
    device.assert_no_race()


def test_a_training_step_of_what_is_beside_frozen_streamed_weights(device: ModelledDevice) -> None:
    def step(compiled: Any, model: nn.Module) -> list[Tensor]:
        compiled(X).square().sum().backward()  # compiles both graphs
        model.zero_grad()
        with device.watching():
            compiled(X).square().sum().backward()
        return [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None]

    model = nn.Sequential(nn.Linear(16, 16), *mlp(4).requires_grad_(False), nn.Linear(16, 16))
    twin = copy.deepcopy(model)
    want = step(resident(model), model)
    torch._dynamo.reset()
    compiled = stream_from_host(twin, include_patterns=[f"{n}" for n in range(1, 9)])
    found = step(compiled, twin)
    assert len(found) == 4
    assert_equal(found, want)
    device.assert_no_race()
    assert len(session_of(twin).moved) == 8


def test_read_only_weights_never_travel_back(device: ModelledDevice) -> None:
    model = mlp(4)
    compiled = stream_from_host(model)
    with torch.no_grad():
        compiled(X)
        before = device.copied_bytes
        compiled(X)
    stats = flextensor_fx.report(compiled).stats
    assert stats is not None and stats.device is not None
    assert stats.device.returned_bytes == 0
    assert device.copied_bytes - before == sum(p.nbytes for p in model.parameters())


WRITES = {
    "in place": lambda p: p.mul_(3),
    "data": lambda p: p.data.mul_(3),
    "data of a row": lambda p: p.data[0].mul_(3),
    "view": lambda p: p.view(-1)[5:9].mul_(3),
    "detached": lambda p: p.detach().mul_(3),
    "detached view": lambda p: p.detach()[1].mul_(3),
    "copy": lambda p: p.copy_(torch.full_like(p, 0.25)),
    "copy of less": lambda p: p.copy_(torch.tensor(0.25)),
    "set data": lambda p: setattr(p, "data", torch.full((16, 16), 0.5)),
    "foreach": lambda p: torch._foreach_mul_([p], 3),
    "out": lambda p: torch.mul(p, 3, out=p),
    "index": lambda p: p.__setitem__((0, slice(None)), 0.5),
}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", WRITES)
def test_a_write_reaches_the_very_next_call(device: ModelledDevice, name: str, objective: str) -> None:
    model = mlp(3)
    twin = copy.deepcopy(model)
    compiled = stream_from_host(model, objective=objective)
    with torch.no_grad(), device.watching():
        compiled(X)
        compiled(X)
        WRITES[name](model[2].weight)
        with device.on_host():
            WRITES[name](twin[2].weight)
            want = twin(X)
        assert_equal(compiled(X), want)
        assert_equal(model[2].weight.cpu(), twin[2].weight)
    device.assert_no_race()


@pytest.mark.parametrize("store", ["host", "disk"])
def test_data_may_be_set_to_itself_in_another_order(device: ModelledDevice, store: str) -> None:
    model = mlp(2)
    compiled = stream_from_host(model, store=store)
    with torch.no_grad():
        compiled(X)
        turned = model[0].weight.t().clone()
        model[0].weight.data = model[0].weight.data.t()
        assert_equal(model[0].weight.cpu(), turned)
        assert_equal(compiled(X), expected(copy.deepcopy(model), X))
        model[0].weight.data = model[0].weight.data  # what some libraries do
        assert_equal(model[0].weight.cpu(), turned)


def test_a_detached_weight_outlives_its_store(device: ModelledDevice) -> None:
    model = mlp(2)
    before = values(model)["0.weight"]
    compiled = stream_from_host(model)
    with torch.no_grad():
        compiled(X)
        detached = model[0].weight.detach()
        assert_equal(detached + 0, before)
        flextensor_fx.release(model)
        assert_equal(detached + 0, before)
        detached.mul_(2)
        assert_equal(model[0].weight.detach(), before * 2)


def test_a_view_that_is_kept_goes_on_writing(device: ModelledDevice) -> None:
    model = mlp(2)
    compiled = stream_from_host(model)
    with torch.no_grad():
        compiled(X)
        row = model[0].weight[3]
        for value in (1.0, 2.0):
            row.fill_(value)
            twin = copy.deepcopy(model)
            assert float(twin[0].weight[3, 0]) == value
            assert_equal(compiled(X), twin(X))
        del row
        compiled(X)
        gc.collect()
        assert len(session_of(model).engine._values) == 0


def test_eager_reads_copy_nothing_back(device: ModelledDevice) -> None:
    model = mlp(2)
    compiled = stream_from_host(model)
    with torch.no_grad():
        compiled(X)
        compiled(X)
        before = session_of(model).engine.stats().device.returned_bytes
        assert model[0].weight.abs().max() > 0
        (model[0].weight + 1).sum()
        compiled(X)
    assert session_of(model).engine.stats().device.returned_bytes == before


def test_state_dicts_are_host_tensors_of_full_values(device: ModelledDevice) -> None:
    model = Tied()
    before = values(model)
    live = device.allocated_bytes
    compiled = stream_from_host(model)
    tokens = torch.arange(12).view(3, 4)
    with torch.no_grad():
        compiled(tokens)
        state = model.state_dict()
        assert device.allocated_bytes == live
        assert list(state) == list(before)
        assert_equal(dict(state), before)
        assert state["head.weight"].untyped_storage().data_ptr() == state["table.weight"].untyped_storage().data_ptr()
        assert all(type(value) is Tensor for value in state.values())
        assert_equal(
            dict(model.block.state_dict(prefix="block.")),
            {name: value for name, value in before.items() if name.startswith("block.")},
        )
        changed = {name: value + 1 for name, value in before.items()}
        model.load_state_dict(changed)
        assert_equal(values(model), changed)
        want = expected(copy.deepcopy(model), tokens)
        assert_equal(compiled(tokens), want)
        model.load_state_dict({name: value.clone() for name, value in before.items()}, assign=True)
        assert_equal(compiled(tokens), expected(copy.deepcopy(model), tokens))
        assert_equal(values(pickle.loads(pickle.dumps(model))), before)


def test_release_gives_everything_back(install: Install) -> None:
    device = install()
    model = mlp(4)
    before = values(model)
    compiled = stream_from_host(model)
    with torch.no_grad():
        want = compiled(X)
        assert device.pinned_bytes > 0
        flextensor_fx.release(model)
        assert device.pinned_bytes == 0
        assert all(type(p) is nn.Parameter for p in model.parameters())
        assert_equal(values(model), before)
        assert not any(module._state_dict_hooks for module in model.modules())
        assert_equal(compiled(X), want)  # offloaded anew


def test_a_model_that_is_dropped_unpins(install: Install) -> None:
    device = install()
    model = mlp(4)
    with torch.no_grad():
        stream_from_host(model)(X)
    assert device.pinned_bytes > 0
    del model
    torch._dynamo.reset()
    gc.collect()
    assert device.pinned_bytes == 0


def test_small_weights_of_a_unit_are_one_copy(device: ModelledDevice) -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList(torch.randn(n % 7 + 1) for n in range(300))
            self.halves = nn.ParameterList(torch.randn(3).bfloat16() for n in range(5))

        def forward(self, x: Tensor) -> Tensor:
            for scale in self.scales:
                x = x * scale.sum() + 0.5
            for half in self.halves:
                x = x + half.sum()
            return x

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unit, self.last = Many(), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.unit(x))

    model = Holder()
    want = expected(model, X)
    compiled = stream_from_host(model, include_patterns=["unit"])
    with torch.no_grad(), device.watching():
        assert_equal(compiled(X), want)
        before = device.copies
        assert_equal(compiled(X), want)
        assert device.copies - before == 2  # one for each dtype
        model.unit.scales[7].fill_(2.0)
        assert_equal(compiled(X), expected(copy.deepcopy(model), X))
    device.assert_no_race()
    engine = session_of(model).engine
    assert all(engine.store.source(p.key).data_ptr() % 256 == 0 for p in session_of(model).moved.values())


@pytest.mark.parametrize("budget", ["25%", "55%", "90%"])
def test_weights_that_do_not_fit_together_travel_alone(device: ModelledDevice, budget: str) -> None:
    """All of a unit's weights are small enough to be packed. At 25% their pack is larger than the budget; at 90% it grows with
    every plan that makes room for it."""
    model = nn.Sequential(mlp(20, 64, bias=False), nn.Linear(64, 64))
    x = torch.ones(2, 64)
    want = expected(model, x)
    compiled = stream_from_host(model, include_patterns=["0"], budget=budget)
    with torch.no_grad(), device.watching():
        assert_equal(compiled(x), want)
        before = device.copies
        assert_equal(compiled(x), want)
        assert device.copies - before == len(session_of(model).moved) > 1
    report = flextensor_fx.report(compiled)
    assert report.peak_bytes <= report.budget
    device.assert_no_race()


def test_pinning_that_fails_costs_speed_alone(install: Install) -> None:
    device = install(fail_pin_at=1)
    model = mlp(4)
    want = expected(model, X)
    compiled = stream_from_host(model)
    with torch.no_grad(), device.watching():
        with pytest.warns(UserWarning, match="stay pageable") as caught:
            assert_equal(compiled(X), want)
        assert len(caught) == 1
        assert_equal(compiled(X), want)
    device.assert_no_race()
    stats = flextensor_fx.report(compiled).stats
    assert stats is not None and stats.device is not None
    assert stats.device.pinned_bytes == 0 < stats.device.pageable_bytes
    assert "pageable" in str(stats) and stats.device.unpinned_because


@pytest.mark.parametrize("options", [{"host_budget": 3000}, {"host_budget": 1}, {"pin_memory": False}])
def test_a_host_budget_is_kept_with_the_same_numbers(device: ModelledDevice, options: dict[str, Any]) -> None:
    model = mlp(6)
    want = expected(model, X)
    compiled = stream_from_host(model, **options)
    with torch.no_grad(), device.watching():
        for _ in range(2):
            assert_equal(compiled(X), want)
        model[4].weight.fill_(0.5)
        assert_equal(compiled(X), expected(copy.deepcopy(model), X))
    device.assert_no_race()
    store = session_of(model).engine.store
    assert isinstance(store, HostStore)
    assert store.pageable_bytes > 0
    assert device.peak_pinned_bytes <= options.get("host_budget", 0) + 0
    assert store.host_bytes <= options.get("host_budget", 1 << 30)
    flextensor_fx.release(model)
    assert_equal(resident(model)(X).detach(), expected(copy.deepcopy(model), X))


def test_a_device_that_another_process_has_filled_gives_one_clear_error(install: Install) -> None:
    device = install(total_bytes=1 << 20)
    model = mlp(4, width=128)
    x = torch.ones(2, 128)
    want = expected(model, x)
    compiled = stream_from_host(model)
    with torch.no_grad():
        assert_equal(compiled(x), want)
        other = device.empty([(1 << 20) - 70_000], [1], torch.uint8)
        with pytest.raises(
            StoreError, match=r"expected room for .* on cpu, found .* free of 1.00 MiB.*lower the budget"
        ):
            compiled(x)
        del other
        assert_equal(compiled(x), want)
    device.assert_no_race()


def test_a_call_that_fails_half_way_leaves_nothing_behind(device: ModelledDevice) -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp(4)

        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            x = self.layers[:2](x)
            return self.layers[2:](x[index])

    model = Failing()
    compiled = stream_from_host(model)
    good, bad = torch.tensor([0, 1]), torch.tensor([0, 99])
    want = expected(model, X, good)
    with torch.no_grad(), device.watching():
        assert_equal(compiled(X, good), want)
        for _ in range(3):
            with pytest.raises((IndexError, RuntimeError)):
                compiled(X, bad)
        gc.collect()
        assert session_of(model).engine._books.live == 0
        assert_equal(compiled(X, good), want)
    device.assert_no_race()


def test_threads_may_call_at_once(device: ModelledDevice) -> None:
    model = mlp(4)
    want = expected(model, X)
    compiled = stream_from_host(model)
    with torch.no_grad():
        compiled(X)
    found: list[bool] = []

    def call() -> None:
        with torch.no_grad():
            for _ in range(10):
                found.append(torch.equal(compiled(X), want))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 40


def test_threads_may_read_and_write_weights_while_others_call(device: ModelledDevice) -> None:
    model = mlp(2)
    compiled = stream_from_host(model)
    with torch.no_grad():
        want = compiled(X)
    done: list[Callable[[], object]] = []

    def repeat(use: Callable[[], object]) -> None:
        with torch.no_grad():
            for _ in range(100):
                use()
        done.append(use)

    def touch() -> None:
        for parameter in model.parameters():
            parameter.mul_(1.0)
            assert parameter[:1].abs().sum() >= 0

    def call() -> None:
        assert_equal(compiled(X), want)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=repeat, args=(use,)) for use in (touch, touch, call)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(done) == 3


def test_weights_that_their_module_lists_stay(device: ModelledDevice) -> None:
    model = nn.ModuleDict({"rnn": nn.GRU(16, 16), "out": nn.Linear(16, 16)})
    flextensor_fx.offload(model, {"include_patterns": ["*"], "store": "host", "min_stream_bytes": 0})
    assert set(session_of(model).moved) == {"out.weight", "out.bias"}
    assert "keeps a list of its weights" in str(flextensor_fx.report(model))
    assert model["rnn"](X)[0].shape == X.shape


def test_events_and_streams_are_made_once(device: ModelledDevice) -> None:
    compiled = stream_from_host(mlp(8), lookahead=2)
    with torch.no_grad():
        compiled(X)
        made = device.events_made, device.streams_made
        for _ in range(5):
            compiled(X)
    assert (device.events_made, device.streams_made) == made
    assert made[0] <= 4 and made[1] == 1


def test_a_weight_that_arrives_on_another_stream_than_it_left_on(device: ModelledDevice) -> None:
    """As where the user's own side stream is around one layer inside of the graph."""
    engine = host_engine(device, {"a": torch.full((64,), 1.0), "b": torch.full((64,), 2.0)})
    with device.watching():
        a, b = engine.start("a"), engine.start("b")
        side = device.user_stream()
        with device.stream(side):
            weight = engine.finish(a)
            found = weight * 3
            engine.give_up((weight,))
            del weight
        other = engine.finish(b) * 3
        done = device.new_event()
        device.record(done, side)
        device.wait(device.current_stream(), done)
        assert bool((found == 3).all()) and bool((other == 6).all())
    device.assert_no_race()
    assert engine._books.live == 0 or engine._books.live == 256
    engine.close()


def test_a_new_plan_is_followed_at_the_next_call(device: ModelledDevice) -> None:
    model = mlp(6)
    want = expected(model, X)
    compiled = stream_from_host(model, budget="40%")
    with torch.no_grad(), device.watching():
        compiled(X)
        session = session_of(model)
        before = set(session.moved)
        plan = session.planned(session.costs)
        keep = sorted(before)[:2]
        streamed = tuple(name for name in plan.streamed if name not in keep)
        session.adopt(session.costs, replace(plan, streamed=streamed, resident=plan.resident | set(keep)))
        assert_equal(compiled(X), want)
        assert_equal(compiled(X), want)
        assert not set(keep) & set(session.moved)
    device.assert_no_race()


def test_a_profile_measures_copies_to_the_device(device: ModelledDevice) -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 256), nn.Linear(256, 16))
    options = {"include_patterns": ["*"], "store": "host", "min_stream_bytes": 0, "inner_backend": "aot_eager"}
    found = flextensor_fx.profile(model, (X,), options, calls=3)
    assert found.link.bytes_per_ms > 0 and found.link.points
    assert {weight.name for weight in found.weights} == {name for name, _ in model.named_parameters()}


def test_generated_code_clones_no_weight_of_a_pack(device: ModelledDevice) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)) for _ in range(3)))
    want = resident(model, inner="inductor")(X).detach()
    torch._dynamo.reset()
    compiled = stream_from_host(model, inner="inductor", include_patterns=["*"])
    with torch.no_grad():
        found, (code,) = run_and_get_code(compiled, X)
    assert_equal(found, want)
    assert code.count("prefetch.default.direct(") == code.count("wait.default.direct(") == 3
    assert "clone" not in code and "copy_" not in code


def test_a_recorded_call_has_copies_and_compute(device: ModelledDevice) -> None:
    model = mlp(6)
    compiled = stream_from_host(model, budget="50%")
    with torch.no_grad():
        compiled(X)
        timeline = record_call(compiled, X)
    assert sum(span.nbytes for span in timeline.transfers) == sum(
        session_of(model).nbytes[name] for name in session_of(model).moved
    )
    assert 0 < timeline.total_ms < 1e4


def test_old_references_become_host_tensors_and_free_the_device(device: ModelledDevice) -> None:
    model = mlp(3)
    kept = model[0].weight
    before = kept.detach().clone()
    compiled = stream_from_host(model)
    with torch.no_grad():
        compiled(X)
        assert_equal(kept.detach(), before)
        kept.fill_(0.25)
        assert_equal(model[0].weight.cpu(), torch.full((16, 16), 0.25))
        assert_equal(compiled(X), expected(copy.deepcopy(model), X))
