"""From the first call to the last: releasing, deleting, failing half-way, calling from threads and from processes."""

from __future__ import annotations

import copy
import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flextensor_fx
from compiling import (
    Inner,
    assert_equal,
    counts_of,
    fresh_compiler,
    mlp,
    reader_threads,
    resident,
    session_of,
    stream,
    streamed_names,
    values,
)
from flextensor_fx.errors import OffloadError, StoreError
from flextensor_fx.runtime import registry

__all__ = ["fresh_compiler"]


# --- the end of a model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reset", [True, False])
def test_a_deleted_model_takes_its_store_and_threads_along(reset: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXTENSOR_FX_TEST_DELAY_MS", "1")  # else reads as small as these need no thread
    model, x = mlp().requires_grad_(False), torch.randn(2, 16)
    compiled = stream(model)
    compiled(x)
    directory = Path(session_of(model).engine.store.path)
    threads, gone = len(reader_threads()), weakref.ref(model)
    assert directory.is_dir()
    assert threads
    del model, compiled
    if reset:
        torch._dynamo.reset()
    gc.collect()
    assert gone() is None
    assert not registry.living_sessions()
    for _ in range(100):  # the thread may be busy, and holds the store until it ends
        if len(reader_threads()) < threads and not directory.exists():
            break
        threading.Event().wait(0.05)
    assert len(reader_threads()) < threads
    assert not directory.exists()


def test_many_models_one_after_the_other_leave_nothing(tmp_path: Path) -> None:
    def once() -> None:
        model = mlp(2).requires_grad_(False)
        stream(model, inner="eager", store_dir=tmp_path)(torch.randn(2, 16))
        torch._dynamo.reset()

    once()
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        once()
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_release_gives_plain_parameters_back_and_the_model_can_be_compiled_again() -> None:
    model, x = mlp(), torch.randn(2, 16)
    model[0].weight.requires_grad_(False)
    before, wanted = values(model), [p.requires_grad for p in model.parameters()]
    with torch.no_grad():
        expected = resident(model)(x)
        compiled = stream(model)
        assert_equal(compiled(x), expected)
        directory, kept = Path(session_of(model).engine.store.path), model[2].weight
        flextensor_fx.release(compiled)
        flextensor_fx.release(model)  # again: nothing happens
        assert not directory.exists()
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
        assert [p.requires_grad for p in model.parameters()] == wanted
        assert_equal(values(model), before)
        assert_equal(kept + 0, before["2.weight"])  # what the user kept goes on working
        assert_equal(model(x), expected)
        assert_equal(compiled(x), expected)  # compiles and offloads anew
        assert streamed_names(model) == set(before)
        assert_equal(compiled(x), expected)


def test_release_then_convert_then_compile() -> None:
    model, x = mlp().requires_grad_(False), torch.randn(2, 16)
    compiled = stream(model)
    compiled(x)
    flextensor_fx.release(model)
    model.double()
    expected = resident(model)(x.double())
    assert_equal(compiled(x.double()), expected)
    assert streamed_names(model) == {name for name, _ in model.named_parameters()}


# --- offloading first --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_offloading_before_compiling_gives_the_same_numbers(inner: Inner) -> None:
    model, x = mlp().requires_grad_(False), torch.randn(2, 16)
    twin = copy.deepcopy(model)
    plain, expected = counts_of(
        lambda: stream(model, inner=inner, budget="40%"), lambda compiled: [compiled(x), compiled(x)]
    )
    flextensor_fx.offload(twin, {"include_patterns": ["**"], "min_stream_bytes": 0, "budget": "40%"})
    torch.testing.assert_close(twin(x), expected[0])  # eagerly, over the store's file
    first, actual = counts_of(
        lambda: torch.compile(twin, backend=flextensor_fx.flextensor, options={"inner_backend": inner}),
        lambda compiled: [compiled(x), compiled(x)],
    )
    assert first == plain
    assert_equal(actual, expected)
    with pytest.raises(OffloadError, match=r"offloaded already; call flextensor_fx\.release\(model\) first"):
        flextensor_fx.offload(twin, {"include_patterns": ["**"]})


def test_compiling_an_offloaded_model_with_another_backend_gives_right_numbers() -> None:
    model, x = mlp().requires_grad_(False), torch.randn(2, 16)
    expected = {inner: resident(model, inner=inner)(x) for inner in ("eager", "aot_eager", "inductor")}
    flextensor_fx.offload(model, {"include_patterns": ["**"], "min_stream_bytes": 0})
    for inner, numbers in expected.items():
        torch._dynamo.reset()
        assert_equal(resident(model, inner=inner)(x), numbers)  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert_equal(resident(model)(x), resident(copy.deepcopy(model))(x))


def test_another_backend_may_not_change_an_offloaded_weight() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            self.weight.add_(1)
            return x + self.weight

    model = Counter()
    flextensor_fx.offload(model, {"include_patterns": ["weight"], "min_stream_bytes": 0})
    with pytest.raises(Exception, match=r"the change would be lost; compile with backend=\"flextensor\""):
        resident(model)(torch.zeros(8))
    compiled = stream(model, include=["weight"])
    assert_equal([compiled(torch.zeros(8)), compiled(torch.zeros(8))], [torch.ones(8), torch.full((8,), 2.0)])


# --- failures half-way, threads ----------------------------------------------------------------------------------------


class Failing(Exception):
    pass


def failing_model() -> tuple[nn.Module, list[bool]]:
    """A model with a custom op in the middle that fails when told to."""
    told = [False]

    @torch.library.custom_op("flextensor_fx_tests::maybe_fail", mutates_args=())
    def maybe_fail(x: Tensor) -> Tensor:
        if told[0]:
            raise Failing("as told")
        return x.clone()

    maybe_fail.register_fake(torch.empty_like)

    class Middle(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.flextensor_fx_tests.maybe_fail(x)

    return nn.Sequential(mlp(3), Middle(), mlp(3)).requires_grad_(False), told


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_an_error_in_the_middle_of_a_call_leaves_the_engine_usable(inner: Inner) -> None:
    model, told = failing_model()
    x = torch.randn(2, 16)
    expected = resident(model, inner=inner)(x)
    compiled = stream(model, inner=inner, budget="50%")
    assert_equal(compiled(x), expected)
    told[0] = True
    for _ in range(5):
        with pytest.raises(Failing):
            compiled(x)
    told[0] = False
    gc.collect()
    assert_equal(compiled(x), expected)
    stats = session_of(model).engine.stats()
    assert stats.peak_pool_bytes <= stats.pool_bytes
    assert stats.overruns == 0


def test_a_read_that_fails_raises_and_the_next_call_is_right() -> None:
    model, x = mlp().requires_grad_(False), torch.randn(2, 16)
    compiled = stream(model)
    expected = compiled(x)
    store = session_of(model).engine.store
    key = session_of(model).key("2.weight")
    store._damaged.add(key)  # as after a write that failed
    with pytest.raises(StoreError, match=r"2\.weight"):
        compiled(x)
    with torch.no_grad():
        store._damaged.discard(key)
    assert_equal(compiled(x), expected)


def test_calls_from_two_threads_give_each_its_numbers() -> None:
    model = mlp(4, 32).requires_grad_(False)
    inputs = [torch.randn(4, 32) for _ in range(2)]
    plain = resident(model)
    expected = [plain(x) for x in inputs]
    compiled = stream(model, budget="50%")
    compiled(inputs[0])
    wrong: list[Any] = []

    def work(number: int) -> None:
        try:
            wrong.extend(1 for _ in range(20) if not torch.equal(compiled(inputs[number]), expected[number]))
        except Exception as error:  # noqa: BLE001 - shown by the assertion below
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert session_of(model).engine.stats().overruns == 0


# --- processes ---------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = mlp(3, 16).requires_grad_(False)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x))


def _train(rank: int, port: int, compile_first: bool, results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    gradients = []
    include = ["base"] if compile_first else ["module.base"]
    for make in (
        lambda model: resident(model, fullgraph=compile_first),
        lambda model: stream(model, fullgraph=compile_first, include=include),
    ):
        torch.manual_seed(0)
        model = Net()
        if compile_first:
            parallel = nn.parallel.DistributedDataParallel(make(model))
        else:
            parallel = make(nn.parallel.DistributedDataParallel(model))
        torch.manual_seed(rank)
        for _ in range(2):
            parallel(torch.randn(3, 16)).square().sum().backward()
        assert model.head.weight.grad is not None
        gradients.append(model.head.weight.grad.clone())
    names = [name for session in registry.living_sessions() for name in session.moved]
    torch.distributed.barrier()
    results.put((rank, [g.tolist() for g in gradients], sorted(names)))
    # A reducer that holds the last reference to a gloo group joins its thread under the GIL, which that thread may wait for.
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("compile_first", [True, False])
def test_two_processes_average_their_gradients(compile_first: bool) -> None:
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    port = 29600 + os.getpid() % 300 + compile_first
    torch.multiprocessing.spawn(_train, (port, compile_first, results), nprocs=2)
    found = sorted([results.get(), results.get()])
    for _, (plain, streamed), names in found:
        assert plain == streamed
        assert len(names) == 6
    assert found[0][1] == found[1][1]  # the hooks have run: both have the average


def test_weights_that_come_back_in_inference_mode_are_no_inference_tensors():
    model = mlp()
    compiled = stream(model)
    with torch.inference_mode():
        compiled(torch.randn(2, 16))
        flextensor_fx.release(model)
    assert not any(p.is_inference() for p in model.parameters())
    model(torch.randn(2, 16)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
