"""Reports as one HTML page that needs nothing else: no network, no other file. `assets/` holds its style and its script."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from ._report_units import unit_table
from .passes.schedule import format_bytes
from .report import Report
from .timeline import Timeline, lanes

# The page says so itself: whatever names a model brings along, nothing is ever loaded from anywhere.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def report_to_html(report: Report) -> str:
    """The page as a text. Every name is escaped; it follows the reader's choice of light or dark."""
    body = "\n".join(
        part
        for part in (
            _head(report),
            _tiles(report),
            _timelines(report),
            unit_table(report),
            _patterns(report),
            _listing("Selected, and stays resident all the same", ("weight", "because"), report.stays),
            _listing(
                "Kept back by exclude patterns",
                ("weight", "pattern"),
                [(entry.weight, entry.pattern) for entry in report.selection.excluded],
            ),
            _listing("Each weight, and why it stays or moves", ("weight", "plan"), list(report.plan.why.items())),
            _graphs(report),
            _engine(report),
        )
        if part
    )
    title = escape(f"flextensor: {report.store}")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title}</title>\n'
        f"<style>\n{_asset('report.css')}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        f'<div id="tip" role="tooltip" hidden></div>\n<script type="application/json" id="data">{_data(report)}</script>\n'
        f"<script>\n{_asset('report.js')}{_asset('report_table.js')}</script>\n</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return files("flextensor_fx").joinpath("assets", name).read_text(encoding="utf-8")


# --- what the script draws ---------------------------------------------------------------------------------------------


def _data(report: Report) -> str:
    units: dict[str, int] = {unit.path or "(root)": place for place, unit in enumerate(report.units)}
    keys: dict[str, int] = {}

    def number(table: dict[str, int], name: str) -> int:
        return table.setdefault(name, len(table))

    def drawn(timeline: Timeline) -> dict[str, Any]:
        unit_of = {move.key: move.unit for move in timeline.transfers}
        moves = zip(timeline.transfers, lanes(timeline.transfers), strict=True)
        return {
            "total": timeline.total_ms,
            "budget": timeline.budget_bytes,
            "resident": timeline.resident_bytes,
            "compute": [[_ms(s.start_ms), _ms(s.end_ms), number(units, s.label)] for s in timeline.compute],
            "transfers": [
                [_ms(m.start_ms), _ms(m.end_ms), number(units, m.unit), number(keys, m.key), m.nbytes, lane]
                for m, lane in moves
            ],
            "stalls": [
                [_ms(s.start_ms), _ms(s.end_ms), number(units, unit_of.get(s.key, s.key)), number(keys, s.key)]
                for s in timeline.stalls
            ],
            "memory": [[_ms(level.ms), level.nbytes] for level in timeline.memory],
        }

    timelines = [drawn(timeline) for timeline in report.timelines]
    text = json.dumps({"timelines": timelines, "units": list(units), "keys": list(keys)}, separators=(",", ":"))
    # "</script>" or "<!--" in a name would end or change the element, whatever JSON says about strings.
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _ms(value: float) -> float:
    return round(value, 6)


# --- the page from top to bottom ---------------------------------------------------------------------------------------


def _head(report: Report) -> str:
    predicted, measured = report.timeline("predicted"), report.timeline("measured")
    told = [f"Measured {_call(measured)}."] if measured else []
    told += [f"Predicted {_call(predicted)}, from {predicted.source}."] if predicted else []
    told += (
        [] if measured else ["Nothing was measured: record a call with record_call to see it beside the prediction."]
    )
    return f"<header><h1>{escape(report.store)}</h1><p>{escape(' '.join(told))}</p></header>"


def _call(timeline: Timeline) -> str:
    share = timeline.stall_ms / timeline.total_ms if timeline.total_ms else 0.0
    return f"{timeline.total_ms:.1f} ms a call, {timeline.stall_ms:.1f} ms of it stalled ({share:.1%})"


