"""Vector clocks over streams: what was accessed, in which order, and which two accesses have none.

The method is FastTrack's (Flanagan and Freund, PLDI 2009): each queue has a clock of what it comes after, and a block of memory
remembers of every queue no more than its last accesses, as epochs (queue, tick).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple


class Kind(StrEnum):
    """What may go wrong."""

    UNARRIVED = "read before arrival"
    UNWRITTEN = "read before the kernel that writes it"
    OVERWRITTEN = "overwritten before its last use"
    REUSED = "given to another owner before its last use"
    FREED = "freed before its last use"
    UNALLOCATED = "used before its allocation"
    SOURCE_WRITTEN = "host memory written while a copy may still read it"
    SOURCE_UNPINNED = "host memory unpinned while a copy may still read it"
    CAPTURE_UNJOINED = "capture left unjoined"
    CAPTURE_ISOLATION = "wait across the edge of a capture"
    CAPTURE_PAGEABLE = "copy from pageable memory in a capture"
    CAPTURE_SYNCHRONIZED = "host waits for a stream that is being captured"


class Access(NamedTuple):
    """What one piece of work does to one range of memory.

    Attributes:
        what: "copy", or the name of the kernel, or what the host does.
        stream: the name of its stream.
        key: of the tensor; empty where nobody named it.
        owner: the serial number of the allocation; -1 for host memory.
        low, high: the range, in bytes of the model's own address space, or addresses of host memory.
        line, tick: the epoch.
    """

    what: str
    stream: str
    key: str
    owner: int
    low: int
    high: int
    line: int
    tick: int

    @property
    def name(self) -> str:
        """The tensor's, or one made up."""
        return self.key or f"tensor {self.owner}"

    def __str__(self) -> str:
        return f"{self.what} of {self.name} on {self.stream}"


@dataclass(frozen=True)
class Race:
    """Two things that happen in no certain order, but must.

    Attributes:
        key: of the tensor that suffers.
        before: what should have been over; None where the fault is not one of two accesses.
        after: what does not wait for it.
    """

    kind: Kind
    key: str
    before: Access | None
    after: Access

    def __str__(self) -> str:
        if self.before is None:
            return f"{self.kind}: {self.key}: {self.after}"
        return f"{self.kind}: {self.key}: {self.after} does not come after {self.before}"


class Line:
    """A queue of work in order: a stream's, or a stream's within one capture.

    Attributes:
        clock: per line, the last tick of it that this line comes after. Its own entry counts what was queued.
        work: the own tick of the last copy or kernel.
        captured: it is part of a capture that goes on.
        pending: copies whose bytes have not been moved, in order.
        freed: blocks that came back since the last allocation.
        free: by size, blocks to give out, the one that came back last at the end.
    """

    __slots__ = ("captured", "clock", "free", "freed", "index", "name", "pending", "work")

    def __init__(self, name: str, index: int, clock: list[int]) -> None:
        self.name = name
        self.index = index
        self.clock = clock
        self.work = 0
        self.captured = False
        self.pending: deque[Any] = deque()
        self.freed: list[Block] = []
        self.free: dict[int, list[Block]] = {}

    def tick(self) -> int:
        self.clock[self.index] += 1
        return self.clock[self.index]

    def join(self, clock: Sequence[int]) -> None:
        """From now on comes after all that `clock` stands for."""
        mine = self.clock
        for index, tick in enumerate(clock):
            if tick > mine[index]:
                mine[index] = tick

    def after(self, access: Access) -> bool:
        return self.clock[access.line] >= access.tick


class Block:
    """A range of device memory with one owner at a time, and what was done to it.

    Attributes:
        start, size: the range, in bytes of an address space of the model's own.
        line: whose allocator it belongs to.
        owner: the serial number of the allocation, new at each.
        key: the owner's name in messages, or "".
        born: the owner's line's tick at the allocation.
        base: where its bytes are in the memory of the process.
        memory: for a block of a capture, its bytes, which every owner gets.
        storage: weak reference to the owner's storage.
    """

    __slots__ = ("base", "born", "key", "line", "memory", "owner", "reads", "size", "start", "storage", "writes")

    def __init__(self, start: int, size: int, line: Line) -> None:
        self.start = start
        self.size = size
        self.line = line
        self.owner = self.born = self.base = 0
        self.key = ""
        self.memory: Any = None
        self.storage: weakref.ref[Any] | None = None
        self.reads: list[Access] = []
        self.writes: list[Access] = []

    @property
    def end(self) -> int:
        return self.start + self.size

    def split(self, size: int) -> Block:
        """Keeps the first `size` bytes; returns the rest."""
        rest = Block(self.start + size, self.size - size, self.line)
        if self.memory is not None:
            rest.memory, self.memory = self.memory[size:], self.memory[:size]
        self.size = size
        return rest

    def read(self, line: Line, access: Access) -> list[Race]:
        """Notes a read; returns what it should have come after."""
        races = self._early(line, access)
        _, _, _, owner, low, high, line_index, _ = access
        clock = line.clock
        for write in self.writes:
            if clock[write.line] < write.tick and write.low < high and low < write.high:
                kind = Kind.UNARRIVED if write.what == "copy" else Kind.UNWRITTEN
                races.append(Race(kind if write.owner == owner else Kind.REUSED, access.name, write, access))
        # Whoever comes after this read also comes after those of its line before it.
        if self.reads:
            self.reads = [a for a in self.reads if a.line != line_index or a.low < low or high < a.high]
        self.reads.append(access)
        return races

    def write(self, line: Line, access: Access) -> list[Race]:
        """Notes a write; returns what it should have come after."""
        races = self._early(line, access)
        _, _, _, owner, low, high, _, _ = access
        clock = line.clock
        if self.reads or self.writes:
            for before in (*self.reads, *self.writes):
                if clock[before.line] < before.tick and before.low < high and low < before.high:
                    kind = Kind.OVERWRITTEN if before.owner == owner else Kind.REUSED
                    races.append(Race(kind, before.name, before, access))
            # Whoever comes after this write also comes after what it came after; what it did not was reported.
            self.reads = [a for a in self.reads if a.low < low or high < a.high]
            self.writes = [a for a in self.writes if a.low < low or high < a.high]
        self.writes.append(access)
        return races

    def free(self) -> list[Race]:
        """The allocator may give the memory to work that is queued on the block's line from now on; returns who still uses it."""
        line, races = self.line, []
        clock = line.clock
        for accesses in (self.reads, self.writes):
            for before in accesses:
                if clock[before.line] < before.tick:
                    after = Access(
                        "freed memory", line.name, before.key, self.owner, self.start, self.end, line.index, 0
                    )
                    races.append(Race(Kind.FREED, before.name, before, after))
            # The next owner comes after them all, else it was reported; others have to come after its allocation.
            accesses.clear()
        return races

    def _early(self, line: Line, access: Access) -> list[Race]:
        # An access to memory that it does not own any more is no access before the present owner's allocation.
        if line is self.line or line.clock[self.line.index] >= self.born or access.owner != self.owner:
            return []
        birth = Access(
            "allocation", self.line.name, self.key, self.owner, self.start, self.end, self.line.index, self.born
        )
        return [Race(Kind.UNALLOCATED, access.name, birth, access)]
