"""What a captured graph tells the planner: which weights each step uses, and a rough cost of every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, strided
from torch._ops import HigherOrderOperator
from torch.fx import Graph, Node

from ._torch_versions import source_name, source_of
from .estimate import Rates, step_costs
from .passes.activation_peak import activation_peak
from .passes.collect_uses import collect_uses
from .passes.fetches import FetchSpec
from .passes.realized import captured_elementwise, captured_realized
from .simulate import Link

_OF_MODULES = ("_modules", "_parameters", "_buffers")


@dataclass(frozen=True)
class Costs:
    """What a plan is made from: steps that use each weight (by name), ms per step, the link, and `fused` as in `plan`.

    `activation_bytes` are at most alive at once; None where no graph tells. `in_bodies` are the operators with bodies, such as
    cond, that read a weight there, by name.
    """

    steps_of: Mapping[str, tuple[int, ...]]
    step_ms: Sequence[float]
    link: Link
    fused: frozenset[str] = frozenset()
    activation_bytes: int | None = None
    in_bodies: Mapping[str, str] = field(default_factory=dict)

    def step_labels(self, label_of: Mapping[str, str], before: str = "") -> list[str]:
        """The label of each step: that of the first weight in `label_of` that it uses, or of the step before it if it uses none.

        Args:
            label_of: of weights, by name.
            before: the label of steps before the first such weight.
        """
        first: dict[int, str] = {}
        for name, label in label_of.items():
            for step in self.steps_of[name]:
                first.setdefault(step, label)
        labels, label = [], before
        for step in range(len(self.step_ms)):
            label = first.get(step, label)
            labels.append(label)
        return labels


@dataclass(frozen=True)
class CapturedGraph:
    """A graph as Dynamo captured it.

    Fields:
        name: no other graph of the same session has it.
        costs: of the weights that it uses; estimated.
    """

    name: str
    costs: Costs


def captured_costs(
    graph: Graph, names: Mapping[Node, Sequence[str]], parameters: Mapping[Node, Tensor], link: Link, rates: Rates
) -> Costs:
    """Estimates of a captured graph.

    Args:
        names: of the weight that each placeholder stands for.
        parameters: their values; only shapes and dtypes are read.
        link: what copies are thought to cost.
        rates: of the device that computes.
    """
    specs = {
        node: FetchSpec(names[node][0], tuple(p.shape), (), p.dtype, p.device)
        for node in names
        if (p := parameters[node]).layout is strided
    }
    uses = collect_uses(graph, captured_realized, specs)
    steps_of = {
        name: tuple(sorted({step for c in use.consumers for step in (c.step, c.closes)}))
        for use in uses.fetches
        for name in names[use.node]
    }
    fused = {
        name
        for use in uses.fetches
        if all(captured_elementwise(consumer.node) for consumer in use.consumers)
        for name in names[use.node]
    }
    activations = activation_peak(graph, keeps_all=torch.is_grad_enabled())
    in_bodies = {
        name: user.target.name()
        for node in specs
        for user in node.users
        if isinstance(user.target, HigherOrderOperator)
        for name in names[node]
    }
    return Costs(steps_of, step_costs(graph, uses, rates), link, frozenset(fused), activations, in_bodies)


def input_places(placeholders: Sequence[Node]) -> tuple[int, ...]:
    """Places of the arguments that the caller gave, as far as Dynamo tells: no parameters and buffers of modules."""
    sources = [source_of(node) for node in placeholders]
    named = ["" if source is None else source_name(source) for source in sources]
    return tuple(place for place, name in enumerate(named) if not any(part in name for part in _OF_MODULES))


def signature(arguments: Sequence[object], places: Sequence[int]) -> str:
    """The class of shapes of a call: dtype and shape of each input that is a tensor."""
    tensors = [value for place in places if isinstance(value := arguments[place], Tensor)]
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)
