"""What was offloaded, and how it went: a value that prints."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from .errors import OffloadError
from .offloading import find_sessions
from .passes.schedule import Schedule, format_bytes, format_table
from .planner import Plan
from .runtime.engine import EngineStats
from .selection import Selection
from .session import GraphRecord, Session


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
    """

    store: str
    selection: Selection
    plan: Plan
    stays: tuple[tuple[str, str], ...]
    units: tuple[UnitReport, ...]
    graphs: tuple[GraphRecord, ...]
    stats: EngineStats | None

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
        return self.resident_bytes + max((graph.schedule.peak_bytes for graph in self.graphs), default=self.plan.pool)

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
            f"  predicted   {plan.predicted_ms:.1f} ms a call, {plan.predicted_stall_ms:.1f} ms of it stalled (estimated costs)",
        ]
        for graph in self.graphs:
            lines.append(f"  graph       {graph.name}: {len(graph.schedule.transfers)} transfers, "
                         f"peak {format_bytes(graph.schedule.peak_bytes)}, passes {graph.pass_seconds * 1e3:.0f} ms")
        if stats is not None:
            rate = f"{stats.bandwidth / 1e6:.2f} GB/s" if stats.bandwidth else "no reads yet"
            lines.append(
                f"  seen        {stats.transfers} transfers, {format_bytes(stats.disk_bytes)} from disk, "
                f"{format_bytes(stats.cached_bytes)} from page cache, {rate}; {stats.stall_ms:.1f} ms stalled, "
                f"{stats.overruns} times beyond the pool"
            )
        return "\n".join(lines)

    def _units(self) -> str:
        rows = [
            (u.path or "(root)", str(u.weights), format_bytes(u.nbytes), format_bytes(u.streamed_bytes), f"{u.stall_ms:.1f}")
            for u in self.units
        ]
        return format_table(("unit", "weights", "bytes", "streamed", "stall ms"), rows)

    def _patterns(self) -> str:
        rows = [(m.pattern, m.role, str(m.modules), str(m.parameters)) for m in self.selection.matches]
        lines = [format_table(("pattern", "role", "modules", "parameters"), rows)]
        lines += [f"{u.pattern!r} matched nothing; nearest: {', '.join(u.nearest)}" for u in self.selection.unmatched]
        return "\n".join(lines)

    def _stays(self) -> str:
        return "\n".join(f"stays resident: {name}: {reason}" for name, reason in self.stays)


def report(compiled: Any) -> Report:
    """The report of an offloaded model.

    Args:
        compiled: the model, its compiled wrapper, or a compiled function.

    Raises:
        OffloadError: it is not offloaded (a compiled model is from its first call on), or uses several offloaded models.
    """
    sessions = find_sessions(compiled)
    if len(sessions) != 1:
        what = getattr(compiled, "__name__", type(compiled).__name__)
        found = "none" if not sessions else ", ".join(session.uid for session in sessions)
        raise OffloadError(
            f"report: expected {what} to belong to one offloaded model, found {found}; "
            + ("call the compiled model once first" if not sessions else "ask for the report of each model")
        )
    return _report(sessions[0])


def _report(session: Session) -> Report:
    stats = session.engine.stats() if session.engine is not None else None
    stalls: Counter[str] = Counter()
    for key, ms in (stats.stall_ms_by_key if stats is not None else {}).items():
        stalls[session.unit_of[key.partition(":")[2]]] += ms  # pyright: ignore[reportArgumentType]
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
        session.uid, session.selection, session.plan, tuple(session.stays.items()), units, tuple(session.graphs), stats
    )


__all__ = ["Report", "Schedule", "UnitReport", "report"]
