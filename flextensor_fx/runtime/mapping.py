"""The value of a stored weight as a plain tensor over the store's own file."""

from __future__ import annotations

import mmap

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from flextensor_fx._torch_versions import storage_again, without_modes
from flextensor_fx.runtime.store import Store


class Mappings:
    """Weights as tensors over the store's own file.

    All tensors of one weight share one storage for as long as any of them lives: that is how whoever saves a model tells that
    two names are one weight.
    """

    def __init__(self) -> None:
        self.given = 0  # tensors so far
        self._storages: dict[str, tuple[tuple[int, int], StorageWeakRef]] = {}

    def lives(self, key: str) -> bool:
        """Whether anybody holds a tensor of `key`, and may write to it at any time."""
        known = self._storages.get(key)
        return known is not None and not known[1].expired()

    def tensor(self, store: Store, key: str) -> torch.Tensor:
        """A tensor of the weight's shape, stride and dtype that aliases its bytes in the file.

        Pages come in as they are touched and can be dropped again, so a model that does not fit can be read through it. A write
        reaches the file's pages at once, and every later read of the store sees it: the kernel writes dirty pages back before
        a read that goes past the page cache.

        A weight served in place from the user's file is copied into a file of our own first, since the caller may write.

        Raises:
            StoreError: the weight cannot be read.
        """
        self.given += 1
        place = store.writable_place(key)
        spec = store.spec(key)
        storage = None
        known = self._storages.get(key)
        if known is not None and known[0] == place:  # a forked child has a place of its own
            storage = storage_again(known[1])
        # The compiler describes real parameters while its modes are on, which would make a fake of what is mapped here.
        with without_modes(), torch.inference_mode(False):
            if storage is None:
                storage = _map(*place, spec.nbytes)
                self._storages[key] = place, StorageWeakRef(storage)
            return torch.empty(0, dtype=spec.dtype, device="cpu").set_(storage, 0, spec.shape, spec.stride)


def _map(file: int, offset: int, nbytes: int) -> torch.UntypedStorage:
    begin = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    pages = mmap.mmap(file, offset - begin + nbytes, mmap.MAP_SHARED, offset=begin)
    return torch.from_numpy(np.frombuffer(pages, np.uint8, nbytes, offset - begin)).untyped_storage()
