"""Tensors of safetensors files, in pieces, so that little of a file is in memory at once; the next piece is read meanwhile."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from flextensor_fx.errors import StoreError
from flextensor_fx.runtime.container import ALIGN, Entry, round_up
from flextensor_fx.runtime.fileio import PositionalFile, ShortRead
from flextensor_fx.runtime.layout import WeightSpec, contiguous_stride, tensor_over

PIECE_BYTES = 8 << 20
"""Enough for a disk to be busy, little beside a weight."""

_POINTER_ALIGN, _BEST_ALIGN = 16, 64
_LEAST_DIRECT = 1 << 20  # Smaller tensors share pages, and a process may have no more than 65530 maps.
_LEAST_HUGE = 32 << 20


class PieceReader:
    """Reads tensors of open files. Not to be used by two threads at once.

    Args:
        on_read: told the bytes of each piece that has been used.
    """

    def __init__(self, on_read: Callable[[int], object] = lambda nbytes: None) -> None:
        self._on_read = on_read
        self._buffers: list[np.ndarray] = []
        self._thread: ThreadPoolExecutor | None = None

    def read(self, file: PositionalFile, entry: Entry, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The tensor on `device`, in memory of its own, row-major unless the file says otherwise.

        Raises:
            StoreError: it cannot be read in full.
        """
        spec = entry.spec
        if device.type == "cpu" and dtype == spec.dtype and spec.nbytes >= _LEAST_DIRECT:
            return self._read_whole(file, entry)
        if spec.stride != contiguous_stride(spec.shape):
            return self._read_whole(file, entry).to(device, dtype)
        value = torch.empty(spec.shape, dtype=dtype, device=device)
        flat, done = value.view(-1), 0
        for piece in self.pieces(file, entry):
            flat[done : done + piece.numel()].copy_(piece)
            done += piece.numel()
        return value

    def pieces(self, file: PositionalFile, entry: Entry) -> Iterator[torch.Tensor]:
        """The elements as they lie in the file, in 1-d tensors, each of which is overwritten once the next but one is taken.

        Raises:
            StoreError: they cannot be read in full.
        """
        spec = entry.spec
        steps = [(at, min(PIECE_BYTES, spec.nbytes - at)) for at in range(0, spec.nbytes, PIECE_BYTES)]
        buffers = [self._buffer(number) for number in range(min(2, len(steps)))]

        def read(step: int) -> torch.Tensor:
            at, nbytes = steps[step]
            return _read(file, spec, entry.offset + at, nbytes, buffers[step % 2]).view(spec.dtype)

        coming: Future[torch.Tensor] | None = None
        try:
            for step, (_, nbytes) in enumerate(steps):
                piece = read(step) if coming is None else coming.result()
                coming = self._executor().submit(read, step + 1) if step + 1 < len(steps) else None
                yield piece
                self._on_read(nbytes)
        finally:
            if coming is not None:  # else the read would go on into a buffer that another tensor uses
                coming.exception()

    def close(self) -> None:
        """Gives the buffers back and ends the thread."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self._buffers.clear()

    def _read_whole(self, file: PositionalFile, entry: Entry) -> torch.Tensor:
        spec = entry.spec
        memory = mmap.mmap(
            -1, round_up(entry.offset % ALIGN + spec.nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        if spec.nbytes >= _LEAST_HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(
                mmap.MADV_HUGEPAGE
            )  # fewer faults; a read into fresh small pages costs more than the disk does
        data = _read(file, spec, entry.offset, spec.nbytes, np.frombuffer(memory, np.uint8))
        self._on_read(spec.nbytes)
        return data.view(spec.dtype).as_strided(spec.shape, spec.stride)

    def _buffer(self, number: int) -> np.ndarray:
        while len(self._buffers) <= number:
            self._buffers.append(np.frombuffer(mmap.mmap(-1, PIECE_BYTES + ALIGN), np.uint8))
        return self._buffers[number]

    def _executor(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="flextensor_fx-pieces")
        return self._thread


def _read(file: PositionalFile, spec: WeightSpec, offset: int, nbytes: int, buffer: np.ndarray) -> torch.Tensor:
    """Bytes of a file in `buffer`, with the whole blocks around them, at an address that is a multiple of 16."""
    lead = offset % ALIGN
    try:
        file.read(buffer.data[: round_up(lead + nbytes)], offset - lead, lead + nbytes)
    except ShortRead as error:
        raise StoreError(
            f"weight {spec}: expected {nbytes} bytes at {offset} of {file.path}, found {max(0, error.found - lead)}; the file "
            "was truncated: fetch it again"
        ) from error
    except OSError as error:
        raise StoreError(
            f"weight {spec}: expected {nbytes} bytes at {offset} of {file.path}, found {error.strerror}; check the disk, then "
            "load again"
        ) from error
    shift = lead
    if lead % _POINTER_ALIGN:
        shift = lead // _BEST_ALIGN * _BEST_ALIGN
        begin = buffer.__array_interface__["data"][0]
        ctypes.memmove(begin + shift, begin + lead, nbytes)
    return tensor_over(WeightSpec(spec.key, (nbytes,), (1,), torch.uint8), buffer, shift)
