"""Reports as trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing show."""

from __future__ import annotations

import json
from typing import Any

from .report import Report
from .timeline import Timeline, lanes

_COMPUTE, _STALLS, _TRANSFERS = 1, 2, 3  # track numbers; overlapping copies take the numbers from _TRANSFERS on
_US = 1000  # of trace time in a ms


def report_to_trace(report: Report) -> str:
    """A JSON object of trace events: one process per timeline, with tracks for compute, stalls and transfers and a counter of
    the memory. Source: the Trace Event Format of the Chromium project; times are in us."""
    events: list[dict[str, Any]] = []
    for pid, timeline in enumerate(report.timelines, start=1):
        events += _process(pid, timeline)
    data = {"displayTimeUnit": "ms", "otherData": {"store": report.store}, "traceEvents": events}
    return json.dumps(data, allow_nan=False) + "\n"


def _process(pid: int, timeline: Timeline) -> list[dict[str, Any]]:
    lane_of = lanes(timeline.transfers)
    tracks = {_COMPUTE: "compute", _STALLS: "stalls"}
    for lane in range(max(lane_of, default=0) + 1):
        tracks[_TRANSFERS + lane] = "transfers" if lane == 0 else f"transfers {lane + 1}"
    title = f"{timeline.provenance}: {timeline.name} ({timeline.source})"
    events = [
        _named("process_name", pid, 0, title),
        {**_meta("process_sort_index", pid, 0), "args": {"sort_index": pid}},
    ]
    for tid, name in tracks.items():
        events.append(_named("thread_name", pid, tid, name))
        events.append({**_meta("thread_sort_index", pid, tid), "args": {"sort_index": tid}})
    for span in timeline.compute:
        events.append(_span(pid, _COMPUTE, span.label, span.start_ms, span.end_ms, "compute", {}))
    for stall in timeline.stalls:
        events.append(
            _span(pid, _STALLS, f"stall: {stall.key}", stall.start_ms, stall.end_ms, "stall", {"key": stall.key})
        )
    for lane, move in zip(lane_of, timeline.transfers, strict=True):
        arguments = {"unit": move.unit, "bytes": move.nbytes}
        events.append(_span(pid, _TRANSFERS + lane, move.key, move.start_ms, move.end_ms, "transfer", arguments))
    for level in timeline.memory:
        streamed = max(0, level.nbytes - timeline.resident_bytes)
        values = {"resident": level.nbytes - streamed, "streamed": streamed}
        events.append({"name": "memory (bytes)", "ph": "C", "pid": pid, "tid": 0, "ts": level.ms * _US, "args": values})
    if timeline.budget_bytes is not None:
        for ms in (0.0, timeline.total_ms):
            arguments = {"bytes": timeline.budget_bytes}
            events.append(
                {"name": "budget (bytes)", "ph": "C", "pid": pid, "tid": 0, "ts": ms * _US, "args": arguments}
            )
    return events


def _span(
    pid: int, tid: int, name: str, start_ms: float, end_ms: float, category: str, arguments: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": start_ms * _US,
        "dur": (end_ms - start_ms) * _US,
        "args": arguments,
    }


def _meta(name: str, pid: int, tid: int) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid}


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {**_meta(kind, pid, tid), "args": {"name": name}}
