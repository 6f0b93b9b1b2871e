"""What was offloaded, and how it went: a value that prints, and that can be saved as JSON, as a page and as a trace."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ReportError
from .graph_record import GraphRecord
from .passes.schedule import Schedule, format_bytes, format_table, least_pool, schedule, windows_of
from .passes.steady_schedule import steady_schedule
from .planner import Plan
from .recording import one_session
from .runtime.stats import EngineStats
from .selection import Selection
from .session import Session
from .session_plan import FETCHED_BEFORE
from .timeline import START, Provenance, Timeline, predicted_timeline


@dataclass(frozen=True)
class UnitReport:
    """One offload unit. Bytes; `stall_ms` is what calls have waited for its weights so far."""

    path: str
    weights: int
    nbytes: int
    streamed_bytes: int
    stall_ms: float


@dataclass(frozen=True)
class Report:
    """An offloaded model.

    Fields:
        store: its name in keys.
        selection: what each pattern matched.
        plan: residents, pool, predicted times (from estimated costs).
        stays: selected weights that cannot be offloaded, with the reason.
        units: one line each.
        graphs: the compiled graphs with their schedules.
        stats: of the engine; None while nothing is streamed.
        timelines: of one call, what the plan predicts first, then what was measured, if anything was.
    """

    store: str
    selection: Selection
    plan: Plan
    stays: tuple[tuple[str, str], ...]
    units: tuple[UnitReport, ...]
    graphs: tuple[GraphRecord, ...]
    stats: EngineStats | None
    timelines: tuple[Timeline, ...] = ()

    @property
    def budget(self) -> int | None:
        """Bytes; None if none was given."""
        return self.plan.budget

    @property
    def resident_bytes(self) -> int:
        """Bytes of selected weights that stay in memory."""
        return self.selection.nbytes - sum(unit.streamed_bytes for unit in self.units)

    @property
    def peak_bytes(self) -> int:
        """Most bytes of selected weights in memory at once: residents, and what transfers have held so far.

        Before the first call it is what the schedules promise. Memory is taken in whole pages, so `held` may show a little
        more than the promise for weights that are no multiple of 4096 bytes.
        """
        return self.resident_bytes + max((graph.peak_bytes for graph in self.graphs), default=self.plan.pool)

    def timeline(self, provenance: Provenance) -> Timeline | None:
        """The last one that was "predicted" or "measured"; None if there is none."""
        return next((found for found in reversed(self.timelines) if found.provenance == provenance), None)

    def to_json(self) -> str:
        """The whole report as a JSON text, which `from_json` reads."""
        from .report_json import report_to_json

        return report_to_json(self)

    @staticmethod
    def from_json(text: str | bytes, who: str = "report") -> Report:
        """The report that `to_json` wrote.

        Args:
            who: where the text is from, for messages.

        Raises:
            ReportError: the text is no JSON, no report, of a newer version, or damaged.
        """
        from .report_json import report_from_json

        return report_from_json(text, who)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Writes the report, in the form that the name asks for.

        1. `.html`: one page that needs nothing else, with the timelines and the tables.
        2. `.perfetto.json` or `.trace.json`: trace events, for ui.perfetto.dev and chrome://tracing.
        3. any other `.json`: the report itself, for `Report.load`.

        Raises:
            ReportError: another suffix, or the file cannot be written.
        """
        from .report_json import REPORT_FORMAT

        path = Path(file)
        name = path.name.lower()
        if name.endswith(".html"):
            from .report_html import report_to_html

            text = report_to_html(self)
        elif name.endswith((".perfetto.json", ".trace.json")):
            from .report_trace import report_to_trace

            text = report_to_trace(self)
        elif name.endswith(".json"):
            text = self.to_json()
        else:
            raise ReportError(
                f"report file {str(path)!r}: expected a name that ends in .html, .perfetto.json or .json, found {path.suffix!r}"
            )
        REPORT_FORMAT.write(text, path)

    @staticmethod
    def load(file: str | os.PathLike[str]) -> Report:
        """The report that `save` wrote as `.json`.

        Raises:
            ReportError: the file cannot be read, or does not hold a report of this version.
        """
        from .report_json import REPORT_FORMAT

        return REPORT_FORMAT.load(file)

    def __str__(self) -> str:
        return "\n\n".join(part for part in (self._head(), self._units(), self._patterns(), self._stays()) if part)

    def _head(self) -> str:
        plan, stats = self.plan, self.stats
        given = "none given" if plan.budget is None else format_bytes(plan.budget)
        streamed = sum(unit.streamed_bytes for unit in self.units)
        lines = [
            f"flextensor: {self.store}",
            f"  selected    {len(self.selection.weights)} weights in {len(self.units)} units, "
            f"{format_bytes(self.selection.nbytes)}",
            f"  budget      {given}; least workable {format_bytes(plan.least_budget)}",
            f"  resident    {format_bytes(self.resident_bytes)}",
            f"  streamed    {format_bytes(streamed)} through a pool of {format_bytes(plan.pool)}",
            f"  peak        {format_bytes(self.peak_bytes)}",
            f"  predicted   {plan.predicted_ms:.1f} ms a call, {plan.predicted_stall_ms:.1f} ms of it stalled "
            f"({self._source})",
        ]
        measured = self.timeline("measured")
        if measured is not None:
            lines.append(
                f"  measured    {measured.total_ms:.1f} ms a call, {measured.stall_ms:.1f} ms of it stalled ({measured.source})"
            )
        for graph in self.graphs:
            lines.append(
                f"  graph       {graph.name}: {len(graph.schedule.transfers)} transfers, "
                f"peak {format_bytes(graph.peak_bytes)}, passes {graph.pass_seconds * 1e3:.0f} ms"
                + (f", {len(graph.steady.ahead)} begun in the call before" if graph.steady is not None else "")
            )
        if stats is not None:
            lines.append(f"  set up      in {stats.setup_seconds:.2f} s")
        if stats is not None and stats.device is not None:
            lines.append(
                f"  seen        {stats.transfers} transfers, held at most {format_bytes(stats.peak_pool_bytes)} of "
                f"{format_bytes(stats.pool_bytes)}; {stats.device}"
                + (f"; {stats.ahead} begun ahead of a call, {stats.dropped} of them in vain" if stats.ahead else "")
            )
        elif stats is not None:
            rate = f"{stats.bandwidth / 1e6:.2f} GB/s" if stats.bandwidth else "no reads yet"
            lines.append(
                f"  seen        {stats.transfers} transfers, {format_bytes(stats.disk_bytes)} from disk, "
                f"{format_bytes(stats.cached_bytes)} from page cache, {rate}; {stats.stall_ms:.1f} ms stalled, "
                f"{stats.overruns} times beyond the pool"
                + (f"; {stats.ahead} begun ahead of a call, {stats.dropped} of them in vain" if stats.ahead else "")
            )
        return "\n".join(lines)

    @property
    def _source(self) -> str:
        predicted = self.timeline("predicted")
        return "estimated costs" if predicted is None else predicted.source

    def _units(self) -> str:
        rows = [
            (
                u.path or "(root)",
                str(u.weights),
                format_bytes(u.nbytes),
                format_bytes(u.streamed_bytes),
                f"{u.stall_ms:.1f}",
            )
            for u in self.units
        ]
        return format_table(("unit", "weights", "bytes", "streamed", "stall ms"), rows)

    def _patterns(self) -> str:
        rows = [(m.pattern, m.role, str(m.modules), str(m.parameters)) for m in self.selection.matches]
        lines = [format_table(("pattern", "role", "modules", "parameters"), rows)]
        lines += [f"{u.pattern!r} matched nothing; nearest: {', '.join(u.nearest)}" for u in self.selection.unmatched]
        return "\n".join(lines)

    def _stays(self) -> str:
        lines = [f"stays resident: {name}: {reason}" for name, reason in self.stays]
        inside = [(name, why.partition("; ")[2]) for name, why in self.plan.why.items() if FETCHED_BEFORE in why]
        return "\n".join([*lines, *(f"streamed: {name}: {told}" for name, told in inside)])


