"""Profiles built from numbers alone, for tests of what is made of profiles."""

from __future__ import annotations

from flextensor_fx.profile import (
    GraphProfile,
    LinkPoint,
    Machine,
    Profile,
    ProfiledWeight,
    StepProfile,
    fit_link,
)

MIB = 1 << 20
MACHINE = Machine("quiet", "cpu", 8, 32 << 30, "3.12.1", "2.13.0")
SIZES = {"up.weight": (6 * MIB, (1024, 1536)), "down.weight": (4 * MIB, (1024, 1024)), "norm.weight": (4096, (1024,))}


def model_profile(units: int, *, graphs: int = 1, measured: bool = True) -> Profile:
    """A model of `units` layers of three weights, and a head that must stay.

    Its first graph uses all of them, further ones the first layer only. Each third step is estimated in any case.
    """
    weights = tuple(
        ProfiledWeight(f"layers.{n}.{name}", f"layers.{n}", nbytes, shape, "torch.float32", name == "norm.weight", None)
        for n in range(units)
        for name, (nbytes, shape) in SIZES.items()
    )
    head = ProfiledWeight("head.weight", "head", 2 * MIB, (512, 1024), "torch.float32", False, "it is changed in place")
    return Profile(
        "Model", MACHINE, (*weights, head), tuple(_graph(n, units if n == 0 else 1, measured) for n in range(graphs)), link()
    )  # fmt: skip


def link():
    """1.5 GB/s and 50 us, with one size that was disturbed."""
    points = [LinkPoint(4096 << 2 * n, 0.05 + (4096 << 2 * n) / 1.5e6, 0.02) for n in range(6)]
    points[2] = LinkPoint(points[2].nbytes, points[2].ms * 1.8, 0.4)
    return fit_link(points, "measured on quiet, 2026-05-01, while computing")


def _graph(number: int, units: int, measured: bool) -> GraphProfile:
    steps = tuple(
        StepProfile(f"layers.{n}", (3.2, 2.0, 0.1)[at], *((0.03, "measured") if measured and at < 2 else (0.0, "estimated")))
        for n in range(units)
        for at in range(3)
    )  # fmt: skip
    uses = {f"layers.{n}.{name}": (3 * n + at,) for n in range(units) for at, name in enumerate(SIZES)}
    if number == 0:
        steps += (StepProfile("head", 1.0, 0.0, "estimated"),)
        uses["head.weight"] = (3 * units,)
    call_ms = sum(step.ms for step in steps) + 0.4
    return GraphProfile(f"forward {number}", f"[{number + 1}, 16]", steps, uses, call_ms, 0.2, 7 if measured else 0)
