"""The table of units on a report's page: where each is, and what it took, predicted and measured side by side."""

from __future__ import annotations

from html import escape

from .passes.schedule import format_bytes
from .report import Report, UnitReport
from .timeline import Timeline, UnitTimes

_TIMES = (("compute", "compute_ms"), ("transfer", "transfer_ms"), ("stall", "stall_ms"))


def unit_table(report: Report) -> str:
    """The section as HTML, every name escaped. Rows carry the unit's number in the page's data, cells the value to sort by."""
    timelines = [t for t in (report.timeline("predicted"), report.timeline("measured")) if t is not None]
    times = [timeline.by_unit() for timeline in timelines]
    names = [unit.path or "(root)" for unit in report.units]
    others = [name for name in dict.fromkeys(n for found in times for n in found) if name not in set(names)]
    rows = [_row(place, name, unit, times) for place, (name, unit) in enumerate(zip(names, report.units, strict=True))]
    rows += [_row(None, name, None, times) for name in others]
    notes = [f"{t.provenance.capitalize()}: {t.source}." for t in timelines]
    if any(timeline.provenance == "measured" for timeline in timelines):
        notes.append(
            "Measured compute is the time between two waits, and counts for the unit waited for last: what resident units "
            "compute counts for the streamed unit before them."
        )
    notes.append("Stalled so far is over all calls.")
    return (
        f'<section><div class="bar"><h2>Units ({len(report.units)})</h2><span class="gap"></span>'
        '<input id="filter" type="search" placeholder="part of a name" aria-label="show units by part of their name"></div>'
        f'<p class="note">{escape(" ".join(notes))}</p><div class="scroll"><table id="units"><thead>{_header(timelines)}'
        f"</thead><tbody>{''.join(rows)}</tbody><tfoot>{_totals(report, timelines)}</tfoot></table></div></section>"
    )


def _header(timelines: list[Timeline]) -> str:
    first = '<tr><th class="l" colspan="2"></th><th class="group" colspan="3">weights</th>'
    second = [("unit", "l"), ("where", "l"), ("number", ""), ("bytes", ""), ("streamed", "")]
    for name, _ in _TIMES:
        if timelines:
            first += f'<th class="group" colspan="{len(timelines)}">{name}, ms</th>'
        second += [(timeline.provenance, "") for timeline in timelines]
    first += '<th class="group">stalled so far, ms</th></tr>'
    second.append(("all calls", ""))
    cells = "".join(
        f'<th class="{style}" data-column="{n}"><button>{name}</button></th>' for n, (name, style) in enumerate(second)
    )
    return f"{first}<tr>{cells}</tr>"


def _row(place: int | None, name: str, unit: UnitReport | None, times: list[dict[str, UnitTimes]]) -> str:
    if unit is None:
        where, order, sizes = "", -1, '<td class="none">–</td>' * 3
    else:
        where, order = _where(unit)
        sizes = (
            f'<td data-v="{unit.weights}">{unit.weights}</td><td data-v="{unit.nbytes}">{format_bytes(unit.nbytes)}</td>'
            f'<td data-v="{unit.streamed_bytes}">{format_bytes(unit.streamed_bytes)}</td>'
        )
    number = "" if place is None else f' data-unit="{place}"'
    at = 1_000_000_000 if place is None else place
    cells = "".join(
        _cell(getattr(found[name], attribute) if name in found else None, kind == "stall")
        for kind, attribute in _TIMES
        for found in times
    )
    stalled = _cell(None if unit is None else unit.stall_ms, True)
    return (
        f'<tr{number}><td class="l wrap" data-v="{at}">{escape(name)}</td><td class="l" data-v="{order}">{where}</td>'
        f"{sizes}{cells}{stalled}</tr>"
    )


def _where(unit: UnitReport) -> tuple[str, int]:
    if not unit.streamed_bytes:
        return '<span class="badge">resident</span>', 0
    if unit.streamed_bytes < unit.nbytes:
        return '<span class="badge part">part streamed</span>', 1
    return '<span class="badge streamed">streamed</span>', 2


def _cell(ms: float | None, stall: bool) -> str:
    if ms is None or ms == 0:
        return '<td class="none" data-v="0">–</td>'
    return f'<td{" class=stalls" if stall and ms >= 0.0005 else ""} data-v="{ms!r}">{ms:.3f}</td>'


def _totals(report: Report, timelines: list[Timeline]) -> str:
    streamed = sum(unit.streamed_bytes for unit in report.units)
    cells = "".join(f"<td>{getattr(timeline, attribute):.3f}</td>" for _, attribute in _TIMES for timeline in timelines)
    return (
        f'<tr><td class="l">all</td><td></td><td>{sum(unit.weights for unit in report.units)}</td>'
        f"<td>{format_bytes(sum(unit.nbytes for unit in report.units))}</td><td>{format_bytes(streamed)}</td>{cells}"
        f"<td>{sum(unit.stall_ms for unit in report.units):.3f}</td></tr>"
    )
