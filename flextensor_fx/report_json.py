"""Reports as JSON texts, with a version, and back."""

from __future__ import annotations

from ._json_files import JsonFormat
from .errors import ReportError
from .report import Report

REPORT_FORMAT = JsonFormat(Report, "report", 1, ReportError, "Report.save", "save the report again")


def report_to_json(report: Report) -> str:
    """One object: "format", "version", and "report" with the fields of `Report` by name, bytes and ms as numbers."""
    return REPORT_FORMAT.to_text(report)


def report_from_json(text: str | bytes, who: str) -> Report:
    """The report that `report_to_json` wrote.

    Raises:
        ReportError: `text` is no JSON, no report, of a newer version, or damaged; `who` says where it is from.
    """
    return REPORT_FORMAT.from_text(text, who)
