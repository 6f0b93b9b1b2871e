"""The command `flextensor-fx`.

A subcommand is one function that takes the table of subparsers, adds a parser to it, and sets its `run`: a function of the parsed
arguments that prints, returns an exit code or None for 0, and raises an OffloadError, StoreError or OSError where it cannot do
what was asked. `COMMANDS` lists them.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ._load_model import load_model
from .cli_plan import add_plan
from .cli_profile import add_profile
from .errors import OffloadError, StoreError
from .passes.schedule import format_bytes
from .report import Report
from .selection import PatternWarning, select
from .tree import ModuleTree

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[Any]

MODEL_HELP = (
    "module:callable that returns a model, or (model, example arguments); or a .pt2 file of an exported program"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line.

    Returns:
        The exit code: 0, or 2 where the command line or what it names is wrong; then one line on stderr says so. A command may
        also return 2 where what it printed is that nothing works.
    """
    parser = _Parser(prog="flextensor-fx", description="Weight offloading inside the compiled graph.")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
    for add in COMMANDS:
        add(subparsers)
    parsed = parser.parse_args(arguments)
    try:
        code = parsed.run(parsed)
    except (OffloadError, StoreError, OSError) as error:
        print(f"flextensor-fx: {_one_line(error)}", file=sys.stderr)
        return 2
    return code or 0


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# --- inspect -----------------------------------------------------------------------------------------------------------


def add_inspect(subparsers: Subparsers) -> None:
    """Adds `inspect`: what patterns select, before anything runs."""
    parser = subparsers.add_parser("inspect", help="what the patterns select, in bytes, before anything runs")
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--include", nargs="+", required=True, metavar="PATTERN", help="what to offload, such as 'layers.*'"
    )
    parser.add_argument("--exclude", nargs="+", default=(), metavar="PATTERN", help="what stays resident all the same")
    parser.set_defaults(run=_inspect)


def _inspect(arguments: argparse.Namespace) -> None:
    model = load_model(arguments.model).model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PatternWarning)  # the text below names such patterns
        selection = select(model, arguments.include, arguments.exclude)
    total = sum(parameter.nbytes for parameter in ModuleTree.of(model).parameters)
    print(selection)
    share = selection.nbytes / total if total else 0.0
    print(f"{format_bytes(selection.nbytes)} of the {format_bytes(total)} of the model's parameters ({share:.1%})")


# --- report ------------------------------------------------------------------------------------------------------------


def add_report(subparsers: Subparsers) -> None:
    """Adds `report`: print a saved report, or turn it into a page or a trace."""
    parser = subparsers.add_parser("report", help="print a saved report, or make a page or a trace of it")
    parser.add_argument("file", metavar="RUN.json", type=Path, help="what Report.save wrote")
    parser.add_argument("--html", metavar="FILE.html", type=Path, help="write one page with the timelines and tables")
    parser.add_argument(
        "--trace", metavar="FILE.perfetto.json", type=Path, help="write trace events, for ui.perfetto.dev"
    )
    parser.set_defaults(run=_report)


def _report(arguments: argparse.Namespace) -> None:
    report = Report.load(arguments.file)
    if arguments.html is None and arguments.trace is None:
        print(report)
    for option, suffixes in (("html", (".html",)), ("trace", (".perfetto.json", ".trace.json"))):
        file = getattr(arguments, option)
        if file is None:
            continue
        if not file.name.lower().endswith(suffixes):
            raise OffloadError(f"--{option}: expected a name that ends in {' or '.join(suffixes)}, found {str(file)!r}")
        report.save(file)
        print(f"wrote {file}")


COMMANDS: tuple[Callable[[Subparsers], None], ...] = (add_inspect, add_profile, add_plan, add_report)
