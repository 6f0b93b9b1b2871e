"""Reports built from numbers alone, for tests of what is made of reports; and ways to damage what is saved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from flextensor_fx.graph_record import GraphRecord
from flextensor_fx.passes.schedule import schedule, windows_of
from flextensor_fx.planner import Plan
from flextensor_fx.report import Report, UnitReport
from flextensor_fx.runtime.stats import EngineStats
from flextensor_fx.selection import Excluded, Match, Selection, Unit, Unmatched
from flextensor_fx.simulate import Link, simulate
from flextensor_fx.timeline import Timeline, predicted_timeline

MIB = 1 << 20
LINK = Link(0.05, 1.5e6, "estimated")


def model_report(units: int, *, measured: bool = True, prefix: str = "model.layers.") -> Report:
    """The report of a model of `units` layers of three weights, whose large ones and every other medium one are streamed."""
    paths = [f"{prefix}{n}" for n in range(units)]
    sizes = {"up.weight": 6 * MIB, "down.weight": 4 * MIB, "norm.weight": 4096}
    uses = [
        (f"{path}.{name}", nbytes, (3 * n + at,))
        for n, path in enumerate(paths)
        for at, (name, nbytes) in enumerate(sizes.items())
    ]
    step_ms = [(3.2, 2.0, 0.1)[step % 3] * (1 + 0.5 * (step // 3 % 4 == 0)) for step in range(3 * units)]
    total = sum(nbytes for _, nbytes, _ in uses)
    moved = [use for use in uses if use[1] == 6 * MIB or (use[1] == 4 * MIB and use[2][0] // 3 % 2)]
    streamed = {key for key, _, _ in moved}
    resident = total - sum(nbytes for _, nbytes, _ in moved)
    moves = schedule(windows_of(moved), 12 * MIB)
    run = simulate(moves, step_ms, LINK)
    made = Plan(
        resident=frozenset(key for key, _, _ in uses if key not in streamed),
        streamed=tuple(key for key, _, _ in moved),
        pool=moves.pool,
        budget=resident + 13 * MIB,
        lookahead=None,
        peak_bytes=resident + moves.pool,
        streamed_bytes=total - resident,
        predicted_ms=run.total_ms,
        predicted_stall_ms=run.stall_ms,
        lower_bound_ms=sum(step_ms),
        least_budget=6 * MIB,
        why={key: "streamed" if key in streamed else "resident: within the budget" for key, _, _ in uses},
    )
    labels = [path for path in paths for _ in sizes]
    unit_of = {f"{path}.{name}": path for path in paths for name in sizes}
    predicted = predicted_timeline(moves, step_ms, LINK, labels, resident, made.budget, unit_of=unit_of)
    timelines = (predicted, as_measured(predicted)) if measured else (predicted,)
    times = timelines[-1].by_unit()
    selection = Selection(
        tuple(Unit(path, tuple(f"{path}.{name}" for name in sizes), sum(sizes.values())) for path in paths),
        (
            Match(f"{prefix}*", "include", units, 3 * units),
            Match("layer.*", "include", 0, 0),
            Match("lm_head", "exclude", 1, 1),
        ),
        (Unmatched("layer.*", "include", (f"{prefix}0",)),),
        (Excluded("lm_head.weight", "lm_head"),),
    )
    reports = tuple(
        UnitReport(
            unit.path,
            len(unit.weights),
            unit.nbytes,
            sum(sizes[name.removeprefix(unit.path + ".")] for name in unit.weights if name in streamed),
            3 * times[unit.path].stall_ms,
        )
        for unit in selection.units
    )
    stats = EngineStats(
        transfers=3 * len(moves.transfers), reads=3 * len(moves.transfers), disk_bytes=3 * made.streamed_bytes, cached_bytes=0,
        read_seconds=3 * made.streamed_bytes / 1.5e9, stall_ms=3 * timelines[-1].stall_ms, stall_ms_by_key={},
        overruns=0, pool_bytes=made.pool, peak_pool_bytes=made.pool, touched_bytes=made.pool,
    )  # fmt: skip
    stays = (("model.layers.0.mask", "it is empty"),)
    return Report(
        "Model-0a1b2c3d", selection, made, stays, reports, (GraphRecord("forward 0", moves, 0.12),), stats, timelines
    )


def as_measured(predicted: Timeline) -> Timeline:
    """A call that went like `predicted`, except that everything took 7% longer."""
    grow = 1.07
    return Timeline(
        "one call",
        "measured",
        "recorded while it ran",
        predicted.total_ms * grow,
        predicted.budget_bytes,
        predicted.resident_bytes,
        tuple(replace(s, start_ms=s.start_ms * grow, end_ms=s.end_ms * grow) for s in predicted.compute),
        tuple(replace(s, start_ms=s.start_ms * grow, end_ms=s.end_ms * grow) for s in predicted.transfers),
        tuple(replace(s, start_ms=s.start_ms * grow, end_ms=s.end_ms * grow) for s in predicted.stalls),
        tuple(replace(level, ms=level.ms * grow) for level in predicted.memory),
    )


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def put(data: Any, path: tuple[str | int, ...], value: Any) -> None:
    for part in path[:-1]:
        data = data[part]
    data[path[-1]] = value


def paths(data: Any, here: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [here, *(path for key, value in items for path in paths(value, (*here, key)))]


def without(data: Any, place: tuple[str | int, ...]) -> Any:
    """`data`, whose value at `place` is taken out."""
    *parents, last = place
    inner = data
    for part in parents:
        inner = inner[part]
    del inner[last]
    return data
