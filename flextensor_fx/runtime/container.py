"""The safetensors container: an 8-byte little-endian header length, a JSON header, then the data without holes.

Format: https://github.com/huggingface/safetensors#format. Padding is spelled out as U8 entries, since a reader refuses holes.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flextensor_fx.errors import StoreError
from flextensor_fx.runtime.layout import NATIVE_NAMES, RAW_DTYPES, WeightSpec, contiguous_stride, physical_order

ALIGN = 4096
_PAD = "__pad__."
_OURS = "flextensor_fx"
_MAX_HEADER = 100_000_000

_DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in NATIVE_NAMES.items()} | {
    "C64": torch.complex64,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
_RAW_NAMES: dict[str, torch.dtype] = {str(dtype).removeprefix("torch."): dtype for dtype in RAW_DTYPES}


@dataclass(frozen=True)
class Entry:
    """Where a weight lies in a file.

    Attributes:
        spec: the weight.
        offset: of its first byte, from the start of the file.
    """

    spec: WeightSpec
    offset: int


@dataclass(frozen=True)
class Container:
    """A laid out file, before any data.

    Attributes:
        header: the bytes the file begins with; a multiple of 4096.
        entries: key -> place; every offset is a multiple of 4096.
        nbytes: size of the whole file, a multiple of 4096.
    """

    header: bytes
    entries: Mapping[str, Entry]
    nbytes: int


def round_up(nbytes: int) -> int:
    """The next multiple of 4096 bytes."""
    return -(-nbytes // ALIGN) * ALIGN


def lay_out(specs: Iterable[WeightSpec], metadata: Mapping[str, str] | None = None) -> Container:
    """Place weights one after another, each at a multiple of 4096 bytes, under the names of their keys.

    Args:
        metadata: further texts for the header, by name.

    Raises:
        StoreError: a key is used twice or reserved, or a stride is not dense.
    """
    table: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    starts: list[tuple[WeightSpec, int]] = []
    position = 0
    for spec in specs:
        order = physical_order(spec.shape, spec.stride)
        if spec.key in table or spec.key == "__metadata__" or spec.key.startswith(_PAD):
            raise StoreError(f"weight {spec.key!r}: the key is used twice or reserved; give every weight its own key")
        if order is None or spec.nbytes == 0:
            raise StoreError(
                f"weight {spec}: expected a dense, non-empty value, found stride {spec.stride}; keep it resident"
            )
        name, shape = NATIVE_NAMES.get(spec.dtype), [spec.shape[d] for d in order]
        if name is None:
            name, shape = "U8", [*shape, spec.dtype.itemsize]
        table[spec.key] = {"dtype": name, "shape": shape, "data_offsets": [position, position + spec.nbytes]}
        if name == "U8" or spec.stride != contiguous_stride(spec.shape):
            dtype = str(spec.dtype).removeprefix("torch.")
            facts[spec.key] = {"shape": spec.shape, "stride": spec.stride, "dtype": dtype}
        starts.append((spec, position))
        end, position = position + spec.nbytes, round_up(position + spec.nbytes)
        if position > end:
            table[f"{_PAD}{len(starts)}"] = {
                "dtype": "U8",
                "shape": [position - end],
                "data_offsets": [end, position],
            }
    texts = dict(metadata or {})
    if facts:
        texts[_OURS] = json.dumps(facts, separators=(",", ":"))
    if texts:
        table = {"__metadata__": texts} | table
    text = json.dumps(table, separators=(",", ":")).encode()
    text = text.ljust(round_up(8 + len(text)) - 8)
    header = len(text).to_bytes(8, "little") + text
    entries = {spec.key: Entry(spec, len(header) + start) for spec, start in starts}
    return Container(header, entries, len(header) + position)


def read_metadata(path: str, fd: int) -> Mapping[str, str]:
    """The texts in the header of an open safetensors file, by name.

    Raises:
        StoreError: the file is no safetensors file.
    """
    return _read_header(path, fd, os.fstat(fd).st_size)[3]


def read_names(path: str, fd: int) -> tuple[str, ...]:
    """The names of all tensors in an open safetensors file, in the order of its header.

    Raises:
        StoreError: the file is no safetensors file.
    """
    table = _read_header(path, fd, os.fstat(fd).st_size)[0]
    return tuple(name for name in table if not name.startswith(_PAD))


def read_entries(path: str, fd: int, names: Mapping[str, str], *, empty: bool = False) -> dict[str, Entry]:
    """Find weights in an open safetensors file, ours or any other.

    Args:
        path: of the file, for messages.
        fd: open for reading.
        names: key -> name in the file.
        empty: whether tensors without elements are accepted, which a store does not keep.

    Raises:
        StoreError: the file is no safetensors file, lacks a name or is shorter than its header says.
    """
    size = os.fstat(fd).st_size
    table, facts, start, _ = _read_header(path, fd, size)
    found: dict[str, Entry] = {}
    for key, name in names.items():
        item = table.get(name)
        if item is None:
            near = difflib.get_close_matches(name, table, 3) or sorted(table)[:3]
            raise StoreError(f"weight {key!r}: {path} has no tensor {name!r}; nearest names: {', '.join(near)}")
        try:
            begin, end = item["data_offsets"]
            spec = _spec(key, item, facts.get(name))
            numbers = [begin, end, *spec.shape, *spec.stride]
            if any(type(number) is not int or number < 0 for number in numbers):
                raise ValueError(f"expected whole numbers, found {str(item)[:100]}")
            if spec.nbytes and physical_order(spec.shape, spec.stride) is None:
                raise ValueError(f"its stride {spec.stride} for shape {spec.shape} overlaps itself or leaves gaps")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"weight {key!r}: the entry {name!r} of {path} cannot be read: {error}") from error
        if not begin <= end or end - begin != spec.nbytes or (spec.nbytes == 0 and not empty):
            raise StoreError(f"weight {spec}: {path} gives {name!r} bytes {begin}..{end}; expected {spec.nbytes} bytes")
        if start + end > size:
            raise StoreError(
                f"weight {spec}: expected it to end at byte {start + end} of {path}, found a file of {size} bytes; "
                "the file is truncated: fetch it again"
            )
        found[key] = Entry(spec, start + begin)
    return found


def _read_header(path: str, fd: int, size: int) -> tuple[dict[str, Any], dict[str, Any], int, dict[str, str]]:
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if size < 8 or length > min(_MAX_HEADER, size - 8):
        raise StoreError(f"{path}: expected a safetensors file, found {size} bytes that do not begin with its header")
    try:
        table = json.loads(os.pread(fd, length, 8))
        texts = table.pop("__metadata__", {})
        facts = json.loads(texts.get(_OURS, "{}"))
        if not isinstance(facts, dict):
            raise ValueError(f"{_OURS} metadata of type {type(facts).__name__}")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(f"{path}: expected a safetensors header, found {error}") from error
    return table, facts, 8 + length, texts


def _spec(key: str, item: dict[str, Any], fact: dict[str, Any] | None) -> WeightSpec:
    if fact is not None:
        name = fact["dtype"]
        dtype = _RAW_NAMES.get(name) or getattr(torch, name)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype {name} is not known")
        return WeightSpec(key, tuple(fact["shape"]), tuple(fact["stride"]), dtype)
    if item["dtype"] not in _DTYPES:
        raise ValueError(f"dtype {item['dtype']} is not known")
    shape = tuple(item["shape"])
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"shape {shape}")
    return WeightSpec(key, shape, contiguous_stride(shape), _DTYPES[item["dtype"]])


def entries_by_offset(path: str) -> dict[int, tuple[str, int]]:
    """The (name, bytes) of each row-major entry of a safetensors file, by the offset of its first byte in the file.

    Raises:
        OSError: the file cannot be read.
        StoreError: it is no safetensors file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        table, _, start, _ = _read_header(path, fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)
    places = ((name, item["data_offsets"]) for name, item in table.items())
    return {start + begin: (name, end - begin) for name, (begin, end) in places if end > begin}
