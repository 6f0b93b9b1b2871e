"""What a model's compiled graphs and its link cost: a frozen value that prints, that can be saved as JSON, and that plans."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .errors import ProfileError
from .graph_profile import GraphProfile, StepProfile
from .link_profile import LinkPoint, LinkProfile, fit_link
from .machine import Machine
from .planner import Objective, Plan, plan
from .simulate import Link


@dataclass(frozen=True, slots=True)
class ProfiledWeight:
    """A selected weight.

    Fields:
        name: its path in the model.
        unit: path of its offload unit.
        nbytes: bytes.
        shape, dtype: as `tuple(w.shape)` and `str(w.dtype)`.
        fused: whether elementwise work alone reads it; see `plan`.
        stays: why it cannot be offloaded; None if it can.

    Raises:
        ProfileError: bytes or an extent below 0.
    """

    name: str
    unit: str
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    fused: bool
    stays: str | None

    def __post_init__(self) -> None:
        if self.nbytes < 0 or any(extent < 0 for extent in self.shape):
            raise ProfileError(f"ProfiledWeight: expected bytes and extents of at least 0, found {self!r}")


@dataclass(frozen=True)
class Profile:
    """A model with what its graphs and its link cost.

    Fields:
        model: name of the model's class.
        machine: where it was profiled.
        weights: the selected ones, in the model's order.
        graphs: in the order compiled.
        link: what copies cost.
        include_patterns, exclude_patterns: what selected the weights; options that name no patterns take these.

    Raises:
        ProfileError: a weight or a graph is listed twice, or a graph uses a weight that is not listed.
    """

    model: str
    machine: Machine
    weights: tuple[ProfiledWeight, ...]
    graphs: tuple[GraphProfile, ...]
    link: LinkProfile
    include_patterns: tuple[str, ...] = ()
    exclude_patterns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _refuse_twice("weight", (repr(weight.name) for weight in self.weights))
        _refuse_twice("graph", (f"{graph.name!r} for {graph.signature!r}" for graph in self.graphs))
        known = {weight.name for weight in self.weights}
        for graph in self.graphs:
            if unknown := graph.uses.keys() - known:
                raise ProfileError(
                    f"Profile: graph {graph.name!r} uses weight {min(unknown)!r}, which is not among the {len(known)} weights"
                )

    @property
    def nbytes(self) -> int:
        """Bytes of all weights; shares in budgets are shares of these."""
        return sum(weight.nbytes for weight in self.weights)

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of the model's class and the weights' names, shapes and dtypes; the same in every process."""
        lines = [self.model, *sorted(f"{w.name!r} {w.shape} {w.dtype}" for w in self.weights)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    @property
    def foreign(self) -> bool:
        """Whether it was taken on a machine whose times are not this one's: another name, device or number of cores."""
        return bool(self.machine.unlike_here())

    # --- files ----------------------------------------------------------------------------------------------------------
    def to_json(self) -> str:
        """The whole profile as a JSON text, which `from_json` reads."""
        from .profile_json import PROFILE_FORMAT

        return PROFILE_FORMAT.to_text(self)

    @staticmethod
    def from_json(text: str | bytes, who: str = "profile") -> Profile:
        """The profile that `to_json` wrote.

        Args:
            who: where the text is from, for messages.

        Raises:
            ProfileError: the text is no JSON, no profile, of a newer version, or damaged.
        """
        from .profile_json import PROFILE_FORMAT

        return PROFILE_FORMAT.from_text(text, who)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Writes the profile as JSON, for `Profile.load`.

        Raises:
            ProfileError: the file cannot be written.
        """
        from .profile_json import PROFILE_FORMAT

        PROFILE_FORMAT.save(self, file)

    @staticmethod
    def load(file: str | os.PathLike[str]) -> Profile:
        """The profile that `save` wrote.

        Raises:
            ProfileError: the file cannot be read, or does not hold a profile of this version.
        """
        from .profile_json import PROFILE_FORMAT

        return PROFILE_FORMAT.load(file)

    # --- use ------------------------------------------------------------------------------------------------------------
    def check_fits(self, weights: Sequence[ProfiledWeight], torch: str, device: str) -> None:
        """Checks that the profile is of a model with these weights, as the running torch compiles it for `device`.

        Units, fused and stays are not compared: they follow from patterns and graphs, and the plan is made anew with them.

        Args:
            weights: of the model at hand, in any order.
            torch: version, such as "2.13.0+cpu".
            device: where compute runs.

        Raises:
            ProfileError: names the first difference.
        """
        found = {weight.name: weight for weight in weights}
        for weight in self.weights:
            other = found.pop(weight.name, None)
            if other is None:
                raise self._misfit(f"weight {weight.name!r}", "no such weight among those selected")
            for what in ("shape", "dtype", "nbytes"):
                expected, there = getattr(weight, what), getattr(other, what)
                if expected != there:
                    raise self._misfit(f"weight {weight.name!r} to have {what} {expected}", f"{there}")
        if found:
            raise self._misfit(f"{len(self.weights)} weights", f"also {next(iter(found))!r}")
        if self.machine.device != device:
            raise self._misfit(f"device {self.machine.device!r}", repr(device))
        if self.machine.torch != torch:
            raise self._misfit(f"torch {self.machine.torch}", torch)

    def _misfit(self, expected: str, found: str) -> ProfileError:
        return ProfileError(
            f"profile of {self.model}: expected {expected}, found {found}; profile again, as the model or its selection, "
            "the device or torch has changed since"
        )

    def joined(self, link: Link | None = None) -> tuple[list[tuple[str, int, tuple[int, ...]]], list[float]]:
        """All graphs one after another, as `plan` takes them, so that they share one budget.

        Args:
            link: for the weights that no graph uses: each gets a step at the end that takes as long as its copy. None: the
                profile's own.

        Returns:
            (name, bytes, steps that use it) for every weight, and the ms of each step.
        """
        link = self.link.link if link is None else link
        steps_of: dict[str, list[int]] = {weight.name: [] for weight in self.weights}
        step_ms: list[float] = []
        for graph in self.graphs:
            for name, steps in graph.uses.items():
                steps_of[name] += (len(step_ms) + step for step in sorted(steps))
            step_ms += (step.ms for step in graph.steps)
        for weight in self.weights:
            if not steps_of[weight.name]:
                steps_of[weight.name] = [len(step_ms)]
                step_ms.append(link.copy_ms(weight.nbytes))
        return [(w.name, w.nbytes, tuple(steps_of[w.name])) for w in self.weights], step_ms

    def plan(
        self,
        budget: int | None,
        *,
        link: Link | None = None,
        objective: Objective = "single",
        lookahead: int | None = None,
        min_stream_bytes: int | None = None,
    ) -> Plan:
        """Plans all graphs under one budget.

        Args:
            budget, objective, lookahead, min_stream_bytes: as in `planner.plan`.
            link: another one than was profiled, to see what it would change; None: the profile's own.

        Raises:
            BudgetError, ValueError: as `planner.plan`.
        """
        link = self.link.link if link is None else link
        uses, step_ms = self.joined(link)
        return plan(
            uses,
            step_ms,
            link,
            budget,
            fixed=frozenset(weight.name for weight in self.weights if weight.stays is not None),
            fused=frozenset(weight.name for weight in self.weights if weight.fused),
            lookahead=lookahead,
            min_stream_bytes=min_stream_bytes,
            objective=objective,
        )

    def __str__(self) -> str:
        from .profile_text import profile_text

        return profile_text(self)


def _refuse_twice(what: str, names: Iterable[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ProfileError(f"Profile: expected each {what} once, found {what} {name} {count} times")


__all__ = [
    "GraphProfile",
    "LinkPoint",
    "LinkProfile",
    "Machine",
    "Profile",
    "ProfiledWeight",
    "StepProfile",
    "fit_link",
]
