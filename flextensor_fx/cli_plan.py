"""The command `flextensor-fx plan`: what a profiled model would take under other budgets and on other links."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from ._config_values import budget as checked_budget
from ._config_values import share_of
from .errors import BudgetError, ConfigError
from .estimate import default_link
from .link_profile import describe
from .passes.schedule import format_bytes, format_table
from .planner import Plan
from .profile import Profile
from .simulate import Link

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[Any]

_COPY_MS = 0.006  # 5 to 7 us of host time for each call that starts a copy
LINKS = {
    "nvme": Link(default_link().latency_ms, default_link().bytes_per_ms, "estimated: a disk"),
    "pcie4": Link(_COPY_MS, 25e6, "estimated: PCIe 4 x16"),
    "pcie5": Link(_COPY_MS, 55e6, "estimated: PCIe 5 x16"),
    "c2c": Link(_COPY_MS, 350e6, "estimated: GH200 NVLink-C2C"),
}
"""Links by name, each with rounded numbers for large copies."""

_LINK_HELP = f"""\
links:
  profile         what was measured or estimated for the profile (the default)
  nvme            {describe(LINKS["nvme"])}: what is assumed of a disk until it is measured
  pcie4           {describe(LINKS["pcie4"])}: 24 to 26 GB/s measured, of 31.5 by the standard
  pcie5           {describe(LINKS["pcie5"])}: 55 to 56 GB/s measured, of 63 by the standard
  c2c             {describe(LINKS["c2c"])}: 342 to 375 GB/s measured, of 450 by NVIDIA's specification
  100:1.5         a latency of 100 us and 1.5 GB/s (10^9 bytes per second)
Measured: large copies from page-locked host memory to the device. The latency of these three is the 5 to 7 us of host time that
the call for one copy takes.
"""


def add_plan(subparsers: Subparsers) -> None:
    """Adds `plan`: one row per budget, and why each weight stays or moves."""
    parser = subparsers.add_parser(
        "plan",
        help="what a profiled model would take under other budgets and links",
        epilog=_LINK_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("profile", metavar="PROFILE.json", help="what Profile.save wrote")
    parser.add_argument(
        "--budget",
        required=True,
        metavar="BUDGET,...",
        help="most bytes of selected weights in memory: bytes, 6GiB, 300MB, or a share of the selected weights, 25%%",
    )
    parser.add_argument("--link", default="profile", metavar="LINK", help="what copies cost; see below")
    parser.add_argument(
        "--objective",
        choices=("single", "steady"),
        default="single",
        help="plan for one cold call (the default), or for calls that follow one another",
    )
    parser.add_argument(
        "--lookahead",
        type=int,
        metavar="N",
        help="transfers that may run ahead of the one waited for (default: chosen)",
    )
    parser.add_argument("--explain", action="store_true", help="with a single budget: why each weight stays or moves")
    parser.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> int | None:
    budgets = [checked_budget("--budget", text) for text in arguments.budget.split(",")]
    if arguments.lookahead is not None and arguments.lookahead < 0:
        raise ConfigError(
            f"--lookahead: expected a whole number of at least 0, found {arguments.lookahead}; write 0 or more"
        )
    if arguments.explain and len(budgets) > 1:
        raise ConfigError(f"--explain: expected a single budget, found {len(budgets)}; name the one to explain")
    given = None if arguments.link == "profile" else _link(arguments.link)
    profile = Profile.load(arguments.profile)
    plans = [_made(profile, share_of(budget, profile.nbytes), given, arguments) for budget in budgets]
    print(_head(profile, profile.link.link if given is None else given, arguments.objective))
    rows = [_row(text.strip(), made) for text, made in zip(arguments.budget.split(","), plans, strict=True)]
    header = ("budget", "in bytes", "ms", "stall ms", "peak", "resident", "streamed", "least ms", "above", "")
    print(format_table(header, rows, whole=True))
    if arguments.explain and isinstance(plans[0], Plan):
        print("\n" + format_table(("weight", "why"), list(plans[0].why.items()), left=2, whole=True))
    return None if any(isinstance(made, Plan) for made in plans) else 2


def _made(
    profile: Profile, budget: int | None, link: Link | None, arguments: argparse.Namespace
) -> Plan | tuple[int, BudgetError]:
    """The plan, or the budget in bytes and why there is none."""
    assert budget is not None, "the checker of budgets makes None of nothing but None"
    try:
        return profile.plan(budget, link=link, objective=arguments.objective, lookahead=arguments.lookahead)
    except BudgetError as error:
        return budget, error


def _row(text: str, made: Plan | tuple[int, BudgetError]) -> tuple[str, ...]:
    if not isinstance(made, Plan):
        budget, error = made
        refused = f"cannot work; the least is {error.least} bytes ({format_bytes(error.least)})"
        return (text, format_bytes(budget), *7 * ("-",), refused)
    assert made.budget is not None
    return (
        text,
        format_bytes(made.budget),
        f"{made.predicted_ms:.3f}",
        f"{made.predicted_stall_ms:.3f}",
        format_bytes(made.peak_bytes),
        str(len(made.resident)),
        str(len(made.streamed)),
        f"{made.lower_bound_ms:.3f}",
        f"{made.gap:.1%}",
        "",
    )


def _head(profile: Profile, link: Link, objective: str) -> str:
    steps = [step for graph in profile.graphs for step in graph.steps]
    measured = sum(step.provenance == "measured" for step in steps)
    compute_ms = math.fsum(step.ms for step in steps)
    differs = profile.machine.unlike_here()
    calls = "one call" if objective == "single" else "a call among equal ones"
    graphs = "" if len(profile.graphs) == 1 else f" of {len(profile.graphs)} graphs, one after another"
    return "\n".join(
        [
            f"{profile.model}: {len(profile.weights)} weights, {format_bytes(profile.nbytes)}",
            f"  compute    {compute_ms:.3f} ms in {len(steps)} steps ({measured} measured, {len(steps) - measured} estimated)",
            f"  machine    {profile.machine}" + (f"; not this one: {', '.join(differs)}" if differs else ""),
            f"  link       {describe(link)}",
            f"Predicted by simulation for {calls}{graphs}. least ms: no plan within the budget is faster. above: predicted over "
            "that.",
        ]
    )


def _link(text: str) -> Link:
    if text in LINKS:
        return LINKS[text]
    latency, colon, rate = text.partition(":")
    try:
        numbers = float(latency), float(rate)
    except ValueError:
        numbers = (math.nan, math.nan)
    # A rate below 1 kB/s, or a latency of a day, is a slip of the pen, and times would no longer be exact.
    if colon and 0 <= numbers[0] <= 1e11 and 1e-6 <= numbers[1] <= 1e9:
        return Link(numbers[0] / 1e3, numbers[1] * 1e6, f"given: {text}")
    raise ConfigError(
        f"--link: expected profile, {', '.join(LINKS)} or LATENCY_US:GB_PER_S such as 100:1.5, found {text!r}; write one of these"
    )
