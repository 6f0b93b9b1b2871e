"""How much memory does streaming save, and how much does getting there take?

Every case is a process of its own, which reports its peak resident set (VmHWM, reset before the part that counts) and, from a
sampling thread, its peak of anonymous memory (RssAnon: without mapped files and libraries).

1. A streamed run must take less than a resident one by 90% of the selected weights beyond the budget.
2. `offload()` of a model must never take more than the model and one unit.
3. The first call of a plain model, which compiles and moves the weights, must take no more than the same with Inductor alone
   and one unit.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from _common import Check, Output, build_llama, command_line, finish

import flextensor_fx

FULL: dict[str, Any] = {
    "vocab_size": 2000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
QUICK: dict[str, Any] = {**FULL, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6}
SELECT: dict[str, Any] = {"include_patterns": ["model.layers.*"], "budget": "25%"}
SLACK = 48 << 20  # allocator, threads and code that a first use loads


def main() -> None:
    """Runs the benchmark, or one case of it."""
    parser = command_line("memory", __doc__)
    parser.add_argument("--case", choices=CASES, help="run this one in this process and print what it found as JSON")
    args = parser.parse_args()
    sizes = QUICK if args.quick else FULL
    if args.case:
        with torch.no_grad():
            print(json.dumps(CASES[args.case](sizes)))
        return
    output = Output("memory", args.quick)
    found = {case: in_process(case, args.quick) for case in CASES}
    output.table("MB", [{"case": case, **{k: v / 1e6 for k, v in numbers.items()}} for case, numbers in found.items()])
    judge(output, found)
    finish(output, args.out)


def in_process(case: str, quick: bool) -> dict[str, int]:
    """What one case found."""
    command = [sys.executable, __file__, "--case", case, *(["--quick"] if quick else [])]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def judge(output: Output, found: dict[str, dict[str, int]]) -> None:
    """The bounds."""
    resident, streamed, offloaded = found["resident run"], found["streamed run"], found["offload()"]
    surplus = streamed["selected"] - streamed["budget"]
    for kind in ("peak", "anonymous peak"):
        saved = resident[kind] - streamed[kind]
        output.check(
            Check(f"{kind}: saved share of the {surplus / 1e6:.0f} MB beyond the budget", saved / surplus, 0.9, False)
        )
    allowed = (offloaded["unit"] + SLACK) / 1e6
    for kind in ("peak", "anonymous peak"):
        before = offloaded["before" if kind == "peak" else "anonymous before"]
        more = found["first call"][kind] - found["first call of inductor"][kind]
        output.check(Check(f"offload(), {kind} over the model, MB", (offloaded[kind] - before) / 1e6, allowed))
        output.check(Check(f"first call, {kind} over Inductor's, MB", more / 1e6, allowed))


# --- the cases ---------------------------------------------------------------------------------------------------------


def resident_run(sizes: dict[str, Any]) -> dict[str, int]:
    """Calls after the first, all weights in memory."""
    model, ids = build(sizes)
    call = torch.compile(model, backend="inductor", fullgraph=True)
    call(ids)
    return measured(lambda: [call(ids) for _ in range(3)])


def streamed_run(sizes: dict[str, Any]) -> dict[str, int]:
    """The same within the budget."""
    model, ids = build(sizes)
    call = torch.compile(model, backend=flextensor_fx.flextensor, fullgraph=True, options=SELECT)
    call(ids)
    numbers = measured(lambda: [call(ids) for _ in range(3)])
    report = flextensor_fx.report(model)
    return {**numbers, "selected": report.selection.nbytes, "budget": report.budget or 0}


def offloading(sizes: dict[str, Any]) -> dict[str, int]:
    """`offload()`, nothing compiled."""
    model, _ = build(sizes)
    numbers = measured(lambda: flextensor_fx.offload(model, SELECT))
    return {**numbers, "unit": max(unit.nbytes for unit in flextensor_fx.report(model).units)}


def first_call(sizes: dict[str, Any]) -> dict[str, int]:
    """Compiling and moving, within the budget."""
    model, ids = build(sizes)
    call = torch.compile(model, backend=flextensor_fx.flextensor, fullgraph=True, options=SELECT)
    return measured(lambda: call(ids))


def first_call_of_inductor(sizes: dict[str, Any]) -> dict[str, int]:
    """Compiling, all weights in memory."""
    model, ids = build(sizes)
    call = torch.compile(model, backend="inductor", fullgraph=True)
    return measured(lambda: call(ids))


CASES: dict[str, Callable[[dict[str, Any]], dict[str, int]]] = {
    "resident run": resident_run,
    "streamed run": streamed_run,
    "offload()": offloading,
    "first call of inductor": first_call_of_inductor,
    "first call": first_call,
}


def build(sizes: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    """The model and its input."""
    return build_llama(**sizes), torch.randint(sizes["vocab_size"], (1, 64), generator=torch.Generator().manual_seed(1))


# --- measuring ---------------------------------------------------------------------------------------------------------


def measured(work: Callable[[], Any]) -> dict[str, int]:
    """Bytes before, after and at the peak of `work`."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = status("VmRSS")
    with sampled() as anonymous:
        work()
    gc.collect()
    return {
        "before": before,
        "after": status("VmRSS"),
        "peak": status("VmHWM"),
        "anonymous before": anonymous[0],
        "anonymous peak": max(anonymous),
    }


@contextmanager
def sampled() -> Iterator[list[int]]:
    """A list that fills with RssAnon, every 2 ms."""
    values, ended = [status("RssAnon")], threading.Event()

    def sample() -> None:
        while not ended.wait(0.002):
            values.append(status("RssAnon"))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield values
    finally:
        ended.set()
        thread.join()
        values.append(status("RssAnon"))


def status(field: str) -> int:
    """Bytes of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field + ":")).split()[1]) * 1024


if __name__ == "__main__":
    main()
