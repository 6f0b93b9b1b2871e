import errno
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from flextensor_fx.errors import OffloadError, StoreError
from flextensor_fx.runtime.engine import Engine
from flextensor_fx.runtime.layout import spec_of
from flextensor_fx.runtime.reader import Transfer
from flextensor_fx.runtime.session_dir import SessionDir
from flextensor_fx.runtime.store import Store

PAGE = 4096
Make = Callable[..., Engine]


class GatedStore(Store):
    """A store whose reads wait for `gate`, and that notes what was read in which order."""

    def __init__(self, *args: object, **options: bool) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.gate = threading.Event()
        self.gate.set()
        self.order: list[str] = []
        self.fail: set[str] = set()

    def read_slab(self, key: str, slab: np.ndarray) -> tuple[int, object]:  # type: ignore[override]
        self.order.append(key)
        assert self.gate.wait(20)
        if key in self.fail:
            raise StoreError(f"weight {key}: injected") from OSError(errno.EIO, "Input/output error")
        return super().read_slab(key, slab)

    def read_cached_slab(self, key: str, slab: np.ndarray) -> None:  # type: ignore[override]
        """Nothing is read at once, or the gate would hold up `start`."""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    engines = []

    def build(weights: dict[str, torch.Tensor] | int = 4, pool: int = 64 * PAGE, **options: float) -> Engine:
        if isinstance(weights, int):
            weights = {str(n): torch.full((1024,), float(n)) for n in range(weights)}
        store = GatedStore.create(SessionDir(tmp_path), [spec_of(k, v) for k, v in weights.items()])
        for key, value in weights.items():
            store.write(key, value)
        engines.append(Engine("u", store, pool, **options))  # type: ignore[arg-type]
        return engines[-1]

    yield build
    for engine in engines:
        engine.store.gate.set()
        engine.close()


def gated(engine: Engine) -> GatedStore:
    assert isinstance(engine.store, GatedStore)
    return engine.store


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it did not happen within 10 s"
        time.sleep(0.001)


def live_bytes(engine: Engine) -> int:
    return engine._reader.arena.stats().live_bytes


class TestFinish:
    @pytest.mark.parametrize("threads", [1, 3])
    def test_weights_have_their_shape_stride_dtype_and_value(self, make: Make, threads: int):
        weights = {
            "cl": torch.randn(4, 3, 5, 6).to(memory_format=torch.channels_last),
            "t": torch.randn(60, 110).half().t(),
            "scalar": torch.tensor(3, dtype=torch.int8),
            "bool": torch.rand(9000) > 0.5,
            "c": torch.randn(5, dtype=torch.complex64),
            "f8": torch.randn(77).to(torch.float8_e4m3fn),
        }
        engine = make(weights, read_threads=threads)
        for _ in range(3):
            transfers = {key: engine.start(key) for key in weights}
            for key, transfer in transfers.items():
                value = engine.finish(transfer)
                assert value.stride() == weights[key].stride()
                assert value.dtype == weights[key].dtype
                assert value.data_ptr() % PAGE == 0
                assert torch.equal(value.contiguous().view(torch.uint8), weights[key].contiguous().view(torch.uint8))

    def test_memory_is_the_graphs_own(self, make: Make):
        engine = make(pool=2 * PAGE)
        first = engine.finish(engine.start("1"))
        part = first[3:5]
        del first
        assert live_bytes(engine) == PAGE
        second = engine.finish(engine.start("2"))
        second.fill_(9)
        assert part.tolist() == [1, 1]
        address = second.data_ptr()
        del second
        assert engine.finish(engine.start("3")).data_ptr() == address
        assert torch.equal(engine.read("2"), torch.full((1024,), 2.0))

    def test_a_second_finish_is_our_own_bug(self, make: Make):
        engine = make()
        transfer = engine.start("1")
        engine.finish(transfer)
        with pytest.raises(AssertionError, match="finished before"):
            engine.finish(transfer)

    def test_reads_follow_the_order_of_start(self, make: Make):
        engine = make(8)
        gated(engine).gate.clear()
        keys = list("73150246")
        transfers = [engine.start(key) for key in keys]
        assert not any(t.arrived for t in transfers)
        gated(engine).gate.set()
        for key, transfer in reversed(list(zip(keys, transfers, strict=True))):
            assert engine.finish(transfer)[0] == float(key)
        assert gated(engine).order == keys

    def test_stalls_are_recorded(self, make: Make):
        engine = make()
        gated(engine).gate.clear()
        transfer = engine.start("1")
        threading.Timer(0.05, gated(engine).gate.set).start()
        engine.finish(transfer)
        ready = engine.start("2")
        until(lambda: ready.arrived)
        engine.finish(ready)
        stats = engine.stats()
        assert 20 < stats.stall_ms_by_key["1"] < 2000
        assert "2" not in stats.stall_ms_by_key
        assert stats.stall_ms == stats.stall_ms_by_key["1"]
        assert (stats.transfers, stats.reads) == (2, 2)
        assert stats.disk_bytes + stats.cached_bytes == 2 * PAGE
        assert stats.bandwidth > 0
        assert "transfers 2" in str(stats)

    def test_attached_weights(self, make: Make, tmp_path: Path):
        value = torch.randn(1000)
        save_file({"w": value}, tmp_path / "m.safetensors")
        engine = make()
        engine.store.attach(tmp_path / "m.safetensors", {"x": "w"})
        got = engine.finish(engine.start("x"))
        assert torch.equal(got, value)
        assert got.data_ptr() % 16 == 0
        engine.give_up([got])
        assert live_bytes(engine) == 0
        early = engine.start("x")
        engine.write("x", value + 1)
        assert torch.equal(engine.finish(early), value + 1)


