"""A store of weights in host memory, in a few large slabs that are pinned once they are filled."""

from __future__ import annotations

import math
import mmap
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from flextensor_fx.errors import StoreError
from flextensor_fx.passes.schedule import format_bytes
from flextensor_fx.runtime.container import round_up
from flextensor_fx.runtime.device import Device, PinError
from flextensor_fx.runtime.layout import WeightSpec, has_other_holders, tensor_over
from flextensor_fx.runtime.mapping import Mappings
from flextensor_fx.runtime.store import Store

SLAB_BYTES = 1 << 30
"""Weights share slabs up to this size: few registrations with the driver, and no loss but the rest of a page in each."""

WEIGHT_ALIGN = 256
"""Bytes to which every weight is aligned in its slab, as torch's allocator aligns it on a device."""


@dataclass(frozen=True)
class Pack:
    """Small weights of one dtype that travel as one: a flat tensor of `numel` elements, in which each has its place.

    Attributes:
        spec: of the flat tensor, under the pack's own key.
        members: (weight, first element) in order; each begins at a multiple of 256 bytes.
    """

    spec: WeightSpec
    members: tuple[tuple[WeightSpec, int], ...]

    @staticmethod
    def of(key: str, members: Iterable[WeightSpec]) -> Pack:
        """Packs weights of one dtype, in the order given."""
        placed, position = [], 0
        for spec in members:
            step = WEIGHT_ALIGN // spec.dtype.itemsize
            position = -(-position // step) * step
            placed.append((spec, position))
            position += math.prod(spec.shape)
        dtype = placed[0][0].dtype
        return Pack(WeightSpec(key, (position,), (1,), dtype), tuple(placed))


class _Slab:
    """Anonymous memory in whole pages."""

    def __init__(self, nbytes: int, shared: bool) -> None:
        self.nbytes = round_up(nbytes)
        # Pages of a private map are copied when the process writes to them after a fork, and a device would read the old ones.
        flags = (mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE) | mmap.MAP_ANONYMOUS
        self.map = mmap.mmap(-1, self.nbytes, flags=flags)
        self.array = np.frombuffer(self.map, np.uint8)
        self.address: int = self.array.__array_interface__["data"][0]
        self.pinned = False


class HostStore:
    """Weights by key, in host memory. Safe from any thread; a copy to a device that races with a write may give a mix.

    Args:
        device: pins the memory.
        overflow: makes the disk store of what `limit` leaves out.
        limit: most bytes of host memory; what goes beyond lies in mapped files, of which the system keeps in memory as much as
            it likes. None: no limit.
        pin: whether to pin at all.
    """

    def __init__(
        self, device: Device, overflow: Callable[[], Store], limit: int | None = None, *, pin: bool = True
    ) -> None:
        self._device = device
        self._overflow, self._limit, self._pins = overflow, limit, pin
        self.unpinned_because = "" if pin else "pinning is switched off"
        self._files: Store | None = None
        self._mappings = Mappings()
        self._slabs: list[_Slab] = []
        self._specs: dict[str, WeightSpec] = {}
        self._sources: dict[str, torch.Tensor] = {}
        self._versions: dict[str, int] = {}
        self._slab_of: dict[str, _Slab] = {}
        self._pack_of: dict[str, str] = {}
        self._members: dict[str, tuple[str, ...]] = {}
        self._in_place: set[str] = set()
        self._lock = threading.Lock()
        self._closed = False

    def add(
        self,
        specs: Iterable[WeightSpec],
        packs: Iterable[Pack] = (),
        files: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        """Make room for more weights, in this order; members of packs come with their packs and not in `specs`.

        Args:
            files: by key, the (safetensors file, name in it) that has a weight row-major and in its dtype. What is beyond the
                limit has its value from there then: mapped, so that processes share it. Such a file must stay as it is.

        Raises:
            StoreError: a key that the store already has, there is no memory, or a file cannot be used.
        """
        self._check_open()
        packs = tuple(packs)
        wanted = {spec.key: spec for spec in (*specs, *(pack.spec for pack in packs))}
        new = [*wanted, *(spec.key for pack in packs for spec, _ in pack.members)]
        if known := [key for key in new if key in self._specs]:
            raise StoreError(f"weight {known[0]!r}: the host store already has this key")
        inside, outside = self._split(wanted)
        slabs: list[_Slab] = []
        for group in _groups(inside):
            try:
                slabs.append(_Slab(_end(group), not self._device.shares_memory))
            except (OSError, OverflowError, ValueError) as error:
                raise StoreError(
                    f"host store: {_end(group)} bytes of memory could not be had for {len(group)} weights: {error}; give a "
                    "host_budget below what is free, or offload less"
                ) from error
            self._fill_table(slabs[-1], group)
        self._slabs += slabs
        there = {key: entry for key, entry in (files or {}).items() if key in outside}
        if there:
            self._add_in_place(there)
        if outside := {key: spec for key, spec in outside.items() if key not in there}:
            self._add_files(outside)
        for pack in packs:
            self._add_members(pack)

    def _split(self, wanted: Mapping[str, WeightSpec]) -> tuple[dict[str, WeightSpec], dict[str, WeightSpec]]:
        """What the limit has room for, first come first served, and the rest."""
        if self._limit is None:
            return dict(wanted), {}
        left = self._limit - self.host_bytes
        inside: dict[str, WeightSpec] = {}
        outside: dict[str, WeightSpec] = {}
        end = 0
        for key, spec in wanted.items():
            ends = _aligned(end) + spec.nbytes
            # Each slab may be a page larger than what is in it.
            if ends + mmap.PAGESIZE * (2 * ends // SLAB_BYTES + 1) <= left:
                inside[key], end = spec, ends
            else:
                outside[key] = spec
        return inside, outside

    def _fill_table(self, slab: _Slab, group: Iterable[WeightSpec]) -> None:
        offset = 0
        for spec in group:
            offset = _aligned(offset)
            self._add(spec, tensor_over(spec, slab.array, offset))
            self._slab_of[spec.key] = slab
            offset += spec.nbytes

    def _add(self, spec: WeightSpec, source: torch.Tensor) -> None:
        self._specs[spec.key], self._sources[spec.key], self._versions[spec.key] = spec, source, 0

    def _add_members(self, pack: Pack) -> None:
        key = pack.spec.key
        slab = self._slab_of.get(key)
        self._members[key] = tuple(spec.key for spec, _ in pack.members)
        for spec, element in pack.members:
            if slab is None:
                source = self._sources[key].as_strided(spec.shape, spec.stride, element)
            else:
                begin = self._sources[key].data_ptr() - slab.address
                source = tensor_over(spec, slab.array, begin + element * spec.dtype.itemsize)
                self._slab_of[spec.key] = slab
            self._add(spec, source)
            self._pack_of[spec.key] = key

    def _add_in_place(self, files: Mapping[str, tuple[str, str]]) -> None:
        if self._files is None:
            self._files = self._overflow()
        for path in sorted({path for path, _ in files.values()}):
            for spec in self._files.attach(path, {key: name for key, (file, name) in files.items() if file == path}):
                source = self._files.private_map(spec.key)
                if source is None:
                    source = self._mappings.tensor(self._files, spec.key)  # a copy
                else:
                    self._in_place.add(spec.key)
                self._add(spec, source)
                self._versions[spec.key] = 1
        self._note_limit()

    def _note_limit(self) -> None:
        limit = format_bytes(self._limit or 0)
        self.unpinned_because = self.unpinned_because or f"host_budget is {limit}, the rest lies in files"

    def _add_files(self, specs: Mapping[str, WeightSpec]) -> None:
        if self._files is None:
            self._files = self._overflow()
        self._files.add(specs.values())
        for spec in specs.values():
            # A first value, so that the file can be mapped; the weight's own follows.
            self._files.write(spec.key, torch.zeros((), device="cpu").to(spec.dtype).expand(spec.shape))
            self._add(spec, self._mappings.tensor(self._files, spec.key))
        self._note_limit()

    def __contains__(self, key: object) -> bool:
        return key in self._specs

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._specs))

    def spec(self, key: str) -> WeightSpec:
        """Shape, stride and dtype of a weight or a pack.

        Raises:
            StoreError: the store has no such key, or is closed.
        """
        self._check_open(key)
        try:
            return self._specs[key]
        except KeyError:
            raise StoreError(f"weight {key!r}: the host store has no such key") from None

    def source(self, key: str) -> torch.Tensor:
        """The weight in host memory, of its shape, stride and dtype; with a storage of its own.

        Raises:
            StoreError: as `spec`; also a weight that was never written, or whose file was.
        """
        self.spec(key)
        if not self.version(key):
            raise StoreError(f"weight {key!r}: has never been written to the host store; write a value first")
        if key in self._in_place:
            assert self._files is not None
            self._files.check_unchanged(key)
        return self._sources[key]

    def version(self, key: str) -> int:
        """Number of writes so far: 0 has no value yet."""
        return self._versions.get(key, 0)

    def travels_as(self, key: str) -> str:
        """The key of the pack that a weight is in; its own where it is in none."""
        return self._pack_of.get(key, key)

    def is_held(self, key: str) -> bool:
        """Whether anybody but this store has a tensor over the memory of a weight, or of any that travels with it."""
        members = self._members.get(key, ())
        return any(has_other_holders(self._sources[one]) for one in (key, *members))

    def is_pinned(self, key: str) -> bool:
        """Whether copies from the weight run beside the host."""
        slab = self._slab_of.get(key)
        return slab is not None and slab.pinned

    def write(self, key: str, tensor: torch.Tensor) -> None:
        """Write the value of one weight: of exactly its shape and dtype, on any device. No copy of the old one may be under way.

        Raises:
            StoreError: the tensor differs from the weight, or the store has no such key.
        """
        spec = self.spec(key)
        if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
            raise StoreError(
                f"weight {spec}: cannot be given a value of {tensor.dtype}{list(tensor.shape)}; convert it"
            )
        self._write(key, lambda source: source.copy_(tensor.detach()))

    def write_pieces(self, key: str, pieces: Iterable[torch.Tensor]) -> None:
        """Write the value of one weight piece by piece, none of which is kept. No copy of the old one may be under way.

        Args:
            key: of a weight, row-major.
            pieces: 1-d tensors, which make up the value one after another; converted to the weight's dtype.

        Raises:
            StoreError: the store has no such key.
        """
        self.spec(key)

        def fill(source: torch.Tensor) -> None:
            flat, done = source.view(-1), 0
            for piece in pieces:
                flat[done : done + piece.numel()].copy_(piece)
                done += piece.numel()
            assert done == flat.numel(), f"weight {key!r}: was given {done} elements"

        self._write(key, fill)

    def _write(self, key: str, fill: Callable[[torch.Tensor], object]) -> None:
        with self._lock, torch.no_grad():
            try:
                fill(self._sources[key])
                self._in_place.discard(key)  # all its pages are of this process now
            finally:
                # Also after a failure: a copy that began before must count as old.
                self._versions[key] += 1
                pack = self._pack_of.get(key)
                if pack is not None:
                    self._versions[pack] += 1

    def pin(self) -> None:
        """Pins every slab that is not pinned yet. Call it when they are filled: pages that are there are pinned faster.

        Where the system refuses, that slab and later ones stay as they are, with one warning.
        """
        for slab in self._slabs:
            if slab.pinned or not self._pins:
                continue
            try:
                self._device.pin(slab.address, slab.nbytes)
            except PinError as error:
                self._pins = False
                self.unpinned_because = str(error)
                left = format_bytes(sum(s.nbytes for s in self._slabs if not s.pinned))
                warnings.warn(
                    f"flextensor: {left} of host memory stay pageable: {error}. Copies from there are slower and do not run "
                    "beside the host; the numbers are the same. Raise the limit of locked memory (ulimit -l), or give a "
                    "host_budget",
                    UserWarning,
                    stacklevel=2,
                )
            else:
                slab.pinned = True

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory."""
        return sum(slab.nbytes for slab in self._slabs if slab.pinned)

    @property
    def pageable_bytes(self) -> int:
        """Bytes of memory that is not pinned, and of mapped files."""
        files = sum(spec.nbytes for key, spec in self._specs.items() if key not in self._slab_of)
        return files + sum(slab.nbytes for slab in self._slabs if not slab.pinned)

    @property
    def host_bytes(self) -> int:
        """Bytes of memory in slabs."""
        return sum(slab.nbytes for slab in self._slabs)

    def close(self) -> None:
        """Unpin and give up the memory; nothing may be copying from it. Calling it again does nothing; other uses raise."""
        if self._closed:
            return
        self._closed = True
        for slab in self._slabs:
            if slab.pinned:
                slab.pinned = False
                self._device.unpin(slab.address)
        # Tensors over a slab that somebody still holds keep its memory; the map goes with the last of them.
        self._slabs.clear()
        self._sources.clear()
        if self._files is not None:
            self._files.close()

    def _check_open(self, key: str = "") -> None:
        if self._closed:
            raise StoreError(f"weight {key!r}: its host store is closed; nothing can be read or written after close")


def _aligned(offset: int) -> int:
    return -(-offset // WEIGHT_ALIGN) * WEIGHT_ALIGN


def _end(specs: Iterable[WeightSpec]) -> int:
    """Bytes that weights take one after another."""
    end = 0
    for spec in specs:
        end = _aligned(end) + spec.nbytes
    return end


def _groups(specs: Mapping[str, WeightSpec]) -> Iterator[list[WeightSpec]]:
    """Weights in order, in groups of at most SLAB_BYTES; a larger one has a slab to itself."""
    group: list[WeightSpec] = []
    end = 0
    for spec in specs.values():
        if group and _aligned(end) + spec.nbytes > SLAB_BYTES:
            yield group
            group, end = [], 0
        group.append(spec)
        end = _aligned(end) + spec.nbytes
    if group:
        yield group
