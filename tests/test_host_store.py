"""Host memory for weights: exact sizes, few registrations, limits, and what happens where pinning fails."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from flextensor_fx.errors import StoreError
from flextensor_fx.runtime import host_store
from flextensor_fx.runtime.host_store import HostStore, Pack
from flextensor_fx.runtime.layout import WeightSpec, spec_of
from flextensor_fx.runtime.store import Store
from modelled_device import ModelledDevice
from modelled_session import host_engine

PAGE = mmap.PAGESIZE


def no_files() -> Store:
    raise AssertionError("without a limit nothing lies in files")


def store_of(device: ModelledDevice, *sizes: int, limit: int | None = None, folder: Path | None = None) -> HostStore:
    """A store with one weight of each size in bytes, all written."""
    made = HostStore(device, no_files if folder is None else lambda: Store.create(folder), limit)
    weights = {str(n): torch.full((nbytes,), n % 251, dtype=torch.uint8) for n, nbytes in enumerate(sizes)}
    made.add([spec_of(key, weight) for key, weight in weights.items()])
    for key, weight in weights.items():
        made.write(key, weight)
    return made


@pytest.mark.parametrize("share", [0.6, 1.0, 1.1, 2.25])
def test_memory_is_as_large_as_the_weights(share: float) -> None:
    device = ModelledDevice()
    sizes = [int(share * (1 << 20))] * 5
    made = store_of(device, *sizes)
    made.pin()
    assert sum(sizes) <= device.pinned_bytes == made.pinned_bytes <= 1.02 * sum(sizes)
    assert made.pageable_bytes == 0


def test_two_thousand_small_weights_are_one_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    device = ModelledDevice()
    made = store_of(device, *[100] * 2000)
    made.pin()
    assert len(device.pinned_ranges) == 1
    monkeypatch.setattr(host_store, "SLAB_BYTES", 100_000)
    made = store_of(device, *[100] * 2000, 300_000)
    made.pin()
    assert len(device.pinned_ranges) == 1 + -(-2000 * 256 // 100_000) + 1


def test_pages_are_filled_before_they_are_pinned() -> None:
    device = ModelledDevice()
    made = store_of(device, 5000, 70)
    assert device.pinned_bytes == 0 and not made.is_pinned("0")
    made.pin()
    assert made.is_pinned("0") and made.is_pinned("1")
    made.pin()  # nothing new
    assert len(device.pinned_ranges) == 1


def test_every_weight_is_aligned_and_has_a_storage_of_its_own() -> None:
    made = store_of(ModelledDevice(), 3, 5, 7, 100_000)
    sources = [made.source(str(n)) for n in range(4)]
    assert all(source.data_ptr() % 256 == 0 for source in sources)
    assert len({source.untyped_storage().data_ptr() for source in sources}) == 4
    assert [source.untyped_storage().nbytes() >= source.nbytes for source in sources] == [True] * 4


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.uint8, torch.float64, torch.bool, torch.float8_e4m3fn, torch.complex64]
)
def test_packs_hold_their_members_aligned(dtype: torch.dtype) -> None:
    members = [torch.ones(n, dtype=torch.float32).to(dtype) for n in (3, 5, 7)]
    members.append(torch.ones(2, 3).to(dtype).t())
    specs = [spec_of(f"m{n}", member) for n, member in enumerate(members)]
    pack = Pack.of("pack", specs)
    made = HostStore(ModelledDevice(), no_files)
    made.add([], [pack])
    for spec, member in zip(specs, members, strict=True):
        made.write(spec.key, member)
    flat = made.source("pack")
    assert flat.shape == pack.spec.shape and flat.dtype == dtype
    for (spec, element), member in zip(pack.members, members, strict=True):
        assert element * dtype.itemsize % 256 == 0
        assert torch.equal(flat.as_strided(spec.shape, spec.stride, element), member)
    before = made.version("pack")
    made.write("m1", torch.zeros(5).to(dtype))
    assert made.version("pack") == before + 1


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_pinning_that_fails_leaves_whole_slabs_pageable(monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
    monkeypatch.setattr(host_store, "SLAB_BYTES", 10_000)
    device = ModelledDevice(fail_pin_at=fails_at)
    made = store_of(device, *[9000] * 4)
    with pytest.warns(UserWarning, match="stay pageable") as caught:
        made.pin()
    made.pin()  # says it once, and tries no more
    assert len(caught) == 1
    assert [made.is_pinned(str(n)) for n in range(4)] == [n < fails_at - 1 for n in range(4)]
    assert made.pinned_bytes == device.pinned_bytes == (fails_at - 1) * 3 * PAGE
    assert made.pageable_bytes == (5 - fails_at) * 3 * PAGE
    assert made.unpinned_because
    assert torch.equal(made.source("3"), torch.full((9000,), 3, dtype=torch.uint8))
    made.close()
    assert device.pinned_bytes == 0


@pytest.mark.parametrize("limit", [1, 9000, 3 * PAGE, 6 * PAGE, 100 * PAGE])
def test_a_limit_is_kept_and_the_rest_lies_in_files(tmp_path: Path, limit: int) -> None:
    device = ModelledDevice()
    made = store_of(device, *[9000] * 4, limit=limit, folder=tmp_path)
    made.pin()
    assert made.host_bytes <= limit and device.pinned_bytes == made.host_bytes
    inside = sum(made.is_pinned(str(n)) for n in range(4))
    assert made.pageable_bytes == (4 - inside) * 9000
    assert inside == 4 if limit > 99 * PAGE else inside < 4
    for n in range(4):
        assert torch.equal(made.source(str(n)), torch.full((9000,), n, dtype=torch.uint8))
        made.write(str(n), torch.zeros(9000, dtype=torch.uint8))
        assert not made.source(str(n)).any()
    made.close()


def test_what_is_not_there_is_refused() -> None:
    made = store_of(ModelledDevice(), 8)
    with pytest.raises(StoreError, match="already has this key"):
        made.add([WeightSpec("0", (1,), (1,), torch.uint8)])
    with pytest.raises(StoreError, match="no such key"):
        made.source("x")
    made.add([WeightSpec("new", (4,), (1,), torch.float32)])
    with pytest.raises(StoreError, match="never been written"):
        made.source("new")
    with pytest.raises(StoreError, match=r"cannot be given a value of torch\.float64"):
        made.write("new", torch.zeros(4, dtype=torch.float64))
    made.close()
    made.close()
    with pytest.raises(StoreError, match="closed"):
        made.source("0")
    with pytest.raises(StoreError, match="closed"):
        made.add([])


def test_memory_that_cannot_be_had_is_an_error_before_anything_is_written() -> None:
    made = HostStore(ModelledDevice(), no_files)
    with pytest.raises(StoreError, match=r"bytes of memory could not be had for 1 weights.*host_budget"):
        made.add([WeightSpec("huge", (1 << 60,), (1,), torch.uint8)])
    assert "huge" not in made and made.host_bytes == 0


def test_a_write_waits_for_copies_of_the_old_value() -> None:
    device = ModelledDevice()
    engine = host_engine(device, {"w": torch.zeros(64)})
    with device.watching():
        first = engine.start("w")
        engine.write("w", torch.ones(64))
        second = engine.start("w")
        assert bool((engine.finish(first) == 1).all())  # started before, read after the write
        assert bool((engine.finish(second) == 1).all())
    device.assert_no_race()
    engine.close()
