"""What the link costs: copies timed at several sizes, and the line through them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from .errors import ProfileError
from .passes.schedule import format_bytes, format_table
from .simulate import Link

_LEAST_BYTES_PER_MS = 1.0  # below, the copy of a large weight would take longer than times are exact to
_LEAST_SHARE = 1e-3
_LEAST_MS = 1e-9


@dataclass(frozen=True, slots=True)
class LinkPoint:
    """Copies of one size.

    Fields:
        nbytes: of each copy, at least 1.
        ms: median of the copies' times, at least a picosecond.
        spread: median absolute deviation of the times / their median; 0 where estimated.

    Raises:
        ProfileError: a number is out of range.
    """

    nbytes: int
    ms: float
    spread: float

    def __post_init__(self) -> None:
        if not (self.nbytes >= 1 and _LEAST_MS <= self.ms < math.inf and 0 <= self.spread < math.inf):
            raise ProfileError(f"LinkPoint: expected nbytes >= 1, ms >= {_LEAST_MS:g} and spread >= 0, found {self!r}")


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """The transfer curve of a link.

    Fields:
        points: by size, each size once; none where nothing was measured.
        latency_ms, bytes_per_ms: of the line that stands for them; as in `Link`.
        provenance: where that comes from; begins with "measured" or "estimated".

    Raises:
        ProfileError: sizes do not increase, or a number is out of range.
    """

    points: tuple[LinkPoint, ...]
    latency_ms: float
    bytes_per_ms: float
    provenance: str

    def __post_init__(self) -> None:
        sizes = [point.nbytes for point in self.points]
        if any(a >= b for a, b in pairwise(sizes)):
            raise ProfileError(f"LinkProfile: expected points of increasing size, found sizes {sizes}")
        if not (0 <= self.latency_ms < math.inf and _LEAST_BYTES_PER_MS <= self.bytes_per_ms < math.inf):
            raise ProfileError(
                f"LinkProfile: expected latency_ms >= 0 and bytes_per_ms >= {_LEAST_BYTES_PER_MS:g}, found "
                f"{self.latency_ms} and {self.bytes_per_ms}"
            )

    @staticmethod
    def of(link: Link) -> LinkProfile:
        """A link of which no copies were timed."""
        return LinkProfile((), link.latency_ms, link.bytes_per_ms, link.provenance)

    @property
    def link(self) -> Link:
        """The line, for planning."""
        return Link(self.latency_ms, self.bytes_per_ms, self.provenance)

    def __str__(self) -> str:
        link = self.link
        title = f"Link: {describe(link)}"
        rows = [
            (
                format_bytes(point.nbytes),
                f"{point.ms:.3f}",
                f"{point.spread:.1%}",
                f"{link.copy_ms(point.nbytes):.3f}",
                f"{link.copy_ms(point.nbytes) / point.ms - 1:+.1%}",
            )
            for point in self.points
        ]
        return title + ("\n" + format_table(("bytes", "ms", "spread", "line ms", "line off"), rows) if rows else "")


def describe(link: Link) -> str:
    """One line: latency, bandwidth and where they come from."""
    return f"latency {link.latency_ms * 1e3:.3g} us, {link.bytes_per_ms / 1e6:.3g} GB/s ({link.provenance})"


def fit_link(points: Sequence[LinkPoint], provenance: str) -> LinkProfile:
    """The line latency + bytes / bandwidth with the least sum of relative errors, sum |line(n) / ms - 1| over the points.

    Relative, since 10% matter as much for small copies as for large ones; absolute deviations and not their squares, since then
    a size whose median is off pulls the line nowhere while the others agree (least absolute deviations; Bloomfield and Steiger,
    Least Absolute Deviations, 1983). The errors are convex and piecewise linear in both numbers, so that a best line goes
    through two points, or through one with one number at its limit; all of those are tried.

    The latency is at least 0. Bandwidth is such that bytes take at least a thousandth of the time of the largest copy, as the
    times may not grow with size at all.

    Args:
        points: in any order, each size once, at least one.
        provenance: as in `LinkProfile`.

    Raises:
        ProfileError: no points, or one size twice.
    """
    ordered = tuple(sorted(points, key=lambda point: point.nbytes))
    if not ordered:
        raise ProfileError("fit_link: expected at least one size that was timed, found none; measure the link first")
    if twice := [a.nbytes for a, b in pairwise(ordered) if a.nbytes == b.nbytes]:
        raise ProfileError(
            f"fit_link: expected each size once, found {twice[0]} bytes twice; take the median of the two"
        )
    if len(ordered) == 1:
        return LinkProfile(ordered, 0.0, max(ordered[0].nbytes / ordered[0].ms, _LEAST_BYTES_PER_MS), provenance)
    least = _LEAST_SHARE * ordered[-1].ms / ordered[-1].nbytes
    slopes = [(a, (b.ms - a.ms) / (b.nbytes - a.nbytes)) for a, b in combinations(ordered, 2)]
    lines = [(a.ms - slope * a.nbytes, slope) for a, slope in slopes]
    lines += [(0.0, point.ms / point.nbytes) for point in ordered]
    lines += [(point.ms - least * point.nbytes, least) for point in ordered]

    def error(line: tuple[float, float]) -> float:
        return math.fsum(abs((line[0] + line[1] * point.nbytes) / point.ms - 1) for point in ordered)

    latency, slope = min((line for line in lines if line[0] >= 0 and line[1] >= least), key=error)
    return LinkProfile(ordered, latency, max(1 / slope, _LEAST_BYTES_PER_MS), provenance)
