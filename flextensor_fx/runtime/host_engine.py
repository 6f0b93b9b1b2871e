"""The transfer engine of the host tier: weights by key, out of host memory, into device memory that the graph owns.

A copy runs on a stream of the engine's own. Three orders make it safe, and each is an event of the device:

1. The copy comes after all that was queued on the stream that was current when it was started. Its memory comes from torch's
   allocator on that very stream, and may have been another tensor's until then.
2. What is queued behind `finish` comes after the copy.
3. A transfer that is dropped unfinished gives its memory back behind the copy.

The host waits for nothing, unless a weight is written.
"""

from __future__ import annotations

import gc
import os
import uuid
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch

from flextensor_fx.errors import OffloadError, StoreError
from flextensor_fx.passes.schedule import format_bytes
from flextensor_fx.runtime.ahead import Ahead
from flextensor_fx.runtime.device import Device
from flextensor_fx.runtime.device_trace import DeviceRecorder
from flextensor_fx.runtime.device_transfer import Books, DeviceTransfer
from flextensor_fx.runtime.device_values import DeviceValues
from flextensor_fx.runtime.host_store import HostStore
from flextensor_fx.runtime.layout import converted
from flextensor_fx.runtime.stats import DeviceStats, EngineStats
from flextensor_fx.runtime.trace import Recorder


