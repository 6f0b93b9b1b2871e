"""How far above the lower bound are planned periods, how do simple policies compare, and how long does planning take?

The traces are models on four links: per compute step its time, per weight its bytes and steps. Each is planned under seven
budgets, for a call that repeats. Four policies that anyone would try first are scheduled and simulated by the same code.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from _common import RESULTS, Check, Output, finish

from flextensor_fx.errors import BudgetError
from flextensor_fx.passes.schedule import PoolError
from flextensor_fx.passes.steady_schedule import circular_windows, steady_schedule
from flextensor_fx.planner import plan
from flextensor_fx.simulate import Link
from flextensor_fx.steady import simulate_steady

TRACES = Path(__file__).parent / "traces"
COUNTS = (1_000, 5_000, 20_000, 50_000)
QUICK_COUNTS = (200, 1_000)
MB = 1_000_000


@dataclass(frozen=True)
class Case:
    """One model on one link; `budgets` are (share of all bytes, bytes)."""

    family: str
    link_name: str
    uses: tuple[tuple[str, int, tuple[int, ...]], ...]
    step_ms: tuple[float, ...]
    link: Link
    budgets: tuple[tuple[str, int], ...]


def read_traces(folder: Path) -> list[Case]:
    """The traces in `folder`, by name."""
    cases: list[Case] = []
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text())
        family, _, link_name = path.stem.partition("__")
        cases.append(
            Case(
                family,
                link_name,
                tuple((t["name"], t["bytes"], tuple(t["uses"])) for t in data["tensors"]),
                tuple(unit["compute_ms"] for unit in data["units"]),
                Link(data["link"]["latency_ms"], data["link"]["bytes_per_ms"], "trace"),
                tuple((share, budget["bytes"]) for share, budget in data["budgets"].items()),
            )
        )
    return cases


# --- simple policies ---------------------------------------------------------------------------------------------------


def period(case: Case, budget: int, resident: set[str], lookahead: int | None) -> float | None:
    """Period with these layers resident and all others streamed; None where the budget does not hold them."""
    streamed = [use for use in case.uses if layer_of(use[0]) not in resident]
    pool = budget - sum(nbytes for key, nbytes, _ in case.uses if layer_of(key) in resident)
    steps = len(case.step_ms)
    try:
        made = steady_schedule(circular_windows(streamed, steps), steps, pool, lookahead)
    except PoolError:
        return None
    return simulate_steady(made, case.step_ms, case.link).period_ms


def layer_of(key: str) -> str:
    """ "12.qkv" is part of layer "12"."""
    return key.partition(".")[0]


def layers_of(case: Case) -> list[str]:
    """All layers, in order of use."""
    return list(dict.fromkeys(layer_of(key) for key, _, _ in sorted(case.uses, key=lambda use: min(use[2]))))


def front_layers(case: Case, budget: int, lookahead: int) -> float | None:
    """As many whole layers resident, from the front, as the budget allows."""
    layers = layers_of(case)
    tried = (period(case, budget, set(layers[:kept]), lookahead) for kept in range(len(layers), -1, -1))
    return next((ms for ms in tried if ms is not None), None)


def some_of_every(case: Case, budget: int) -> float | None:
    """N of every M layers streamed, the others resident: the fewest that the budget allows, the best M up to 8."""
    layers = layers_of(case)
    found: list[float] = []
    for every in range(1, 9):
        for some in range(every + 1):
            resident = {name for at, name in enumerate(layers) if at % every >= some}
            if (ms := period(case, budget, resident, 2)) is not None:
                found.append(ms)
                break
    return min(found, default=None)


POLICIES: dict[str, Callable[[Case, int], float | None]] = {
    "front layers resident": lambda case, budget: front_layers(case, budget, 2),
    "N of every M layers": some_of_every,
    "nothing resident": lambda case, budget: period(case, budget, set(), 2),
    "no overlap": lambda case, budget: front_layers(case, budget, 0),
}


# --- the questions -----------------------------------------------------------------------------------------------------


def mean(ratios: Sequence[float]) -> float:
    """Geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else float("nan")


