"""Memory of the modelled device: torch's caching allocator in an address space of its own, and pinned pages of the host."""

from __future__ import annotations

import ctypes
import mmap
import weakref
import zlib
from bisect import bisect_right, insort
from collections import deque
from typing import Any

import numpy as np
import torch

from flextensor_fx.runtime.device import PinError
from modelled_queue import UNWRITTEN
from modelled_races import Access, Block, Kind, Line, Race

_ROUND = 512  # torch's allocator gives out multiples of it


class Allocator:
    """Blocks by storage. A block that is free goes to the next allocation on its line that it is large enough for.

    Args:
        total: bytes that may be allocated together.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.live = self.peak = 0
        self.blocks: dict[int, Block] = {}
        self._dead: deque[int] = deque()
        self._next = self._serial = 0

    def allocate(self, line: Line, nbytes: int, *, memory: bool = False) -> tuple[Block, list[Race]]:
        """A block for an owner that is still to be bound, and who still uses the memory that this allocation could have got.

        Args:
            memory: the block has bytes of its own, which it keeps from owner to owner.

        Raises:
            torch.OutOfMemoryError: there are not that many bytes left.
        """
        size = -(-nbytes // _ROUND) * _ROUND
        if self._dead:
            self.drain()
        live = self.live + size
        if live > self.total:
            raise torch.OutOfMemoryError(
                f"modelled device out of memory: tried to allocate {size} bytes, {self.live} of {self.total} are in use"
            )
        races: list[Race] = []
        free = line.free
        if line.freed:
            for block in line.freed:
                races += block.free()
                free.setdefault(block.size, []).append(block)
            line.freed.clear()
        fitting = free.get(size)
        if fitting:
            block = fitting.pop()
        else:
            block = self._cut(line, size) or Block(self._next, size, line)
            if block.start == self._next:
                self._next += size
                block.memory = np.full(size, UNWRITTEN, np.uint8) if memory else None
        self.live = live
        if live > self.peak:
            self.peak = live
        self._serial += 1
        block.owner, block.born, block.key = self._serial, line.clock[line.index], ""
        return block, races

    def _cut(self, line: Line, size: int) -> Block | None:
        """The first part of a free block that is larger, of the smallest such."""
        larger = min((other for other, blocks in line.free.items() if other > size and blocks), default=None)
        if larger is None:
            return None
        block = line.free[larger].pop()
        rest = block.split(size)
        line.free.setdefault(rest.size, []).append(rest)
        return block

    def bind(self, block: Block, storage: torch.UntypedStorage) -> None:
        """The block is given back with the last reference to `storage`."""
        cdata, dead = storage._cdata, self._dead
        block.base = storage.data_ptr()
        # Torch keeps the Python object of a storage as long as the storage, so its weak references die with the memory.
        block.storage = weakref.ref(storage, lambda _: dead.append(cdata))
        self.blocks[cdata] = block

    def of(self, storage: torch.UntypedStorage) -> Block | None:
        if self._dead:  # else a new storage at an old one's place would be taken for it
            self.drain()
        return self.blocks.get(storage._cdata)

    def drain(self) -> None:
        """Takes back what has no reference any more, in the order in which the last ones went."""
        while self._dead:
            block = self.blocks.pop(self._dead.popleft())
            block.storage = None
            self.live -= block.size
            block.line.freed.append(block)


class Pins:
    """Pinned ranges of host memory.

    Args:
        fail_at: the call, from 1, that the driver refuses; None for none.
        limit: bytes that may be pinned together; None for any number.
    """

    def __init__(self, fail_at: int | None, limit: int | None) -> None:
        self.fail_at, self.limit = fail_at, limit
        self.calls = self.nbytes = self.peak = 0
        self._starts: list[int] = []
        self._ends: dict[int, int] = {}

    def pin(self, address: int, nbytes: int) -> None:
        self.calls += 1
        if self.calls == self.fail_at or (self.limit is not None and self.nbytes + nbytes > self.limit):
            raise PinError(f"the driver would not pin {nbytes} bytes: out of memory")
        if address % mmap.PAGESIZE or nbytes <= 0:
            raise PinError(
                f"the driver would not pin {nbytes} bytes at {address:#x}: not a range of whole pages' start"
            )
        place = bisect_right(self._starts, address)
        begun_before = place > 0 and self._ends[self._starts[place - 1]] > address
        if begun_before or (place < len(self._starts) and self._starts[place] < address + nbytes):
            raise PinError(f"the driver would not pin {nbytes} bytes at {address:#x}: pinned already")
        insort(self._starts, address)
        self._ends[address] = address + nbytes
        self.nbytes += nbytes
        self.peak = max(self.peak, self.nbytes)

    def unpin(self, address: int) -> int:
        """Returns the range's end."""
        if address not in self._ends:
            raise AssertionError(f"unpin of {address:#x}: no pinned range starts there; there are {self.ranges()}")
        end = self._ends.pop(address)
        self._starts.remove(address)
        self.nbytes -= end - address
        return end

    def pinned(self, low: int, high: int) -> bool:
        """Whether all of the range is, by one call of `pin`."""
        place = bisect_right(self._starts, low)
        return place > 0 and self._ends[self._starts[place - 1]] >= high

    def ranges(self) -> list[tuple[int, int]]:
        """(address, end) of each, ascending."""
        return [(start, self._ends[start]) for start in self._starts]


