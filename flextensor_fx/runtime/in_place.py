"""Finds weights that came from a safetensors file by memory map and still equal it, so that the file itself can serve them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping

import torch

from flextensor_fx.errors import StoreError
from flextensor_fx.runtime.container import entries_by_offset

_SUFFIX = ".safetensors"
_ENTRY = 8
_FILE_PAGE, _SWAPPED, _PRESENT = 1 << 61, 1 << 62, 1 << 63  # of an entry in /proc/self/pagemap


def find_in_place(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, str]]:
    """The (file, name in it) of each tensor that is an unchanged memory map of a safetensors entry.

    Nothing is found where the system does not tell (no /proc), which only costs a copy.

    Args:
        tensors: contiguous tensors by key.
    """
    try:
        maps = list(_mapped_files())
    except OSError:
        return {}
    tables: dict[str, Mapping[int, tuple[str, int]]] = {}
    found: dict[str, tuple[str, str]] = {}
    for key, tensor in tensors.items():
        address = tensor.data_ptr()
        for begin, end, offset, path in maps:
            if not begin <= address < end:
                continue
            if path not in tables:
                tables[path] = _table(path)
            name, nbytes = tables[path].get(offset + address - begin, ("", -1))
            if nbytes == tensor.numel() * tensor.element_size() and _is_unchanged(address, nbytes):
                found[key] = path, name
            break
    return found


def _mapped_files() -> Iterable[tuple[int, int, int, str]]:
    """(first address, end, offset in the file, path) of each mapped safetensors file that still has its name."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and fields[5].endswith(_SUFFIX) and fields[1].endswith("p"):
                begin, _, end = fields[0].partition("-")
                if os.stat(fields[5]).st_ino == int(fields[4]):
                    yield int(begin, 16), int(end, 16), int(fields[2], 16), fields[5]


def _table(path: str) -> Mapping[int, tuple[str, int]]:
    try:
        return entries_by_offset(path)
    except (OSError, StoreError):
        return {}


def _is_unchanged(address: int, nbytes: int) -> bool:
    """Whether no page of a private map was written to: such a page becomes anonymous memory."""
    first, last = address // mmap.PAGESIZE, (address + nbytes - 1) // mmap.PAGESIZE
    try:
        with open("/proc/self/pagemap", "rb") as pagemap:
            pagemap.seek(first * _ENTRY)
            raw = pagemap.read((last - first + 1) * _ENTRY)
    except OSError:
        return False
    pages = (
        torch.frombuffer(bytearray(raw), dtype=torch.int64) if raw else torch.zeros(0, dtype=torch.int64, device="cpu")
    )
    if len(pages) != last - first + 1:
        return False
    changed = ((pages & _signed(_PRESENT | _SWAPPED)) != 0) & ((pages & _FILE_PAGE) == 0)
    return not bool(changed.any())


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >= 1 << 63 else bits
