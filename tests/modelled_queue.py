"""What is queued on the modelled device: streams, events and copies."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from modelled_races import Block, Line

if TYPE_CHECKING:
    from modelled_capture import Graph

UNWRITTEN = 0xFF


class Stream:
    """A stream. While it is part of a capture, `line` is a queue of that graph's.

    Attributes:
        graph: the capture that it is part of.
        user: it is one of the user's, not of an engine's.
    """

    def __init__(self, line: Line, user: bool = False) -> None:
        self.own = self.line = line
        self.user = user
        self.graph: Graph | None = None

    def __repr__(self) -> str:
        return f"<{self.line.name}>"


class Event:
    """An event. `clock` is what its last record comes after, None before the first; `line` where that was.

    Attributes:
        seconds: when it was queued; of marks.
        graph, place: the capture in which it was recorded last, and the number of the record there.
    """

    __slots__ = ("clock", "graph", "line", "place", "seconds")

    def __init__(self) -> None:
        self.clock: list[int] | None = None
        self.graph: Graph | None = None
        self.line: Any = None
        self.place = 0
        self.seconds = 0.0


class Copy:
    """A queued copy: `nbytes` from `source` to `into`, both addresses, or by tensors where the two lie differently."""

    __slots__ = ("block", "into", "keep", "layout", "low", "nbytes", "owner", "pinned", "source", "span", "tick")

    block: Block
    owner: int
    low: int
    span: int
    into: int
    source: int
    nbytes: int
    layout: tuple[torch.dtype, torch.Size, tuple[int, ...]] | None
    keep: Any
    pinned: bool
    tick: int

    def land(self) -> None:
        """Moves the bytes, if the destination is still there."""
        block, layout = self.block, self.layout
        if layout is None and block.memory is None:
            if block.storage is not None and block.owner == self.owner:
                memory = block.storage()  # held, else another thread could free it here
                if memory is not None:
                    ctypes.memmove(self.into, self.source, self.nbytes)
            return
        memory = self._memory()
        if memory is None:
            return
        if layout is None:
            ctypes.memmove(self.into, self.source, self.nbytes)
            return
        dtype, size, stride = layout
        with by_the_model(), torch.no_grad():
            offset = (self.into - memory.data_ptr()) // dtype.itemsize
            torch.empty(0, dtype=dtype).set_(memory, offset, size, stride).copy_(self.keep)

    def blank(self) -> None:
        """Has the destination hold 0xFF."""
        memory = self._memory()
        if memory is None:
            return
        if self.layout is None:
            ctypes.memset(self.into, UNWRITTEN, self.nbytes)
            return
        dtype, size, stride = self.layout
        with by_the_model(), torch.no_grad():
            size, stride = (*size, dtype.itemsize), (*(step * dtype.itemsize for step in stride), 1)
            offset = self.into - memory.data_ptr()
            torch.empty(0, dtype=torch.uint8).set_(memory, offset, size, stride).fill_(UNWRITTEN)

    def alive(self) -> bool:
        """Whether the destination is still there."""
        return self._memory() is not None

    def _memory(self) -> torch.UntypedStorage | None:
        block = self.block
        if block.memory is not None:
            return torch.from_numpy(block.memory).untyped_storage()
        return None if block.storage is None or block.owner != self.owner else block.storage()


class _Busy(threading.local):
    depth = 0


BUSY = _Busy()


@contextmanager
def by_the_model() -> Iterator[None]:
    BUSY.depth += 1
    try:
        yield
    finally:
        BUSY.depth -= 1


def extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from a tensor's first to its last, both included."""
    if 0 in size:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