class HostEngine:
    """Starts and finishes transfers of weights from host memory to one device.

    Args:
        uid: of the store, for messages.
        store: closed with the engine.
        device: that the weights go to.
        pool_bytes: that the weights of one graph may take on the device together; their schedule sees to that, the engine counts.

    Attributes:
        serves_backwards: whether weights of it are in the backward graph of a forward.
        setup_seconds: that moving the weights here has taken.
    """

    def __init__(self, uid: str, store: HostStore, device: Device, pool_bytes: int) -> None:
        self.uid = uid
        self.instance = uuid.uuid4().hex
        self.store = store
        self.device = device
        self.recorder: Recorder | None = None
        self._pool_bytes = pool_bytes
        self._copies = device.new_stream()
        self._books = Books(device)
        self._values = DeviceValues(device, store)
        self._ahead: Ahead[DeviceTransfer] = Ahead(DeviceTransfer.drop)
        self._transfers = self._started_ahead = self._captured = self._copied = self._peak_live = 0
        self.serves_backwards = False
        self.setup_seconds = 0.0
        self._closed = False
        self._compiled = True
        self._finalizer = weakref.finalize(self, _close, store, device, os.getpid())

    # --- transfers -------------------------------------------------------------------------------------------------
    def start(self, key: str) -> DeviceTransfer:
        """Begin to copy a weight, behind all that is queued on the current stream. The host does not wait.

        Returns:
            The transfer; one that `start_ahead` began, if there is one of this key, of this value and on this stream.

        Raises:
            StoreError: the store has no such key, the engine is closed, or the device has no memory left.
        """
        if self.device.capturing():
            # What was begun outside of the capture cannot be waited for in it: copies for the next call stay as they are.
            return self._capture(key)
        if self._books.left:
            self._books.let_go()
        self.settle()
        if self._ahead:
            started = self._take_ahead(key)
            if started is not None:
                return started
            self._make_room(self.store.spec(key).nbytes)
        return self._start(key)

    def _start(self, key: str, captured: bool = False) -> DeviceTransfer:
        device, copies, books = self.device, self._copies, self._books
        source = self.store.source(key)
        stream = device.current_stream()
        weight = self._memory_for(key, source)
        recorder = self.recorder
        if recorder is not None:
            recorder.note("issued", key)
            recorder.note("taken", key)
        event = books.take_event()
        # The memory may have been another tensor's, which kernels that are queued here have yet to read.
        device.record(event, stream)
        device.wait(copies, event)
        if recorder is not None:
            recorder.note("read", key)
        device.copy(weight, source, copies)
        if recorder is not None:
            recorder.note("arrived", key)
        device.record(event, copies)
        books.hold(weight)
        self._transfers += 1
        self._copied += weight.nbytes
        self._peak_live = max(self._peak_live, books.live)
        return DeviceTransfer(books, key, weight, stream, event, self.store.version(key), captured)

    def _capture(self, key: str) -> DeviceTransfer:
        if not self.store.is_pinned(key):
            raise OffloadError(
                f"weight {key!r}: a graph of the device is being captured, and the weight's memory is not pinned "
                f"({self.store.unpinned_because}), so that its copy cannot be part of it; switch CUDA graphs off"
            )
        self._captured += 1
        return self._start(key, captured=True)

    def finish(self, transfer: DeviceTransfer) -> torch.Tensor:
        """Have the current stream wait for a weight. The host does not wait.

        Returns:
            A tensor of the weight's shape, stride and dtype that owns its memory.

        Raises:
            StoreError: the engine is closed.
        """
        if self._closed:
            raise self._closed_error(transfer.key)
        weight = transfer.weight
        if weight is None:
            raise AssertionError(f"{transfer!r} was finished before; start another one")
        device = self.device
        stream = device.current_stream()
        recorder = self.recorder
        if recorder is not None:
            recorder.note("waits", transfer.key)
        if transfer.version != self.store.version(transfer.key):  # written since it was started
            transfer.drop()
            return self.finish(self._start(transfer.key, transfer.captured))
        if stream == transfer.stream:
            transfer.weight = None
            device.wait(stream, transfer.event)
            self._books.return_event(transfer.event)
        else:
            weight = self._moved(transfer, stream)
        if recorder is not None:
            recorder.note("waited", transfer.key)
        return weight

    def _moved(self, transfer: DeviceTransfer, stream: Any) -> torch.Tensor:
        """The weight in memory of `stream`: that of another one could be handed on while kernels here still read it."""
        device, weight = self.device, transfer.weight
        assert weight is not None
        transfer.weight = None
        device.wait(stream, transfer.event)
        with torch.no_grad():
            moved = device.empty(weight.shape, weight.stride(), weight.dtype).copy_(weight)
        device.record(transfer.event, stream)
        device.wait(transfer.stream, transfer.event)
        self._books.return_event(transfer.event)
        self._books.give_up(weight)
        self._books.hold(moved)
        return moved

    def give_up(self, tensors: Iterable[torch.Tensor]) -> None:
        """The weights are done with: they no longer count as held, though their memory goes with the last reference to it."""
        for tensor in tensors:
            self._books.give_up(tensor)

    # --- transfers for the next call ---------------------------------------------------------------------------------
    def start_ahead(self, key: str) -> None:
        """Begin to copy a weight that the next call will `start`, which then gets this transfer.

        Does nothing without room in the pool, while a graph is captured, which could not hand it on, nor where the last such
        copies of the weight were made for nothing, or while somebody holds a tensor over its host memory, since a write to that
        is not seen. What is held for the next call makes room for other transfers.

        Raises:
            StoreError: as `start`.
        """
        if self.device.capturing() or self._ahead.renew(key) or self._ahead.skip(key):
            return
        if self._compiled and self.store.is_held(key):
            # What a compilation leaves behind holds tensors of weights in cycles, which may not be collected for long.
            self._compiled = False
            gc.collect()
        if self.store.is_held(key):
            return
        if self._books.live + self.store.spec(key).nbytes > self._pool_bytes:
            return
        transfer = self._start(key)
        self._started_ahead += 1
        self._ahead.put(transfer)

    def _take_ahead(self, key: str) -> DeviceTransfer | None:
        transfer = self._ahead.take(key)
        if transfer is None:
            return None
        if transfer.version == self.store.version(key) and transfer.stream == self.device.current_stream():
            return transfer
        transfer.drop()
        self._ahead.dropped += 1
        return None

    def _drop_ahead(self) -> bool:
        key = self._ahead.drop_last()
        if key is not None and self.recorder is not None:
            self.recorder.note("dropped", key)
        return key is not None

    def _make_room(self, nbytes: int) -> None:
        while self._ahead and self._books.live + nbytes > self._pool_bytes:
            self._drop_ahead()

    # --- values ------------------------------------------------------------------------------------------------------
    def settle(self) -> None:
        """Brings what eager code has written to weights into the store, from where a replayed graph copies."""
        if self._values:
            self._values.settle()

    def read(self, key: str) -> torch.Tensor:
        """The value of a weight now, on the device, in memory of its own.

        Raises:
            StoreError: as `start`.
        """
        self.settle()
        source = self.store.source(key)
        value = self._memory_for(key, source)
        with torch.no_grad():
            return value.copy_(source)

    def mapped(self, key: str) -> torch.Tensor:
        """The value of a weight as a device tensor; a write to it, or to a view of it, is in the store before the next call.

        Raises:
            StoreError: the store has no such key, or the engine is closed.
        """
        if not self.aliases:
            return self._values.tensor(key, shown=True)
        return self.host_value(key)

    def borrowed(self, key: str) -> torch.Tensor:
        """As `mapped`, for one op: the caller tells by `note_shown` and `note_written` what became of it."""
        return self._values.tensor(key, shown=False)

    def note_shown(self, key: str) -> None:
        """A tensor over the memory of what `borrowed` gave is in the hands of eager code."""
        self._values.note_shown(key)

    def note_written(self, key: str) -> None:
        """What `borrowed` gave was written to."""
        self._values.note_written(key)
        if self._captured:
            # Whoever captured a call by himself replays it without asking here.
            self._values.settle()

    def host_value(self, key: str) -> torch.Tensor:
        """The value of a weight as a host tensor that is the store's own memory.

        Raises:
            StoreError: the store has no such key, or the engine is closed.
        """
        self.settle()
        source = self.store.source(key)
        self._ahead.discard(self.store.travels_as(key))  # a write to it is not seen, and must reach the very next call
        with torch.inference_mode(False):
            return torch.empty(0, dtype=source.dtype, device="cpu").set_(
                source.untyped_storage(), source.storage_offset(), source.shape, source.stride()
            )

    @property
    def aliases(self) -> bool:
        """Whether what `mapped` returns is the store's own memory."""
        return self.device.shares_memory

    def write(self, key: str, tensor: torch.Tensor) -> None:
        """Give a weight a new value, as `weight.copy_(tensor)` would: broadcast and converted. Waits for the device.

        Raises:
            OffloadError: the shape cannot be broadcast to the weight's.
            StoreError: the store has no such key, or the engine is closed.
        """
        self.settle()
        spec = self.store.spec(key)
        with torch.no_grad():
            tensor = converted(spec, tensor)
            # Copies of the old value may be under way, also in a graph that the device replays.
            self.device.synchronize()
            self.store.write(key, tensor)
        self._values.refresh(key)

    # --- the rest ----------------------------------------------------------------------------------------------------
    def seal(self) -> None:
        """The weights are written: pins the memory they are in."""
        self.store.pin()

    def quiesce(self) -> None:
        """Wait until the device has done all that was queued."""
        self.device.synchronize()

    @contextmanager
    def trace(self) -> Iterator[Recorder]:
        """Notes every event of transfers until the block ends, at the times of the device; at most one block at a time notes."""
        before, recorder = self.recorder, DeviceRecorder(self.device, self._copies)
        for key, _ in self._ahead.items():
            recorder.note("issued", key)
            recorder.note("taken", key)
        self.recorder = recorder
        try:
            yield recorder
        finally:
            self.recorder = before

    def note_compilation(self) -> None:
        """A graph of these weights was compiled; see `start_ahead`."""
        self._compiled = True

    def set_pool(self, nbytes: int) -> None:
        """Change the bytes that the weights of one graph may take together."""
        self._pool_bytes = nbytes
        self._make_room(0)

    def stats(self) -> EngineStats:
        """What was done so far."""
        store = self.store
        device = DeviceStats(
            str(self.device.device),
            self._copied,
            self._values.returned_bytes,
            store.pinned_bytes,
            store.pageable_bytes,
            self._captured,
            self.device.peak_allocated(),
            store.unpinned_because,
        )
        return EngineStats(
            self._transfers, 0, 0, 0, 0.0, 0.0, MappingProxyType({}), 0, self._pool_bytes, self._peak_live, 0,
            self._started_ahead, self._ahead.dropped, self.setup_seconds, device,
        )  # fmt: skip

    def close(self) -> None:
        """Wait for the device and give the memory back. Calling it again does nothing.

        A backward that was captured may be replayed by whoever still holds its forward's results, and reads the weights' memory:
        that goes at exit then.
        """
        if self._closed:
            return
        self._closed = True
        while self._drop_ahead():
            pass
        if self._captured and self.serves_backwards:
            self._finalizer.detach()
            weakref.finalize(torch, _close, self.store, self.device, os.getpid())
        else:
            self._finalizer()

    def _memory_for(self, key: str, source: torch.Tensor) -> torch.Tensor:
        try:
            return self.device.empty(source.shape, source.stride(), source.dtype)
        except torch.OutOfMemoryError as error:
            raise self._no_memory(key, source.nbytes) from error

    def _no_memory(self, key: str, nbytes: int) -> StoreError:
        free, total = self.device.memory()
        return StoreError(
            f"weight {key!r}: expected room for {format_bytes(nbytes)} on {self.device.device}, found {format_bytes(free)} free "
            f"of {format_bytes(total)}, while streamed weights had {format_bytes(self._books.live)} of at most "
            f"{format_bytes(self._pool_bytes)}; activations or another process have the rest: lower the budget, or free memory "
            "there, and call again"
        )

    def _closed_error(self, key: str) -> StoreError:
        return StoreError(f"weight {key!r}: its engine is closed; nothing can be read or written after close")


def _close(store: HostStore, device: Device, pid: int) -> None:
    if pid != os.getpid():
        return  # the driver and what is pinned belong to the process that this one was forked from
    if device.capturing():
        # Garbage is collected at any time, and the host may not wait in a capture: the memory goes at exit.
        weakref.finalize(torch, _close, store, device, pid)
        return
    device.synchronize()
    store.close()
