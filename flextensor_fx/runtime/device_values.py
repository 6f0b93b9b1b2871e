"""The values of stored weights as tensors on the device, for eager code, which may read them and write to them."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from flextensor_fx._torch_versions import without_modes
from flextensor_fx.runtime.device import Device
from flextensor_fx.runtime.host_store import HostStore
from flextensor_fx.runtime.layout import has_other_holders


@dataclass(slots=True)
class _Value:
    tensor: torch.Tensor
    stored: int  # the store's version of it
    written: bool = False  # since then
    shown: bool = False  # eager code has had a tensor over its memory, and may have written to it at any time since


class DeviceValues:
    """Weights as device tensors, each copied when it is first asked for, and written back to the store where it may have changed.

    Nothing of this is fast, and all of it synchronises: compiled calls read no weight this way. Safe from any thread.

    Attributes:
        returned_bytes: written back so far.
    """

    def __init__(self, device: Device, store: HostStore) -> None:
        self.returned_bytes = 0
        self._device, self._store = device, store
        self._held: dict[str, _Value] = {}
        # A value that one thread has made and not handed out yet looks to another as if nobody held it.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._held)

    def tensor(self, key: str, *, shown: bool) -> torch.Tensor:
        """The weight on the device. All tensors of one weight share their memory for as long as any of them lives.

        Args:
            shown: whether it, or a view of it, gets out of the caller's hands; else a write is made known by `note_written`.

        Raises:
            StoreError: the store has no such key, or is closed.
            torch.OutOfMemoryError: the device has no room for it.
        """
        with self._lock:
            self.settle()
            held = self._held.get(key)
            # The compiler describes real parameters while its modes are on, which would make a fake of what is copied here.
            with without_modes(), torch.inference_mode(False), torch.no_grad():
                if held is None:
                    source = self._store.source(key)
                    value = self._device.empty(source.shape, source.stride(), source.dtype)
                    value.copy_(source)
                    # Readers may be on other streams than the one that copies.
                    self._device.synchronize()
                    held = self._held[key] = _Value(value, self._store.version(key))
                held.shown |= shown
                return held.tensor.detach()

    def note_shown(self, key: str) -> None:
        """Somebody holds a tensor over the value's memory from now on."""
        self._held[key].shown = True

    def note_written(self, key: str) -> None:
        """The value was written to."""
        self._held[key].written = True

    def settle(self) -> None:
        """Writes what may have changed back to the store, and forgets the weights that nobody holds any more."""
        with self._lock:
            for key, held in list(self._held.items()):
                alone = not has_other_holders(held.tensor)
                if alone or held.written or held.shown:
                    # Readers and writers may be on any stream; and copies from the store may be under way.
                    self._device.synchronize()
                if held.written or held.shown:
                    self._store.write(key, held.tensor)
                    held.written, held.stored = False, self._store.version(key)
                    self.returned_bytes += held.tensor.nbytes
                if alone:
                    del self._held[key]

    def refresh(self, key: str) -> None:
        """The store has a new value: tensors of the weight that somebody holds get it too."""
        with self._lock:
            held = self._held.get(key)
            if held is not None and held.stored != self._store.version(key):
                with torch.no_grad():
                    held.tensor.copy_(self._store.source(key))
                self._device.synchronize()
                held.stored = self._store.version(key)
