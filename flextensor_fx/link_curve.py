"""The transfer curve of the disk tier: reads of several sizes, timed as the engine reads, and kept per machine and disk."""

from __future__ import annotations

import datetime
import math
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from ._json_files import JsonFormat
from .errors import ProfileError, StoreError
from .link_profile import LinkPoint, LinkProfile, fit_link
from .machine_cache import keep, kept_file, read_kept
from .runtime.arena import LEAST_HUGE, Arena
from .runtime.container import ALIGN, round_up
from .runtime.fileio import PositionalFile
from .runtime.session_dir import choose_base, mount_of

LARGEST = 64 << 20
"""The engine reads larger weights in pieces of this size, so that the curve goes on as a line."""

_LEAST_SAMPLES = 5
_ENOUGH = 0.02  # of its median: the error of a median at which a size is measured well enough
_GOLDEN = (math.sqrt(5) - 1) / 2


def curve_sizes(largest: int, count: int = 8) -> tuple[int, ...]:
    """About `count` sizes from 4 KiB to `largest` bytes, at most LARGEST, in equal ratios; all multiples of 4096."""
    pages = max(1, round_up(min(largest, LARGEST)) // ALIGN)
    return tuple(sorted({round(pages ** (k / max(count - 1, 1))) * ALIGN for k in range(count)}))


def measure_curve(
    files: Iterable[PositionalFile],
    sizes: Sequence[int] = (),
    *,
    samples: int = 40,
    seconds: float = 1.0,
    pool: int = LEAST_HUGE,
    beside: Callable[[], object] | None = None,
) -> LinkProfile:
    """Times reads past the page cache where possible, into memory that is reused, as the engine's reader does them.

    1. One round over all sizes warms up and is dropped. It ends where five rounds would take more than `seconds`.
    2. Then rounds over all sizes follow, so that a disturbance that passes meets each size alike. From the fifth on a size is
       left out once the spread of its times, by the root of their number, is at most 2%.

    Args:
        files: the largest is read, at places all over it; for an engine, `engine.store.files`.
        sizes: bytes of the reads, rounded up to multiples of 4096 and cut to the file; () takes `curve_sizes` of the file.
        samples: most reads per size; at least 5 are made.
        seconds: about as long as it may take.
        pool: bytes of the engine's pool. From 32 MiB on its memory is in huge pages, into which a fast disk is read at more than
            twice the rate.
        beside: called again and again on this thread while another one reads. The reader shares the cores with compute, so
            that a disk at rest looks faster than one that is read while a model runs; give it a step of that model, or one
            like it. It should take at most some tens of milliseconds.

    Raises:
        StoreError: there is no file, none of at least 4096 bytes, or a read failed.
        Exception: whatever `beside` raises.
    """
    file = max(files, key=lambda f: f.stat().st_size, default=None)
    size = 0 if file is None else file.stat().st_size // ALIGN * ALIGN
    if file is None or not size:
        found = "none" if file is None else f"{file.path} of {file.stat().st_size} bytes"
        raise StoreError(
            f"link curve: expected a file of at least {ALIGN} bytes to read, found {found}; write it first"
        )
    wanted = sorted({min(max(round_up(n), ALIGN), size, LARGEST) for n in sizes or curve_sizes(size)})
    sampler = _Sampler(file, size, wanted, max(samples, _LEAST_SAMPLES), seconds, pool)
    times = sampler.run() if beside is None else _run_beside(sampler, beside)
    how = ("at rest" if beside is None else "while computing") + ", into small pages" * (pool < LEAST_HUGE)
    today = datetime.date.today().isoformat()
    return fit_link(
        [LinkPoint(n, median(found) * 1e3, _spread(found)) for n, found in times.items()],
        f"measured on {platform.node()}, {today}, {how}",
    )


def _run_beside(sampler: _Sampler, beside: Callable[[], object]) -> dict[int, list[float]]:
    with ThreadPoolExecutor(1, "flextensor_fx-link") as pool:
        reading = pool.submit(sampler.run)
        try:
            while not reading.done():
                beside()
        finally:
            sampler.stop.set()  # else leaving the pool would wait for all of its reads when `beside` has failed
        return reading.result()


class _Sampler:
    """Reads of one file: the seconds each took, by size."""

    def __init__(
        self, file: PositionalFile, size: int, sizes: Sequence[int], samples: int, seconds: float, pool: int
    ) -> None:
        self._file, self._size, self._sizes = file, size, sizes
        self._samples, self._seconds, self._pool = samples, seconds, pool
        self._reads = 0
        self.stop = threading.Event()

    def run(self) -> dict[int, list[float]]:
        largest = self._sizes[-1]
        block = Arena(self._pool).take(
            largest, force=True
        )  # as the engine's memory: aligned, in huge pages if it is large
        assert block is not None, f"a forced block of {largest} bytes was refused"
        block.array.fill(0)
        buffer = block.array.data
        deadline = time.perf_counter() + self._seconds
        times: dict[int, list[float]] = {n: [] for n in self._warm_up(buffer)}
        active = list(times)
        while active and not self.stop.is_set():
            for n in active:
                if len(times[n]) < _LEAST_SAMPLES or time.perf_counter() < deadline:
                    times[n].append(self._read(buffer, n))
            if time.perf_counter() >= deadline and min(map(len, times.values())) >= _LEAST_SAMPLES:
                break
            active = [n for n in active if not self._enough(times[n])]
        return times

    def _warm_up(self, buffer: memoryview) -> list[int]:
        kept: list[int] = []
        spent = last = 0.0
        for n in self._sizes:
            expected = last * n / kept[-1] if kept else 0.0  # at most: part of it is latency
            if len(kept) >= 2 and _LEAST_SAMPLES * (spent + expected) > self._seconds:
                break
            last = self._read(buffer, n)
            spent += last
            kept.append(n)
        return kept

    def _read(self, buffer: memoryview, nbytes: int) -> float:
        self._reads += 1
        share = self._reads * _GOLDEN % 1  # spread evenly over the file whenever it ends, and never the place just read
        place = int(share * (self._size - nbytes)) // ALIGN * ALIGN
        try:
            return self._file.time_read(buffer[:nbytes], place)
        except OSError as error:
            raise StoreError(f"link curve: {self._file.path} cannot be read: {error}; check the disk") from error

    def _enough(self, times: Sequence[float]) -> bool:
        if len(times) < _LEAST_SAMPLES:
            return False
        return len(times) >= self._samples or _spread(times) / math.sqrt(len(times)) <= _ENOUGH


def _spread(times: Sequence[float]) -> float:
    middle = median(times)
    return median(abs(t - middle) for t in times) / middle


# --- the curve of a directory, kept -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Key:
    """What a curve is of: a directory, by its st_dev and its mount, on a machine; beside compute, into huge pages or not."""

    machine: str
    device: int
    mount: str
    computing: bool
    huge: bool


@dataclass(frozen=True)
class _Kept:
    key: _Key
    largest: int
    link: LinkProfile


_FORMAT = JsonFormat(_Kept, "link", 1, ProfileError, "link_of", "measure again")


def link_of(
    store_dir: str | os.PathLike[str] | None = None,
    *,
    largest: int = LARGEST,
    pool: int = LEAST_HUGE,
    beside: Callable[[], object] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    again: bool = False,
) -> LinkProfile:
    """The curve of the disk that holds a directory: as it was measured on this machine before, or measured and kept now.

    Curves are kept by the machine's name, the directory's device and mount, whether compute ran beside, and whether memory was in
    huge pages. Measuring writes a file of twice the largest size to the directory and removes it.

    Args:
        store_dir: the directory; None takes where stores go by default.
        largest: bytes of the largest weight. A curve that was kept serves weights of up to twice the size it went to.
        pool, beside: as in `measure_curve`.
        cache_dir: where curves are kept; None takes `flextensor_fx` in $XDG_CACHE_HOME or ~/.cache. Where that cannot be written
            to, nothing is kept.
        again: measure even if a curve is kept.

    Raises:
        StoreError: the directory cannot be used, is full, or a read failed.
        Exception: whatever `beside` raises.
    """
    base = choose_base(store_dir)
    wanted = curve_sizes(largest)[-1]
    key, file = _key(base, pool, beside is not None, cache_dir)
    kept = None if again else read_kept(file, _FORMAT)
    if kept is not None and kept.key == key and 2 * kept.largest >= wanted:
        return kept.link
    with _probe(base, 2 * wanted) as probe:
        link = measure_curve([probe], curve_sizes(wanted), pool=pool, beside=beside)
    keep(file, _FORMAT, _Kept(key, wanted, link))
    return link


def kept_link(store_dir: str | os.PathLike[str] | None = None) -> LinkProfile | None:
    """The curve that `link_of` has kept for a directory: beside compute if there is one, else at rest; None if there is none.

    Raises:
        StoreError: the directory cannot be used.
    """
    base = choose_base(store_dir)
    for computing in (True, False):
        key, file = _key(base, LEAST_HUGE, computing, None)
        kept = read_kept(file, _FORMAT)
        if kept is not None and kept.key == key:
            return kept.link
    return None


def _key(base: Path, pool: int, computing: bool, cache_dir: str | os.PathLike[str] | None) -> tuple[_Key, Path | None]:
    mount = mount_of(base)
    where = "unknown" if mount is None else f"{mount.source} {mount.kind} {mount.point}"
    key = _Key(platform.node(), os.stat(base).st_dev, where, computing, pool >= LEAST_HUGE)
    name = f"link-{key.device:x}{'-computing' * computing}{'-small' * (not key.huge)}"
    return key, kept_file(name, cache_dir)


@contextmanager
def _probe(base: Path, nbytes: int) -> Iterator[PositionalFile]:
    """A file of bytes that no file system can squeeze, on the disk and not in the page cache; its name is gone at once."""
    try:
        fd, name = tempfile.mkstemp(prefix="flextensor_fx-", suffix=".link", dir=base)
        os.close(fd)
        try:
            probe = PositionalFile(name, writable=True)
        finally:
            os.unlink(name)
        try:
            probe.reserve(nbytes)
            probe.write(memoryview(np.random.default_rng().bytes(nbytes)), 0)
            probe.drop_cache()
        except OSError:
            probe.close()
            raise
    except OSError as error:
        raise StoreError(
            f"link curve: no file of {nbytes} bytes can be written to {base}: {error}; make room, or set store_dir"
        ) from error
    try:
        yield probe
    finally:
        probe.close()


__all__ = ["LARGEST", "curve_sizes", "kept_link", "link_of", "measure_curve"]