def _tiles(report: Report) -> str:
    plan, selection = report.plan, report.selection
    streamed = sum(unit.streamed_bytes for unit in report.units)
    given = "none given" if plan.budget is None else format_bytes(plan.budget)
    tiles = [
        ("selected", format_bytes(selection.nbytes), f"{len(selection.weights)} weights in {len(report.units)} units"),
        ("budget", given, f"least workable {format_bytes(plan.least_budget)}"),
        ("peak", format_bytes(report.peak_bytes), "residents and what transfers hold"),
        ("resident", format_bytes(report.resident_bytes), f"{len(plan.resident)} weights"),
        ("streamed", format_bytes(streamed), f"through a pool of {format_bytes(plan.pool)}"),
    ]
    for timeline in report.timelines:
        share = timeline.stall_ms / timeline.total_ms if timeline.total_ms else 0.0
        tiles.append((timeline.provenance, f"{timeline.total_ms:.1f} ms", f"{share:.1%} stalled"))
    cells = "".join(
        f'<div class="tile"><span>{escape(name)}</span><b>{escape(value)}</b><small>{escape(more)}</small></div>'
        for name, value, more in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _timelines(report: Report) -> str:
    legend = "".join(
        f'<span><i style="background:var(--{name})"></i>{words}</span>'
        for name, words in (
            ("transfer", "transfer"),
            ("compute", "compute"),
            ("stall", "stall: compute waits"),
            ("streamed", "streamed weights"),
            ("resident", "resident weights"),
        )
    )
    figures = "".join(
        f"<figure><figcaption><b>{t.provenance}</b> <span>{escape(t.name)}, {escape(t.source)}: {_call(t)}; copied "
        f"{format_bytes(t.moved_bytes)}, peak {format_bytes(t.peak_bytes)}</span></figcaption>"
        f'<canvas id="timeline-{n}" tabindex="0" role="img" aria-label="{t.provenance} timeline; the table of units below has '
        'its numbers"></canvas></figure>'
        for n, t in enumerate(report.timelines)
    )
    return (
        '<section><div class="bar"><h2>Timeline of a call</h2>'
        f'<div class="legend">{legend}<span><i class="dash"></i>budget</span></div><span class="gap"></span>'
        '<button id="clear" hidden></button><span class="hint"><button id="out" aria-label="zoom out">−</button> '
        '<button id="in" aria-label="zoom in">+</button> <button id="all">whole call</button></span></div>'
        f'{figures}<p class="note hint">Drag to zoom in, double-click for the whole call, Ctrl and wheel to zoom, Shift and '
        "wheel to move; with the keyboard: arrows, +, −, 0. Click a span or a row to follow its unit. Two shades tell "
        "neighbouring units apart; where spans are narrower than a few pixels, the strength of the colour tells how busy "
        "the lane was.</p></section>"
        "<noscript><p>The timelines are drawn by the script of this page, which is switched off here.</p></noscript>"
    )


def _patterns(report: Report) -> str:
    selection = report.selection
    text = _table(
        ("pattern", "role", "modules", "parameters"),
        [(m.pattern, m.role, f"{m.modules}", f"{m.parameters}") for m in selection.matches],
        left=2,
    )
    for entry in selection.unmatched:
        near = ", ".join(entry.nearest) or "none"
        text += (
            f'<p class="warn">{escape(entry.role)} pattern <b>{escape(entry.pattern)}</b> matched nothing; nearest: '
            f"{escape(near)}</p>"
        )
    for pattern in selection.ignored:
        text += f'<p class="warn">{escape(pattern)} was ignored: the model has no classes</p>'
    return f"<details open><summary>What each pattern matched</summary>{text}</details>"


def _listing(title: str, header: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    if not rows:
        return ""
    return f"<details><summary>{title} ({len(rows)})</summary>{_table(header, rows, left=2)}</details>"


def _graphs(report: Report) -> str:
    rows = [
        (
            graph.name,
            f"{len(graph.schedule.transfers)}",
            format_bytes(sum(move.nbytes for move in graph.schedule.transfers)),
            format_bytes(graph.peak_bytes),
            f"{graph.pass_seconds * 1000:.0f}",
        )
        for graph in report.graphs
    ]
    if not rows:
        return ""
    table = _table(("graph", "transfers", "bytes a call", "peak", "passes, ms"), rows)
    return f"<details><summary>Compiled graphs ({len(rows)})</summary>{table}</details>"


def _engine(report: Report) -> str:
    stats = report.stats
    if stats is None:
        return ""
    if stats.device is not None:
        device = stats.device
        rows = [
            ("set up", f"{stats.setup_seconds:.2f} s"),
            ("transfers", f"{stats.transfers}"),
            (f"copied to {device.device}", format_bytes(device.copied_bytes)),
            ("written back by eager code", format_bytes(device.returned_bytes)),
            ("captured in graphs of the device", f"{device.captured}"),
            ("pinned host memory", format_bytes(device.pinned_bytes)),
            ("pageable host memory", f"{format_bytes(device.pageable_bytes)} {device.unpinned_because}".rstrip()),
            ("pool", format_bytes(stats.pool_bytes)),
            ("most of it held", format_bytes(stats.peak_pool_bytes)),
            ("torch's peak on the device, all in all", format_bytes(device.peak_allocated)),
        ]
        return f"<details><summary>The engine, over all calls</summary>{_table(('', 'so far'), rows)}</details>"
    rows = [
        ("set up", f"{stats.setup_seconds:.2f} s"),
        ("transfers", f"{stats.transfers}"),
        ("read from disk", format_bytes(stats.disk_bytes)),
        ("read from the page cache", format_bytes(stats.cached_bytes)),
        ("rate of reading", f"{stats.bandwidth / 1e6:.2f} GB/s" if stats.bandwidth else "no reads yet"),
        ("stalled", f"{stats.stall_ms:.1f} ms"),
        ("times memory beyond the pool was taken", f"{stats.overruns}"),
        ("pool", format_bytes(stats.pool_bytes)),
        ("most of it held", format_bytes(stats.peak_pool_bytes)),
    ]
    return f"<details><summary>The engine, over all calls</summary>{_table(('', 'so far'), rows)}</details>"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        classes = ['class="l wrap"' if n < left else "" for n in range(len(cells))]
        return (
            "<tr>"
            + "".join(f"<{tag} {c}>{escape(cell)}</{tag}>" for c, cell in zip(classes, cells, strict=True))
            + "</tr>"
        )

    body = "".join(line(row, "td") for row in rows)
    return f'<div class="scroll"><table><thead>{line(header, "th")}</thead><tbody>{body}</tbody></table></div>'
