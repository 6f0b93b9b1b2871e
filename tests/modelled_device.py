"""A device of the host tier that is a model: streams, events, allocator, captures and pinned pages, on the memory of the CPU.

It stands in for `flextensor_fx.runtime.device.Device`. What the engine does through that interface is checked at once; inside
`with device.watching():` so is every op that runs, as a kernel on the current stream:

    device = ModelledDevice()
    engine = HostEngine(..., device)
    with device.watching():
        model(x)
    device.assert_no_race()

A tensor from before is host memory to it; `adopt` makes one the device's.

Streams run in order, each beside the others and beside the host, as late as the order allows: a copy's bytes arrive when a
stream or the host waits for it, and until then its destination holds 0xFF. So a missing wait is a race and a wrong number.

What is not modelled: the order of threads among themselves (races are those of the order in which the calls came in), kernels
that run past torch's dispatcher (generated C++; name them with `launch`), and one allocation over two neighbouring free blocks.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from modelled_capture import Graph
from modelled_core import Core
from modelled_queue import UNWRITTEN, Copy, Event, Stream, by_the_model, extent
from modelled_races import Access, Kind, Race


class ModelledDevice(Core):
    """See the module.

    Args:
        total_bytes: of its memory.
        fail_pin_at: the call of `pin`, from 1, that the driver refuses.
        pin_limit: bytes that may be pinned together.
        name: in messages, for a test of several devices.

    Attributes:
        phase: what the engine has been asked to do, where a test says so; see `engine_faults`.
        watched: how many `watching` blocks are open.
        copies, copied_bytes: queued so far, without those of replays.
        streams_made, events_made: by `new_stream` and `new_event`.
    """

    def __init__(
        self,
        total_bytes: int = 1 << 30,
        *,
        fail_pin_at: int | None = None,
        pin_limit: int | None = None,
        name: str = "",
    ) -> None:
        super().__init__(total_bytes, fail_pin_at, pin_limit, name)
        self.device = torch.device("cpu")
        self.shares_memory = False
        self.copies = self.copied_bytes = self.streams_made = self.user_streams_made = self.events_made = 0

    # The interface of runtime/device.py.

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        owner = self.current_stream()
        if owner.graph is not None:
            return self.allocate_captured(size, stride, dtype)
        if self.watched:
            with by_the_model():
                tensor = torch.empty_strided(size, stride, dtype=dtype)
                ctypes.memset(tensor.data_ptr(), UNWRITTEN, tensor.untyped_storage().nbytes())
        else:
            tensor = torch.empty_strided(size, stride, dtype=dtype)
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if nbytes:
            with self.lock:
                block, races = self._allocator.allocate(owner.line, nbytes)
                self._allocator.bind(block, storage)
                if races:
                    self._races += races
        return tensor

    def new_stream(self) -> Stream:
        with self.lock:
            self.streams_made += 1
            return Stream(self.new_line(f"stream {self.streams_made}"))

    def new_event(self) -> Event:
        self.events_made += 1
        return Event()

    def record(self, event: Event, stream: Stream) -> None:
        with self.lock:
            line, graph = stream.line, stream.graph
            line.clock[line.index] += 1
            event.clock = line.clock.copy()
            event.line = line
            event.graph = graph
            if graph is not None:
                event.place = graph.recorded(line)

    def wait(self, stream: Stream, event: Event) -> None:
        clock = event.clock
        if clock is None:
            return
        with self.lock:
            if event.graph is not stream.graph and not self._enter(stream, event):
                return
            line = stream.line
            line.clock[line.index] += 1
            of = event.line.index
            if line.clock[of] < clock[of]:
                line.join(clock)
            if stream.graph is not None:
                stream.graph.waited(line, event.place)
            if self._late:
                self.land(clock)

    def copy(self, into: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        nbytes = into.nbytes
        if not nbytes:
            return
        with self.lock:
            block = self._allocator.of(into.untyped_storage())
            if block is None:
                raise AssertionError(
                    f"copy into {list(into.shape)}: expected a tensor of this device, found memory that it did not give out"
                )
            job = Copy()
            job.block, job.owner = block, block.owner
            job.into, job.source = into.data_ptr(), source.data_ptr()
            job.nbytes = job.span = reach = nbytes
            job.layout, job.keep = None, source
            plain = into.is_contiguous() and source.is_contiguous() and into.dtype == source.dtype
            if not plain or source.nbytes != nbytes:
                job.span = extent(into.shape, into.stride()) * into.itemsize
                reach = extent(source.shape, source.stride()) * source.itemsize
                alike = into.dtype == source.dtype and into.shape == source.shape and into.stride() == source.stride()
                if not alike or job.span != nbytes:
                    job.layout = into.dtype, into.shape, into.stride()
            job.low = block.start + job.into - block.base
            job.pinned = self._pins.pinned(job.source, job.source + reach)
            if not job.pinned:
                # The driver has taken the bytes when the call returns.
                with by_the_model(), torch.no_grad():
                    job.keep = source.detach().clone(memory_format=torch.preserve_format)
                job.source = job.keep.data_ptr()
                if stream.graph is not None:
                    access = self.access("copy", stream.line, job)
                    self.report(Kind.CAPTURE_PAGEABLE, access.name, None, access)
            self.copies += 1
            self.copied_bytes += nbytes
            if stream.graph is not None:
                stream.graph.copied(stream.line, job, reach)
            self.queue_copy(stream.line, job, reach, sums=self.watched > 0 and stream.graph is None)

    def synchronize(self) -> None:
        with self.lock:
            for line in self._lines:
                if line.captured:
                    access = Access("synchronize", "the host", line.name, -1, 0, 0, line.index, 0)
                    self.report(Kind.CAPTURE_SYNCHRONIZED, line.name, None, access)
            self._wait_for_all()

    def capturing(self) -> bool:
        return self.current_stream().graph is not None

    def pin(self, address: int, nbytes: int) -> None:
        with self.lock:
            self._pins.pin(address, nbytes)

    def unpin(self, address: int) -> None:
        with self.lock:
            end = self._pins.unpin(address)
            self._races += self._sources.unpinned(address, end)
            # It may be unmapped now, so nothing reads it after this.
            for line in self._lines:
                if any(job.pinned and address <= job.source < end for job in line.pending):
                    self.land_all(line)
            for graph in self._graphs:
                graph.let_go(address, end)

    def mark(self, stream: Stream) -> Event:
        event = Event()
        self.record(event, stream)
        event.seconds = time.perf_counter()
        return event

    def ms_between(self, begin: Event, end: Event) -> float:
        with self.lock:
            for event in (begin, end):
                if event.clock is None or self._known[event.line.index] < event.clock[event.line.index]:
                    raise RuntimeError(
                        "a mark's time is asked for before the host has waited for it: synchronise first"
                    )
        return (end.seconds - begin.seconds) * 1000

    def memory(self) -> tuple[int, int]:
        with self.lock:
            self._allocator.drain()
            return self._allocator.total - self._allocator.live, self._allocator.total

    def peak_allocated(self) -> int:
        return self._allocator.peak

    # What a test does with it.

    def user_stream(self) -> Stream:
        """A stream of the user's, for tests that must tell them from the engine's."""
        with self.lock:
            self.user_streams_made += 1
            return Stream(self.new_line(f"user stream {self.user_streams_made}"), user=True)

    @property
    def pinned_bytes(self) -> int:
        """That are pinned now."""
        return self._pins.nbytes

    @property
    def peak_pinned_bytes(self) -> int:
        return self._pins.peak

    @property
    def pinned_ranges(self) -> list[tuple[int, int]]:
        """(address, end) of each, ascending."""
        return self._pins.ranges()

    @property
    def allocated_bytes(self) -> int:
        """Of tensors that are referred to now, each rounded up to 512."""
        return self.memory()[1] - self.memory()[0]

    def reset_peak(self) -> None:
        with self.lock:
            self._allocator.drain()
            self._allocator.peak = self._allocator.live

    @property
    def races(self) -> tuple[Race, ...]:
        """All that were found so far, in order."""
        with self.lock:
            self._races += self._sources.changed()
            return tuple(self._races)

    def assert_no_race(self) -> None:
        races = self.races
        if races:
            raise AssertionError("\n".join([f"{len(races)} races:", *map(str, races[:20])]))

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[Stream]:
        """Makes `stream` current on this thread."""
        before, self._here.stream = self._here.stream, stream
        try:
            yield stream
        finally:
            self._here.stream = before

    def watching(self) -> AbstractContextManager[Any]:
        """Takes every op of this thread for a kernel on the current stream. For several devices, see `Watching`."""
        from modelled_kernels import Watching

        return Watching(self)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """While watched: ops of this thread are the host's, on host memory, and what they write is written by the host."""
        before, self._here.on_host = self._here.on_host, True
        try:
            yield
        finally:
            self._here.on_host = before

    def adopt(self, tensor: torch.Tensor, key: str | None = None) -> torch.Tensor:
        """From now on `tensor`'s storage is memory of this device, allocated on the current stream and written there."""
        with self.lock:
            storage, line = tensor.untyped_storage(), self.current_stream().line
            if self._allocator.of(storage) is None and storage.nbytes():
                block = self._allocate(line, storage.nbytes())
                self._allocator.bind(block, storage)
                block.key = key or block.key
                self.kernel(line, "its first value", (), (self.place(tensor),))
        return tensor

    def name_tensor(self, tensor: torch.Tensor, key: str) -> None:
        """Names a tensor's memory in messages, for as long as it has this owner."""
        block = self.block(tensor)
        if block is None:
            raise ValueError(f"{key!r}: the tensor is not on this device")
        block.key = key

    def launch(
        self,
        what: str,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        again: Callable[[], None] | None = None,
    ) -> None:
        """Notes a kernel on the current stream. What it reads and writes in host memory is the host's doing.

        Args:
            again: computes it once more, for replays.
        """
        with self.lock:
            stream = self.current_stream()
            self.land_all(stream.line)
            read, written = (tuple(self.place(t) for t in ts if not self.is_host(t)) for ts in (reads, writes))
            self.kernel(stream.line, what, read, written)
            if stream.graph is not None:
                stream.graph.launched(stream.line, what, read, written, again)
            for tensor in writes:
                if self.is_host(tensor):
                    self.host_wrote(tensor)

    def host_wrote(self, tensor: torch.Tensor) -> None:
        """Notes that the host has written to host memory."""
        low = tensor.data_ptr()
        with self.lock:
            self._races += self._sources.written(low, low + extent(tensor.shape, tensor.stride()) * tensor.itemsize)

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        """Captures what is queued on the current stream, and on streams that come to wait for it, into a graph.

        Work is run once, for its values; nothing of it counts as done outside. As torch does, it begins with a synchronisation.
        """
        with self.lock:
            stream = self.current_stream()
            if stream.graph is not None:
                raise RuntimeError(f"{stream!r} is being captured already")
            self._wait_for_all()
            graph = Graph(self)
            self._graphs.add(graph)
            graph.enter(stream)
        done = False
        try:
            yield graph
            done = True
        finally:
            with self.lock:
                graph.end(check=done)