def report(compiled: Any, measured: Timeline | Iterable[Timeline] = ()) -> Report:
    """The report of an offloaded model.

    Args:
        compiled: the model, its compiled wrapper, or a compiled function.
        measured: timelines of calls that `record_call` recorded, to stand beside the predicted one.

    Raises:
        OffloadError: it is not offloaded (a compiled model is from its first call on), or uses several offloaded models.
    """
    session = one_session(compiled, "report")
    return _report(session, (measured,) if isinstance(measured, Timeline) else tuple(measured))


def _report(session: Session, measured: tuple[Timeline, ...]) -> Report:
    stats = session.engine.stats() if session.engine is not None else None
    stalls: Counter[str] = Counter()
    stalls_of = stats.stall_ms_by_key if stats is not None else {}
    for name, parameter in session.moved.items():
        stalls[session.unit_of[name]] += stalls_of.get(parameter.key, 0.0)  # pyright: ignore[reportArgumentType]
    units = tuple(
        UnitReport(
            unit.path,
            len(unit.weights),
            unit.nbytes,
            sum(session.nbytes[name] for name in unit.weights if name in session.streamed),
            stalls[unit.path],
        )
        for unit in session.selection.units
    )
    return Report(
        session.uid,
        session.selection,
        session.plan,
        tuple(session.stays.items()),
        units,
        tuple(session.graphs),
        stats,
        (_predicted(session), *measured),
    )


def _predicted(session: Session) -> Timeline:
    """The call that the plan was chosen for: weights and their units, in the steps of the captured graph."""
    costs, made = session.costs, session.plan
    streamed = session.streamed
    uses = [(name, nbytes, costs.steps_of[name]) for name, nbytes in session.nbytes.items() if name in streamed]
    windows = windows_of(uses)
    pool = max(made.pool, least_pool(windows))
    if made.steady is not None and windows:
        moves = steady_schedule(windows, len(costs.step_ms), pool, made.lookahead)
    else:
        moves = schedule(windows, pool, made.lookahead)
    unit_of = {name: session.unit_of[name] or "(root)" for name in session.nbytes}
    provenance = costs.link.provenance
    return predicted_timeline(
        moves,
        costs.step_ms,
        costs.link,
        costs.step_labels(unit_of, START),
        sum(session.nbytes.values()) - sum(nbytes for _, nbytes, _ in uses),
        made.budget,
        unit_of={name: unit_of[name] for name, _, _ in uses},
        source="estimated costs" if provenance == "estimated" else f"costs {provenance}",
    )


__all__ = ["Report", "Schedule", "UnitReport", "report"]
