"""What do our passes add to a compilation, and our ops to a call?

1. The share of the first call's time that goes into selecting, planning, moving the weights and our passes, for models of 4 to
   64 blocks and a cold compile cache, and whether it grows linearly; the kernels that Inductor generates must be those that it
   generates without us.
2. Microseconds per transfer on a model so small that nothing else matters: the call's time over that of the same model compiled
   by Inductor alone. With the weights in files (and the page cache), in host memory, and in host memory beside a modelled device,
   whose streams and events cost about what a real one's do.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from _common import Check, Output, command_line, finish, interleave
from torch import Tensor, nn
from torch._inductor import metrics
from torch._inductor.utils import fresh_cache

import flextensor_fx
import flextensor_fx.compilation
import flextensor_fx.tiers

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # for the modelled device

TIERS = ("disk", "host memory", "modelled device")
SELECT: dict[str, Any] = {"include_patterns": ["layers.*"], "budget": "50%", "min_stream_bytes": 0}


class Block(nn.Module):
    """A transformer block without attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Layers one after another."""

    def __init__(self, layer: Callable[[], nn.Module], count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(layer() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def main() -> None:
    """Runs the benchmark."""
    args = command_line("compile_time", __doc__).parse_args()
    output = Output("compile_time", args.quick)
    with torch.no_grad():
        share_of_compile_time(output, (4, 8) if args.quick else (4, 8, 16, 32, 64))
        host_cost(output, (20,) if args.quick else (20, 50), 200 if args.quick else 2000)
    finish(output, args.out)


# --- compile time ------------------------------------------------------------------------------------------------------


def share_of_compile_time(output: Output, sizes: tuple[int, ...]) -> None:
    """Question 1."""
    first_call(4, flextensor_fx.flextensor, SELECT)  # imports, and what Inductor does once per process
    rows: list[dict[str, Any]] = []
    for layers in sizes:
        plain = first_call(layers, "inductor", None)
        ours = first_call(layers, flextensor_fx.flextensor, SELECT)
        rows.append(
            {
                "blocks": layers,
                "inductor s": plain["seconds"],
                "ours s": ours["seconds"],
                "select, plan, move ms": (ours["backend"] - ours["inner"]) * 1e3,
                "passes ms": ours["passes"] * 1e3,
                "share": (ours["backend"] - ours["inner"] + ours["passes"]) / ours["seconds"],
                "ms per block": (ours["backend"] - ours["inner"] + ours["passes"]) * 1e3 / layers,
                "kernels": ours["kernels"],
                "inductor kernels": plain["kernels"],
            }
        )
    output.table("first call, cold compile cache", rows)
    output.check(Check("greatest share of our part in the first call", max(row["share"] for row in rows), 0.05))
    output.check(
        Check(
            f"our ms per block, {sizes[-1]} blocks over {sizes[1]}",
            rows[-1]["ms per block"] / rows[1]["ms per block"],
            1.5,
        )
    )
    output.check(
        Check("kernels more or fewer than Inductor's", max(abs(r["kernels"] - r["inductor kernels"]) for r in rows), 0)
    )


def first_call(layers: int, backend: Any, chosen: dict[str, Any] | None) -> dict[str, float]:
    """Seconds of a first call and of its parts."""
    torch._dynamo.reset()
    model, x = Stack(lambda: Block(64), layers).eval(), torch.randn(4, 64)
    spent = {"backend": 0.0, "inner": 0.0}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - begin

        return run

    inner = timed("inner", flextensor_fx.compilation.compile_inner)
    used = backend if isinstance(backend, str) else timed("backend", backend)
    with fresh_cache(), mock.patch.object(flextensor_fx.compilation, "compile_inner", inner):
        metrics.reset()
        call = torch.compile(model, backend=used, fullgraph=True, options=chosen)
        begin = time.perf_counter()
        call(x)
        seconds = time.perf_counter() - begin
    passes = 0.0
    if chosen:
        passes = sum(graph.pass_seconds for graph in flextensor_fx.report(model).graphs)
        flextensor_fx.release(model)
    return {**spent, "seconds": seconds, "passes": passes, "kernels": metrics.generated_kernel_count}


# --- time per call -----------------------------------------------------------------------------------------------------


def host_cost(output: Output, counts: tuple[int, ...], rounds: int) -> None:
    """Question 2."""
    rows: list[dict[str, Any]] = []
    x = torch.randn(1, 64)
    for tier, count in itertools.product(TIERS, counts):
        torch._dynamo.reset()
        plain = Stack(lambda: nn.Linear(64, 64, bias=False), count).eval()
        resident = torch.compile(plain, backend="inductor", fullgraph=True)
        model = Stack(lambda: nn.Linear(64, 64, bias=False), count).eval()
        chosen: dict[str, Any] = SELECT | {"store": None if tier == "disk" else "host"}
        streamed = torch.compile(model, backend=flextensor_fx.flextensor, fullgraph=True, options=chosen)
        expected = resident(x)
        with _modelled() if tier == "modelled device" else contextlib.nullcontext():
            equal = torch.equal(streamed(x), expected)
        transfers = len(flextensor_fx.report(model).graphs[-1].schedule.transfers)
        for _ in range(50):
            streamed(x)
        seconds = interleave({"inductor": partial(resident, x), "ours": partial(streamed, x)}, rounds)
        pairs = zip(seconds["ours"], seconds["inductor"], strict=True)
        rows.append(
            {
                "tier": tier,
                "linears": count,
                "transfers": transfers,
                "inductor us": median(seconds["inductor"]) * 1e6,
                "ours us": median(seconds["ours"]) * 1e6,
                "us per transfer": median(ours - plain for ours, plain in pairs) * 1e6 / transfers,
                "fastest, us per transfer": (min(seconds["ours"]) - min(seconds["inductor"])) * 1e6 / transfers,
                "bits equal": equal,
            }
        )
        flextensor_fx.release(model)
    output.table(f"host time of a call, {rounds} rounds", rows)
    for row in rows:
        what = f"{row['tier']}, {row['transfers']} transfers: us per transfer"
        output.check(Check(what, row["us per transfer"], 30 if row["tier"] == "disk" else 40))


def _modelled() -> Any:
    """The model of a device that the tests use: its streams and events cost what they do beside the engine's own work."""
    from modelled_device import ModelledDevice

    device = ModelledDevice(8 << 30)
    return mock.patch.object(flextensor_fx.tiers, "open_device", return_value=device)


if __name__ == "__main__":
    main()
