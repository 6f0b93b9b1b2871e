"""Programs as packages of AOTInductor: compiled ahead of time, run without a compiler and without the model's code.

A package is a directory of three files: the program, the compiled graph, and a record of what the two have agreed on. The
transfers in the compiled graph are ops that flextensor_fx serves, so it must be installed where one is loaded.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._json_files import JsonFormat
from ._torch_versions import load_ahead
from .errors import ProgramError
from .exported import held
from .inner import compile_ahead
from .passes.metadata import value_of
from .program import Program
from .rewriting import load_program_as

_PROGRAM, _CODE, _RECORD = "program.safetensors", "graph.pt2", "package.json"


@dataclass(frozen=True)
class PackageRecord:
    """What a compiled graph counts on.

    Fields:
        store: the name that its keys begin with.
        program: fingerprint of the program file.
        torch: the release that compiled it.
        kept: names of the tensors that it is given, before the leaves of the arguments.
        namespaces: of the operators beside torch's own that the program calls.
    """

    store: str
    program: str
    torch: str
    kept: tuple[str, ...]
    namespaces: tuple[str, ...]


_FORM = JsonFormat(PackageRecord, "package", 1, ProgramError, "Program.package", "package the program again")


class Package:
    """A program whose graph was compiled ahead of time; made by `load_package`, called like the program."""

    def __init__(self, program: Program, run: Callable[..., Any], kept: tuple[str, ...]) -> None:
        self._program = program
        self.session = program.session
        self._run = run
        self._slots = [program.slot(name) for name in kept]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the program's."""
        program, session = self._program, self.session
        leaves = [leaf for leaf in program.laid_out(program.leaves(args, kwargs)) if isinstance(leaf, Tensor)]
        with torch.no_grad(), session.lock:
            if session.engine is not None:
                session.engine.settle()
            return program.result(self._run([*(held(*slot) for slot in self._slots), *leaves]))

    def close(self) -> None:
        """Removes the store; see `Program.close`."""
        self._program.close()


def package(program: Program, path: str | os.PathLike[str]) -> None:
    """Writes `program` and its compiled graph to the directory `path`, which must not exist; see `Program.package`."""
    target = Path(path)
    if program.takes_numbers:
        raise ProgramError(
            "package: expected tensors as arguments that vary, found a number, which AOTInductor does not take"
        )
    if program.has_free_strides:
        raise ProgramError(
            "package: expected contiguous arguments where sizes vary, found other strides; export with contiguous ones"
        )
    if target.exists() or not target.parent.is_dir():
        found = "which is there already; remove it" if target.exists() else "in no directory; make that first"
        raise ProgramError(
            f"package: expected the name of a directory that can be made, found {str(path)!r}, {found}, or give another"
        )
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.mkdir()
        program.save(partial / _PROGRAM)
        store = f"{program.session.uid}-{secrets.token_hex(4)}"
        namespaces = program.namespaces
        twin = load_program_as(store, partial / _PROGRAM, namespaces=namespaces)
        try:
            kept = _compile(twin, str(partial / _CODE))
            twin.save(partial / _PROGRAM)  # its pool may be larger now
            fingerprint = twin.fingerprint
        finally:
            twin.close()
        _FORM.save(PackageRecord(store, fingerprint, str(torch.__version__), kept, namespaces), partial / _RECORD)
        os.rename(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def load_package(
    path: str | os.PathLike[str], options: Mapping[str, Any] | None = None, *, verify: bool = True
) -> Package:
    """Loads what `Program.package` wrote, in any process that has this package and torch.

    A package has machine code in it, which runs: load only what you trust. For files of others there is `load_program`.

    Args:
        options, verify: as of `load_program`.

    Raises:
        ProgramError: it is no package, is damaged, was made by another release of torch, or is loaded already.
        ConfigError, StoreError: as `load_program`.
    """
    directory = Path(path)
    who = f"package {str(path)!r}"
    if not directory.is_dir():
        found = "a file; what Program.save wrote is loaded by flextensor_fx.load_program"
        raise ProgramError(
            f"{who}: expected a directory that Program.package wrote, found "
            f"{found if directory.exists() else 'nothing; check the path'}"
        )
    record = _FORM.load(directory / _RECORD)
    if record.torch != str(torch.__version__):
        raise ProgramError(
            f"{who}: expected torch {record.torch}, which compiled it, found {torch.__version__}; package the program again"
        )
    program = load_program_as(record.store, directory / _PROGRAM, options, verify=verify, namespaces=record.namespaces)
    try:
        if program.fingerprint != record.program:
            raise ProgramError(f"{who}: expected the program that its graph was compiled from, found another")
        return Package(program, load_ahead(str(directory / _CODE)), record.kept)
    except BaseException:
        program.close()
        raise


def _compile(program: Program, file: str) -> tuple[str, ...]:
    """Compiles the graph of a program to a file; the names of the tensors that the result is given."""
    with torch.no_grad():
        compilation = program.compilation(program.config, partial(compile_ahead, file=file))
        for node, tensor in zip(compilation.module.graph.find_nodes(op="placeholder"), program.tensors(), strict=False):
            value = value_of(node)
            if value.stride() != tensor.stride():  # it was a part of other memory when it was exported
                with value.fake_mode:
                    node.meta["val"] = torch.empty_strided(
                        tensor.shape, tensor.stride(), dtype=value.dtype, device=value.device
                    )
        compilation.run_until_it_fits(program.inputs_by_place())
    placeholders = compilation.module.graph.find_nodes(op="placeholder")
    return tuple(n for n, node in zip(program.targets, placeholders, strict=False) if node not in compilation.fetched)
