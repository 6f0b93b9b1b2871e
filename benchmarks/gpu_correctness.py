"""The first part of gpu_check.py: whatever is streamed, the bits are those of the resident run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gpu_training
import torch
from gpu_models import KINDS
from gpu_setting import (
    GRAPHS,
    INCLUDE,
    TIER,
    Call,
    Setting,
    WrongNumber,
    judge_report,
    require_equal,
    require_telling,
    started,
)
from torch import Tensor, nn

import flextensor_fx

PLANS = [("10%", "single"), ("25%", "single"), ("50%", "single"), ("25%", "steady")]
INPUTS = 3
ROUNDS = 2  # under CUDA graphs the first call warms up, the second is captured, and the others are replayed
_SLACK = 4 << 20  # bytes that small tensors and workspaces may take


@dataclass(frozen=True)
class Case:
    """Something to check; `run` returns what to say of it."""

    name: str
    run: Callable[[Setting], str]


def check(setting: Setting, share: float) -> None:
    """All cases, in order, as far as that share of the time reaches.

    Raises:
        WrongNumber: the first, unless the setting keeps going.
    """
    print("\nbits equal to those of the resident run", flush=True)
    longest = 0.0
    for case in cases(setting):
        if not setting.clock.has(longest, share):
            setting.skipped.append(f"bits: {case.name}")
            print(f"skipped  {case.name}: no time left", flush=True)
            continue
        begin = time.monotonic()
        said = "wrong"
        try:
            with setting.fresh():
                said = case.run(setting)
        except Exception as error:  # noqa: BLE001 - noted, and raised there unless told to keep going
            setting.note(error)
        seconds = time.monotonic() - begin
        longest = max(longest, seconds)
        print(f"{'WRONG' if said == 'wrong' else 'ok'}     {case.name}: {said}, {seconds:.1f} s", flush=True)
        setting.output.rows.append({"table": "bits", "case": case.name, "said": said, "seconds": seconds})
        setting.save()


def cases(setting: Setting) -> list[Case]:
    """What is checked, what tells most first."""
    kinds = KINDS[:1] if setting.quick else KINDS
    plain = [Case(f"{kind}, {setting.inner}", partial(inference, kind, None)) for kind in kinds]
    found = [
        plain[0],
        Case("offloaded from the CPU", offloaded_first),
        Case("training", partial(gpu_training.training, None)),
        *plain[1:],
    ]
    if setting.inner == "inductor":
        found += [Case(f"{kind}, CUDA graphs", partial(inference, kind, GRAPHS)) for kind in kinds]
        found.append(Case("training, CUDA graphs", partial(gpu_training.training, GRAPHS)))
    else:
        found.append(Case("llama, Inductor", partial(inference, "llama", GRAPHS, inner="inductor", layers=1)))
    return found


def plans_of(setting: Setting, kind: str, layers: int | None) -> list[tuple[str, str]]:
    """Budgets and objectives; on the CPU as few as touch all of this code."""
    if layers is not None:
        return [("50%", "steady")]
    if setting.on_gpu and not setting.quick:
        return PLANS
    return PLANS[::3] if kind == "llama" else PLANS[3:]


# --- inference ---------------------------------------------------------------------------------------------------------


def inference(
    kind: str, mode: str | None, setting: Setting, *, inner: str | None = None, layers: int | None = None
) -> str:
    """One model under all plans: calls, calls behind streams, a weight that is written between calls, and the release."""
    sizes = setting.sizes(kind)
    sizes = sizes if layers is None else replace(sizes, layers=layers)
    plans = plans_of(setting, kind, layers)
    where = f"{kind}, {inner or setting.inner}{', CUDA graphs' if mode == GRAPHS else ''}"
    calls = setting.inputs(kind, sizes, INPUTS)
    with torch.no_grad():
        model = setting.build(kind, sizes)
        resident = setting.resident(model, mode, inner)
        expected = results(resident, calls)
        require_telling(where, expected[0])
        compare(f"{where}, resident called again", resident, calls * ROUNDS, expected * ROUNDS)
        transfers = [
            one_plan(setting, f"{where}, {budget} {objective}", model, resident, calls, expected, setting.build(kind, sizes),
                     mode=mode, inner=inner, budget=budget, objective=objective)
            for budget, objective in plans
        ]  # fmt: skip
    return f"{', '.join(f'{b} {o}' for b, o in plans)}; {', '.join(map(str, transfers))} transfers a call"


def one_plan(
    setting: Setting,
    where: str,
    model: nn.Module,
    resident: Call,
    calls: Sequence[tuple[Tensor, ...]],
    expected: Sequence[Tensor],
    streamed: nn.Module,
    **options: Any,
) -> int:
    """One plan; the number of transfers in a call."""
    ours = setting.ours(streamed, **options)
    compare(where, ours, list(calls) * ROUNDS, list(expected) * ROUNDS)
    transfers = flextensor_fx.report(streamed).graphs[-1].schedule.transfers
    largest = [transfer.nbytes for transfer in transfers]
    behind_streams(setting, where, ours, calls, expected, largest, alternate=options["mode"] != GRAPHS)
    if options["mode"] == GRAPHS and options["objective"] == "single" and setting.on_gpu:
        setting.replayed[where] = is_replayed(streamed, lambda: ours(*calls[0]))
    judge_report(where, streamed)
    with rewritten(model, streamed):
        changed = [ours(*calls[n]).clone() for n in range(INPUTS)]  # the first of them right behind the write
        for n, wanted in enumerate(results(resident, calls)):
            if torch.equal(wanted, expected[n]):
                raise AssertionError(f"{where}: the write of the weights does not show in the result")
            require_equal(
                f"result {n} after a write to all weights", where, changed[n], wanted, lambda n=n: ours(*calls[n])
            )
    compare(f"{where}, weights written back", ours, calls, expected)
    flextensor_fx.release(streamed)
    for name, value in model.named_parameters():
        require_equal(f"weight {name} after release", where, streamed.get_parameter(name), value)
    return len(transfers)


def results(call: Call, calls: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    """Copies, as the next call may use the memory under CUDA graphs."""
    return [call(*arguments).clone() for arguments in calls]


def compare(where: str, call: Call, calls: Sequence[tuple[Tensor, ...]], expected: Sequence[Tensor]) -> None:
    """Calls that follow one another without synchronising, then their results.

    Raises:
        WrongNumber: one is wrong.
    """
    for number, found in enumerate(results(call, calls)):
        again = partial(call, *calls[number])
        require_equal(f"result of call {number + 1} of {len(calls)}", where, found, expected[number], again)


def behind_streams(
    setting: Setting,
    where: str,
    call: Call,
    calls: Sequence[tuple[Tensor, ...]],
    expected: Sequence[Tensor],
    sizes: Sequence[int],
    alternate: bool,
) -> None:
    """Calls on streams of the user's that lag behind the host, in memory that is still being written as the call is queued.

    Args:
        sizes: bytes of the weights that are copied.
        alternate: whether two streams take turns; under CUDA graphs all calls share memory, so that they must not.
    """
    streams = [setting.stream() for _ in range(2 if alternate else 1)]
    found = []
    for number in range(2 * INPUTS):
        with setting.under(streams[number % len(streams)]):
            setting.hold_back()
            setting.poison(sizes)
            found.append(call(*calls[number % INPUTS]).clone())
    for stream in streams:
        setting.join(stream)
    for number, value in enumerate(found):
        what = f"result of call {number + 1} of {len(found)} on {len(streams)} non-default streams"
        require_equal(what, where, value, expected[number % INPUTS], partial(call, *calls[number % INPUTS]))


def is_replayed(streamed: nn.Module, call: Callable[[], Tensor]) -> bool:
    """Whether a call starts its transfers without the host's doing."""
    before = started(streamed)
    call()
    return started(streamed) == before


