"""The second part of gpu_check.py: times, memory, and what the link carries, beside what could be had at best.

A Llama-shaped model is called with many tokens, where computing takes longer than copying, so that copies can hide; and with
few, where the link is the limit. All columns are called in turn, and ratios are medians over rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from _common import Check, interleave, paired
from gpu_baselines import PlainCopies, with_hooks
from gpu_models import Sizes
from gpu_setting import GRAPHS, Call, Setting, WrongNumber, require_equal, require_telling
from torch import Tensor, nn

import flextensor_fx

GPU = Sizes(layers=8, hidden=4096, inner=14336, heads=32, kv_heads=8, batch=4, tokens=4096)
QUICK = Sizes(layers=6, hidden=2048, inner=5632, heads=16, kv_heads=4, batch=4, tokens=4096)
CPU = Sizes(layers=3, hidden=256, inner=704, heads=4, kv_heads=2, batch=4, tokens=16)
TINY = Sizes(layers=8, hidden=256, inner=512, heads=4, kv_heads=4, batch=1, tokens=4)
FEW = {"batch": 1, "tokens": 256}

PLANS: dict[str, dict[str, Any]] = {
    "25%": {"budget": "25%"},
    "10%": {"budget": "10%"},
    "50%": {"budget": "50%"},
    "25% lookahead 0": {"budget": "25%", "lookahead": 0},
    "25% steady": {"budget": "25%", "objective": "steady"},
}
SMALL = ("25%", "25% steady")  # of these, what runs on the CPU
PLAIN, RESIDENT = "plain pinned copies", "resident"
HIDES = 0.9  # of the resident time, that copying may take for the link to count as able to hide behind it
SLOWER, BANDWIDTH, PEAK = 1.02, 0.95, 1.01
HOST_US = 40.0  # of a prefetch and its wait
ROUND_SECONDS = 15.0
ROUNDS = (3, 11)
HOST_ROUNDS = 40


@dataclass
class Column:
    """A way to run the model.

    Fields:
        transfers, streamed: of one call, and their bytes.
        held: most bytes of selected weights on the device during a call; None where that is not measured.
        budget: for these bytes.
        model: to be released.
    """

    call: Callable[[], Any]
    transfers: int = 0
    streamed: int = 0
    held: int | None = None
    budget: int | None = None
    model: nn.Module | None = None


@dataclass(frozen=True)
class Stage:
    """Something to measure, and about how long it takes on a GPU, for when time is short."""

    name: str
    seconds: float
    run: Callable[[], None]


def measure(setting: Setting) -> None:
    """All stages, as far as the time reaches.

    Raises:
        WrongNumber: a result has other bits than the resident one.
    """
    many = (QUICK if setting.quick else GPU) if setting.on_gpu else CPU
    few = replace(many, **(FEW if setting.on_gpu else {"batch": 1, "tokens": 2}))
    first = dict(list(PLANS.items())[:1])
    plans = PLANS if setting.on_gpu else {name: PLANS[name] for name in SMALL}
    stages = [
        Stage("few tokens, the link is the limit", 60, lambda: times(setting, few, "few tokens", plans)),
        Stage("many tokens, the link can hide", 60, lambda: times(setting, many, "many tokens", plans)),
        Stage("host time per transfer", 15, lambda: host_time(setting)),
        Stage("CUDA graphs, few tokens", 25, lambda: times(setting, few, "few tokens, CUDA graphs", first, GRAPHS)),
    ]
    for stage in stages if setting.inner == "inductor" else stages[:-1]:
        if not setting.clock.has(stage.seconds if setting.on_gpu else 0):
            setting.skipped.append(f"numbers: {stage.name}")
            print(f"\nskipped  {stage.name}: no time left", flush=True)
            continue
        try:
            with setting.fresh(), torch.no_grad():
                stage.run()
        except Exception as error:  # noqa: BLE001 - noted, and raised there unless told to keep going
            setting.note(error)
        setting.save()
    graphs = setting.replayed
    if graphs:
        setting.output.check(
            Check("plans under CUDA graphs that replay their copies", sum(graphs.values()), len(graphs), False)
        )


# --- times and memory --------------------------------------------------------------------------------------------------


def times(
    setting: Setting, sizes: Sizes, title: str, plans: Mapping[str, Mapping[str, Any]], mode: str | None = None
) -> None:
    """The columns of one size, as a table, and the bounds."""
    columns = build_columns(setting, sizes, title, plans, mode)
    for column in columns.values():
        column.call()
    setting.synchronize()
    calls = {name: then_synchronized(setting, column.call) for name, column in columns.items()}
    once = sum(second for (second,) in interleave(calls, 1).values())
    rounds = min(max(int(ROUND_SECONDS * (1 if setting.on_gpu else 0.1) / once), ROUNDS[0]), ROUNDS[1])
    seconds = interleave(calls, rounds)
    plain = columns[PLAIN]
    link = [plain.streamed / taken for taken in seconds[PLAIN]]
    heading = f"{title}: {sizes.batch} x {sizes.tokens}, {rounds} rounds, link {median(link) / 1e9:.2f} GB/s"
    setting.output.table(heading, [row(name, column, seconds, link) for name, column in columns.items()])
    setting.output.check(*checks(title, columns, seconds, link, plans, graphs=mode == GRAPHS))
    for column in columns.values():
        if column.model is not None:
            flextensor_fx.release(column.model)


def build_columns(
    setting: Setting, sizes: Sizes, title: str, plans: Mapping[str, Mapping[str, Any]], mode: str | None
) -> dict[str, Column]:
    """Everything that is to be timed, compiled, and its result compared with the resident one."""
    (arguments,) = setting.inputs("llama", sizes, 1)
    setting.build("llama", replace(sizes, layers=1))(*arguments)  # workspaces of libraries, which stay
    base = setting.begin_peak()
    model = setting.build("llama", sizes)
    weights = [p for name, p in model.named_parameters() if name.startswith("layers.")]
    selected = sum(p.nbytes for p in weights)
    rest = setting.begin_peak() - base - selected
    resident = setting.resident(model, mode)
    expected = resident(*arguments).clone()
    require_telling(title, expected)
    columns = {RESIDENT: Column(lambda: resident(*arguments))}
    activations = peak_of(setting, columns[RESIDENT].call) - base - rest - selected
    columns[RESIDENT].held = selected if setting.on_gpu else None
    for name, options in plans.items():
        base = setting.begin_peak()
        streamed = setting.build("llama", sizes)
        columns[name] = column = streamed_column(
            setting, f"{title}, {name}", streamed, arguments, expected, mode, options
        )
        if setting.on_gpu:
            # Activations are taken to be those of the resident run. Under CUDA graphs their memory is kept between calls.
            column.held = None if mode == GRAPHS else peak_of(setting, column.call) - base - rest - activations
    if mode != GRAPHS:
        for compiles in (False, True):
            base = setting.begin_peak()
            hooked = setting.build("llama", sizes)
            call = with_hooks(hooked, setting.inner if compiles else None)
            require_close(f"{title}, hooks", call(*arguments), expected)
            name = f"hooks, {'compiled by layer' if compiles else 'eager'}"
            columns[name] = Column(lambda call=call: call(*arguments), streamed=selected)
            if setting.on_gpu:
                columns[name].held = peak_of(setting, columns[name].call) - base - rest - activations
    copied = [p.nbytes for p in weights if p.dim() > 1]
    copies = PlainCopies(copied, setting.device)
    columns[PLAIN] = Column(copies, len(copied), copies.nbytes)
    return columns


def streamed_column(
    setting: Setting,
    where: str,
    streamed: nn.Module,
    arguments: tuple[Tensor, ...],
    expected: Tensor,
    mode: str | None,
    options: Mapping[str, Any],
) -> Column:
    """A plan of ours, after calls enough for CUDA graphs to be captured."""
    call = setting.ours(streamed, mode, **options)
    for number in range(3):
        found = call(*arguments).clone()
        require_equal(f"result of call {number + 1}", where, found, expected, lambda: call(*arguments))
    report = flextensor_fx.report(streamed)
    transfers = report.graphs[-1].schedule.transfers
    held = None if setting.on_gpu else report.peak_bytes
    nbytes = sum(transfer.nbytes for transfer in transfers)
    return Column(lambda: call(*arguments), len(transfers), nbytes, held, report.budget, streamed)


def then_synchronized(setting: Setting, call: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        call()
        setting.synchronize()

    return run


def peak_of(setting: Setting, call: Callable[[], Any]) -> int:
    """Most bytes allocated on the device while two calls follow one another."""
    setting.begin_peak()
    for _ in range(2):
        call()
    setting.synchronize()
    return setting.peak()


def require_close(where: str, found: Tensor, expected: Tensor) -> None:
    """The same up to rounding, so that what is timed is the same work.

    Raises:
        WrongNumber: it is not.
    """
    likeness = float(torch.cosine_similarity(found.double().flatten(), expected.double().flatten(), 0))
    if likeness < 0.99:
        raise WrongNumber(
            "cosine of the results of hooks and of the resident model", where, "at least 0.99", f"{likeness:.4f}"
        )


# --- judging -----------------------------------------------------------------------------------------------------------


def row(name: str, column: Column, seconds: Mapping[str, Sequence[float]], link: Sequence[float]) -> dict[str, Any]:
    """A line of the table; "hidden" is the share of the copy time that the call does not show, and "could be" the most of it
    that there is compute for."""
    taken, resident = seconds[name], seconds[RESIDENT]
    copying = [column.streamed / rate for rate in link]
    streams = column.streamed > 0 and name != PLAIN
    hidden = [(c + r - t) / c for c, r, t in zip(copying, resident, taken, strict=True)] if streams else []
    return {
        "column": name,
        "ms": median(taken) * 1e3,
        "x resident": paired(taken, resident),
        "copies": column.transfers or None,
        "MB copied": column.streamed / 1e6 or None,
        "GB/s": column.streamed / median(taken) / 1e9 or None,
        "of the link": paired(copying, taken) if column.streamed else None,
        "hidden": min(max(median(hidden), 0.0), 1.0) if streams else None,
        "could be": min(paired(resident, copying), 1.0) if streams else None,
        "MB held": None if column.held is None else column.held / 1e6,
        "MB budget": None if column.budget is None else column.budget / 1e6,
    }


def checks(
    title: str,
    columns: Mapping[str, Column],
    seconds: Mapping[str, Sequence[float]],
    link: Sequence[float],
    plans: Mapping[str, Mapping[str, Any]],
    graphs: bool,
) -> list[Check]:
    """The bounds. Whether the link can hide, or is the limit, is told from the plan's bytes and what the link was seen to do."""
    found: list[Check] = []
    for name in plans:
        column, taken = columns[name], seconds[name]
        share = paired([column.streamed / rate for rate in link], seconds[RESIDENT])
        who = f"{title}, {name}"
        # Without lookahead nothing is meant to hide; a single call has first to wait for its first copy.
        if "lookahead" not in plans[name] and name.startswith("25%") and share <= HIDES:
            found.append(Check(f"{who}: time / resident", paired(taken, seconds[RESIDENT]), SLOWER))
        if "lookahead" not in plans[name] and share >= 1 / HIDES:
            limit = paired([column.streamed / rate for rate in link], taken)
            found.append(Check(f"{who}: share of the link's bandwidth", limit, BANDWIDTH, at_most=False))
        if column.held is not None and column.budget is not None and not graphs:
            found.append(Check(f"{who}: held / budget", column.held / column.budget, PEAK))
    return found


