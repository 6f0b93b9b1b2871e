"""How far are predicted times from measured ones, and do they rank budgets as measurements do? What does recording a call cost?

A Llama whose layers' weights are on disk is profiled once for each number of tokens, with all of them streamed. For each budget
it is compiled with a plan made from that profile. Then all of them are called in turns, the one that streams everything too; the
files' pages are dropped from the page cache before each call, also while profiling. "plan" is the plan's prediction, "anew" that
of the same plan at costs measured between the timed calls: a machine whose speed has changed since it was profiled is off in the
first and not in the second. What a call does outside of its graph (guards, the output's dataclass) is in no plan: the time of
recorded calls beyond that of their graph is added to both. Recorded and plain calls are compared in pairs.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _common import Check, Output, build_llama, command_line, finish, interleave, paired, rotated
from overlap import FULL, QUICK, fill_cache
from torch import Tensor, nn

import flextensor_fx
from flextensor_fx.backend import stream_all
from flextensor_fx.offloading import find_sessions
from flextensor_fx.replanning import time_in_force
from flextensor_fx.runtime.engine import Engine
from flextensor_fx.runtime.trace import Event
from flextensor_fx.session import Session
from flextensor_fx.session_plan import costs_of
from flextensor_fx.session_profile import profile_of

BUDGETS = ("15%", "25%", "50%", "75%")
TIE = 0.03


@dataclass
class Case:
    """One budget at one number of tokens; times in ms.

    Fields:
        model: compiled for it.
        call: it.
        plan: predicted from the profile, for the graph.
        anew: predicted at costs measured between the calls, for the graph.
        calls: measured.
        outside: of recorded calls, what their graph does not account for.
        stalls, compute: of recorded calls.
    """

    budget: str
    model: nn.Module
    call: Callable[[], Any]
    plan: float
    anew: float = 0.0
    calls: list[float] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    compute: list[float] = field(default_factory=list)

    def error(self, predicted: float) -> float:
        """Relative, of a prediction for the graph."""
        return (predicted + median(self.outside)) / median(self.calls) - 1


def main() -> None:
    """Runs the benchmark."""
    parser = command_line("prediction", __doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 64, 256], help="numbers of tokens (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="%(default)s; 2 with --quick")
    args = parser.parse_args()
    output = Output("prediction", args.quick)
    sizes = QUICK if args.quick else FULL
    models = [build_llama(**sizes) for _ in range(1 + len(BUDGETS))]
    cases: list[Case] = []
    with torch.no_grad(), tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as directory:
        for tokens in args.tokens:
            ids = torch.randint(sizes["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(1))
            cases += measure(output, models, ids, 2 if args.quick else args.rounds, directory)
    for name in ("plan", "anew"):
        errors = [abs(case.error(getattr(case, name))) for case in cases]
        output.check(Check(f"median error, {name}", median(errors), 0.08))
    finish(output, args.out)


def measure(output: Output, models: Sequence[nn.Module], ids: Tensor, rounds: int, directory: str) -> list[Case]:
    """All budgets at one number of tokens."""
    tokens, (everything, *others) = ids.shape[1], models
    file = Path(directory) / f"profile-{tokens}.json"
    options: dict[str, Any] = {"include_patterns": ["model.layers.*"], "store_dir": directory}
    torch._dynamo.reset()
    found = flextensor_fx.profile(everything, (ids,), options, before_each=lambda: drop(everything))
    found.save(file)
    (graph,) = found.graphs
    print(
        f"\n{tokens} tokens: profiled over {graph.samples} calls of {graph.call_ms:.1f} ms, compute {graph.compute_ms:.1f} ms, "
        f"stalled {graph.stall_ms:.1f} ms\n{found.link}",
        flush=True,
    )
    all_streamed = compiled(everything, ids, backend=stream_all, options=options)
    cases: list[Case] = []
    for budget, model in zip(BUDGETS, others, strict=True):
        given = options | {"budget": budget, "profile": file}
        call = compiled(model, ids, backend=flextensor_fx.flextensor, options=given)
        cases.append(Case(budget, model, call, session_of(model).plan.predicted_ms))
    events: list[Event] = []
    for number in range(rounds):
        events += recorded(everything, all_streamed)[0]
        for name in rotated(BUDGETS, number):
            sample(cases[BUDGETS.index(name)])
    costs = costs_of(profile_of(session_of(everything), events))
    for case in cases:
        case.anew = time_in_force(session_of(case.model), costs)
    output.table(
        f"{tokens} tokens, {found.nbytes / 1e9:.2f} GB selected, {rounds} rounds", [row(case) for case in cases]
    )
    ratio = recorded_ratio(cases[1].model, cases[1].call, max(rounds, 15))
    output.check(
        Check(f"{tokens} tokens, plan: pairs of budgets in the wrong order", float(len(inversions(cases))), 0),
        Check(f"{tokens} tokens, {cases[1].budget}: recorded / plain, in the page cache", ratio, 1.03),
    )
    for model in models:
        flextensor_fx.release(model)
    return cases


def compiled(model: nn.Module, ids: Tensor, **how: Any) -> Callable[[], Any]:
    """The model compiled for `ids` and warm."""
    call = torch.compile(model, fullgraph=True, dynamic=False, **how)
    for _ in range(3):
        call(ids)
    return lambda: call(ids)


def sample(case: Case) -> None:
    """A plain call and a recorded one."""
    drop(case.model)
    begin = time.perf_counter()
    case.call()
    case.calls.append((time.perf_counter() - begin) * 1e3)
    engine = engine_of(session_of(case.model))
    stalled = engine.stats().stall_ms
    events, total = recorded(case.model, case.call)
    marks = {event.kind: event.at_s for event in events}
    within = (marks["leaves"] - marks["enters"]) * 1e3
    case.outside.append(total - within)
    case.stalls.append(engine.stats().stall_ms - stalled)
    case.compute.append(within - case.stalls[-1])


def recorded(model: nn.Module, call: Callable[[], Any]) -> tuple[tuple[Event, ...], float]:
    """A call that finds nothing in the page cache: its events, and ms."""
    session = session_of(model)
    engine = engine_of(session)
    engine.store.drop_cache()
    begin = time.perf_counter()
    with session.lock, engine.trace() as recorder:
        call()
    return recorder.events(), (time.perf_counter() - begin) * 1e3


def recorded_ratio(model: nn.Module, call: Callable[[], Any], rounds: int) -> float:
    """Recorded calls over plain ones, in pairs; with the files in the page cache, where the disk adds no noise."""
    session = session_of(model)
    engine = engine_of(session)
    fill_cache([file.fd for file in engine.store.files])

    def traced() -> None:
        with session.lock, engine.trace():
            call()

    calls: Mapping[str, Callable[[], Any]] = {"recorded": traced, "plain": call}
    for one in calls.values():
        one()
    seconds = interleave(calls, 3 * rounds)
    return paired(seconds["recorded"], seconds["plain"])


def inversions(cases: Sequence[Case]) -> list[tuple[str, str]]:
    """Pairs of budgets that plans and measurements put in opposite orders, neither of them a tie."""
    found = []
    for a, b in combinations(cases, 2):
        predicted, measured = b.plan / a.plan - 1, median(b.calls) / median(a.calls) - 1
        if predicted * measured < 0 and min(abs(predicted), abs(measured)) > TIE:
            found.append((a.budget, b.budget))
    return found


def row(case: Case) -> dict[str, Any]:
    """A line of the table."""
    session = session_of(case.model)
    held = sum(nbytes for name, nbytes in session.nbytes.items() if name not in session.streamed)
    return {
        "budget": case.budget,
        "plan ms": case.plan,
        "anew ms": case.anew,
        "outside ms": median(case.outside),
        "measured ms": median(case.calls),
        "plan off": f"{case.error(case.plan):+.1%}",
        "anew off": f"{case.error(case.anew):+.1%}",
        "fastest ms": min(case.calls),
        "slowest ms": max(case.calls),
        "plan stall": session.plan.predicted_stall_ms,
        "stall": median(case.stalls),
        "compute": median(case.compute),
        "resident": held / sum(session.nbytes.values()),
    }


def drop(model: nn.Module) -> None:
    """Takes the files of an offloaded model out of the page cache."""
    engine_of(session_of(model)).store.drop_cache()


def session_of(model: nn.Module) -> Session:
    (session,) = find_sessions(model)
    return session


def engine_of(session: Session) -> Engine:
    assert isinstance(session.engine, Engine), "everything fits the budget, so nothing is streamed"
    return session.engine


if __name__ == "__main__":
    main()
