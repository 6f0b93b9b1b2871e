"""The saved form of a program: one safetensors file with its tensors, its graph as JSON, and a record of all else.

    entry                    what it is
    __program__.record       the record, JSON: configuration, plan, schedule, tensors, digests
    __program__.graph        the graph, in the JSON of torch.export
    every other              a tensor under its name; every one at a multiple of 4096 bytes, so that it is read in place

Nothing in it is ever unpickled. Every entry has a SHA-256 in the record, and the record has one in the header: that finds damage.
What a file that was made to do harm may say, `program_check` and the types of the record allow or refuse.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from ._json_files import JsonFormat
from ._torch_versions import graph_from_json, graph_to_json
from .captured import Costs
from .config import OffloadConfig
from .errors import OffloadError, ProgramError, StoreError
from .graph_record import GraphRecord
from .planner import Plan
from .program_check import parsed_graph
from .runtime.container import Entry, lay_out, read_entries, read_metadata, read_names
from .runtime.engine import Engine
from .runtime.fileio import PositionalFile, ShortRead
from .runtime.host_engine import HostEngine
from .runtime.layout import WeightSpec, byte_view, check_storable, spec_of
from .runtime.parameter import OffloadedParameter
from .simulate import Link

_RECORD, _GRAPH = "__program__.record", "__program__.graph"
_DIGEST = "flextensor_fx.program"
_LARGEST = 1 << 30  # bytes of a record or a graph
_PIECE = 16 << 20
_ELSEWHERE = ("store_dir", "dump_dir", "profile", "device")
"""Options that speak of the machine that a program was made on."""


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a program.

    Fields:
        name: in the exported program.
        kind: "parameter", "buffer" or "constant_tensor".
        entry: its name in the file, which a tied tensor shares; "" of one without elements.
        shape, stride, dtype: of the tensor.
        requires_grad: of a parameter.
    """

    name: str
    kind: str
    entry: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    requires_grad: bool


@dataclass(frozen=True)
class SavedCosts:
    """As `Costs`."""

    steps_of: Mapping[str, tuple[int, ...]]
    step_ms: tuple[float, ...]
    link: Link
    fused: frozenset[str]
    activation_bytes: int | None

    @staticmethod
    def of(costs: Costs) -> SavedCosts:
        """The costs that a plan was made from."""
        return SavedCosts(costs.steps_of, tuple(costs.step_ms), costs.link, costs.fused, costs.activation_bytes)

    @property
    def costs(self) -> Costs:
        """As the planner takes them."""
        return Costs(self.steps_of, self.step_ms, self.link, self.fused, self.activation_bytes)


@dataclass(frozen=True)
class ProgramRecord:
    """What a program file says beside the graph and the values.

    Fields:
        torch: the release that made it.
        store: what keys in the schedule begin with.
        config: fields of `OffloadConfig`, as JSON.
        plan, costs, stays: of the session.
        graph: the schedule of the interpreted graph.
        packs_small: whether small weights travel together, where the store is host memory.
        tensors: in the order of the graph.
        digests: SHA-256 by entry, in hexadecimal digits.
    """

    torch: str
    store: str
    config: str
    plan: Plan
    costs: SavedCosts
    stays: Mapping[str, str]
    graph: GraphRecord | None
    packs_small: bool
    tensors: tuple[SavedTensor, ...]
    digests: Mapping[str, str]

    @property
    def fingerprint(self) -> str:
        """Of all that a file holds: equal for equal programs."""
        text = json.dumps([self.config, sorted(self.digests.items())])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


_FORM = JsonFormat(ProgramRecord, "program", 1, ProgramError, "Program.save", "save the program again")


@dataclass(frozen=True)
class SavedProgram:
    """A program file that has been read as far as its tensors, which are where `entries` says.

    Fields:
        exported: the graph, with tensors on the meta device.
        config: as saved.
    """

    path: str
    record: ProgramRecord
    exported: ExportedProgram
    config: OffloadConfig
    entries: Mapping[str, Entry]


# --- writing -----------------------------------------------------------------------------------------------------------


