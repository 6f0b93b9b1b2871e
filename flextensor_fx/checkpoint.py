"""Where the values of a model that is loaded come from: safetensors files, or tensors in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ._sources import strip_wrappers
from .errors import LoadError
from .runtime.container import Entry, read_entries, read_names
from .runtime.engine import Engine
from .runtime.fileio import PositionalFile
from .runtime.host_engine import HostEngine
from .runtime.in_place import find_in_place
from .runtime.layout import WeightSpec, contiguous_stride
from .runtime.pieces import PieceReader

_SUFFIX, _INDEX = ".safetensors", ".safetensors.index.json"
_MAX_INDEX_BYTES = 100_000_000

PathLike = str | os.PathLike[str]
Weights = PathLike | Sequence[PathLike] | Mapping[str, Any]


@dataclass(frozen=True)
class Facts:
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Checkpoint(Protocol):
    """Tensors by name, which are read one at a time."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of all tensors, without the marks of compiled modules."""
        ...

    def facts(self, names: Iterable[str]) -> dict[str, Facts]:
        """Shape and dtype of the tensors that are asked for; of a mapping's values that are none, nothing.

        Raises:
            LoadError, StoreError: one cannot be used.
        """
        ...

    def in_place(self, wanted: Mapping[str, WeightSpec]) -> dict[str, tuple[str, str]]:
        """The (file, name in it) of each wanted tensor that a file has just as it is wanted, row-major, by name."""
        ...

    def store(self, name: str, key: str, engine: Engine | HostEngine) -> None:
        """Writes a tensor to the store of an engine, as weight `key`.

        Raises:
            StoreError: it cannot be read or written.
        """
        ...

    def value(self, name: str, spec: WeightSpec, device: torch.device) -> Tensor:
        """A tensor of `spec`, on `device`, in memory of its own.

        Raises:
            StoreError: it cannot be read.
        """
        ...

    def check_unchanged(self) -> None:
        """Sees that all that was read is of one state.

        Raises:
            LoadError: a file was written to since it was opened.
        """
        ...

    def close(self) -> None:
        """Gives up what is open."""
        ...


def open_checkpoint(weights: Weights, on_read: Callable[[int], object]) -> Checkpoint:
    """The tensors of a file, of several, of a directory, or of a mapping. Reads names only.

    Args:
        weights: a safetensors file, an index of such files, a directory with one index or with files, a list of files, or a
            mapping of names to tensors.
        on_read: told of bytes that have been read.

    Raises:
        LoadError: there is no such file, two files have one name, or an index and its files do not fit.
        StoreError: a file is no safetensors file.
    """
    if isinstance(weights, Mapping):
        return MappingCheckpoint(weights, on_read)
    if isinstance(weights, (str, os.PathLike)):
        return _open_path(Path(weights), on_read)
    if not isinstance(weights, Sequence):
        raise LoadError(
            f"weights: expected a file, a list of files, a directory or a mapping, found {type(weights).__name__}"
        )
    paths = [Path(path) for path in weights]
    if not paths:
        raise LoadError("weights: expected at least one file, found an empty list")
    if twice := [path for path in paths if paths.count(path) > 1]:
        raise LoadError(f"weights: file {twice[0]} is given twice; give it once")
    return FileCheckpoint(dict.fromkeys(paths), on_read)


def _open_path(path: Path, on_read: Callable[[int], object]) -> FileCheckpoint:
    if not path.is_dir():
        if path.name.endswith(".index.json"):
            return FileCheckpoint(_read_index(path), on_read)
        return FileCheckpoint({path: None}, on_read)
    found = sorted(entry for entry in path.iterdir() if entry.is_file())
    indexes = [entry for entry in found if entry.name.endswith(_INDEX)]
    usual = [entry for entry in indexes if entry.name == f"model{_INDEX}"]
    if usual or len(indexes) == 1:
        return FileCheckpoint(_read_index((usual or indexes)[0]), on_read)
    if indexes:
        names = ", ".join(entry.name for entry in indexes)
        raise LoadError(f"{path}: expected one index, found {names}; give the path of the one to load")
    files = [entry for entry in found if entry.name.endswith(_SUFFIX)]
    if not files:
        names = ", ".join(entry.name for entry in found[:5]) or "no files"
        raise LoadError(f"{path}: expected files in {_SUFFIX}, found {names}; save the weights as safetensors first")
    return FileCheckpoint(dict.fromkeys(files), on_read)


