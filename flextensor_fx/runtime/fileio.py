"""Positional reads and writes on one file: from the page cache where it has the pages, else past it."""

from __future__ import annotations

import ctypes
import errno
import os
import time
import weakref
from dataclasses import dataclass

import numpy as np

from flextensor_fx.runtime.container import ALIGN

# One system call each: at every return the calling thread needs the GIL back, so small pieces leave the disk idle.
_READ_PIECE = 64 << 20
_WRITE_PIECE = 64 << 20
_SYS_CACHESTAT = 451
_CacheRange = ctypes.c_uint64 * 2  # offset, length
_CacheCounts = ctypes.c_uint64 * 5  # the first: pages in the cache
_LIBC = ctypes.PyDLL(None)  # Keeps the GIL: getting it back may take 5 ms, the call takes 3 us.


@dataclass(frozen=True)
class ReadCount:
    """Bytes that one read took from the page cache and from the disk."""

    cached: int
    disk: int


class ShortRead(OSError):
    """The file ended before the wanted bytes did.

    Attributes:
        found: bytes that were there.
    """

    def __init__(self, found: int) -> None:
        super().__init__(errno.EIO, f"the file ends after {found} bytes of it")
        self.found = found


class PositionalFile:
    """An open file, read by offset from any thread; its descriptors close with it.

    Attributes:
        path: what was opened, for messages; the file may have been removed since.
        direct: whether reads go past the page cache (O_DIRECT); turns False where the file system refuses.
    """

    def __init__(self, path: str, *, writable: bool = False, create: bool = False, direct: bool = True) -> None:
        flags = os.O_RDWR if writable or create else os.O_RDONLY
        if create:
            flags |= os.O_CREAT | os.O_EXCL
        self.path = path
        self._fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        self._direct_fd = -1
        self._finalizer = weakref.finalize(self, _close, [self._fd])
        self.direct = False
        self._probe = True
        if direct and hasattr(os, "O_DIRECT"):
            try:
                self._direct_fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    self._finalizer()
                    raise
            else:
                self.direct = True
                self._finalizer.detach()
                self._finalizer = weakref.finalize(self, _close, [self._fd, self._direct_fd])

    @property
    def fd(self) -> int:
        """The buffered descriptor."""
        return self._fd

    def stat(self) -> os.stat_result:
        """fstat of the open file, whatever has become of its name."""
        return os.fstat(self._fd)

    def reserve(self, nbytes: int) -> None:
        """Give the file `nbytes` bytes of disk now, so that no later write runs out of it.

        Raises:
            OSError: ENOSPC, and what ftruncate raises.
        """
        os.ftruncate(self._fd, nbytes)
        try:
            os.posix_fallocate(self._fd, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data` at `offset`, through the page cache."""
        done = 0
        while done < len(data):
            done += os.pwrite(self._fd, data[done : done + _WRITE_PIECE], offset + done)

    def drop_cache(self) -> None:
        """Write dirty pages to the disk and take the file out of the page cache. Blocks until it is done."""
        os.fdatasync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self, buffer: memoryview, offset: int, needed: int) -> ReadCount:
        """Fill `buffer` from `offset`; at least the first `needed` bytes.

        What follows `needed` bytes exists to let a direct read end at a multiple of 4096, and holds anything afterwards.
        Direct reads happen where address, offset and length are such multiples.

        Raises:
            ShortRead: the file ends before `needed` bytes.
            OSError: what the read raised.
        """
        cached = disk = 0
        aligned = offset % ALIGN == 0 and np.frombuffer(buffer, np.uint8).__array_interface__["data"][0] % ALIGN == 0
        while cached + disk < needed:
            done = cached + disk
            piece = buffer[done : min(len(buffer), done + _READ_PIECE)]
            wanted = min(len(piece), needed - done)
            if self._is_cached(offset + done, wanted):
                count = self._read_cached(piece[:wanted], offset + done)
                cached += count
                if count:
                    continue
            count = 0
            if aligned and self.direct and done % ALIGN == 0:
                count = self._read_direct(piece, offset + done)
            # At the end of a file a direct read may be short of the truth; the buffered one decides.
            if count == 0:
                count = os.preadv(self._fd, [piece[:wanted]], offset + done)
            if count == 0:
                raise ShortRead(done)
            disk += min(count, wanted)
        return ReadCount(cached, disk)

    def read_cached(self, buffer: memoryview, offset: int) -> bool:
        """Fill `buffer` from the page cache, if that has all of it; otherwise what it holds is undefined."""
        return self._is_cached(offset, len(buffer)) and self._read_cached(buffer, offset) == len(buffer)

    def time_read(self, buffer: memoryview, offset: int) -> float:
        """Seconds that one read of the disk takes; buffer and offset as for a direct read."""
        fd = self._direct_fd if self.direct else self._fd
        if not self.direct:
            os.posix_fadvise(fd, offset, len(buffer), os.POSIX_FADV_DONTNEED)
        begin = time.perf_counter()
        os.preadv(fd, [buffer], offset)
        return time.perf_counter() - begin

    def close(self) -> None:
        """Close the descriptors. Calling it again does nothing."""
        self._finalizer()

    def _is_cached(self, offset: int, length: int) -> bool:
        # A plain RWF_NOWAIT read as a probe would start readahead on a miss (Linux 5.9 and later), and the disk would be
        # read twice.
        if not self._probe:
            return False
        begin = offset // ALIGN * ALIGN
        pages = -(-(offset + length - begin) // ALIGN)
        counts = _CacheCounts()
        if _LIBC.syscall(_SYS_CACHESTAT, self._fd, _CacheRange(begin, pages * ALIGN), counts, 0) != 0:
            self._probe = False  # Before Linux 6.5, or a file system without it.
            return False
        return counts[0] >= pages

    def _read_cached(self, piece: memoryview, offset: int) -> int:
        try:
            return os.preadv(self._fd, [piece], offset, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP:
                self._probe = False
            elif error.errno != errno.EAGAIN:
                raise
            return 0

    def _read_direct(self, piece: memoryview, offset: int) -> int:
        length = len(piece) // ALIGN * ALIGN
        if length == 0:
            return 0
        try:
            return os.preadv(self._direct_fd, [piece[:length]], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.direct = False
            return 0


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
