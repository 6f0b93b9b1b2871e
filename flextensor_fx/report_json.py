"""Reports as JSON texts, with a version, and back."""

from __future__ import annotations

import json
from typing import NoReturn

from ._json_values import ValueMismatch, decode, encode
from .errors import ReportError
from .report import Report

_FORMAT = "flextensor_fx report"
_VERSION = 1


def report_to_json(report: Report) -> str:
    """One object: "format", "version", and "report" with the fields of `Report` by name, bytes and ms as numbers."""
    data = {"format": _FORMAT, "version": _VERSION, "report": encode(report)}
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def report_from_json(text: str | bytes, who: str) -> Report:
    """The report that `report_to_json` wrote.

    Raises:
        ReportError: `text` is no JSON, no report, of a newer version, or damaged; `who` says where it is from.
    """
    try:
        data = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ReportError(f"{who}: expected a report, found JSON that is nested too deeply") from None
    except ValueError as error:
        raise ReportError(f"{who}: expected JSON, found: {error}; save the report again") from None
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise ReportError(
            f'{who}: expected a report, an object with "format": "{_FORMAT}", found other JSON; give a file that '
            "Report.save wrote, by a name in .json"
        )
    version = data.get("version")
    if version != _VERSION or isinstance(version, bool):
        raise ReportError(
            f"{who}: expected version {_VERSION} of the format, found {ascii(version)[:40]}; read it with the release that "
            "wrote it, or save it again with this one"
        )
    try:
        return decode(Report, data.get("report"), "report")
    except ValueMismatch as error:
        raise ReportError(f"{who}: {error}; save the report again") from None


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"the number {text}, which JSON does not have")
