"""The transfer engine of the disk tier: weights by key, out of files, into memory that the graph owns."""

from __future__ import annotations

import gc
import math
import mmap
import os
import time
import uuid
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from statistics import median
from types import MappingProxyType

import numpy as np
import torch

from flextensor_fx.errors import StoreError
from flextensor_fx.runtime.arena import Block
from flextensor_fx.runtime.container import ALIGN
from flextensor_fx.runtime.layout import converted, tensor_over
from flextensor_fx.runtime.mapping import Mappings
from flextensor_fx.runtime.reader import Reader, Transfer, closed_error
from flextensor_fx.runtime.stats import EngineStats
from flextensor_fx.runtime.store import Store
from flextensor_fx.runtime.trace import Recorder

_PROBE_BYTES = 4 << 20
_PROBE_SECONDS = 0.04


class Engine:
    """Starts and finishes transfers of weights from a store.

    Args:
        uid: of the store, for messages.
        store: closed with the engine.
        pool_bytes: that transfers may hold together.
        read_threads: 1 reads in the order of start; with more, reads overlap.
        delay_ms: for tests: every transfer arrives that late and its memory holds 0xFF until then. None takes
            FLEXTENSOR_FX_TEST_DELAY_MS, else 0.
    """

    def __init__(
        self, uid: str, store: Store, pool_bytes: int, *, read_threads: int = 1, delay_ms: float | None = None
    ) -> None:
        if delay_ms is None:
            delay_ms = float(os.environ.get("FLEXTENSOR_FX_TEST_DELAY_MS", "0"))
        self.uid = uid
        self.instance = uuid.uuid4().hex
        self.store = store
        self._pool_bytes = pool_bytes
        self._mappings = Mappings()
        self._reader = Reader(store, pool_bytes, read_threads, delay_ms)
        self._transfers = self._ahead = self._overruns = 0
        self._stalls: dict[str, float] = {}
        self.serves_backwards = False
        self.setup_seconds = 0.0
        self._closed = False
        self._compiled = True
        # An engine that is dropped without close still ends its threads; those hold the store, whose directory goes last.
        self._finalizer = weakref.finalize(self, Reader.stop, self._reader)

    def start(self, key: str) -> Transfer:
        """Begin to read a weight. Never waits: without room in the pool the read begins when a block comes back.

        Returns:
            The transfer; one that `start_ahead` began, if there is one of this key.

        Raises:
            StoreError: the store has no such key, or the engine is closed.
        """
        self._reader.check_fork()
        started = self._reader.ahead.take(key)
        if started is not None:
            return started
        self._transfers += 1
        recorder = self._reader.recorder  # read once: a trace may end on another thread at any moment
        if recorder is not None:
            recorder.note("issued", key)
        return self._reader.start(key)

    def start_ahead(self, key: str) -> None:
        """Begin to read a weight that the next call will `start`, which then gets this transfer.

        Does nothing without room in the pool, nor where the last such copies of the weight were made for nothing, nor while
        somebody holds a tensor that aliases the weight in the store, since a write to that is not seen. What is held for the next
        call makes room for other transfers, and is dropped when such a tensor is given out.

        Raises:
            StoreError: the store has no such key, or the engine is closed.
        """
        self._reader.check_fork()
        given = self._mappings.given
        if self._compiled and self._mappings.lives(key):
            # What a compilation leaves behind holds tensors of weights in cycles, which may not be collected for long.
            self._compiled = False
            gc.collect()
        if self._mappings.lives(key) or not self._reader.start_ahead(key):
            return
        self._transfers += 1
        self._ahead += 1
        if self._mappings.given != given:  # on another thread, before there was a copy to drop
            self._reader.discard_ahead(key)

    def finish(self, transfer: Transfer) -> torch.Tensor:
        """Wait for a weight.

        A transfer that found no room so far takes memory beyond the pool, so that this always returns. A weight written
        since its transfer was started is read again.

        Returns:
            A tensor of the weight's shape, stride and dtype that owns its memory, which goes back to the pool with the
            last reference to it.

        Raises:
            StoreError: the read failed. The engine stays usable.
        """
        reader = self._reader
        reader.check_fork()
        if self._closed:
            raise closed_error(transfer.key)
        recorder = reader.recorder
        if recorder is not None:
            recorder.note("waits", transfer.key)
        error = None
        begin = time.perf_counter()
        # Before a fork the read went to a thread of the parent; a claimed one found no room so far.
        if transfer.epoch is not reader.epoch or (not transfer.arrived and reader.claim(transfer)):
            block = self._take(transfer.nbytes)
            if recorder is not None:
                recorder.note("taken", transfer.key)
            error = self._fill(transfer, block, begin)
        else:
            if not transfer.arrived and transfer.done is not None:
                # The timeout is for a close on another thread, after which nobody may be left to serve the queue.
                while not transfer.done.acquire(timeout=1):
                    if self._closed:
                        raise closed_error(transfer.key)
                self._stalled(transfer.key, begin)
            error, transfer.error = transfer.error, None
            block, transfer.block = transfer.block, None
            if block is None:
                raise AssertionError(f"{transfer!r} was finished before; start another one")
            if transfer.version != self.store.version(transfer.key):
                error = self._fill(transfer, block, time.perf_counter())
        if error is not None:
            del block  # Else the frames of the exception would hold it for as long as the user holds the exception.
            raise error
        if recorder is not None:
            recorder.note("waited", transfer.key)
        return tensor_over(self.store.spec(transfer.key), block.array, transfer.shift)

    def give_up(self, tensors: Iterable[torch.Tensor]) -> None:
        """The weights are done with: they no longer count against the pool, even if their memory is still in use.

        Tensors that are no weights of this engine are ignored.
        """
        reader = self._reader
        reader.check_fork()
        for tensor in tensors:
            reader.arena.give_up(tensor.data_ptr())
        reader.start_deferred()

    @property
    def recorder(self) -> Recorder | None:
        """What notes the events of `trace`; None outside of it."""
        return self._reader.recorder

    @contextmanager
    def trace(self) -> Iterator[Recorder]:
        """Notes every event of transfers until the block ends; at most one block at a time notes.

        Of copies ahead that are held when it begins, it also notes what came before, apart from reads that have ended.
        """
        before, recorder = self._reader.recorder, Recorder()
        for key, at_s in [(key, transfer.issued_s) for key, transfer in self._reader.ahead.items()]:
            recorder.note("issued", key, at_s)
            recorder.note("taken", key, at_s)
        self._reader.recorder = recorder
        try:
            yield recorder
        finally:
            self._reader.recorder = before

    def read(self, key: str) -> torch.Tensor:
        """The value of a weight now, in memory of its own, not from the pool.

        Raises:
            StoreError: the read failed, or the engine is closed.
        """
        self._reader.check_fork()
        if self._closed:
            raise closed_error(key)
        memory = mmap.mmap(-1, self.store.slab_bytes(key), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        array = np.frombuffer(memory, np.uint8)
        shift, _ = self.store.read_slab(key, array)
        return tensor_over(self.store.spec(key), array, shift)

    def mapped(self, key: str) -> torch.Tensor:
        """The value of a weight as a tensor that aliases the store; see `Mappings`.

        Raises:
            StoreError: the weight cannot be read, or the engine is closed.
        """
        self._reader.check_fork()
        if self._closed:
            raise closed_error(key)
        tensor = self._mappings.tensor(self.store, key)
        self._reader.discard_ahead(key)  # whoever gets it may write to it, and a write must reach the very next call
        return tensor

    def host_value(self, key: str) -> torch.Tensor:
        """As `mapped`."""
        return self.mapped(key)

    def borrowed(self, key: str) -> torch.Tensor:
        """As `mapped`, so that the next two have nothing to do."""
        return self.mapped(key)

    def note_shown(self, key: str) -> None:
        """Nothing to do."""

    def note_written(self, key: str) -> None:
        """Nothing to do."""

    def write(self, key: str, tensor: torch.Tensor) -> None:
        """Give a weight a new value, as `weight.copy_(tensor)` would: broadcast and converted.

        Raises:
            OffloadError: the shape cannot be broadcast to the weight's.
            StoreError: the disk failed, or the engine is closed.
        """
        self._reader.check_fork()
        if self._closed:
            raise closed_error(key)
        spec = self.store.spec(key)
        with torch.no_grad():
            self.store.write(key, converted(spec, tensor))

    @property
    def aliases(self) -> bool:
        """Whether what `mapped` returns is the store's own memory: it is."""
        return True

    def settle(self) -> None:
        """Nothing to do: what eager code writes is in the store at once."""

    def seal(self) -> None:
        """Nothing to do: files need no pinning."""

    def quiesce(self) -> None:
        """Nothing to do: a call is over when it returns."""

    def note_compilation(self) -> None:
        """A graph of these weights was compiled; see `start_ahead`."""
        self._compiled = True

    def set_pool(self, nbytes: int) -> None:
        """Change the bytes that transfers may hold together."""
        self._reader.check_fork()
        self._pool_bytes = nbytes
        self._reader.set_pool(nbytes)

    def stats(self) -> EngineStats:
        """What was done so far."""
        self._reader.check_fork()
        totals, arena = self._reader.totals, self._reader.arena.stats()
        return EngineStats(
            transfers=self._transfers,
            reads=totals.reads,
            disk_bytes=totals.disk_bytes,
            cached_bytes=totals.cached_bytes,
            read_seconds=totals.seconds,
            stall_ms=math.fsum(self._stalls.values()),
            stall_ms_by_key=MappingProxyType(dict(self._stalls)),
            overruns=self._overruns,
            pool_bytes=self._pool_bytes,
            peak_pool_bytes=arena.peak_live,
            touched_bytes=arena.touched_bytes,
            ahead=self._ahead,
            dropped=self._reader.ahead.dropped,
            setup_seconds=self.setup_seconds,
        )

    def measure_link(self) -> tuple[float, float]:
        """Time a few reads of the store, past the page cache where possible. Takes about 50 ms.

        Returns:
            Latency of a read in ms, and bytes per ms beyond it.

        Raises:
            StoreError: the store has no file, or a read failed.
        """
        files = () if self._closed else self.store.files
        file = max(files, key=lambda f: f.stat().st_size, default=None)
        if file is None:
            raise StoreError(
                f"store {self.uid!r}: expected a file to measure, found none; write the weights first, and measure before close"
            )
        size = file.stat().st_size
        large = max(ALIGN, min(_PROBE_BYTES, size // ALIGN * ALIGN))
        buffer = memoryview(mmap.mmap(-1, large))
        buffer[:] = bytes(large)
        places = [int(size * part) // ALIGN * ALIGN for part in (0.0, 0.5, 0.25, 0.75, 0.125, 0.625, 0.375, 0.875)]
        try:
            latency = min(file.time_read(buffer[:ALIGN], place) for place in places[:3])
            rates, begin = [], time.perf_counter()
            for place in places:
                seconds = file.time_read(buffer, min(place, size - large))
                # A small file is read in little more than the latency, and the difference says nothing.
                net = seconds - latency if seconds > 2 * latency else seconds
                rates.append(large / net / 1000)
                if time.perf_counter() - begin > _PROBE_SECONDS:
                    break
        except OSError as error:
            raise StoreError(f"store {self.uid!r}: {file.path} cannot be read: {error}; check the disk") from error
        return latency * 1000, median(rates)

    def close(self) -> None:
        """End the threads, close the store and remove its directory. Calling it again does nothing."""
        self._closed = True
        self._finalizer.detach()
        for thread in self._reader.stop():
            thread.join()
        self.store.close()

    def _take(self, nbytes: int) -> Block:
        block = self._reader.take(nbytes)
        if block is None:
            self._overruns += 1
            block = self._reader.arena.take(nbytes, force=True)
            assert block is not None, f"a forced block of {nbytes} bytes was refused"
        return block

    def _fill(self, transfer: Transfer, block: Block, begin: float) -> StoreError | None:
        error = self._reader.fill(transfer, block)
        self._stalled(transfer.key, begin)
        return error

    def _stalled(self, key: str, begin: float) -> None:
        self._stalls[key] = self._stalls.get(key, 0.0) + (time.perf_counter() - begin) * 1000
