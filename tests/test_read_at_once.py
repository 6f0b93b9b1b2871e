"""Small weights that the page cache has are read where their transfer starts, without waking a thread."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flextensor_fx.errors import StoreError
from flextensor_fx.runtime.engine import Engine
from flextensor_fx.runtime.layout import spec_of
from flextensor_fx.runtime.session_dir import SessionDir
from flextensor_fx.runtime.store import Store

WEIGHTS = {
    "f32": torch.randn(40, 30),
    "t": torch.randn(60, 110).half().t(),
    "cl": torch.randn(4, 3, 5, 6).to(memory_format=torch.channels_last),
    "bf16": torch.randn(7, 9).bfloat16(),
    "scalar": torch.tensor(3, dtype=torch.int8),
    "f8": torch.randn(77).to(torch.float8_e4m3fn),
}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    store = Store.create(SessionDir(tmp_path), [spec_of(key, value) for key, value in WEIGHTS.items()])
    engine = Engine("u", store, 64 * 4096)
    for key, value in WEIGHTS.items():
        store.write(key, value)
    if not engine.start("f32").arrived:
        pytest.skip("this system does not say what its page cache has")
    yield engine
    engine.close()


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.stride() == expected.stride() and torch.equal(found.float(), expected.float())


@pytest.mark.parametrize("key", WEIGHTS)
def test_values_without_a_thread(engine: Engine, key: str):
    transfer = engine.start(key)
    assert transfer.arrived and not engine._reader._threads
    value = engine.finish(transfer)
    assert value.dtype == WEIGHTS[key].dtype and same(value, WEIGHTS[key])
    held = value.view(-1) if value.dim() == 0 else value[:1]
    del value
    assert engine._reader.arena.stats().live_bytes > 0
    del held
    assert engine._reader.arena.stats().live_bytes == 0


def test_what_is_on_disk_only_goes_to_the_reader(engine: Engine):
    engine.store.drop_cache()
    transfer = engine.start("t")
    assert engine._reader._threads
    assert same(engine.finish(transfer), WEIGHTS["t"])


def test_a_write_in_between_is_seen(engine: Engine):
    transfer = engine.start("f32")
    engine.write("f32", torch.ones(40, 30))
    assert engine.finish(transfer).sum() == 1200


def test_errors_are_raised_by_finish(engine: Engine, tmp_path: Path):
    engine.store.add([spec_of("new", torch.ones(3))])
    transfer = engine.start("new")
    with pytest.raises(StoreError, match="never been written"):
        engine.finish(transfer)
    path = tmp_path / "theirs.safetensors"
    save_file({"w": torch.ones(64)}, path)
    engine.store.attach(path, {"theirs": "w"})
    os.utime(path, (1, 1))
    transfer = engine.start("theirs")
    with pytest.raises(StoreError, match="written to"):
        engine.finish(transfer)


def test_a_test_delay_holds_them_up_too(tmp_path: Path):
    store = Store.create(SessionDir(tmp_path), [spec_of("a", torch.ones(3))])
    engine = Engine("u", store, 4096, delay_ms=500)
    store.write("a", torch.ones(3))
    transfer = engine.start("a")
    assert not transfer.arrived
    assert engine.finish(transfer).tolist() == [1, 1, 1]
    engine.close()