# --- the host ----------------------------------------------------------------------------------------------------------


def host_time(setting: Setting) -> None:
    """What a transfer costs the host: tiny weights, so that neither the link nor computing takes any time."""
    sizes = TINY if setting.on_gpu else replace(TINY, layers=3)
    (arguments,) = setting.inputs("llama", sizes, 1)
    model, streamed = (setting.build("llama", sizes) for _ in range(2))
    resident: Call = setting.resident(model)
    ours = setting.ours(streamed, budget="25%")
    require_equal("result", "tiny model, 25%", ours(*arguments), resident(*arguments))
    calls = {RESIDENT: lambda: resident(*arguments), "25%": lambda: ours(*arguments)}
    interleave(calls, 3)
    setting.synchronize()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(HOST_ROUNDS):
        for name, call in calls.items():
            seconds[name] += interleave({name: call}, 1)[name]
            setting.synchronize()
    transfers = len(flextensor_fx.report(streamed).graphs[-1].schedule.transfers)
    more = median(b - a for a, b in zip(seconds[RESIDENT], seconds["25%"], strict=True))
    rows = [{"column": name, "ms until the call returns": median(taken) * 1e3} for name, taken in seconds.items()]
    setting.output.table(f"host time: tiny weights, {transfers} transfers a call", rows)
    setting.output.check(Check("host time per transfer, us", more / transfers * 1e6, HOST_US))