@contextmanager
def rewritten(model: nn.Module, streamed: nn.Module) -> Iterator[None]:
    """Other values are written to the weights of all layers, in both models; afterwards those from before."""
    weights = {name: value for name, value in model.named_parameters() if name.startswith("layers.")}
    kept = {name: value.clone() for name, value in weights.items()}
    for name, value in weights.items():
        value.mul_(1.0625)
        streamed.get_parameter(name).copy_(value)
    try:
        yield
    finally:
        for name, value in weights.items():
            value.copy_(kept[name])
            streamed.get_parameter(name).copy_(kept[name])


# --- from the CPU ------------------------------------------------------------------------------------------------------


def offloaded_first(setting: Setting) -> str:
    """`offload` of a model that lies in host memory: its selected weights are never all on the device."""
    sizes, where = setting.sizes("llama"), "llama, offload() from the CPU, 25%"
    calls = setting.inputs("llama", sizes, INPUTS)
    with torch.no_grad():
        model = setting.build("llama", sizes)
        expected = results(setting.resident(model), calls)
        require_telling(where, expected[0])
        streamed = setting.build("llama", sizes).to("cpu")
        before = setting.begin_peak()
        options = {
            "include_patterns": INCLUDE,
            "budget": "25%",
            "device": str(setting.device),
            "inner_backend": setting.inner,
        }
        flextensor_fx.offload(streamed, {**TIER, **options})
        selected = {id(p) for name, p in streamed.named_parameters() if name.startswith("layers.")}
        report = flextensor_fx.report(streamed)
        rest = sum(p.nbytes for p in streamed.parameters() if id(p) not in selected)
        taken, allowed = setting.peak() - before, (report.budget or 0) + rest + _SLACK
        if taken > allowed:
            raise WrongNumber("most device memory while offloading, bytes", where, f"at most {allowed}", str(taken))
        compare(where, setting.ours(streamed), calls * ROUNDS, expected * ROUNDS)
        judge_report(where, streamed)
        flextensor_fx.release(streamed)
        for name, value in model.named_parameters():
            found = streamed.get_parameter(name).to(setting.device)
            require_equal(f"weight {name} after release", where, found, value)
    return f"25%, at most {taken / 1e6:.1f} MB more on the device" if setting.on_gpu else "25%"