class TestErrors:
    def test_an_error_is_raised_once_and_the_engine_stays_usable(self, make: Make):
        engine = make()
        gated(engine).fail.add("1")
        with pytest.raises(StoreError, match="injected") as caught:
            engine.finish(engine.start("1"))
        assert live_bytes(engine) == 0
        assert isinstance(caught.value.__cause__, OSError)
        gated(engine).fail.clear()
        assert engine.finish(engine.start("1"))[0] == 1

    def test_an_error_of_a_deferred_or_repeated_read(self, make: Make):
        engine = make(pool=PAGE)
        held = engine.finish(engine.start("0"))
        late = engine.start("1")
        gated(engine).fail.add("1")
        with pytest.raises(StoreError, match="injected") as caught:
            engine.finish(late)
        assert caught.value is not None
        assert live_bytes(engine) == PAGE
        del held
        gated(engine).fail.clear()
        transfer = engine.start("1")
        engine.write("1", torch.ones(1024))
        gated(engine).fail.add("1")
        until(lambda: transfer.arrived)
        with pytest.raises(StoreError, match="injected"):
            engine.finish(transfer)
        assert live_bytes(engine) == 0

    def test_a_truncated_file(self, make: Make):
        engine = make()
        os.truncate(engine.store.files[0].path, 2 * PAGE)
        with pytest.raises(StoreError, match=r"weight 3: .*expected 4096 bytes.*truncated"):
            engine.finish(engine.start("3"))
        assert engine.finish(engine.start("0"))[0] == 0

    def test_a_reader_survives_what_it_does_not_know(self, make: Make, monkeypatch: pytest.MonkeyPatch):
        engine = make()

        def broken(*args: object) -> None:
            raise MemoryError("injected")

        with monkeypatch.context() as patch:
            patch.setattr(engine.store, "read_slab", broken)
            with pytest.raises(StoreError, match=r"reader failed: MemoryError\('injected'\)"):
                engine.finish(engine.start("1"))
        assert engine.finish(engine.start("1"))[0] == 1

    def test_an_unknown_key(self, make: Make):
        with pytest.raises(StoreError, match="no such key"):
            make().start("nobody")