def _read_index(path: Path) -> dict[Path, tuple[str, ...] | None]:
    """The names that each file of an index has to give."""
    try:
        if path.stat().st_size > _MAX_INDEX_BYTES:
            raise LoadError(f"index {path}: expected at most {_MAX_INDEX_BYTES} bytes, found {path.stat().st_size}")
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise LoadError(f"index {path}: cannot be read: {error.strerror}; check the path") from error
    except (ValueError, RecursionError) as error:
        raise LoadError(f"index {path}: expected JSON, found {error}; fetch it again") from error
    table = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
        raise LoadError(f'index {path}: expected an object with "weight_map", names to files, found other JSON')
    files: dict[Path, tuple[str, ...] | None] = {}
    for name, file in table.items():
        parts = Path(file).parts
        if not parts or Path(file).is_absolute() or ".." in parts or "\0" in file:
            raise LoadError(
                f"index {path}: tensor {name!r}: expected the name of a file beside the index, found {file!r}, which leads "
                "elsewhere; give the files themselves as a list if that is meant"
            )
        files[path.parent / file] = (*(files.get(path.parent / file) or ()), name)
    if not files:
        raise LoadError(f"index {path}: expected tensors, found none")
    absent = [file for file in files if not file.exists()]
    if absent:
        raise LoadError(
            f"index {path}: names {len(absent)} files that are not there: {', '.join(file.name for file in absent[:5])}; "
            "fetch them"
        )
    return files


class FileCheckpoint:
    """Tensors of safetensors files, which stay open.

    Args:
        files: with the names that are taken of each; None for all.
    """

    def __init__(self, files: Mapping[Path, tuple[str, ...] | None], on_read: Callable[[int], object]) -> None:
        self._reader = PieceReader(on_read)
        self._files: dict[str, PositionalFile] = {}
        self._stamps: dict[str, tuple[int, ...]] = {}
        self._file_of: dict[str, tuple[str, str]] = {}
        self._entries: dict[str, Entry] = {}
        try:
            for path, names in files.items():
                self._open(os.path.abspath(path), names)
        except BaseException:
            self.close()
            raise

    def _open(self, path: str, wanted: tuple[str, ...] | None) -> None:
        if path in self._files:
            raise LoadError(f"weights: file {path} is given twice; give it once")
        if not path.endswith(_SUFFIX) and os.path.isfile(path):
            with open(path, "rb") as file:
                start = file.read(4)
            if start[:2] == b"PK" or start[:1] == b"\x80":
                raise LoadError(
                    f"{path}: expected a safetensors file, found what torch.save writes; it may run code when it is read: save "
                    "the weights by safetensors.torch.save_file first"
                )
        try:
            file = self._files[path] = PositionalFile(path)
            self._stamps[path] = _stamp(file)
            there = read_names(path, file.fd)
        except OSError as error:
            raise LoadError(f"{path} cannot be read: {error.strerror}; check the path and its permissions") from error
        if wanted is not None and (lacking := sorted(set(wanted) - set(there))):
            raise LoadError(
                f"{path}: the index expects {len(lacking)} tensors that it lacks: {', '.join(lacking[:5])}; fetch the file and "
                "the index of one version"
            )
        for name in there if wanted is None else wanted:
            other = self._file_of.setdefault(strip_wrappers(name), (path, name))
            if other != (path, name):
                raise LoadError(f"tensor {name!r}: found in {other[0]} and in {path}; give each tensor once")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._file_of)

    def facts(self, names: Iterable[str]) -> dict[str, Facts]:
        by_file: dict[str, dict[str, str]] = {}
        for name in names:
            path, stored = self._file_of[name]
            by_file.setdefault(path, {})[name] = stored
        for path, wanted in by_file.items():
            self._entries.update(read_entries(path, self._files[path].fd, wanted, empty=True))
        specs = {name: self._entries[name].spec for wanted in by_file.values() for name in wanted}
        return {name: Facts(spec.shape, spec.dtype) for name, spec in specs.items()}

    def in_place(self, wanted: Mapping[str, WeightSpec]) -> dict[str, tuple[str, str]]:
        entries = self._entries
        return {name: self._file_of[name] for name, spec in wanted.items() if _same(entries[name].spec, spec)}

    def store(self, name: str, key: str, engine: Engine | HostEngine) -> None:
        path, _ = self._file_of[name]
        spec, entry = engine.store.spec(key), self._entries[name]
        if _row_major(spec) and _row_major(entry.spec):
            engine.store.write_pieces(key, self._reader.pieces(self._files[path], entry))
        else:
            engine.write(key, self._reader.read(self._files[path], entry, spec.dtype, torch.device("cpu")))

    def value(self, name: str, spec: WeightSpec, device: torch.device) -> Tensor:
        path, _ = self._file_of[name]
        value = self._reader.read(self._files[path], self._entries[name], spec.dtype, device).view(spec.shape)
        return _with_stride(value, spec)

    def check_unchanged(self) -> None:
        for path, file in self._files.items():
            now = None
            with suppress(OSError):
                now = _stamp(os.stat(path))
            if not self._stamps[path] == _stamp(file) == now:
                raise LoadError(f"{path}: was changed while it was loaded; load again")

    def close(self) -> None:
        self._reader.close()
        for file in self._files.values():
            file.close()