class Sources:
    """Ranges of host memory that copies read, which the host is not known to come after.

    With `sums` it also finds writes that no dispatch mode sees, by the bytes: each range has the checksum of its last read.
    """

    def __init__(self) -> None:
        self._ranges: dict[tuple[int, int], _Source] = {}

    def note(self, low: int, high: int, access: Access, keep: Any, sums: bool) -> list[Race] | None:
        """A copy was queued that reads the range."""
        place = (low, high)
        source = self._ranges.get(place)
        races = None
        if source is None:
            source = self._ranges[place] = _Source()
        elif source.sum is not None:
            races = source.changed(place)
        source.reads[access.line] = access
        source.keep = keep
        if sums:
            source.sum = _checksum(*place)
        return races

    def written(self, low: int, high: int) -> list[Race]:
        """The host writes to the range."""
        return self._used(low, high, "write", Kind.SOURCE_WRITTEN)

    def unpinned(self, low: int, high: int) -> list[Race]:
        """The host unpins the range, and may unmap it: it is read no more after this."""
        races = self._used(low, high, "unpin", Kind.SOURCE_UNPINNED)
        for place in [place for place in self._ranges if place[0] < high and low < place[1]]:
            races += self._ranges.pop(place).changed(place)
        return races

    def known(self, clock: list[int]) -> list[Race]:
        """The host has waited: it comes after all that `clock` stands for."""
        races = self.changed()
        for place, source in list(self._ranges.items()):
            source.reads = {line: access for line, access in source.reads.items() if clock[line] < access.tick}
            if not source.reads:
                del self._ranges[place]
        return races

    def forget(self, lines: set[int]) -> None:
        """What was queued on these lines was not run."""
        for place, source in list(self._ranges.items()):
            source.reads = {line: access for line, access in source.reads.items() if line not in lines}
            if not source.reads:
                del self._ranges[place]

    def changed(self) -> list[Race]:
        """Which ranges have other bytes than when their last copy was queued."""
        return [race for place, source in self._ranges.items() for race in source.changed(place)]

    def _used(self, low: int, high: int, what: str, kind: Kind) -> list[Race]:
        races = []
        for (start, end), source in self._ranges.items():
            if start < high and low < end:
                source.sum = None  # reported here
                for access in source.reads.values():
                    after = Access(what, "the host", access.name, -1, max(start, low), min(end, high), 0, 0)
                    races.append(Race(kind, access.name, access, after))
        return races


class _Source:
    __slots__ = ("keep", "reads", "sum")

    def __init__(self) -> None:
        self.reads: dict[int, Access] = {}
        self.sum: int | None = None
        self.keep: Any = None  # the memory stays mapped while it may be read here

    def changed(self, place: tuple[int, int]) -> list[Race]:
        if self.sum is None or self.sum == _checksum(*place):
            return []
        self.sum = None
        return [
            Race(Kind.SOURCE_WRITTEN, access.name, access, Access("write", "the host", access.name, -1, *place, 0, 0))
            for access in self.reads.values()
        ]


def _checksum(low: int, high: int) -> int:
    return zlib.crc32((ctypes.c_char * (high - low)).from_address(low))