def write_program(
    path: Path,
    exported: ExportedProgram,
    record: ProgramRecord,
    tensors: Mapping[str, Tensor],
    namespaces: Collection[str],
) -> str:
    """Writes a program file and returns its fingerprint; whatever `path` named before is replaced once all is written.

    Args:
        record: with digests still missing.
        tensors: by entry; those in a store are read one at a time.
        namespaces: of operators beside torch's own that the graph and its bodies call.

    Raises:
        ProgramError: something in the program has no form in a file.
        StoreError: the file cannot be written, or a weight not be read.
    """
    try:
        graph = graph_to_json(exported)
    except Exception as error:  # torch raises what comes to hand
        raise ProgramError(f"{path}: the graph cannot be saved: {type(error).__name__}: {error}") from error
    try:
        _graph("save", graph, record, frozenset(namespaces))  # what torch writes and cannot read is better known now
    except ProgramError as error:
        raise ProgramError(f"{path}: the graph would not come back: {str(error).removeprefix('save: ')}") from error
    specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
    blank = dict.fromkeys([*tensors, _GRAPH], "0" * 64)
    size = len(_FORM.to_text(replace(record, digests=blank)).encode())
    texts = [WeightSpec(name, (n,), (1,), torch.uint8) for name, n in ((_GRAPH, len(graph)), (_RECORD, size))]
    container = lay_out([*specs, *texts], {_DIGEST: "0" * 64})
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        file = PositionalFile(str(partial), create=True, direct=False)
        try:
            file.reserve(container.nbytes)
            digests = {}
            for name, tensor in tensors.items():
                digests[name] = _write(file, container.entries[name], _bytes_of(tensor))
            digests[_GRAPH] = _write(file, container.entries[_GRAPH], memoryview(graph))
            record = replace(record, digests=digests)
            final = _FORM.to_text(record).encode()
            digest = _write(file, container.entries[_RECORD], memoryview(final))
            file.write(memoryview(lay_out([*specs, *texts], {_DIGEST: digest}).header), 0)
            os.fsync(file.fd)
        finally:
            file.close()
        os.replace(partial, path)
        return record.fingerprint
    except OSError as error:
        raise StoreError(
            f"{path}: {container.nbytes} bytes could not be written: {error.strerror}; save to a disk with more room"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def saved_tensor(name: str, kind: str, entry: str, tensor: Tensor) -> SavedTensor:
    """How a file speaks of a tensor.

    Raises:
        ProgramError: it cannot be in a file.
    """
    if entry and not isinstance(tensor, OffloadedParameter) and (why := check_storable(tensor)) is not None:
        raise ProgramError(f"save: tensor {name!r}: cannot be in a file: {why}")
    dtype = str(tensor.dtype).removeprefix("torch.")
    return SavedTensor(name, kind, entry, tuple(tensor.shape), tuple(tensor.stride()), dtype, tensor.requires_grad)


def portable(config: OffloadConfig) -> str:
    """A configuration without what speaks of this machine."""
    return json.dumps({name: value for name, value in config.asdict().items() if name not in _ELSEWHERE})


def _bytes_of(tensor: Tensor) -> memoryview:
    if isinstance(tensor, OffloadedParameter):
        source = tensor.source
        assert isinstance(source, Engine | HostEngine)
        tensor = source.read(tensor.key)
    return byte_view(tensor.cpu()).numpy().data.cast("B")


def _write(file: PositionalFile, entry: Entry, data: memoryview) -> str:
    file.write(data, entry.offset)
    return hashlib.sha256(data).hexdigest()


# --- reading -----------------------------------------------------------------------------------------------------------


def read_program(path: Path, *, verify: bool = True, namespaces: Collection[str] = ()) -> SavedProgram:
    """Reads and checks a program file, apart from the values of its tensors.

    Args:
        verify: compare every tensor with its digest, which reads the whole file once.
        namespaces: of operators beside torch's own that its graph may call.

    Raises:
        ProgramError: it is no such file, is damaged, or does not fit this release.
    """
    who = f"program file {str(path)!r}"
    if path.is_dir():
        raise ProgramError(
            f"{who}: expected a file that Program.save wrote, found a directory; what Program.package wrote is loaded by "
            "flextensor_fx.load_package"
        )
    try:
        file = PositionalFile(os.path.abspath(path))
    except OSError as error:
        raise ProgramError(f"{who}: cannot be read: {error.strerror}; check the path") from error
    try:
        return _read(who, path, file, verify, frozenset(namespaces))
    except (StoreError, ShortRead) as error:
        if os.pread(file.fd, 4, 0) == b"PK\x03\x04":
            raise ProgramError(
                f"{who}: expected a file that Program.save wrote, found a zip archive; what torch.export.save wrote is read by "
                "torch.export.load, then goes to flextensor_fx.rewrite"
            ) from error
        raise ProgramError(f"{who}: {error}") from error
    finally:
        file.close()


def _read(who: str, path: Path, file: PositionalFile, verify: bool, namespaces: frozenset[str]) -> SavedProgram:
    digest = read_metadata(file.path, file.fd).get(_DIGEST)
    if not isinstance(digest, str):
        raise ProgramError(
            f"{who}: expected a file that Program.save wrote, found other tensors; weights of a model are for "
            "flextensor_fx.load"
        )
    found = read_names(file.path, file.fd)
    entries = read_entries(file.path, file.fd, {name: name for name in found})
    if missing := {_RECORD, _GRAPH} - entries.keys():
        raise ProgramError(f"{who}: expected the entries {_RECORD} and {_GRAPH}, found no {sorted(missing)[0]}")
    record = _FORM.from_text(_checked_bytes(who, file, entries[_RECORD], digest), who)
    if record.digests.keys() != entries.keys() - {_RECORD}:
        raise ProgramError(f"{who}: expected digests of its entries, found others; save the program again")
    config = _config(who, record)
    if verify:
        for name in entries.keys() - {_RECORD, _GRAPH}:
            if _digest_of(file, entries[name]) != record.digests[name]:
                raise ProgramError(
                    f"{who}: tensor {name!r} is damaged: expected bytes with another digest; fetch or save the file again"
                )
    data = _checked_bytes(who, file, entries[_GRAPH], record.digests[_GRAPH])
    exported = _graph(who, data, record, namespaces)
    tensors = {name: entry for name, entry in entries.items() if name not in (_RECORD, _GRAPH)}
    _check_tensors(who, record, tensors, exported)
    return SavedProgram(file.path, record, exported, config, tensors)


def _checked_bytes(who: str, file: PositionalFile, entry: Entry, digest: str) -> bytes:
    if entry.spec.nbytes > _LARGEST or entry.spec.dtype is not torch.uint8:
        raise ProgramError(f"{who}: expected at most {_LARGEST} bytes of text, found {entry.spec}")
    data = b"".join(bytes(piece) for piece in _pieces(file, entry))
    if hashlib.sha256(data).hexdigest() != digest:
        raise ProgramError(f"{who}: {entry.spec.key} is damaged: its digest is another; fetch or save the file again")
    return data


def _digest_of(file: PositionalFile, entry: Entry) -> str:
    found = hashlib.sha256()
    for piece in _pieces(file, entry):
        found.update(piece)
    return found.hexdigest()


def _pieces(file: PositionalFile, entry: Entry) -> Iterator[memoryview]:
    buffer = np.empty(_PIECE + 4096, np.uint8)
    skip = -buffer.ctypes.data % 4096
    aligned = buffer[skip : skip + _PIECE].data
    for at in range(0, entry.spec.nbytes, _PIECE):
        count = min(_PIECE, entry.spec.nbytes - at)
        room = min(_PIECE, -(-count // 4096) * 4096)
        file.read(aligned[:room], entry.offset + at, count)
        yield aligned[:count]


def _config(who: str, record: ProgramRecord) -> OffloadConfig:
    try:
        values = json.loads(record.config)
        if not isinstance(values, dict) or set(values) & set(_ELSEWHERE):
            raise ValueError("expected options that go with any machine")
        return OffloadConfig(**values)
    except (OffloadError, TypeError, ValueError) as error:
        raise ProgramError(f"{who}: its configuration cannot be used: {error}") from error


def _graph(who: str, data: bytes, record: ProgramRecord, namespaces: frozenset[str]) -> ExportedProgram:
    by_name = {tensor.name: tensor for tensor in record.tensors}

    def values(signature: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        ties: dict[tuple[str, str], Tensor] = {}
        state: dict[str, Any] = {}
        constants: dict[str, Any] = {}
        for spec in signature.input_specs:
            kind = str(spec.type)
            if kind in ("parameter", "buffer", "tensor_constant"):
                name = getattr(spec.value, f"{kind}_name")
                if name not in by_name:
                    raise ProgramError(f"{who}: its graph wants a tensor {name!r}, which the record lacks")
                saved = by_name[name]
                value = _meta(who, saved)
                if kind == "parameter":
                    value = nn.Parameter(value, saved.requires_grad and _grows(value))
                value = ties.setdefault((kind, saved.entry or name), value)
                persistent = kind == "parameter" or (kind == "buffer" and spec.value.persistent)
                (state if persistent else constants)[name] = value
        return state, constants

    try:
        return graph_from_json(data, lambda text, schema: parsed_graph(text, schema, namespaces), values)
    except OffloadError as error:
        raise ProgramError(f"{who}: {f'{error}'.removeprefix(f'{who}: ')}") from error
    except Exception as error:  # torch's reader raises what comes to hand
        raise ProgramError(
            f"{who}: its graph, which torch {record.torch} wrote, cannot be read by torch {torch.__version__}: "
            f"{type(error).__name__}: {str(error)[:200]}; use that release, or save the program again"
        ) from error


def _grows(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _meta(who: str, saved: SavedTensor) -> Tensor:
    dtype = getattr(torch, saved.dtype, None)
    if not isinstance(dtype, torch.dtype) or len(saved.shape) != len(saved.stride):
        raise ProgramError(f"{who}: tensor {saved.name!r}: expected a shape, a stride and a dtype, found {saved}")
    try:
        return torch.empty_strided(saved.shape, saved.stride, dtype=dtype, device="meta")
    except RuntimeError as error:
        raise ProgramError(f"{who}: tensor {saved.name!r}: {error}") from error


def _check_tensors(who: str, record: ProgramRecord, entries: Mapping[str, Entry], exported: ExportedProgram) -> None:
    """Sees that record, file and graph speak of the same tensors."""
    for saved in record.tensors:
        value = _meta(who, saved)
        entry = entries.get(saved.entry)
        spec = None if entry is None else entry.spec
        if value.numel() == 0 and not saved.entry:
            continue
        if spec is None or (spec.shape, spec.stride, spec.dtype) != (tuple(value.shape), value.stride(), value.dtype):
            raise ProgramError(
                f"{who}: tensor {saved.name!r}: expected {value.dtype}{list(value.shape)}, found {spec or 'no such entry'}"
            )
    if unused := entries.keys() - {saved.entry for saved in record.tensors}:
        raise ProgramError(f"{who}: expected entries that its record names, found {sorted(unused)[0]!r} too")
    known = {saved.name: saved for saved in record.tensors}
    wanted = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    signature = exported.graph_signature
    named = [spec for spec in signature.input_specs if isinstance(spec.target, str)]
    if [saved.name for saved in record.tensors] != [spec.target for spec in named]:
        raise ProgramError(f"{who}: expected the tensors of its graph, in their order, found others")
    for spec in named:
        saved, value = known[str(spec.target)], wanted[spec.arg.name].meta.get("val")
        shape, dtype = tuple(saved.shape), getattr(torch, saved.dtype)
        if not isinstance(value, Tensor) or tuple(value.shape) != shape or value.dtype != dtype:
            raise ProgramError(
                f"{who}: tensor {saved.name!r}: its graph expects {value}, the file has {dtype}{list(shape)}"
            )
        if saved.kind != spec.kind.name.lower():
            raise ProgramError(
                f"{who}: tensor {saved.name!r}: expected a {spec.kind.name.lower()}, found a {saved.kind}"
            )
