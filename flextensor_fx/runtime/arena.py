"""Slabs: blocks of reused memory that return by themselves when the last reference to them is gone."""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flextensor_fx.runtime.container import ALIGN, round_up

_LEAST_REGION = 64 << 20
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_HUGE_PAGE = 2 << 20
LEAST_HUGE = 32 << 20  # A block may fault in up to two huge pages more than it needs: too much for a small arena.


class Block(NamedTuple):
    """Memory taken from an arena.

    Attributes:
        array: 1-d uint8 at an address that is a multiple of 4096. The block returns when this very array is gone, and a
            tensor made of it by `torch.from_numpy`, or a view of such a tensor, holds it.
        address: of its first byte.
    """

    array: np.ndarray
    address: int


@dataclass(frozen=True)
class ArenaStats:
    """Bytes of an arena.

    Attributes:
        live_bytes: in blocks that are taken and not given up.
        given_up_bytes: in blocks that are given up and still referenced.
        touched_bytes: that are or were in a block and have not been handed back to the system.
        peak_live: greatest live_bytes so far.
        peak_touched: greatest touched_bytes so far.
    """

    live_bytes: int
    given_up_bytes: int
    touched_bytes: int
    peak_live: int
    peak_touched: int


class Arena:
    """Blocks cut from reserved memory, best fit first, coalesced on return.

    live_bytes stays within `limit`, except by `take(..., force=True)`. Pages of free blocks are kept for reuse, since
    fresh pages cost eight times as much to fill, as long as touched_bytes - given_up_bytes <= max(limit, live_bytes).

    Args:
        limit: bytes.
        on_room: called whenever a block comes back, at any point of any thread, perhaps inside the garbage collector:
            it must take no lock.
    """

    def __init__(self, limit: int, on_room: Callable[[], None] = lambda: None) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._regions: list[_Region] = []
        self._warm = _Extents()
        self._cold = _Extents()
        # Free blocks not merged yet, by size: a schedule that repeats takes the sizes it returns, and merging costs more.
        self._loose: dict[int, list[int]] = {}
        self._loose_bytes = 0
        self._blocks: dict[int, _Ref] = {}
        self._returned = returned = deque[_Ref]()

        # May run inside the garbage collector while this very thread holds the lock: no lock, no bookkeeping here. And no
        # method: the references to blocks would make a cycle with the arena, and its memory would wait for the collector.
        def on_gone(ref: _Ref) -> None:
            returned.append(ref)
            on_room()

        self._on_gone = on_gone
        self._live = self._given_up = self._peak_live = self._peak_touched = 0

    def take(self, nbytes: int, *, force: bool = False) -> Block | None:
        """A block of at least `nbytes` bytes; None if live_bytes would exceed the limit, unless `force`d.

        Raises:
            MemoryError: the system gives no more address space.
        """
        size = round_up(max(nbytes, 1))
        with self._lock:
            self._drain()
            if self._live + size > self._limit and not force:
                return None
            same = self._loose.get(size)
            if same:
                start = same.pop()
                self._loose_bytes -= size
                self._live += size
            else:
                self._merge()
                start = self._warm.pop_fit(size)
                if start is None:
                    start = self._take_cold(size)
                self._live += size
                self._trim()
                touched = self._touched()
                if touched > self._peak_touched:
                    self._peak_touched = touched
            if self._live > self._peak_live:
                self._peak_live = self._live
            array = self._region(start).array(start, size)
            ref = _Ref(array, self._on_gone)
            ref.start, ref.size, ref.given_up = start, size, False
            self._blocks[start] = ref
            return Block(array, start)

    def give_up(self, address: int) -> bool:
        """The block that holds `address` no longer counts against the limit, though it may still be referenced.

        Returns:
            Whether there is such a block, not given up before. `address` may be up to 4095 bytes into it.
        """
        with self._lock:
            ref = self._blocks.get(address - address % ALIGN)
            if ref is None or ref.given_up or ref() is None:
                return False
            ref.given_up = True
            self._live -= ref.size
            self._given_up += ref.size
            return True

    def watch(self, address: int) -> Callable[[], bool]:
        """What tells whether the block at `address`, taken now, still counts, even if nothing refers to it any more."""
        with self._lock:
            watched = self._blocks[address]

        def taken() -> bool:
            with self._lock:
                self._drain()
                return self._blocks.get(address) is watched and not watched.given_up

        return taken

    def set_limit(self, limit: int) -> None:
        """Change the limit; free pages beyond it go back to the system at once, taken blocks when they return."""
        with self._lock:
            self._limit = limit
            self._prefer_huge_pages()
            self._drain()
            self._trim()

    def stats(self) -> ArenaStats:
        """The arena as it is now."""
        with self._lock:
            self._drain()
            touched = self._touched()
            return ArenaStats(self._live, self._given_up, touched, self._peak_live, self._peak_touched)

    def _drain(self) -> None:
        if not self._returned:
            return
        while self._returned:
            ref = self._returned.popleft()
            del self._blocks[ref.start]
            if ref.given_up:
                self._given_up -= ref.size
            else:
                self._live -= ref.size
            self._loose.setdefault(ref.size, []).append(ref.start)
            self._loose_bytes += ref.size
        self._trim()
        if not self._blocks:
            self._gather()

    def _touched(self) -> int:
        return self._live + self._given_up + self._loose_bytes + self._warm.total

    def _merge(self) -> None:
        for size, starts in self._loose.items():
            for start in starts:
                self._warm.add(start, size)
        self._loose.clear()
        self._loose_bytes = 0

    def _trim(self) -> None:
        excess = self._loose_bytes + self._warm.total - max(0, self._limit - self._live)
        if excess <= 0:
            return
        self._merge()
        while excess > 0:
            start, size = self._warm.pop_least()
            part = min(size, round_up(excess))  # the system takes whole pages back, and refuses parts
            if part < size:
                self._warm.add(start + part, size - part)
            self._forget(start, part)
            excess -= part

    def _forget(self, start: int, size: int) -> None:
        self._region(start).forget(start, size)
        self._cold.add(start, size)

    def _gather(self) -> None:
        # Nothing is taken, so a call is over. Splits that one call leaves behind make the next one split more, until most of
        # its blocks need fresh pages; if each begins with the same whole extent, all of them run like the first.
        self._merge()
        home = self._regions[0]
        end = home.start + self._limit // ALIGN * ALIGN
        if self._warm.count < 2 or end > home.start + home.size:
            return
        extents = self._warm.items()
        self._warm = _Extents()
        for start, size in extents:
            if start + size > end or start < home.start:
                begin = max(start, end) if start >= home.start else start
                self._forget(begin, start + size - begin)
        self._cold.cut(home.start, end)
        self._warm.add(home.start, end - home.start)

    def _take_cold(self, size: int) -> int:
        run = self._warmest_run(size)
        if run is None:
            region = _Region(max(_LEAST_REGION, 2 * round_up(self._limit)), size)
            self._regions.append(region)
            self._prefer_huge_pages()
            self._cold.add(region.start, region.size)
            run = (region.start, region.size)
        start = run[0]
        for extents in (self._warm, self._cold):
            extents.cut(start, start + size)
        return start

    def _prefer_huge_pages(self) -> None:
        # A direct read into pages that are not contiguous is split into requests of a few hundred KB, and was seen to reach
        # half of the disk's bandwidth.
        if self._limit >= LEAST_HUGE:
            for region in self._regions:
                region.prefer_huge_pages()

    def _warmest_run(self, size: int) -> tuple[int, int] | None:
        """Fresh pages with the used free pages on both sides of them: fragments are reused, not faulted in anew."""
        best, most = None, -1
        for start, length in self._cold.items():
            before, after = self._warm.ending_at(start), self._warm.starting_at(start + length)
            if before + length + after < size:
                continue
            warm = min(before, size) + max(0, size - before - length)
            if warm > most or (warm == most and best is not None and length < best[1]):
                best, most = (start - before, before + length + after), warm
        return best

    def _region(self, start: int) -> _Region:
        for region in self._regions:
            if region.start <= start < region.start + region.size:
                return region
        raise AssertionError(f"address {start:#x} is in no region of the arena")