class MappingCheckpoint:
    """Tensors in memory, by name."""

    def __init__(self, tensors: Mapping[str, Any], on_read: Callable[[int], object]) -> None:
        self._tensors = {strip_wrappers(name): value for name, value in tensors.items()}
        self._on_read = on_read

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def extra(self, name: str) -> Any:
        """What a module may have put in a state dict beside its tensors."""
        return self._tensors[name]

    def facts(self, names: Iterable[str]) -> dict[str, Facts]:
        found = {}
        for name in names:
            value = self._tensors[name]
            if not isinstance(value, Tensor):
                raise LoadError(
                    f"weight {name!r}: expected a tensor, found {type(value).__name__}; give tensors by name"
                )
            if value.is_meta:
                raise LoadError(f"weight {name!r}: expected a value, found a tensor on the meta device, which has none")
            found[name] = Facts(tuple(value.shape), value.dtype)
        return found

    def in_place(self, wanted: Mapping[str, WeightSpec]) -> dict[str, tuple[str, str]]:
        tensors = {name: self._tensors[name] for name in wanted}
        fitting = {
            name: tensor
            for name, tensor in tensors.items()
            if type(tensor) in (Tensor, torch.nn.Parameter)
            and tensor.device.type == "cpu"
            and (tuple(tensor.shape), tensor.stride(), tensor.dtype)
            == (wanted[name].shape, wanted[name].stride, wanted[name].dtype)
            and _row_major(wanted[name])
        }
        return find_in_place(fitting)

    def store(self, name: str, key: str, engine: Engine | HostEngine) -> None:
        value = self._tensors[name].detach()
        engine.write(key, value.reshape(engine.store.spec(key).shape))
        self._on_read(value.nbytes)

    def value(self, name: str, spec: WeightSpec, device: torch.device) -> Tensor:
        source = self._tensors[name].detach()
        value = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
        self._on_read(source.nbytes)
        return value.copy_(source.reshape(spec.shape))

    def check_unchanged(self) -> None:
        pass

    def close(self) -> None:
        pass


def _stamp(file: PositionalFile | os.stat_result) -> tuple[int, ...]:
    info = file.stat() if isinstance(file, PositionalFile) else file
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


def _row_major(spec: WeightSpec) -> bool:
    return spec.stride == contiguous_stride(spec.shape)


def _same(found: WeightSpec, wanted: WeightSpec) -> bool:
    return (found.shape, found.dtype, found.stride) == (wanted.shape, wanted.dtype, wanted.stride) and _row_major(
        wanted
    )


def _with_stride(value: Tensor, spec: WeightSpec) -> Tensor:
    if value.stride() == spec.stride or value.numel() == 0:
        return value
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=value.device).copy_(value)
