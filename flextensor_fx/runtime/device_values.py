"""The values of stored weights as tensors on the device, for eager code, which may read them and write to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import _disable_current_modes

from flextensor_fx.runtime.device import Device
from flextensor_fx.runtime.host_store import HostStore


@dataclass(slots=True)
class _Value:
    tensor: torch.Tensor  # everything given out is a view of it, so that its version counts their writes too
    written: int  # its version when it last was the same as the store's
    stored: int  # the store's version at that time


class DeviceValues:
    """Weights as device tensors, each copied when it is first asked for, and written back to the store once it has changed.

    Nothing of this is fast, and all of it synchronises: compiled calls read no weight this way.

    A write is noticed by the version counter that a tensor shares with its views. `.data` of such a tensor has one of its own:
    writes through that are not seen.

    Attributes:
        returned_bytes: written back so far.
    """

    def __init__(self, device: Device, store: HostStore) -> None:
        self.returned_bytes = 0
        self._device, self._store = device, store
        self._held: dict[str, _Value] = {}

    def __len__(self) -> int:
        return len(self._held)

    def tensor(self, key: str) -> torch.Tensor:
        """The weight on the device. All tensors of one weight share their memory for as long as any of them lives.

        Raises:
            StoreError: the store has no such key, or is closed.
            torch.OutOfMemoryError: the device has no room for it.
        """
        self.settle()
        held = self._held.get(key)
        if held is None:
            source = self._store.source(key)
            # The compiler describes real parameters while its modes are on, which would make a fake of what is copied here.
            with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
                value = self._device.empty(source.shape, source.stride(), source.dtype)
                value.copy_(source)
                # Readers may be on other streams than the one that copies.
                self._device.synchronize()
            held = self._held[key] = _Value(value, value._version, self._store.version(key))
        with _disable_current_modes():
            return held.tensor.detach()

    def settle(self) -> None:
        """Writes what has changed back to the store, and forgets the weights that nobody holds any more."""
        for key, held in list(self._held.items()):
            if held.tensor._version != held.written:
                self._device.synchronize()
                self._store.write(key, held.tensor)
                held.written, held.stored = held.tensor._version, self._store.version(key)
                self.returned_bytes += held.tensor.nbytes
            if _is_ours_alone(held.tensor):
                # Its memory goes to the next that asks on the stream it was allocated on; readers may be on others.
                self._device.synchronize()
                del self._held[key]

    def refresh(self, key: str) -> None:
        """The store has a new value: tensors of the weight that somebody holds get it too."""
        held = self._held.get(key)
        if held is not None and held.stored != self._store.version(key):
            with torch.no_grad():
                held.tensor.copy_(self._store.source(key))
            self._device.synchronize()
            held.written, held.stored = held.tensor._version, self._store.version(key)


def _is_ours_alone(tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) <= _OURS


def _uses_of_one() -> int:
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)


_OURS = _uses_of_one()
