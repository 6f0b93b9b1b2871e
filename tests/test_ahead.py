"""Copies that a call starts for the next one, in the engine: taken over, dropped when room is needed, never beyond the pool."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch

from flextensor_fx.errors import StoreError
from flextensor_fx.runtime.engine import Engine
from flextensor_fx.runtime.layout import spec_of
from flextensor_fx.runtime.session_dir import SessionDir
from flextensor_fx.runtime.store import Store
from test_engine import PAGE, Make, gated, live_bytes, make, until

__all__ = ["make"]


def ahead(engine: Engine, *keys: str) -> None:
    """Starts copies of `keys` for the next call, and waits until they are there."""
    for key in keys:
        engine.start_ahead(key)
    until(lambda: all(transfer.arrived for _, transfer in engine._reader.ahead.items()))


def held(engine: Engine) -> list[str]:
    return [key for key, _ in engine._reader.ahead.items()]


def test_the_next_start_takes_the_copy_over(make: Make) -> None:
    engine = make()
    ahead(engine, "1", "2")
    assert held(engine) == ["1", "2"] and live_bytes(engine) == 2 * PAGE
    for key in "12":
        transfer = engine.start(key)
        assert transfer.arrived
        assert engine.finish(transfer)[0] == float(key)
    assert gated(engine).order == ["1", "2"]
    stats = engine.stats()
    assert (stats.transfers, stats.reads, stats.ahead, stats.dropped, stats.stall_ms) == (2, 2, 2, 0, 0.0)
    assert held(engine) == [] and live_bytes(engine) == 0
    assert engine.finish(engine.start("1"))[0] == 1
    assert engine.stats().transfers == 3


def test_a_copy_that_is_under_way_is_taken_over_and_waited_for(make: Make) -> None:
    engine = make()
    gated(engine).gate.clear()
    engine.start_ahead("1")
    transfer = engine.start("1")
    assert not transfer.arrived
    threading.Timer(0.02, gated(engine).gate.set).start()
    assert engine.finish(transfer)[0] == 1
    assert gated(engine).order == ["1"]
    assert engine.stats().stall_ms > 0


def test_what_is_held_makes_room_the_last_needed_first(make: Make) -> None:
    engine = make(pool=3 * PAGE)
    ahead(engine, "0", "1", "2")
    other = engine.start("3")
    assert other.block is not None
    assert held(engine) == ["0", "1"]
    assert engine.finish(other)[0] == 3
    stats = engine.stats()
    assert (stats.dropped, stats.overruns, stats.peak_pool_bytes) == (1, 0, 3 * PAGE)


def test_a_dropped_copy_whose_read_is_under_way_is_waited_for_and_not_exceeded(make: Make) -> None:
    engine = make(pool=PAGE)
    gated(engine).gate.clear()
    engine.start_ahead("1")
    until(lambda: gated(engine).order == ["1"])
    first = engine.start("2")
    second = engine.start("3")
    assert first.block is None and held(engine) == []
    threading.Timer(0.02, gated(engine).gate.set).start()
    value = engine.finish(first)
    assert value[0] == 2
    engine.give_up([value])
    assert engine.finish(second)[0] == 3
    stats = engine.stats()
    assert (stats.overruns, stats.peak_pool_bytes) == (0, PAGE)


def test_nothing_is_started_ahead_without_room(make: Make) -> None:
    engine = make(pool=2 * PAGE)
    first = engine.finish(engine.start("0"))
    engine.start_ahead("1")
    engine.start_ahead("2")
    assert held(engine) == ["1"]
    assert engine.stats().ahead == 1 and first[0] == 0


def test_nothing_is_started_ahead_of_transfers_that_wait_for_room(make: Make) -> None:
    engine = make(pool=PAGE)
    first = engine.finish(engine.start("0"))
    second = engine.start("1")
    engine.start_ahead("2")
    assert held(engine) == []
    del first
    assert engine.finish(second)[0] == 1


def test_copies_made_in_vain_become_rare(make: Make) -> None:
    engine = make(pool=PAGE)
    for _ in range(100):
        engine.start_ahead("1")  # the end of one graph's call
        assert engine.finish(engine.start("2"))[0] == 2  # and a call of another graph
    assert engine.stats().ahead == engine.stats().dropped <= 7
    while not held(engine):
        engine.start_ahead("1")
    assert engine.finish(engine.start("1"))[0] == 1
    for _ in range(3):  # the first that is taken over ends that
        engine.start_ahead("1")
        assert held(engine) == ["1"]
        assert engine.finish(engine.start("1"))[0] == 1


def test_a_copy_held_for_another_graph_is_kept_and_moves_behind(make: Make) -> None:
    engine = make()
    ahead(engine, "1", "2")
    ahead(engine, "3", "1")
    assert held(engine) == ["2", "3", "1"]
    assert engine.stats().ahead == 3


def test_a_write_between_calls_reaches_the_next(make: Make) -> None:
    engine = make()
    ahead(engine, "1")
    engine.write("1", torch.full((1024,), 7.0))
    assert engine.finish(engine.start("1"))[0] == 7
    ahead(engine, "2")
    assert engine.read("2")[0] == 2 and held(engine) == ["2"]
    engine.mapped("2").fill_(8)  # a write that no version tells
    assert held(engine) == []
    assert engine.finish(engine.start("2"))[0] == 8


def test_nothing_is_started_ahead_while_a_write_could_come_unseen(make: Make) -> None:
    engine = make()
    alias = engine.mapped("1")
    for number in (5, 6):
        ahead(engine, "1")
        alias.fill_(number)
        assert engine.finish(engine.start("1"))[0] == number
    del alias
    ahead(engine, "1")
    assert held(engine) == ["1"]


def test_an_error_is_raised_where_the_weight_is_waited_for(make: Make) -> None:
    engine = make()
    gated(engine).fail.add("1")
    ahead(engine, "1")
    transfer = engine.start("1")
    with pytest.raises(StoreError, match="injected"):
        engine.finish(transfer)
    gated(engine).fail.clear()
    assert engine.finish(engine.start("1"))[0] == 1


def test_a_smaller_pool_drops_what_no_longer_fits(make: Make) -> None:
    engine = make(pool=4 * PAGE)
    ahead(engine, "0", "1", "2")
    engine.set_pool(2 * PAGE)
    assert held(engine) == ["0", "1"] and live_bytes(engine) == 2 * PAGE
    engine.set_pool(8 * PAGE)
    assert held(engine) == ["0", "1"]


def test_close_drops_what_is_held(make: Make) -> None:
    engine = make()
    gated(engine).gate.clear()
    for key in "123":
        engine.start_ahead(key)
    until(lambda: gated(engine).order == ["1"])
    threading.Timer(0.02, gated(engine).gate.set).start()
    engine.close()
    assert held(engine) == [] and live_bytes(engine) == 0
    assert gated(engine).order == ["1"]
    with pytest.raises(StoreError, match="closed"):
        engine.start_ahead("1")
    with pytest.raises(StoreError, match="no such key"):
        make().start_ahead("nobody")


def test_an_engine_is_collected_while_it_holds_copies(tmp_path) -> None:
    value = torch.ones(1 << 16)
    store = Store.create(SessionDir(tmp_path), [spec_of("a", value)])
    store.write("a", value)
    engine = Engine("u", store, 1 << 20)
    ahead(engine, "a")
    del store, engine
    until(lambda: not list(tmp_path.iterdir()))


def test_after_a_fork_the_child_begins_with_nothing_held(make: Make) -> None:
    engine = make()
    ahead(engine, "1", "2")
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            engine.start_ahead("3")
            assert held(engine) == ["3"]
            for key in "123":
                assert engine.finish(engine.start(key))[0] == float(key)
            engine.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert held(engine) == ["1", "2"]
    assert engine.finish(engine.start("1"))[0] == 1


def test_late_copies_show_nan_until_they_arrive(make: Make) -> None:
    engine = make(delay_ms=60)
    engine.start_ahead("1")
    transfer = engine.start("1")
    assert transfer.block is not None
    assert bool(torch.from_numpy(transfer.block.array).view(torch.float32).isnan().all())
    assert engine.finish(transfer)[0] == 1


def test_a_trace_tells_what_came_before_it(make: Make) -> None:
    engine = make(5, pool=4 * PAGE)
    ahead(engine, "0")
    gated(engine).gate.clear()
    engine.start_ahead("1")
    engine.start_ahead("2")
    until(lambda: gated(engine).order == ["0", "1"])
    with engine.trace() as recorder:
        gated(engine).gate.set()
        kept = [engine.finish(engine.start(key)) for key in "034"]  # the reader has let go of 2 when it reads 3
        assert [int(value[0]) for value in kept] == [0, 3, 4]
    kinds = {key: [event.kind for event in recorder.events() if event.key == key] for key in "01234"}
    assert kinds["0"] == ["issued", "taken", "waits", "waited"]  # its read had ended before
    assert kinds["1"] == ["issued", "taken", "read", "arrived"]
    assert kinds["2"] == ["issued", "taken", "read", "arrived", "dropped"]
    assert sorted(kinds["3"]) == sorted(["issued", "taken", "read", "arrived", "waits", "waited"])


def test_calls_on_several_threads(make: Make) -> None:
    """Every thread takes over, starts and drops for itself, as backwards may."""
    engine = make(8, pool=4 * PAGE, read_threads=2)
    bad: list[str] = []

    def calls(offset: int) -> None:
        for n in range(150):
            key, following = str((offset + n) % 8), str((offset + n + 1) % 8)
            value = engine.finish(engine.start(key))
            if int(value.min()) != int(key) or int(value.max()) != int(key):
                bad.append(key)
            engine.give_up([value])
            engine.start_ahead(following)

    threads = [threading.Thread(target=calls, args=(offset,)) for offset in range(0, 6, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not bad
    engine._reader.ahead.clear()
    gc.collect()
    until(lambda: live_bytes(engine) == 0)
