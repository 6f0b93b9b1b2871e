"""Models that a command line names."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from .errors import OffloadError


@dataclass(frozen=True)
class LoadedModel:
    """A model, and arguments to call it with.

    Fields:
        model: an nn.Module or an ExportedProgram.
        args, kwargs: example arguments; None where none were given.
    """

    model: Any
    args: tuple[Any, ...] | None = None
    kwargs: Mapping[str, Any] | None = None


def load_model(name: str) -> LoadedModel:
    """What `name` names: "module:callable", whose module is looked for in the working directory first, or a .pt2 file.

    The callable takes nothing and returns a model, or (model, args) or (model, args, kwargs); a single argument need not be in a
    tuple.

    Raises:
        OffloadError: there is no such module, callable or file, or it fails, or returns something else.
    """
    if name.endswith(".pt2"):
        return _load_program(Path(name))
    module_name, colon, attribute = name.partition(":")
    if not (colon and module_name and attribute):
        raise OffloadError(
            f"model {name!r}: expected module:callable or a .pt2 file, such as my_models:tiny or tiny.pt2"
        )
    here = os.getcwd()
    if here not in sys.path:  # a console script has the directory of the script there instead
        sys.path.insert(0, here)
    try:
        make = importlib.import_module(module_name)
    except Exception as error:  # importing runs the user's code, which may raise anything
        raise OffloadError(f"model {name!r}: importing {module_name} failed: {_told(error)}") from error
    for part in attribute.split("."):
        if not hasattr(make, part):
            raise OffloadError(f"model {name!r}: expected {part!r} in {module_name}, found no such name")
        make = getattr(make, part)
    if not callable(make):
        raise OffloadError(f"model {name!r}: expected a callable, found {type(make).__name__}")
    try:
        made = make()
    except Exception as error:  # so may the callable
        raise OffloadError(f"model {name!r}: calling it without arguments failed: {_told(error)}") from error
    return _checked(name, made)


def _load_program(path: Path) -> LoadedModel:
    import torch

    if not path.is_file():
        raise OffloadError(f"model {str(path)!r}: expected a file, found none; correct the path")
    try:
        program = torch.export.load(path)
    except Exception as error:  # whatever readers of archives and pickles raise
        raise OffloadError(f"model {str(path)!r}: expected what torch.export.save wrote: {_told(error)}") from error
    args, kwargs = program.example_inputs or (None, None)
    return LoadedModel(program, args, kwargs)


def _checked(name: str, made: Any) -> LoadedModel:
    parts = list(made) if isinstance(made, tuple) else [made]
    if not (1 <= len(parts) <= 3 and isinstance(parts[0], nn.Module)):
        found = "(" + ", ".join(type(part).__name__ for part in parts) + ")"
        raise OffloadError(f"model {name!r}: expected a model, (model, args) or (model, args, kwargs), found {found}")
    args = parts[1] if len(parts) > 1 else None
    if args is not None and not isinstance(args, tuple | list):
        args = (args,)
    kwargs = parts[2] if len(parts) > 2 else None
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise OffloadError(f"model {name!r}: expected a mapping of keyword arguments, found {type(kwargs).__name__}")
    return LoadedModel(parts[0], None if args is None else tuple(args), kwargs)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
