"""The value of a stored weight as a plain tensor over the store's own file."""

from __future__ import annotations

import mmap

import numpy as np
import torch

from flextensor_fx.runtime.store import Store


def map_weight(store: Store, key: str) -> torch.Tensor:
    """A tensor of the weight's shape, stride and dtype that aliases its bytes in the file.

    Pages come in as they are touched and can be dropped again, so a model that does not fit can be read through it. A write
    reaches the file's pages at once, and every later read of the store sees it: the kernel writes dirty pages back before a
    read that goes past the page cache.

    A weight served in place from the user's file is copied into a file of our own first, since the caller may write.

    Raises:
        StoreError: the weight cannot be read.
    """
    file, offset = store.writable_place(key)
    spec = store.spec(key)
    begin = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    pages = mmap.mmap(file, offset - begin + spec.nbytes, mmap.MAP_SHARED, offset=begin)
    array = np.frombuffer(pages, np.uint8, spec.nbytes, offset - begin)
    with torch.inference_mode(False):
        storage = torch.from_numpy(array).untyped_storage()
        return torch.empty(0, dtype=spec.dtype).set_(storage, 0, spec.shape, spec.stride)