class _Ref(weakref.ref):
    """The weak reference whose callback says that a block is free."""

    __slots__ = ("given_up", "size", "start")

    given_up: bool
    size: int
    start: int


class _Region:
    """Reserved address space; it lives as long as any block of it."""

    def __init__(self, wanted: int, least: int) -> None:
        size = max(wanted, least)
        while True:
            try:
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
                # One page more than is ever used: free blocks of two neighbouring regions would else merge across the seam.
                self.map = mmap.mmap(-1, size + _HUGE_PAGE + ALIGN, flags=flags)
                break
            except OSError as error:
                if size == least:
                    raise MemoryError(f"no address space for a block of {least} bytes: {error}") from error
                size = max(least, round_up(size // 2))
        self.size = size
        address: int = np.frombuffer(self.map, np.uint8).__array_interface__["data"][0]
        self.offset = -address % _HUGE_PAGE
        self.start = address + self.offset
        self._huge = False

    def array(self, start: int, size: int) -> np.ndarray:
        """The bytes from address `start` on. Its base is the map itself, so that views of it keep this very array alive."""
        return np.frombuffer(self.map, np.uint8, size, self.offset + start - self.start)

    def forget(self, start: int, size: int) -> None:
        """Hands pages back to the system."""
        self.map.madvise(mmap.MADV_DONTNEED, self.offset + start - self.start, size)

    def prefer_huge_pages(self) -> None:
        """Asks the system for them, where it has any."""
        if self._huge or not hasattr(mmap, "MADV_HUGEPAGE"):
            return
        self._huge = True
        with contextlib.suppress(OSError):  # a kernel without them
            self.map.madvise(mmap.MADV_HUGEPAGE)


class _Extents:
    """Disjoint free intervals, neighbours merged; found by size, by start and by end."""

    def __init__(self) -> None:
        self.total = 0
        self._by_size: list[tuple[int, int]] = []
        self._size: dict[int, int] = {}
        self._start_by_end: dict[int, int] = {}

    @property
    def count(self) -> int:
        return len(self._size)

    def items(self) -> list[tuple[int, int]]:
        return list(self._size.items())

    def ending_at(self, end: int) -> int:
        start = self._start_by_end.get(end)
        return 0 if start is None else end - start

    def starting_at(self, start: int) -> int:
        return self._size.get(start, 0)

    def add(self, start: int, size: int) -> None:
        end = start + size
        before = self._start_by_end.get(start)
        if before is not None:
            self._remove(before)
            start = before
        if end in self._size:
            end += self._remove(end)
        self._insert(start, end - start)

    def pop_fit(self, size: int) -> int | None:
        at = bisect_left(self._by_size, (size, 0))
        if at == len(self._by_size):
            return None
        found, start = self._by_size[at]
        self._remove(start)
        if found > size:
            self._insert(start + size, found - size)
        return start

    def pop_least(self) -> tuple[int, int]:
        size, start = self._by_size[0]
        self._remove(start)
        return start, size

    def cut(self, begin: int, end: int) -> None:
        for start, size in self.items():
            stop = start + size
            if start < end and begin < stop:
                self._remove(start)
                if start < begin:
                    self._insert(start, begin - start)
                if end < stop:
                    self._insert(end, stop - end)

    def _insert(self, start: int, size: int) -> None:
        insort(self._by_size, (size, start))
        self._size[start] = size
        self._start_by_end[start + size] = start
        self.total += size

    def _remove(self, start: int) -> int:
        size = self._size.pop(start)
        del self._start_by_end[start + size]
        del self._by_size[bisect_left(self._by_size, (size, start))]
        self.total -= size
        return size
