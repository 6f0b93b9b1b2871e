"""What one compiled graph costs, step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from .errors import ProfileError

Source = Literal["measured", "estimated"]


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One compute step.

    Fields:
        unit: path of the offload unit that it belongs to; "" is the root.
        ms: median of its times, at least 0.
        spread: median absolute deviation of its times / their median; 0 where estimated.
        provenance: "measured" or "estimated".

    Raises:
        ProfileError: a number is not finite or below 0, or an estimate has a spread.
    """

    unit: str
    ms: float
    spread: float
    provenance: Source

    def __post_init__(self) -> None:
        if not (0 <= self.ms < math.inf and 0 <= self.spread < math.inf):
            raise ProfileError(f"StepProfile: expected ms >= 0 and spread >= 0, both finite, found {self!r}")
        if self.provenance not in ("measured", "estimated"):
            raise ProfileError(f"StepProfile: expected the provenance measured or estimated, found {self.provenance!r}")
        if self.provenance == "estimated" and self.spread:
            raise ProfileError(f"StepProfile: expected no spread where nothing was measured, found {self!r}")


@dataclass(frozen=True)
class GraphProfile:
    """One compiled graph, for one class of input shapes.

    Fields:
        name: for people.
        signature: the text of its input shapes.
        steps: its compute steps, in order.
        uses: name of each weight that it uses -> the steps that do.
        call_ms: median time of a call.
        stall_ms: the part of it in which compute waited for copies.
        samples: calls that were timed; 0 where all times are estimated.

    Raises:
        ProfileError: a step of `uses` does not exist or is listed twice, a weight has none, or a number is out of range.
    """

    name: str
    signature: str
    steps: tuple[StepProfile, ...]
    uses: Mapping[str, tuple[int, ...]] = field(hash=False)
    call_ms: float
    stall_ms: float
    samples: int

    def __post_init__(self) -> None:
        who = f"GraphProfile {self.name!r}"
        object.__setattr__(self, "uses", MappingProxyType(dict(self.uses)))
        if not (0 <= self.call_ms < math.inf and 0 <= self.stall_ms < math.inf and self.samples >= 0):
            raise ProfileError(
                f"{who}: expected call_ms, stall_ms and samples of at least 0, found {self.call_ms}, {self.stall_ms} and "
                f"{self.samples}"
            )
        for name, steps in self.uses.items():
            if not steps or len(set(steps)) < len(steps):
                raise ProfileError(f"{who}: expected weight {name!r} to have steps, each once, found {steps}")
            if min(steps) < 0 or max(steps) >= len(self.steps):
                raise ProfileError(
                    f"{who}: expected the steps of weight {name!r} to be among 0 to {len(self.steps) - 1}, found {steps}"
                )

    @property
    def compute_ms(self) -> float:
        """Sum over the steps."""
        return math.fsum(step.ms for step in self.steps)
