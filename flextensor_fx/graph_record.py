"""What became of one compiled graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .passes.schedule import Schedule
from .passes.steady_schedule import SteadySchedule

_PAGE = 4096


@dataclass(frozen=True)
class GraphRecord:
    """What became of one compiled graph.

    Fields:
        name: "forward 0", "backward 1".
        schedule: of one call, which takes over at its start what the call before has fetched for it.
        pass_seconds: that our passes took.
        steady: the same among calls that follow one another; None where nothing is fetched ahead of a call.
    """

    name: str
    schedule: Schedule
    pass_seconds: float
    steady: SteadySchedule | None = None

    @staticmethod
    def of(name: str, schedule: Schedule | SteadySchedule, pass_seconds: float) -> GraphRecord:
        """The record of a graph that `lower` gave this schedule."""
        if isinstance(schedule, SteadySchedule):
            return GraphRecord(name, schedule.in_call, pass_seconds, schedule)
        return GraphRecord(name, schedule, pass_seconds)

    @property
    def peak_bytes(self) -> int:
        """Most bytes of weights held together, what is fetched for the next call included."""
        return self.schedule.peak_bytes if self.steady is None else self.steady.peak_bytes

    def paged_peak(self, slab_bytes: Mapping[str, int]) -> int:
        """The same with every weight in whole pages, as the engine allots memory.

        Args:
            slab_bytes: of weights, by key, that take more pages than their bytes, because they lie across pages in a file.
        """
        made = self.schedule if self.steady is None else self.steady
        rounded = tuple(replace(t, nbytes=slab_bytes.get(t.key, -(-t.nbytes // _PAGE) * _PAGE)) for t in made.transfers)
        return replace(made, transfers=rounded).peak_bytes