class TestPool:
    def test_a_deferred_transfer_starts_when_a_block_returns(self, make: Make):
        engine = make(pool=PAGE)
        first = engine.finish(engine.start("1"))
        second = engine.start("2")
        assert second.block is None
        del first
        until(lambda: second.arrived)
        assert engine.finish(second)[0] == 2
        assert engine.stats().overruns == 0

    def test_or_when_one_is_given_up(self, make: Make):
        engine = make(pool=PAGE)
        first = engine.finish(engine.start("1"))
        second = engine.start("2")
        engine.give_up([first, torch.zeros(3)])
        until(lambda: second.arrived)
        assert engine.finish(second)[0] == 2
        assert first[0] == 1
        assert engine.stats().overruns == 0

    def test_or_when_the_pool_grows(self, make: Make):
        engine = make(pool=1)
        transfer = engine.start("1")
        assert transfer.block is None
        engine.set_pool(PAGE)
        until(lambda: transfer.arrived)
        assert engine.stats().pool_bytes == PAGE

    def test_or_when_it_is_finished_with_memory_beyond_the_pool(self, make: Make):
        engine = make(pool=PAGE)
        held = [engine.finish(engine.start(str(n))) for n in range(4)]
        assert [int(t[0]) for t in held] == [0, 1, 2, 3]
        stats = engine.stats()
        assert stats.overruns == 3
        assert stats.peak_pool_bytes == 4 * PAGE
        del held
        assert engine.stats().touched_bytes == PAGE

    def test_deferred_transfers_keep_their_order_and_may_be_finished_in_any(self, make: Make):
        engine = make({"a": torch.zeros(2048), "b": torch.ones(1024), "c": torch.ones(1024)}, pool=2 * PAGE)
        held = engine.finish(engine.start("b"))
        a, c = engine.start("a"), engine.start("c")
        assert a.block is None
        assert c.block is None
        assert engine.finish(c)[0] == 1
        assert engine.stats().overruns == 0
        del held
        until(lambda: a.arrived)
        assert engine.finish(a)[0] == 0
        assert gated(engine).order == ["b", "c", "a"]


class TestDropped:
    def test_a_dropped_transfer_frees_its_block_after_the_read(self, make: Make):
        engine = make(pool=PAGE)
        gated(engine).gate.clear()
        transfer = engine.start("1")
        until(lambda: gated(engine).order == ["1"])
        del transfer
        late = engine.start("2")
        assert late.block is None
        assert live_bytes(engine) == PAGE
        gated(engine).gate.set()
        assert engine.finish(late)[0] == 2
        del late
        until(lambda: live_bytes(engine) == 0)
        assert engine.stats().overruns <= 1

    def test_a_dropped_transfer_that_was_queued_or_deferred_is_not_read(self, make: Make):
        engine = make(pool=2 * PAGE)
        gated(engine).gate.clear()
        first = engine.start("1")
        until(lambda: gated(engine).order == ["1"])
        waiting = [engine.start("2"), engine.start("3"), engine.start("0")]
        assert [t.block is None for t in waiting] == [False, True, True]
        del waiting[:2]
        gated(engine).gate.set()
        assert engine.finish(waiting.pop())[0] == 0
        assert engine.finish(first)[0] == 1
        assert gated(engine).order == ["1", "0"]
        del first
        until(lambda: live_bytes(engine) == 0)

    def test_calls_that_fail_in_the_middle(self, make: Make):
        engine = make(8, pool=3 * PAGE)
        for n in range(200):
            transfers = [engine.start(str(k)) for k in range(6)]
            assert engine.finish(transfers[n % 6])[0] == n % 6
            del transfers
        gc.collect()
        until(lambda: live_bytes(engine) == 0)
        values = [engine.finish(engine.start(str(k))) for k in range(8)]
        assert [int(v[5]) for v in values] == list(range(8))


class TestWrites:
    def test_a_write_voids_a_started_prefetch(self, make: Make):
        engine = make()
        early = engine.start("1")
        until(lambda: early.arrived)
        engine.write("1", torch.full((1024,), 7.0))
        assert engine.finish(early)[0] == 7
        assert engine.finish(engine.start("1"))[0] == 7
        assert engine.read("1")[0] == 7

    def test_a_value_is_converted_as_by_copy(self, make: Make):
        engine = make({"a": torch.randn(3, 4).t().half()})
        engine.write("a", torch.arange(3))
        expected = torch.empty(4, 3, dtype=torch.half).copy_(torch.arange(3))
        assert torch.equal(engine.read("a"), expected)
        assert engine.read("a").stride() == (1, 4)
        with pytest.raises(OffloadError, match=r"weight a: .*shape \[5\]"):
            engine.write("a", torch.zeros(5))

    def test_read_gives_memory_of_its_own(self, make: Make):
        engine = make(pool=PAGE)
        values = [engine.read("1") for _ in range(3)]
        values[0].fill_(4)
        assert values[1][0] == 1
        assert live_bytes(engine) == 0