def near_the_bound(cases: Sequence[Case], output: Output) -> None:
    """Every trace under every budget, against the bound and against the policies."""
    rows: list[dict[str, object]] = []
    missed = 0
    for case in cases:
        for share, budget in case.budgets:
            simple = {name: policy(case, budget) for name, policy in POLICIES.items()}
            begin = time.process_time()
            try:
                made = plan(case.uses, case.step_ms, case.link, budget, objective="steady")
            except BudgetError as error:
                missed += budget >= error.least or any(ms is not None for ms in simple.values())
                continue
            seconds = time.process_time() - begin
            row = {"family": case.family, "link": case.link_name, "budget": share, "period ms": made.predicted_ms}
            row |= {"bound ms": made.lower_bound_ms, "ratio": 1 + made.gap, "across calls": len(made.wrapping)}
            rows.append({**row, **simple, "plan s": seconds})
    output.table("predicted period against the lower bound", rows)
    families = list(dict.fromkeys(str(row["family"]) for row in rows))
    output.table(
        "by family", [{"family": name, **summary([r for r in rows if r["family"] == name])} for name in families]
    )
    every = summary(rows)
    output.table("all", [{"family": "all", **every}])
    slower = [
        float(ms) / float(str(row["period ms"]))
        for row in rows
        for name in POLICIES
        if isinstance(ms := row[name], float)
    ]
    output.check(
        Check("geometric mean of period / lower bound", every["mean"], 1.015),
        Check("worst period / lower bound", every["worst"], 1.17),
        Check("cases refused where a plan exists", missed, 0),
        Check("least of (period of a simple policy) / (planned period)", min(slower), 1 - 1e-6, at_most=False),
    )


def summary(rows: Sequence[dict[str, object]]) -> dict[str, float]:
    """Ratios to the bound of plans and of policies, over the cases where each exists."""
    ratios = [float(str(row["ratio"])) for row in rows]
    times = [float(str(row["plan s"])) for row in rows]
    found: dict[str, float] = {"cases": len(rows), "mean": mean(ratios), "worst": max(ratios)}
    for name in POLICIES:
        found[name] = mean([ms / float(str(row["bound ms"])) for row in rows if isinstance(ms := row[name], float)])
    return {**found, "mean s": sum(times) / len(times), "most s": max(times)}


def made_up(count: int) -> Iterator[tuple[str, Case]]:
    """Models of `count` weights: equal layers of a few sizes, and weights of any size."""
    dice = random.Random(count)
    for kind, sizes in (("layers", [4 * MB, MB, 11 * MB, 11 * MB, 11 * MB]), ("any size", [])):
        uses = tuple((f"w{i}", sizes[i % 5] if sizes else dice.randint(MB, 12 * MB), (i,)) for i in range(count))
        total = sum(nbytes for _, nbytes, _ in uses)
        step_ms = tuple(nbytes / MB * dice.uniform(0.02, 0.06) for _, nbytes, _ in uses)
        yield (
            kind,
            Case(kind, "", uses, step_ms, Link(0.01, total / sum(step_ms) / 3, "made up"), (("0.25", total // 4),)),
        )


def planning_time(counts: Sequence[int], output: Output) -> None:
    """Seconds of one plan by the number of weights."""
    rows: list[dict[str, object]] = []
    for count in counts:
        for kind, case in made_up(count):
            begin = time.process_time()
            made = plan(case.uses, case.step_ms, case.link, case.budgets[0][1], objective="steady")
            seconds = time.process_time() - begin
            rows.append({"weights": count, "kind": kind, "seconds": seconds, "ratio": 1 + made.gap})
    output.table("planning time, CPU seconds", rows)
    at = {(row["weights"], row["kind"]): float(str(row["seconds"])) for row in rows}
    least, most = counts[0], counts[-1]
    for kind in ("layers", "any size"):
        if (5_000, kind) in at:
            output.check(Check(f"seconds for 5000 weights, {kind}", at[5_000, kind], 2.0))
        growth = math.log(at[most, kind] / at[least, kind]) / math.log(most / least)
        output.check(Check(f"growth from {least} to {most} weights, {kind}: exponent", growth, 1.2))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one link, small counts: shows that it works")
    parser.add_argument("--out", type=Path, default=RESULTS / "planner.json", help="where the JSON goes (%(default)s)")
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder of traces (%(default)s)")
    args = parser.parse_args()
    output = Output("planner", args.quick)
    cases = read_traces(args.traces)
    if not cases:
        parser.error(f"--traces: expected *.json in {args.traces}, found none; name the folder that holds the traces")
    near_the_bound([c for c in cases if c.link_name == "H100_PCIe5"] if args.quick else cases, output)
    planning_time(QUICK_COUNTS if args.quick else COUNTS, output)
    finish(output, args.out)


if __name__ == "__main__":
    main()
