"""Reads in the background: a queue in order of start, reader threads, and transfers that wait for room."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from flextensor_fx.errors import StoreError
from flextensor_fx.runtime.ahead import Ahead
from flextensor_fx.runtime.arena import Arena, Block
from flextensor_fx.runtime.store import Store
from flextensor_fx.runtime.trace import Recorder

_DEFERRED, _QUEUED, _TAKEN = range(3)
_ROOM = "room"
_READ_AT_ONCE = 64 << 10  # Waking a thread takes longer than copying that many bytes out of the page cache.


class Transfer:
    """One weight on its way into memory. Made by `Engine.start`, ended by `Engine.finish` or by being dropped.

    Attributes:
        key: of the weight.
        arrived: whether its bytes, or its error, are there.
    """

    __slots__ = (
        "__weakref__",
        "arrived",
        "block",
        "done",
        "due",
        "epoch",
        "error",
        "issued_s",
        "key",
        "nbytes",
        "shift",
        "state",
        "version",
    )

    def __init__(self, key: str, nbytes: int, version: int, epoch: object) -> None:
        self.key = key
        self.arrived = False
        self.block: Block | None = None
        self.done: threading.Lock | None = None
        self.due = 0.0
        self.epoch = epoch
        self.error: StoreError | None = None
        self.issued_s = 0.0
        self.nbytes = nbytes
        self.shift = 0
        self.state = _DEFERRED
        self.version = version

    def __repr__(self) -> str:
        return f"Transfer({self.key!r}, {self.nbytes} bytes, {'arrived' if self.arrived else 'on its way'})"


@dataclass
class ReadTotals:
    """Sums over all reads of weights.

    Attributes:
        reads: number of them.
        cached_bytes: taken from the page cache.
        disk_bytes: taken from the disk.
        seconds: spent in reading, summed over threads.
    """

    reads: int = 0
    cached_bytes: int = 0
    disk_bytes: int = 0
    seconds: float = 0.0


class Reader:
    """Moves weights from a store into blocks of an arena, in the order in which they were started.

    The reader threads refer to this object only, so that an engine can be collected while they wait for work.
    """

    def __init__(self, store: Store, pool_bytes: int, threads: int, delay_ms: float) -> None:
        self.store = store
        self.totals = ReadTotals()
        self.recorder: Recorder | None = None
        self._pool_bytes = pool_bytes
        self._thread_count = max(1, threads)
        self._delay_s = delay_ms / 1000
        self._closed = False
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._spawning = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._queue: SimpleQueue[weakref.ref[Transfer] | str | None] = SimpleQueue()
        self._deferred: deque[weakref.ref[Transfer]] = deque()
        queue, deferred = self._queue, self._deferred

        # Closures over the queue, not methods: a cycle through the arena would keep the files of a dropped engine open.
        def on_room() -> None:
            if deferred:
                queue.put(_ROOM)

        def on_dropped(ref: weakref.ref[Transfer]) -> None:
            queue.put(_ROOM)

        self._on_dropped = on_dropped
        self.arena = arena = Arena(self._pool_bytes, on_room)

        def leave(transfer: Transfer) -> Callable[[], bool]:
            assert transfer.block is not None, "a transfer is held without memory"
            return arena.watch(transfer.block.address)

        self.ahead: Ahead[Transfer] = Ahead(leave)
        self.epoch = queue

    def check_fork(self) -> None:
        """After a fork, start afresh: the threads are not there, and their locks may be held for ever."""
        if self._pid != os.getpid():
            self.store.after_fork()
            self._begin()

    def set_pool(self, nbytes: int) -> None:
        """Change the bytes that transfers may hold together."""
        self._pool_bytes = nbytes
        self.arena.set_limit(nbytes)
        while self.arena.stats().live_bytes > nbytes and self._drop_ahead():
            pass
        self.start_deferred()

    def start(self, key: str) -> Transfer:
        """Queue the read of a weight, or note it down until there is room. Never waits.

        Copies ahead of the next call are dropped where they take the room.
        """
        transfer = self._transfer(key)
        # Behind deferred ones it has to wait even if it fits: those are needed earlier.
        if not self._deferred:
            block = self.take(transfer.nbytes)
            if block is not None:
                self._begin_read(transfer, block)
                return transfer
        self._deferred.append(weakref.ref(transfer, self._on_dropped))
        # A block that came back between the refusal and the append has woken nobody.
        self.start_deferred()
        return transfer

    def start_ahead(self, key: str) -> bool:
        """Queue the read of a weight for the next call and hold it in `ahead`; False where it is not wanted, or has no room."""
        transfer = self._transfer(key)
        if self.ahead.renew(key) or self._deferred or self.ahead.skip(key):
            return False
        block = self.arena.take(transfer.nbytes)
        if block is None:
            return False
        transfer.issued_s = time.perf_counter()
        recorder = self.recorder
        if recorder is not None:
            recorder.note("issued", key, transfer.issued_s)
        self._begin_read(transfer, block)
        self.ahead.put(transfer)
        return True

    def discard_ahead(self, key: str) -> None:
        """Drop the copy of `key` for the next call, if one is held: the weight may have been written since."""
        if self.ahead.discard(key):
            self._note_dropped(key)

    def take(self, nbytes: int) -> Block | None:
        """Memory for a transfer of this call; copies ahead of the next one make room for it, the last needed first."""
        while (block := self.arena.take(nbytes)) is None and self._drop_ahead():
            pass
        return block

    def start_deferred(self) -> None:
        """Start deferred transfers, first come first served, as far as there is room."""
        if not self._deferred or self._closed:
            return
        with self._lock:
            while self._deferred:
                transfer = self._deferred[0]()
                if transfer is not None and transfer.state == _DEFERRED:
                    block = self.arena.take(transfer.nbytes)
                    if block is None:
                        return
                    self._enqueue(transfer, block)
                self._deferred.popleft()

    def claim(self, transfer: Transfer) -> bool:
        """Take a transfer out of the deferred ones; False if its read has been queued."""
        if self.ahead.leaving and transfer.state == _DEFERRED:
            # Memory beyond the pool would be taken although room is about to come back.
            self.ahead.settle(lambda: self._closed)
            self.start_deferred()
        with self._lock:
            if transfer.state != _DEFERRED:
                return False
            transfer.state = _TAKEN
            return True

    def fill(self, transfer: Transfer, block: Block) -> StoreError | None:
        """Read on the calling thread; what went wrong is returned, without frames that would keep the block referenced."""
        begin = time.perf_counter()
        noted = self.recorder  # read once: a trace may end on another thread at any moment
        if noted is not None:
            noted.note("read", transfer.key, begin)
        transfer.version = self.store.version(transfer.key)
        try:
            transfer.shift, count = self.store.read_slab(transfer.key, block.array)
        except StoreError as error:
            for item in (error, error.__cause__, error.__context__):
                if item is not None:
                    item.__traceback__ = None
            return error
        seconds = time.perf_counter() - begin
        with self._lock:
            self.totals.reads += 1
            self.totals.cached_bytes += count.cached
            self.totals.disk_bytes += count.disk
            self.totals.seconds += seconds
        recorder = self.recorder
        if recorder is not None:
            if recorder is not noted:  # a trace that began during the read
                recorder.note("read", transfer.key, begin)
            recorder.note("arrived", transfer.key)
        return None

    def stop(self) -> list[threading.Thread]:
        """Ask the threads to end; what is still queued arrives with an error. Calling it again does nothing."""
        self._closed = True
        self.ahead.clear()
        if self._pid != os.getpid():
            return []
        threads, self._threads = self._threads, []
        for _ in threads:
            self._queue.put(None)
        self.arena.set_limit(0)  # Free pages go back now, and not when the last reference to this object does.
        return threads

    def _transfer(self, key: str) -> Transfer:
        if self._closed:
            raise closed_error(key)
        transfer = Transfer(key, self.store.slab_bytes(key), self.store.version(key), self.epoch)
        if self._delay_s:
            transfer.due = time.monotonic() + self._delay_s
        return transfer

    def _begin_read(self, transfer: Transfer, block: Block) -> None:
        if transfer.nbytes > _READ_AT_ONCE or not self._read_at_once(transfer, block):
            self._enqueue(transfer, block)

    def _drop_ahead(self) -> bool:
        key = self.ahead.drop_last()
        if key is not None:
            self._note_dropped(key)
        return key is not None

    def _note_dropped(self, key: str) -> None:
        recorder = self.recorder
        if recorder is not None:
            recorder.note("dropped", key)

    def _read_at_once(self, transfer: Transfer, block: Block) -> bool:
        """Read on the thread that starts the transfer, if that takes no disk."""
        if self._delay_s:
            return False
        recorder = self.recorder
        begin = 0.0 if recorder is None else time.perf_counter()
        try:
            found = self.store.read_cached_slab(transfer.key, block.array)
        except StoreError:  # for `finish` to raise
            return False
        if found is None:
            return False
        transfer.shift, count = found
        transfer.block, transfer.state, transfer.arrived = block, _QUEUED, True
        with self._lock:
            self.totals.reads += 1
            self.totals.cached_bytes += count.cached
        if recorder is not None:
            recorder.note("taken", transfer.key, begin)
            recorder.note("read", transfer.key, begin)
            recorder.note("arrived", transfer.key)
        return True

    def _enqueue(self, transfer: Transfer, block: Block) -> None:
        transfer.block = block
        recorder = self.recorder
        if recorder is not None:
            recorder.note("taken", transfer.key)
        transfer.done = threading.Lock()
        transfer.done.acquire()
        if self._delay_s:
            block.array.fill(0xFF)  # NaN in every floating type: a reader that does not wait is seen.
        transfer.state = _QUEUED
        self._queue.put(weakref.ref(transfer))
        if not self._threads:
            self._start_threads()

    def _start_threads(self) -> None:
        with self._spawning:
            if self._threads or self._closed:
                return
            self._threads = [
                threading.Thread(target=_serve, args=(self, self._queue), name=f"flextensor_fx-reader-{n}", daemon=True)
                for n in range(self._thread_count)
            ]
            for thread in self._threads:
                thread.start()

    def serve_one(self, ref: weakref.ref[Transfer]) -> None:
        """Do one queued read. Its locals keep the block referenced, so memory is never filled after it went to others."""
        transfer = ref()
        if transfer is None or transfer.block is None or transfer.done is None:
            return
        try:
            if self._delay_s:
                time.sleep(max(0.0, transfer.due - time.monotonic()))
            error = closed_error(transfer.key) if self._closed else self.fill(transfer, transfer.block)
        except Exception as other:  # noqa: BLE001 - a thread that dies would leave every later finish waiting for ever
            error = StoreError(f"weight {transfer.key!r}: its reader failed: {other!r}")
        transfer.error = error
        transfer.arrived = True
        transfer.done.release()


def closed_error(key: str) -> StoreError:
    """What any use after close raises."""
    return StoreError(f"weight {key!r}: its engine is closed; nothing can be read or written after close")


def _serve(reader: Reader, queue: SimpleQueue[weakref.ref[Transfer] | str | None]) -> None:
    while (item := queue.get()) is not None:
        if isinstance(item, str):
            reader.start_deferred()
        else:
            reader.serve_one(item)
