"""Weights at any offset of a file: read whole blocks at a time, and at an address that kernels can use."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flextensor_fx.runtime.container import Entry, read_entries
from flextensor_fx.runtime.fileio import PositionalFile
from flextensor_fx.runtime.pieces import PIECE_BYTES, PieceReader
from flextensor_fx.runtime.store import Store


def aligned(nbytes: int) -> np.ndarray:
    raw = np.full(nbytes + 4096, 0xEE, np.uint8)
    start = -raw.__array_interface__["data"][0] % 4096
    return raw[start : start + nbytes]


def file_at(path: Path, offset: int, data: bytes, behind: int = 0) -> Path:
    """A file that has `data` at `offset`, and `behind` bytes after it."""
    name = path / f"{offset}-{len(data)}-{behind}.safetensors"
    table = {"w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}
    header = json.dumps(table).encode().ljust(offset - 8)
    name.write_bytes(len(header).to_bytes(8, "little") + header + data + b"\xaa" * behind)
    return name


def read_both_ways(path: Path, data: bytes, direct: bool) -> None:
    store = Store(path.parent, direct_io=direct)
    store.attach(path, {"k": "w"})
    for drop in (True, False, True):
        if drop:
            store.drop_cache()
        slab = aligned(store.slab_bytes("k"))
        shift, count = store.read_slab("k", slab)
        assert shift % 16 == 0
        assert slab[shift : shift + len(data)].tobytes() == data
        assert count.cached + count.disk >= len(data)
    Path(path).read_bytes()
    slab = aligned(store.slab_bytes("k"))
    found = store.read_cached_slab("k", slab)
    if found is not None:
        shift, count = found
        assert shift % 16 == 0
        assert slab[shift : shift + len(data)].tobytes() == data
        assert count.cached == len(data)
    store.close()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("block", range(8))
def test_every_eighth_byte_of_a_block(tmp_path: Path, block: int, direct: bool) -> None:
    rng = np.random.default_rng(block)
    for place in range(block * 512, block * 512 + 512, 8):
        for length in (1, 4096 - place, 4097 - place, 8192, 9000):
            data = rng.bytes(length)
            path = file_at(tmp_path, 4096 + place, data)
            read_both_ways(path, data, direct)
            os.unlink(path)


@settings(max_examples=60, deadline=None)
@given(offset=st.integers(300, 13_000), length=st.integers(1, 20_000), behind=st.sampled_from([0, 1, 4096, 5000]))
def test_any_offset_length_and_end_of_file(
    tmp_path_factory: pytest.TempPathFactory, offset: int, length: int, behind: int
) -> None:
    data = np.random.default_rng(offset * length).bytes(length)
    folder = tmp_path_factory.mktemp("store")
    path = file_at(folder, offset, data, behind)
    for direct in (True, False):
        read_both_ways(path, data, direct)


def test_an_odd_offset_is_read_past_the_page_cache(tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes(3 << 20)
    path = file_at(tmp_path, 5000, data)
    store = Store(tmp_path)
    store.attach(path, {"k": "w"})
    if not store.files[0].direct or not store.files[0]._probe:
        pytest.skip("the file system refuses O_DIRECT, or the kernel has no cachestat")
    store.drop_cache()
    for _ in range(2):
        _, count = store.read_slab("k", aligned(store.slab_bytes("k")))
        assert count.cached == 0
    assert not store.files[0]._is_cached(8192, 4096)


@pytest.mark.parametrize("offset", [4096, 4104, 4112, 5001])
@pytest.mark.parametrize("nbytes", [0, 1, 1000, (1 << 20) - 1, PIECE_BYTES, PIECE_BYTES + 4096, 2 * PIECE_BYTES + 123])
def test_pieces_make_up_the_whole(tmp_path: Path, offset: int, nbytes: int) -> None:
    data = np.random.default_rng(nbytes).bytes(nbytes)
    path = str(file_at(tmp_path, offset, data))
    file = PositionalFile(path)
    entry: Entry = read_entries(path, file.fd, {"k": "w"}, empty=True)["k"]
    told: list[int] = []
    reader = PieceReader(told.append)
    for drop in (False, True):
        if drop:
            file.drop_cache()
        pieces = [piece.clone() for piece in reader.pieces(file, entry)]
        assert b"".join(piece.numpy().tobytes() for piece in pieces) == data
        assert all(piece.nbytes <= PIECE_BYTES for piece in pieces)
        value = reader.read(file, entry, torch.uint8, torch.device("cpu"))
        assert value.numpy().tobytes() == data
        assert nbytes == 0 or value.data_ptr() % 16 == 0
        wider = reader.read(file, entry, torch.int32, torch.device("cpu"))
        assert torch.equal(wider, value.to(torch.int32))
    assert sum(told) == 6 * nbytes
    for left in (reader.pieces(file, entry), reader.pieces(file, entry)):  # given up half-way
        next(left, None)
        left.close()
    assert reader.read(file, entry, torch.uint8, torch.device("cpu")).numpy().tobytes() == data
    reader.close()
    file.close()
