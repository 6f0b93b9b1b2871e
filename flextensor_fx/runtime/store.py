"""A store of weights on disk: one safetensors file of our own, and weights served in place from files of the user."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from flextensor_fx.errors import StoreError
from flextensor_fx.runtime.container import ALIGN, lay_out, read_entries, round_up
from flextensor_fx.runtime.fileio import PositionalFile, ReadCount, ShortRead
from flextensor_fx.runtime.layout import WeightSpec, byte_view, check_storable, tensor_over
from flextensor_fx.runtime.session_dir import SessionDir

# The least alignment that compiled kernels take for granted, and the one that torch gives tensors of its own.
_POINTER_ALIGN, _BEST_ALIGN = 16, 64
_CONVERTED_BYTES = 1 << 20
_SERIAL_ELEMENTS = (
    32_000  # torch gives more to several threads, which wait for each other where other work has the cores
)


@dataclass(frozen=True)
class _Place:
    spec: WeightSpec
    file: PositionalFile
    offset: int
    writer: int | None  # Process that may write here; None: nobody, the file is the user's.
    stamp: tuple[int, int] | None  # Size and mtime of the user's file when it was attached.

    @cached_property
    def lead(self) -> int:
        """Bytes between the start of a 4096-byte block and the weight in it."""
        return self.offset % ALIGN

    @cached_property
    def shift(self) -> int:
        """Bytes between the start of a slab and the weight in it; no more than `lead`."""
        return self.lead if self.lead % _POINTER_ALIGN == 0 else self.lead // _BEST_ALIGN * _BEST_ALIGN

    @cached_property
    def slab_bytes(self) -> int:
        return round_up(self.lead + self.spec.nbytes)


class Store:
    """Weights by key. Safe from any thread; a read that races with a write of its key may give a mix of both.

    A forked process reads the files it inherits, and writes to files of its own, which its parent does not see.
    """

    def __init__(self, directory: str | os.PathLike[str] | SessionDir, *, direct_io: bool = True) -> None:
        self._session = directory if isinstance(directory, SessionDir) else None
        self.path = os.fspath(directory.path if isinstance(directory, SessionDir) else directory)
        self._direct_io = direct_io
        self._places: dict[str, _Place] = {}
        self._versions: dict[str, int] = {}
        self._damaged: set[str] = set()
        self._files: list[PositionalFile] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = False

    @classmethod
    def create(
        cls,
        directory: str | os.PathLike[str] | SessionDir,
        specs: Iterable[WeightSpec] = (),
        *,
        direct_io: bool = True,
    ) -> Store:
        """Make a store in `directory` with room for all of `specs`, in that order.

        Args:
            directory: an existing directory; a SessionDir is closed with the store.
            specs: of the weights that will be written. More can be added by `add` and `attach`.
            direct_io: read past the page cache where the file system can.

        Raises:
            StoreError: the disk has too little room, or the file cannot be made.
        """
        store = cls(directory, direct_io=direct_io)
        store.add(specs)
        return store

    def add(self, specs: Iterable[WeightSpec]) -> None:
        """Make room for more weights, in one further file.

        Raises:
            StoreError: as `create`; also a key that the store already has.
        """
        specs = tuple(specs)
        self._check_new(spec.key for spec in specs)
        if specs:
            with self._locked():
                self._places.update(self._new_file(specs))
                self._versions.update({spec.key: 0 for spec in specs})

    def attach(self, path: str | os.PathLike[str], names: Mapping[str, str]) -> tuple[WeightSpec, ...]:
        """Serve weights in place from a safetensors file, which is never written to.

        A weight is read directly, with the whole 4096-byte blocks around it, and lies at an offset inside its slab. Where that
        is no multiple of 16, its pointer would be misaligned for compiled kernels, so it is moved down within the slab.

        Args:
            path: of the file.
            names: key -> name in the file.

        Returns:
            The specs as the file states them, in the order of `names`.

        Raises:
            StoreError: the file cannot be read, lacks a name, is truncated, or the store already has a key.
        """
        self._check_new(names)
        path = os.path.abspath(path)
        try:
            file = PositionalFile(path, direct=self._direct_io)
            entries = read_entries(path, file.fd, names)
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}; check the path and its permissions") from error
        with self._locked():
            self._files.append(file)
            for key, entry in entries.items():
                self._places[key] = _Place(entry.spec, file, entry.offset, None, _stamp(file))
                self._versions[key] = 1
        return tuple(entry.spec for entry in entries.values())

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._places))

    def spec(self, key: str) -> WeightSpec:
        """Shape, stride and dtype of a weight."""
        return self._place(key).spec

    def slab_bytes(self, key: str) -> int:
        """Bytes of memory that `read_slab` needs; a multiple of 4096."""
        return self._place(key).slab_bytes

    def version(self, key: str) -> int:
        """Number of writes so far: 0 has no value yet. Changes when a write is over, successful or not."""
        return self._versions.get(key, 0)

    @property
    def files(self) -> tuple[PositionalFile, ...]:
        """The open files."""
        return tuple(self._files)

    def write(self, key: str, tensor: torch.Tensor) -> None:
        """Write the value of one weight; the next read gives it.

        Args:
            key: of a weight of this store.
            tensor: of exactly the weight's shape and dtype, on any device. With the weight's stride too, its bytes are
                written as they lie; otherwise one temporary copy is made.

        Raises:
            StoreError: the tensor differs from the weight or cannot be stored, or the disk failed; after a failed write
                the weight has no value until a write succeeds (an attached weight keeps the one in its file).
        """
        place = self._place(key)
        spec = place.spec
        if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
            raise StoreError(
                f"weight {spec}: cannot be given a value of {tensor.dtype}{list(tensor.shape)}; convert it"
            )
        tensor = tensor.detach()
        if tensor.stride() != spec.stride or check_storable(tensor) is not None:
            tensor = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="cpu").copy_(tensor)
        self._write(key, (tensor,))

    def write_pieces(self, key: str, pieces: Iterable[torch.Tensor]) -> None:
        """Write the value of one weight piece by piece, none of which is kept.

        Args:
            key: of a weight of this store, row-major.
            pieces: 1-d tensors in memory, which make up the value one after another; converted to the weight's dtype.

        Raises:
            StoreError: the disk failed. After a failed write, or an error of `pieces`, the weight has no value until a write
                succeeds (an attached weight keeps the one in its file).
        """
        self._write(key, _converted(self._place(key).spec.dtype, pieces))

    def _write(self, key: str, pieces: Iterable[torch.Tensor]) -> None:
        place = self._place(key)
        spec, done = place.spec, 0
        owned = place.writer == os.getpid()
        try:
            with self._locked():
                target = place if owned else self._new_file((spec,))[key]
                for piece in pieces:
                    _write_bytes(target, piece, done)
                    done += piece.nbytes
                assert done == spec.nbytes, f"weight {spec}: was given {done} bytes"
                self._places[key] = target
                self._damaged.discard(key)
        except BaseException as error:
            if owned:
                self._damaged.add(key)
            if not isinstance(error, OSError):
                raise
            raise StoreError(
                f"weight {spec}: writing it to {self.path} failed: {error.strerror}; "
                f"{self._free()} bytes are free there; set store_dir to a disk with more room"
            ) from error
        finally:
            # Also after a failure, and never earlier: a read begun before or during the write must count as old.
            self._versions[key] = self._versions.get(key, 0) + 1

    def read_into(self, key: str, buffer: memoryview | np.ndarray) -> ReadCount:
        """Read one weight into exactly nbytes of memory, in physical order.

        Raises:
            StoreError: the weight cannot be read in full.
        """
        place = self._place(key)
        view = (buffer.data if isinstance(buffer, np.ndarray) else buffer).cast("B")
        if len(view) != place.spec.nbytes:
            raise StoreError(f"weight {place.spec}: cannot be read into {len(view)} bytes")
        return self._read(place, view, place.offset, place.spec.nbytes)

    def read_slab(self, key: str, slab: np.ndarray) -> tuple[int, ReadCount]:
        """Read one weight into a slab: 1-d uint8, at least `slab_bytes` long, at an address that is a multiple of 4096.

        Returns:
            Offset of the weight in the slab, a multiple of 16, and where the bytes came from.

        Raises:
            StoreError: the weight cannot be read in full.
        """
        place = self._place(key)
        nbytes, lead, shift = place.spec.nbytes, place.lead, place.shift
        if lead != shift:
            found = self.read_cached_slab(key, slab)
            if found is not None:
                return found
            if not place.file.direct:
                return shift, self._read(place, slab.data[shift : shift + nbytes], place.offset, nbytes)
        count = self._read(place, slab.data[: place.slab_bytes], place.offset - lead, lead + nbytes)
        if lead != shift:
            begin = slab.__array_interface__["data"][0]
            ctypes.memmove(
                begin + shift, begin + lead, nbytes
            )  # without the GIL, and without the copy that numpy makes
        return shift, count

    def read_cached_slab(self, key: str, slab: np.ndarray) -> tuple[int, ReadCount] | None:
        """As `read_slab`, if the page cache has all of the weight; else None, as quickly as that can be said.

        Raises:
            StoreError: as `read_slab`.
        """
        place = self._place(key)
        self._check_readable(place)
        nbytes = place.spec.nbytes
        if not place.file.read_cached(slab.data[place.shift : place.shift + nbytes], place.offset):
            return None
        self._check_unchanged(place)
        return place.shift, ReadCount(nbytes, 0)

    def writable_place(self, key: str) -> tuple[int, int]:
        """The descriptor of a file of our own that holds the weight, and its offset there, for mapping it.

        Raises:
            StoreError: the weight cannot be read, or copied from the user's file into one of ours.
        """
        place = self._place(key)
        if place.writer != os.getpid():
            value = torch.empty_strided(place.spec.shape, place.spec.stride, dtype=place.spec.dtype, device="cpu")
            self.read_into(key, byte_view(value).numpy())
            self.write(key, value)
            place = self._place(key)
        return place.file.fd, place.offset

    def private_map(self, key: str) -> torch.Tensor | None:
        """The weight as a tensor over a private map of its file, which other processes share until this one writes to it.

        None where its pointer would be no multiple of its elements' size. Before each use, call `check_unchanged`.
        """
        place = self._place(key)
        if place.offset % place.spec.dtype.itemsize:
            return None
        pages = mmap.mmap(
            place.file.fd, place.lead + place.spec.nbytes, mmap.MAP_PRIVATE, offset=place.offset - place.lead
        )
        return tensor_over(place.spec, np.frombuffer(pages, np.uint8), place.lead)

    def check_unchanged(self, key: str) -> None:
        """Sees that the user's file that serves a weight is as it was.

        Raises:
            StoreError: it was written to.
        """
        self._check_unchanged(self._place(key))

    def drop_cache(self) -> None:
        """Write all files to the disk and take them out of the page cache."""
        for file in self._files:
            file.drop_cache()

    def after_fork(self) -> None:
        """Make the store usable in a forked child, whose parent may have held its lock."""
        if self._pid != os.getpid():
            self._lock, self._pid = threading.Lock(), os.getpid()

    def close(self) -> None:
        """Close the files and remove a session directory. Calling it again does nothing; any other use raises."""
        self._closed = True
        for file in self._files:
            file.close()
        if self._session is not None:
            self._session.close()

    def _locked(self) -> threading.Lock:
        self.after_fork()
        return self._lock

    def _place(self, key: str) -> _Place:
        if self._closed:
            raise StoreError(
                f"weight {key!r}: its store in {self.path} is closed; nothing can be read or written after close"
            )
        try:
            return self._places[key]
        except KeyError:
            raise StoreError(f"weight {key!r}: the store in {self.path} has no such key") from None

    def _check_new(self, keys: Iterable[str]) -> None:
        if self._closed:
            raise StoreError(f"the store in {self.path} is closed; nothing can be added after close")
        for key in keys:
            if key in self._places:
                raise StoreError(f"weight {key!r}: the store in {self.path} already has this key")

    def _read(self, place: _Place, view: memoryview, offset: int, needed: int) -> ReadCount:
        spec, path = place.spec, place.file.path
        self._check_readable(place)
        try:
            count = place.file.read(view, offset, needed)
            self._check_unchanged(place)
            return count
        except ShortRead as error:
            raise StoreError(
                f"weight {spec}: expected {needed} bytes at {offset} of {path}, found {error.found}; "
                "the file was truncated: restore it and load the weights again"
            ) from error
        except OSError as error:
            raise StoreError(
                f"weight {spec}: expected {needed} bytes at {offset} of {path}, found {error.strerror}; "
                "check the disk, then call again"
            ) from error

    def _check_readable(self, place: _Place) -> None:
        spec, path = place.spec, place.file.path
        if self._versions[spec.key] == 0:
            raise StoreError(f"weight {spec}: has never been written to {path}; write a value first")
        if spec.key in self._damaged:
            raise StoreError(f"weight {spec}: its last write to {path} failed, so its bytes are torn; write it again")

    def _check_unchanged(self, place: _Place) -> None:
        if place.stamp is not None and place.stamp != _stamp(place.file):
            raise StoreError(
                f"weight {place.spec}: expected {place.file.path} as it was when it was attached, found it written to "
                "since; keep the file unchanged while it is served"
            )

    def _new_file(self, specs: tuple[WeightSpec, ...]) -> dict[str, _Place]:
        container = lay_out(specs)
        pid = os.getpid()
        path = os.path.join(self.path, f"weights-{pid}-{len(self._files)}.safetensors")
        free = self._free()
        if container.nbytes > free:
            raise StoreError(
                f"store in {self.path}: needs {container.nbytes} bytes, {free} are free; "
                "set store_dir to a disk with more room, or offload less"
            )
        file = None
        try:
            file = PositionalFile(path, create=True, direct=self._direct_io)
            file.reserve(container.nbytes)
            file.write(memoryview(container.header), 0)
        except OSError as error:
            if file is not None:
                file.close()
                os.unlink(path)
            raise StoreError(
                f"store in {self.path}: {container.nbytes} bytes could not be had: {error.strerror} "
                f"({free} bytes were free); set store_dir to another disk"
            ) from error
        self._files.append(file)
        return {key: _Place(entry.spec, file, entry.offset, pid, None) for key, entry in container.entries.items()}

    def _free(self) -> int:
        try:
            disk = os.statvfs(self.path)
        except OSError as error:
            raise StoreError(f"store in {self.path}: the directory cannot be used: {error.strerror}") from error
        return disk.f_bavail * disk.f_frsize

    def __reduce__(self) -> Any:
        raise TypeError("a Store holds open files and cannot be pickled or copied")


def _converted(dtype: torch.dtype, pieces: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The pieces as `dtype`, in memory that is small enough for the processor's caches and used again."""
    count = _SERIAL_ELEMENTS * max(1, _CONVERTED_BYTES // (_SERIAL_ELEMENTS * dtype.itemsize))
    scratch = torch.empty(count, dtype=dtype, device="cpu")
    for piece in pieces:
        if piece.dtype == dtype:
            yield piece
            continue
        for part in piece.split(count):
            for to, values in zip(scratch.split(_SERIAL_ELEMENTS), part.split(_SERIAL_ELEMENTS), strict=False):
                to[: values.numel()].copy_(values)
            yield scratch[: part.numel()]


def _stamp(file: PositionalFile) -> tuple[int, int]:
    info = file.stat()
    return info.st_size, info.st_mtime_ns


def _write_bytes(place: _Place, tensor: torch.Tensor, done: int = 0) -> None:
    """Writes a tensor that is a weight, or the part of it that begins at byte `done`."""
    data = byte_view(tensor)
    step = data.numel() if data.device.type == "cpu" else 64 << 20
    for start in range(0, data.numel(), step):
        piece = data[start : start + step].cpu()
        place.file.write(piece.numpy().data, place.offset + done + start)
