"""The state of the modelled device, and what its modules do with it: order, memory, and the races that they find in it."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from modelled_capture import Graph
from modelled_memory import Allocator, Pins, Sources
from modelled_queue import UNWRITTEN, Copy, Event, Stream, by_the_model, extent
from modelled_races import Access, Block, Kind, Line, Race


class _Here(threading.local):
    stream: Stream | None = None
    on_host = False


class Core:
    """The part of `ModelledDevice` that tests need not know. See there for the arguments."""

    def __init__(self, total_bytes: int, fail_pin_at: int | None, pin_limit: int | None, name: str) -> None:
        self.name = name
        self.phase = ""
        self.watched = 0
        self.lock = threading.RLock()
        self._here = _Here()
        self._races: list[Race] = []
        self._late: list[Line] = []  # that have pending copies, if not more
        self._known: list[int] = []  # the host comes after this
        self._lines: list[Line] = []
        self._allocator = Allocator(total_bytes)
        self._pins = Pins(fail_pin_at, pin_limit)
        self._sources = Sources()
        self._graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.default_stream = Stream(self.new_line("the default stream"), user=True)

    def current_stream(self) -> Stream:
        return self._here.stream or self.default_stream

    def new_line(self, name: str) -> Line:
        name = f"{name} of {self.name}" if self.name else name
        line = Line(name, len(self._lines), [*self._known, 0])
        self._known.append(0)
        for other in self._lines:
            other.clock.append(0)
        self._lines.append(line)
        return line

    def report(self, kind: Kind, key: str, before: Access | None, after: Access) -> None:
        self._races.append(Race(kind, key, before, after))

    def block(self, tensor: torch.Tensor) -> Block | None:
        """The block that a tensor lies in; None for host memory."""
        return self._allocator.of(tensor.untyped_storage())

    def place(self, tensor: torch.Tensor) -> tuple[Block, int, str, int, int]:
        """A tensor's block, its owner and key, and the range of it that the tensor spans."""
        block = self.block(tensor)
        assert block is not None, "the tensor is not on this device"
        low = block.start + tensor.data_ptr() - block.base
        return block, block.owner, block.key, low, low + extent(tensor.shape, tensor.stride()) * tensor.itemsize

    @property
    def on_this_host(self) -> bool:
        """Whether this thread is in `on_host`."""
        return self._here.on_host

    def kept(self, value: Any) -> Any:
        """A tensor in a capture's memory as another one over the same memory; any other tensor as it is."""
        if not isinstance(value, torch.Tensor):
            return value
        block = self.block(value)
        if block is None or block.memory is None:
            return value.detach()
        with by_the_model(), torch.no_grad():
            offset = (value.data_ptr() - block.base) // value.itemsize
            memory = torch.from_numpy(block.memory).untyped_storage()
            return torch.empty(0, dtype=value.dtype).set_(memory, offset, value.shape, value.stride())

    def is_new(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is neither on this device nor in pinned memory of the host."""
        return self.block(tensor) is None and not self.is_pinned(tensor)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self._pins.pinned(tensor.data_ptr(), tensor.data_ptr() + 1)

    def is_host(self, tensor: torch.Tensor) -> bool:
        return self.block(tensor) is None or self.is_pinned(tensor)

    def kernel(self, line: Line, what: str, reads: Sequence[Any], writes: Sequence[Any]) -> None:
        """Queues a kernel. `reads` and `writes` are places."""
        tick = line.work = line.tick()
        for places, written in ((reads, False), (writes, True)):
            for block, owner, key, low, high in places:
                access = Access(what, line.name, key, owner, low, high, line.index, tick)
                self._races += block.write(line, access) if written else block.read(line, access)

    def queue_copy(self, line: Line, job: Copy, reach: int, *, sums: bool) -> None:
        """Queues a copy: its destination holds 0xFF until it lands."""
        index = line.index
        line.clock[index] = job.tick = line.work = tick = line.clock[index] + 1
        block, low = job.block, job.low
        # Thrice as fast as Access(...).
        access = tuple.__new__(Access, ("copy", line.name, block.key, job.owner, low, low + job.span, index, tick))
        races = block.write(line, access)
        if races:
            self._races += races
        if job.pinned:
            races = self._sources.note(job.source, job.source + reach, access, job.keep, sums)
            if races:
                self._races += races
        if not line.pending:
            self._late.append(line)
        line.pending.append(job)
        if job.layout is None:
            ctypes.memset(job.into, UNWRITTEN, job.nbytes)
        else:
            job.blank()

    def land(self, clock: Sequence[int]) -> None:
        """Somebody comes after what `clock` stands for: copies up to there have arrived."""
        late = self._late
        for index in range(len(late) - 1, -1, -1):
            line = late[index]
            pending = line.pending
            # A line that is newer than the clock is not in it.
            tick = clock[line.index] if line.index < len(clock) else 0
            while pending and pending[0].tick <= tick:
                pending.popleft().land()
            if not pending:
                del late[index]

    def land_all(self, line: Line) -> None:
        while line.pending:
            line.pending.popleft().land()

    def host_waits(self, clock: Sequence[int]) -> None:
        """The host comes after what `clock` stands for, and so does all that it queues from now on."""
        self.land(clock)
        for index, tick in enumerate(clock):
            self._known[index] = max(self._known[index], tick)
        for line in self._lines:
            line.join(self._known)
        self._races += self._sources.known(self._known)

    def captured(self, lines: Sequence[Line]) -> None:
        """A capture on these lines has ended. It did nothing, so nothing need come after it."""
        self._sources.forget({line.index for line in lines})
        for line in lines:
            line.captured = False
            self.host_waits(line.clock)

    def pinned(self, low: int, high: int) -> bool:
        return self._pins.pinned(low, high)

    def allocate_captured(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in memory of the capture that the current stream is part of, which the graph keeps."""
        span = extent(size, stride) * dtype.itemsize
        with self.lock, by_the_model():
            block = self._allocate(self.current_stream().line, span, memory=True)
            storage = torch.from_numpy(block.memory[:span]).fill_(UNWRITTEN).untyped_storage()
            self._allocator.bind(block, storage)
            return torch.empty(0, dtype=dtype).set_(storage, 0, size, stride)

    def allocate(self, storage: torch.UntypedStorage) -> None:
        """A kernel's result is memory of this device, of the current stream."""
        with self.lock:
            if self._allocator.of(storage) is None and storage.nbytes():
                self._allocator.bind(self._allocate(self.current_stream().line, storage.nbytes()), storage)

    def _wait_for_all(self) -> None:
        for line in self._lines:
            if not line.captured:
                self.host_waits(line.clock)

    def _enter(self, stream: Stream, event: Event) -> bool:
        """`stream` waits for an event of another capture than its own; returns whether it may."""
        if stream.graph is None and event.graph is not None and not event.graph.ended:
            event.graph.enter(stream)
            return True
        name = event.line.name
        where = (
            "outside of it"
            if event.graph is None
            else "in another"
            if not event.graph.ended
            else "in one that has ended"
        )
        what = (
            f"wait for an event recorded {where}"
            if stream.graph is not None
            else "wait for an event of an ended capture"
        )
        access = Access(what, stream.line.name, name, -1, 0, 0, stream.line.index, 0)
        self.report(Kind.CAPTURE_ISOLATION, name, None, access)
        return False

    def _allocate(self, line: Line, nbytes: int, *, memory: bool = False) -> Block:
        block, races = self._allocator.allocate(line, nbytes, memory=memory)
        self._races += races
        return block

    def access(self, what: str, line: Line, job: Copy) -> Access:
        """For messages about a copy."""
        return Access(what, line.name, job.block.key, job.owner, job.low, job.low + job.span, line.index, 0)
