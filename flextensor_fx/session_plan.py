"""Plans for the weights of a session, from estimates or from a profile."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from ._sources import nbytes as bytes_of
from .candidates import Candidate
from .captured import Costs
from .config import OffloadConfig
from .device_memory import DeviceMemory
from .errors import BudgetError
from .passes.schedule import format_bytes
from .planner import Objective, Plan, plan
from .profile import Profile, ProfiledWeight

FETCHED_BEFORE = "fetched before"
"""In a plan's reasons: of a weight that the body of an operator reads, such as a branch of cond."""


def plan_weights(
    config: OffloadConfig,
    costs: Costs,
    nbytes: Mapping[str, int],
    stays: Mapping[str, str],
    memory: DeviceMemory,
    pool_floor: int,
    moved: frozenset[str] = frozenset(),
    streams_all: bool = False,
) -> Plan:
    """The plan for the weights of a session.

    Args:
        nbytes: by name of each selected weight.
        memory: what a budget that hangs on the device goes by.
        stays: why weights must stay resident, by name.
        pool_floor: bytes that the pool must have.
        moved: weights that have left memory, and must stay streamed.
        streams_all: as if there were no budget, unless that would exceed the budget.

    Raises:
        BudgetError: no schedule exists within the budget.
    """
    uses = [(name, size, costs.steps_of[name]) for name, size in nbytes.items()]
    budget = config.budget_bytes(sum(nbytes.values()), memory)

    def within(budget: int | None) -> Plan:
        return plan(
            uses,
            costs.step_ms,
            costs.link,
            budget,
            fixed=frozenset(stays),
            fused=costs.fused & nbytes.keys(),
            lookahead=config.lookahead,
            min_stream_bytes=config.min_stream_bytes,
            least_pool_bytes=pool_floor,
            objective=cast("Objective", config.objective),  # as the option has been checked
        )

    try:
        made = within(None if streams_all else budget)
        if budget is not None and made.peak_bytes > budget:
            made = within(budget)
    except BudgetError as error:
        text = f"{error}"
        if config.budget_is_of_device:
            text += f" The budget is {config.budget!r}: {memory}."
        if stays:
            kept = sum(nbytes[name] for name in stays)
            text += f" Of the selected weights {format_bytes(kept)} cannot be offloaded: " + "; ".join(
                f"{name}: {why}" for name, why in list(stays.items())[:3]
            )
        raise BudgetError(text, error.least) from None
    told = {
        name: f"{made.why[name]}; {FETCHED_BEFORE} {op}, whose body reads it"
        for name, op in costs.in_bodies.items()
        if name in made.streamed
    }
    made = replace(made, why={**made.why, **told}) if told else made
    if moved - set(made.streamed):  # moved away already: they stay streamed, and their room goes unused
        made = replace(
            made, streamed=(*made.streamed, *sorted(moved - set(made.streamed))), resident=made.resident - moved
        )
    return made


def profiled(
    candidates: Sequence[Candidate], stays: Mapping[str, str], fused: frozenset[str]
) -> tuple[ProfiledWeight, ...]:
    """The selected weights, as profiles list them."""
    return tuple(
        ProfiledWeight(
            c.name,
            c.unit,
            bytes_of(c.parameter),
            shape_of(c.parameter) or (),
            str(c.parameter.dtype),
            c.name in fused,
            stays.get(c.name),
        )
        for c in candidates
    )


def check_profile(
    found: Profile, file: str, candidates: Sequence[Candidate], stays: Mapping[str, str], device: str
) -> None:
    """Warns of a profile of another machine.

    Raises:
        ProfileError: it is of other weights.
    """
    found.check_fits(profiled(candidates, stays, frozenset()), str(torch.__version__), device)
    if found.foreign:
        warnings.warn(
            f"flextensor: the profile {file!r} was taken on another machine ({found.machine}); times here may differ",
            UserWarning,
            stacklevel=2,
        )


def costs_of(found: Profile) -> Costs:
    """What a profile says, all its graphs one after another."""
    uses, step_ms = found.joined()
    fused = frozenset(weight.name for weight in found.weights if weight.fused)
    return Costs({name: steps for name, _, steps in uses}, step_ms, found.link.link, fused)


def completed(costs: Costs, nbytes: Mapping[str, int]) -> Costs:
    """Gives weights that no graph has used yet a step of their own, behind the others."""
    steps_of, step_ms = dict(costs.steps_of), list(costs.step_ms)
    for name, size in nbytes.items():
        if name not in steps_of:
            steps_of[name] = (len(step_ms),)
            step_ms.append(costs.link.copy_ms(size))
    return Costs(steps_of, step_ms, costs.link, costs.fused, costs.activation_bytes, costs.in_bodies)


def shape_of(parameter: Tensor) -> tuple[int, ...] | None:
    """None for a parameter that has no shape yet."""
    return None if nn.parameter.is_lazy(parameter) else tuple(parameter.shape)
