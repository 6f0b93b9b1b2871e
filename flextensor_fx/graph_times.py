"""How long the steps of compiled graphs take, read off the events of calls that ran.

The waits are the marks: the compiler can move no work across the wait for a weight that it reads. So nothing is added to a graph
to measure it, and nothing is synchronised in a call.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from .captured import Costs
from .graph_profile import GraphProfile, StepProfile
from .link_profile import LinkPoint
from .runtime.trace import Event

_LEAST_MS = 1e-6


@dataclass(frozen=True)
class GraphRun:
    """One run of one compiled graph; times in ms.

    Fields:
        graph: name of the captured graph.
        signature: class of its input shapes.
        total_ms: from begin to end.
        stall_ms: the part of it in which compute waited for copies.
        stretches: (first step, ms of compute from there to the next stretch), in order; the first begins at step 0.
    """

    graph: str
    signature: str
    total_ms: float
    stall_ms: float
    stretches: tuple[tuple[int, float], ...]


def graph_runs(events: Sequence[Event], names: Mapping[str, str], costs: Mapping[str, Costs]) -> list[GraphRun]:
    """The runs among `events`, in order.

    Args:
        events: in order of time.
        names: of weights, by key.
        costs: by name of each captured graph; others are left out.
    """
    runs: list[GraphRun] = []
    begin: int | None = None
    for place, event in enumerate(events):
        if event.kind == "enters":
            begin = place
        elif event.kind == "leaves" and begin is not None and events[begin].key == event.key:
            graph, _, signature = event.key.partition(": ")
            if graph in costs:
                runs.append(_run(graph, signature, events[begin : place + 1], names, costs[graph]))
            begin = None
    return runs


def _run(graph: str, signature: str, events: Sequence[Event], names: Mapping[str, str], costs: Costs) -> GraphRun:
    step, since, stall = 0, events[0].at_s, 0.0
    spent: dict[int, float] = {0: 0.0}
    arrived: dict[str, float] = {}
    waits: dict[str, float] = {}
    for event in events[1:]:
        if event.kind == "arrived":
            arrived[event.key] = event.at_s
        elif event.kind == "waits":
            waits[event.key] = event.at_s
        elif event.kind == "waited" and event.key in waits:
            came = waits.pop(event.key)
            # A weight that arrives after compute came to it was waited for; else the way through the wait is compute.
            late = arrived.get(event.key, came) > came
            spent[step] += (came if late else event.at_s) - since
            stall += event.at_s - came if late else 0.0
            since = event.at_s
            uses = costs.steps_of.get(names.get(event.key, ""), ())
            step = min((use for use in uses if use >= step), default=step)
            spent.setdefault(step, 0.0)
    spent[step] += events[-1].at_s - since
    total = events[-1].at_s - events[0].at_s
    stretches = tuple((first, seconds * 1000) for first, seconds in spent.items())
    return GraphRun(graph, signature, total * 1000, stall * 1000, stretches)


def profile_graphs(
    runs: Iterable[GraphRun], costs: Mapping[str, Costs], unit_of: Mapping[str, str]
) -> tuple[GraphProfile, ...]:
    """One profile per graph and class of input shapes, from medians over its runs.

    A graph that took part in no run is estimated if it uses a weight that no graph which ran does. Others are left out: as a rule
    they were compiled for one shape, before one that serves all shapes took their place.

    A stretch between two waits may hold several steps, such as those of weights that stay resident. Its time is measured; it is
    shared out among them as the estimates say. Disturbances lengthen one stretch or another in every run, so that medians of
    stretches add up to less than the median run; all are scaled to add up to it.

    Args:
        costs: by name of each captured graph.
        unit_of: the unit of each weight.
    """
    by_class: defaultdict[tuple[str, str], list[GraphRun]] = defaultdict(list)
    for run in runs:
        by_class[run.graph, run.signature].append(run)
    found = [_profile(graph, signed, runs, costs[graph], unit_of) for (graph, signed), runs in by_class.items()]
    used = {name for graph, _ in by_class for name in costs[graph].steps_of}
    never = [name for name in costs if costs[name].steps_of.keys() - used]
    found += [_profile(name, "", [], costs[name], unit_of) for name in never]
    return tuple(found)


def _profile(
    graph: str, signature: str, runs: Sequence[GraphRun], costs: Costs, unit_of: Mapping[str, str]
) -> GraphProfile:
    units = costs.step_labels({name: unit_of[name] for name in costs.steps_of})
    steps = [StepProfile(unit, ms, 0.0, "estimated") for unit, ms in zip(units, costs.step_ms, strict=True)]
    if runs and steps:
        # The same stretches in every run, but for one that a write or a fork disturbed.
        common, _ = Counter(tuple(first for first, _ in run.stretches) for run in runs).most_common(1)[0]
        runs = [run for run in runs if tuple(first for first, _ in run.stretches) == common]
        computed = [[ms for _, ms in run.stretches] for run in runs]
        whole = sum(median(times) for times in zip(*computed, strict=True))
        scale = median(sum(times) for times in computed) / max(whole, _LEAST_MS)
        for place, (begin, end) in enumerate(pairwise((*common, len(steps)))):
            times = [run[place] for run in computed]
            middle = median(times)
            spread = median(abs(ms - middle) for ms in times) / max(middle, _LEAST_MS)
            estimated = sum(costs.step_ms[begin:end])
            for step in range(begin, end):
                share = costs.step_ms[step] / estimated if estimated else 1 / (end - begin)
                steps[step] = StepProfile(steps[step].unit, middle * share * scale, spread, "measured")
    return GraphProfile(
        graph,
        signature,
        tuple(steps),
        dict(costs.steps_of),
        median(run.total_ms for run in runs) if runs else sum(costs.step_ms),
        median(run.stall_ms for run in runs) if runs else 0.0,
        len(runs),
    )


def read_points(events: Iterable[Event], nbytes: Mapping[str, int]) -> list[LinkPoint]:
    """How long reads took, while compute ran beside them, by size: the mean in a round of calls, and of these the median.

    The mean, since a call waits for the sum of its reads: some are always slowed by what is computed beside them. The n-th reads
    of all weights are one round.

    Args:
        nbytes: by key.
    """
    begun: dict[str, float] = {}
    rounds: Counter[str] = Counter()
    times: defaultdict[int, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        if event.kind == "read":
            begun[event.key] = event.at_s
        elif event.kind == "arrived" and event.key in begun and nbytes.get(event.key):
            times[nbytes[event.key]][rounds[event.key]].append((event.at_s - begun.pop(event.key)) * 1000)
            rounds[event.key] += 1
    points = []
    for size, by_round in sorted(times.items()):
        means = [fmean(taken) for taken in by_round.values()]
        middle = max(median(means), _LEAST_MS)
        points.append(LinkPoint(size, middle, median(abs(ms - middle) for ms in means) / middle))
    return points