class TestDelay:
    def test_a_late_copy_shows_nan_until_it_arrives(self, make: Make):
        engine = make(delay_ms=80)
        begin = time.monotonic()
        one, two = engine.start("1"), engine.start("2")
        assert one.block is not None
        assert bool(torch.from_numpy(one.block.array).view(torch.float32).isnan().all())
        assert engine.finish(one)[0] == 1
        assert time.monotonic() - begin >= 0.08
        assert engine.finish(two)[0] == 2

    def test_the_environment_sets_it(self, make: Make, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("FLEXTENSOR_FX_TEST_DELAY_MS", "30")
        engine = make()
        begin = time.monotonic()
        engine.finish(engine.start("1"))
        assert time.monotonic() - begin >= 0.03


class TestLife:
    def test_close(self, make: Make, tmp_path: Path):
        engine = make()
        kept = engine.finish(engine.start("1"))
        pending = engine.start("2")
        for _ in range(2):
            engine.close()
        assert not list(tmp_path.iterdir())
        assert kept[0] == 1
        for use in (
            lambda: engine.start("1"),
            lambda: engine.finish(pending),
            lambda: engine.read("1"),
            lambda: engine.write("1", torch.zeros(1024)),
            engine.measure_link,
        ):
            with pytest.raises(StoreError, match=r"closed|expected a file"):
                use()
        assert not [t for t in threading.enumerate() if t.name.startswith("flextensor_fx")]

    def test_close_wakes_whoever_waits(self, make: Make):
        engine = make()
        gated(engine).gate.clear()
        transfers = [engine.start("1"), engine.start("2")]
        errors = []

        def wait() -> None:
            try:
                engine.finish(transfers[1])
            except StoreError as error:
                errors.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        until(lambda: gated(engine).order == ["1"])
        closer = threading.Thread(target=engine.close)
        closer.start()
        until(lambda: engine._closed)
        time.sleep(0.02)
        gated(engine).gate.set()
        closer.join(10)
        waiter.join(10)
        assert not waiter.is_alive()
        assert len(errors) == 1

    def test_a_dropped_engine_goes_away(self, tmp_path: Path):
        store = Store.create(SessionDir(tmp_path), [spec_of("a", torch.ones(4))])
        store.write("a", torch.ones(4))
        engine = Engine("u", store, PAGE)
        engine.finish(engine.start("a"))
        del store, engine
        until(lambda: not list(tmp_path.iterdir()))

    def test_after_a_fork_both_sides_work(self, make: Make):
        engine = make()
        gated(engine).gate.clear()
        pending = engine.start("1")
        until(lambda: gated(engine).order == ["1"])
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                gated(engine).gate = threading.Event()
                gated(engine).gate.set()
                assert engine.finish(pending)[0] == 1
                for key in "0123":
                    value = engine.finish(engine.start(key))
                    assert value[0] == int(key)
                    engine.give_up([value])
                engine.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        gated(engine).gate.set()
        assert engine.finish(pending)[0] == 1
        assert os.path.isdir(engine.store.path)

    def test_threads_start_with_the_first_transfer(self, make: Make):
        engine = make(read_threads=2)
        names = lambda: [t.name for t in threading.enumerate() if t.name.startswith("flextensor_fx")]  # noqa: E731
        assert names() == []
        engine.finish(engine.start("1"))
        assert len(names()) == 2
        assert all(t.daemon for t in threading.enumerate() if t.name.startswith("flextensor_fx"))


def test_measure_link(make: Make):
    engine = make({"a": torch.zeros(3 << 20)})
    latency_ms, bytes_per_ms = engine.measure_link()
    assert 0 < latency_ms < 1000
    assert bytes_per_ms > 1000


def test_transfers_from_several_threads(make: Make):
    engine = make(8, pool=6 * PAGE, read_threads=2)
    bad = []

    def call(offset: int) -> None:
        for n in range(150):
            keys = [str((offset + n + k) % 8) for k in range(3)]
            transfers: list[Transfer] = [engine.start(key) for key in keys]
            for key, transfer in zip(keys, transfers, strict=True):
                value = engine.finish(transfer)
                if int(value.min()) != int(key) or int(value.max()) != int(key):
                    bad.append(key)
                engine.give_up([value])

    threads = [threading.Thread(target=call, args=(offset,)) for offset in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not bad
    until(lambda: live_bytes(engine) == 0)
