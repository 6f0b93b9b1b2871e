"""A profile as text: what every unit costs, graph by graph, each number with where it comes from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from .graph_profile import GraphProfile, StepProfile
from .link_profile import describe
from .passes.schedule import format_bytes, format_table
from .profile import Profile, ProfiledWeight
from .simulate import Link

_NOTE = (
    "transfer: copies of the row's weights, at the link above. exposed: what they would take beyond the compute of the row "
    "before."
)


@dataclass
class _Row:
    nbytes: int = 0
    transfer_ms: float = 0.0
    steps: list[StepProfile] = field(default_factory=list)

    @property
    def compute_ms(self) -> float:
        return sum(step.ms for step in self.steps)


def profile_text(profile: Profile) -> str:
    """The text of `str(profile)`: a head, and for every graph a line and a table of its units.

    A weight counts in the unit of the step that uses it first in the graph. A unit whose steps lie apart is one row, where it
    begins.
    """
    parts = [_head(profile)]
    weights = {weight.name: weight for weight in profile.weights}
    parts += [_graph(graph, weights, profile.link.link) for graph in profile.graphs]
    if any(graph.steps for graph in profile.graphs):
        parts[-1] += f"\n{_NOTE}"
    stays = [(weight.name, weight.stays) for weight in profile.weights if weight.stays is not None]
    if stays:
        parts.append(format_table(("stays resident", "why"), stays, left=2))
    return "\n\n".join(parts)


def _head(profile: Profile) -> str:
    units = len({weight.unit for weight in profile.weights})
    differs = profile.machine.unlike_here()
    lines = [
        f"Profile: {profile.model} {profile.fingerprint}",
        f"  selected   {len(profile.weights)} weights in {units} units, {format_bytes(profile.nbytes)}",
        f"  machine    {profile.machine}",
    ]
    if differs:
        lines.append(f"  foreign    this machine differs in {_listed(differs)}: times here may be others")
    lines.append(f"  link       {describe(profile.link.link)}")
    used = {name for graph in profile.graphs for name in graph.uses}
    unused = [weight.nbytes for weight in profile.weights if weight.name not in used]
    if unused:
        lines.append(f"  unused     {len(unused)} weights, {format_bytes(sum(unused))}, by no graph")
    return "\n".join(lines)


def _graph(graph: GraphProfile, weights: dict[str, ProfiledWeight], link: Link) -> str:
    call = f"measured over {graph.samples} calls" if graph.samples else "estimated"
    title = (
        f"graph {graph.name}, inputs {graph.signature or 'unknown'}\n"
        f"  compute    {graph.compute_ms:.3f} ms in {len(graph.steps)} steps ({_source(graph.steps)})\n"
        f"  call       {graph.call_ms:.3f} ms, {graph.stall_ms:.3f} ms of it stalled ({call})"
    )
    rows: dict[str, _Row] = {}
    for step in graph.steps:
        rows.setdefault(step.unit, _Row()).steps.append(step)
    for name, steps in graph.uses.items():
        row, nbytes = rows[graph.steps[min(steps)].unit], weights[name].nbytes
        row.nbytes += nbytes
        row.transfer_ms += link.copy_ms(nbytes) if nbytes else 0.0
    lines, before = [], 0.0
    for unit, row in rows.items():
        exposed = max(0.0, row.transfer_ms - before)
        times = (f"{ms:.3f}" for ms in (row.compute_ms, row.transfer_ms, exposed))
        lines.append((unit or "(root)", format_bytes(row.nbytes), *times, _source(row.steps)))
        before = row.compute_ms
    header = ("unit", "bytes", "compute ms", "transfer ms", "exposed ms", "compute is")
    return f"{title}\n{format_table(header, lines)}" if lines else title


def _source(steps: Iterable[StepProfile]) -> str:
    """Where the times of `steps` come from, with the largest spread of those that were measured."""
    steps = tuple(steps)
    kinds = Counter(step.provenance for step in steps)
    spread = max((step.spread for step in steps), default=0.0)
    if not kinds["measured"]:
        return "estimated"
    if not kinds["estimated"]:
        return f"measured ±{spread:.0%}"
    return f"measured ±{spread:.0%}, {kinds['estimated']} of {len(steps)} estimated"


def _listed(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


__all__ = ["profile_text"]
