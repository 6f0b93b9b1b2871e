"""The command `flextensor-fx profile`: measures a model, prints what was found, and saves it for `plan` and for compiling."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ._load_model import LoadedModel, load_model
from .config import OffloadConfig
from .errors import ConfigError, OffloadError, StoreError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[Any]


def add_profile(subparsers: Subparsers) -> None:
    """Adds `profile`: what the steps of a model and its link cost."""
    parser = subparsers.add_parser(
        "profile",
        help="measure what the steps of a model and its link cost, for plan and for compiling",
        epilog="Other options come from FLEXTENSOR_FX_<OPTION> in the environment, such as FLEXTENSOR_FX_STORE_DIR for the disk.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="module:callable that returns (model, arguments) or (model, arguments, keyword arguments); or a .pt2 file of an "
        "exported program, which has its example inputs with it",
    )
    parser.add_argument(
        "--include",
        nargs="+",
        default=("**",),
        metavar="PATTERN",
        help="what to offload, such as 'layers.*'; all without",
    )
    parser.add_argument("--exclude", nargs="+", default=(), metavar="PATTERN", help="what stays resident all the same")
    parser.add_argument(
        "--budget", metavar="BUDGET", help="most bytes of selected weights in memory while measuring: 6GiB, 25%%"
    )
    parser.add_argument("--out", required=True, type=Path, metavar="PROFILE.json", help="where the profile goes")
    parser.add_argument(
        "--calls", type=int, metavar="N", help="calls to measure (default: as many as it takes, 7 to 30)"
    )
    parser.set_defaults(run=_profile)


def _profile(arguments: argparse.Namespace) -> None:
    from .profiling import profile

    if arguments.calls is not None and arguments.calls < 1:
        raise ConfigError(f"--calls: expected a whole number of at least 1, found {arguments.calls}; write 1 or more")
    if arguments.out.is_dir() or not arguments.out.parent.is_dir():  # else minutes of measuring would be lost
        raise OffloadError(f"--out: expected a file name in a directory that exists, found {str(arguments.out)!r}")
    given: dict[str, Any] = {"include_patterns": arguments.include, "exclude_patterns": arguments.exclude}
    if arguments.budget is not None:
        given["budget"] = arguments.budget
    config = OffloadConfig.resolve(given)
    loaded = load_model(arguments.model)
    model = _module(arguments.model, loaded)
    if loaded.args is None:
        raise OffloadError(
            f"model {arguments.model!r}: expected example arguments to call it with, found none; return (model, arguments)"
        )
    try:
        found = profile(model, loaded.args, config, loaded.kwargs, calls=arguments.calls)
    except (OffloadError, StoreError, OSError):
        raise
    except Exception as error:  # running the model runs the user's code, which may raise anything
        first = f"{error}".strip().partition("\n")[0]
        raise OffloadError(
            f"model {arguments.model!r}: calling it with its example arguments failed: {type(error).__name__}: {first}"
        ) from error
    print(found)
    found.save(arguments.out)
    print(f"wrote {arguments.out}")


def _module(name: str, loaded: LoadedModel) -> nn.Module:
    if isinstance(loaded.model, nn.Module):
        return loaded.model
    return loaded.model.module()
