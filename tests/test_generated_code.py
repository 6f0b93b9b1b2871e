"""What Inductor makes of a lowered graph: the order of its calls, the lives of weights, and what its cache gives back."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import flextensor_fx
from compiling import assert_equal, fresh_compiler, stream
from flextensor_fx.session import Session

__all__ = ["fresh_compiler"]

_CALL = re.compile(
    r"torch\.ops\.flextensor_fx\.(?P<op>\w+)\.default\.direct\((?:(?P<weight>buf\d+), )?'[\w-]+:(?P<key>[\w.]+)'"
    r"|(?P<product>extern_kernels\.\w*mm\()|(?P<fused>cpp_fused\w*\()"
)


class Blocks(nn.Module):
    """Products with pointwise work between, and a branch that a reordering for memory would like to move."""

    def __init__(self, depth: int = 5, width: int = 32, norm: bool = False) -> None:
        super().__init__()
        self.norm = norm
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        branch = x.exp().repeat(8, 1)
        for layer in self.layers:
            x = torch.relu(layer(x)) + 1
            if self.norm:
                x = nn.functional.layer_norm(x, x.shape[-1:])
        return x + branch.sum(0)


def events(code: str) -> list[str]:
    """The calls in `code` in order: "prefetch layers.0.weight", "wait ...", "offload ...", "product", "fused"."""
    found = []
    for match in _CALL.finditer(code[code.index("def call(") :]):
        found.append(f"{match['op']} {match['key']}" if match["op"] else "product" if match["product"] else "fused")
    return found


def expected_order(schedule: Any) -> list[str]:
    """The calls of a schedule with one weight per step."""
    order = []
    for step in range(len(schedule.transfers)):
        issued = [t for t in schedule.transfers if t.issue_at == step]
        order += [f"prefetch {t.key.partition(':')[2]}" for t in issued]
        key = schedule.transfers[step].key.partition(":")[2]
        order += [f"wait {key}", "product", f"offload {key}"]
    return order


@pytest.mark.parametrize("lookahead", [0, 1, None])
@pytest.mark.parametrize("reorder", [True, False])
def test_calls_come_in_the_order_of_the_schedule(reorder: bool, lookahead: int | None) -> None:
    model, x = Blocks().requires_grad_(False), torch.randn(4, 32)
    size = 32 * 32 * 4
    compiled = stream(
        model,
        inner="inductor",
        include=["layers.*"],
        budget=3 * size,
        lookahead=lookahead,
        min_stream_bytes=size,
        inner_options={"reorder_for_peak_memory": reorder},
    )
    out, (code,) = run_and_get_code(compiled, x)
    assert_equal(out, torch.compile(Blocks.forward, fullgraph=True)(model, x))
    (graph,) = flextensor_fx.report(model).graphs
    streamed = {t.key.partition(":")[2] for t in graph.schedule.transfers}
    calls = [event for event in events(code) if event != "fused"]
    resident_products = calls.count("product") - len(streamed)
    expected = expected_order(graph.schedule)
    if not resident_products:
        assert calls == expected
    # Products of resident weights stand between; without any product the order is the schedule's all the same.
    assert [c for c in calls if c != "product"] == [e for e in expected if e != "product"]
    for key in streamed:
        assert "product" in calls[calls.index(f"wait {key}") : calls.index(f"offload {key}")]


def test_work_runs_between_prefetch_and_wait() -> None:
    """Inductor moves calls down to their first user; a copy that starts right before its wait would run beside nothing."""
    model, x = Blocks(norm=True).requires_grad_(False), torch.randn(4, 32)
    compiled = stream(model, inner="inductor", include=["layers.*"], budget=32 * 32 * 4)
    _, (code,) = run_and_get_code(compiled, x)
    calls = events(code)
    assert calls[0] == "prefetch layers.0.weight"
    for number in range(1, 5):
        between = calls[calls.index(f"prefetch layers.{number}.weight") : calls.index(f"wait layers.{number}.weight")]
        assert "fused" in between


@pytest.mark.parametrize("reorder", [True, False])
def test_copies_for_the_next_call_start_as_early_as_memory_allows(
    reorder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the kernels are those of the graph that fetches nothing ahead."""
    size = 32 * 32 * 4
    monkeypatch.setattr(Session, "pool", property(lambda session: 2 * size))
    codes = {}
    for objective in ("single", "steady"):
        model, x = Blocks(norm=True).requires_grad_(False), torch.randn(4, 32)
        torch._dynamo.reset()
        compiled = stream(
            model,
            inner="inductor",
            include=["layers.*"],
            exclude_patterns=["layers.4"],
            budget=size,
            objective=objective,
            inner_options={"reorder_for_peak_memory": reorder},
        )
        with torch.no_grad():
            _, (codes[objective],) = run_and_get_code(compiled, x)
        flextensor_fx.release(model)
    calls = events(codes["steady"])
    assert [call for call in calls if not call.startswith("prefetch_ahead")] == events(codes["single"])
    first, second = (place for place, call in enumerate(calls) if call.startswith("prefetch_ahead"))
    assert calls[first - 1 : first + 1] == ["offload layers.2.weight", "prefetch_ahead layers.0.weight"]
    assert first < calls.index("wait layers.3.weight")
    assert calls[second - 1 : second + 1] == ["offload layers.3.weight", "prefetch_ahead layers.1.weight"]
    assert "product" in calls[second:]  # that of the resident layer, which the copy runs beside


def test_a_weight_is_never_copied_and_dies_at_its_offload() -> None:
    model, x = Blocks().requires_grad_(False), torch.randn(4, 32)
    _, (code,) = run_and_get_code(stream(model, inner="inductor", include=["layers.*"], budget="40%"), x)
    lines = [line.strip() for line in code[code.index("def call(") :].splitlines()]
    seen = 0
    for place, line in enumerate(lines):
        match = _CALL.search(line)
        if match is None or match["op"] != "offload":
            continue
        seen += 1
        buffer = match["weight"]
        after = itertools.takewhile(lambda line: line.startswith(("assert", "del")), lines[place + 1 :])
        assert f"del {buffer}" in after
        uses = [other for other in lines if re.search(rf"\b{buffer}\b", other) and "assert" not in other]
        kinds = [re.search(r"^buf\d+ = buf\d+$|wait\.default|extern_kernels|offload|^del", use) for use in uses]
        assert all(kinds) and len(uses) == 4, uses
    assert seen == len(flextensor_fx.report(model).graphs[0].schedule.transfers)
    assert "aten.clone" not in code and "aten.copy_" not in code and "record_stream" not in code


def test_a_pointwise_reader_in_two_kernels_ends_before_the_offload() -> None:
    """`x * scale` is read by two kernels: written out once, for else the second would read the weight after its offload."""

    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(32, 32))
            self.a = nn.Parameter(torch.randn(32, 32))
            self.register_buffer("seen", torch.zeros(32, 32))

        def forward(self, x: Tensor) -> Tensor:
            scaled = x * self.scale
            y = (scaled + 1) @ self.a
            self.seen.mul_(self.scale)
            return (scaled * 2 + y).relu()

    torch.manual_seed(0)
    models = [Fork().requires_grad_(False) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(32, 32)
    compiled = stream(models[0], inner="inductor")
    out, (code,) = run_and_get_code(compiled, x)
    assert_equal(out, torch.compile(Fork.forward, fullgraph=True)(models[1], x))
    assert_equal(models[0].seen, models[1].seen)
    lines = code[code.index("def call(") :].splitlines()
    offload = next(n for n, line in enumerate(lines) if "offload.default" in line and ":scale'" in line)
    buffer = re.search(r"direct\((buf\d+),", lines[offload])
    assert buffer is not None
    assert not [line for line in lines[offload + 1 :] if re.search(rf"\b{buffer[1]}\b", line) and "del" not in line]


# --- the compile cache -------------------------------------------------------------------------------------------------

_SCRIPT = """
import json, sys
import torch
from torch import nn
from torch._dynamo.utils import counters
import flextensor_fx

def model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(6))).requires_grad_(False)

def run(name, m, **options):
    torch._dynamo.reset()
    counters.clear()
    x = torch.randn(3, 32)
    expected = torch.compile(m, backend="eager")(x)
    options = {"include_patterns": ["*"], "min_stream_bytes": 0, **options}
    out = torch.compile(m, backend=flextensor_fx.flextensor, fullgraph=True, options=options)(x)
    (graph,) = flextensor_fx.report(m).graphs
    stats = flextensor_fx.report(m).stats
    print(json.dumps({
        "name": name,
        "equal": torch.equal(out, expected),
        "planned": [t.key.partition(":")[2] for t in graph.schedule.transfers],
        "store": graph.schedule.transfers[0].key.partition(":")[0],
        "started": stats.transfers,
        "pool": graph.schedule.pool,
        "peak": stats.peak_pool_bytes,
        "hits": counters["inductor"]["fxgraph_cache_hit"],
        "misses": counters["inductor"]["fxgraph_cache_miss"],
    }))

first = model(0)
run("same", first, budget=3 * 4096)
if sys.argv[1] == "again":
    run("another model alive", model(0), budget=3 * 4096)
    flextensor_fx.release(first)
    del first
    run("other weights", model(1), budget=3 * 4096)
    run("other budget", model(0), budget=4 * 4096)
    run("other lookahead", model(0), budget=3 * 4096, lookahead=0)
    run("other patterns", model(0), budget=2 * 4096, include_patterns=["0", "1", "2", "3"])
"""


def run_script(mode: str, cache: Path) -> dict[str, dict[str, Any]]:
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, mode], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {entry["name"]: entry for entry in found}


@pytest.mark.slow
def test_a_cached_graph_is_never_another_plan(tmp_path: Path) -> None:
    cold = run_script("once", tmp_path)["same"]
    warm = run_script("again", tmp_path)
    assert (cold["hits"], cold["misses"]) == (0, 1)
    assert (warm["same"]["hits"], warm["same"]["misses"]) == (1, 0)  # the same settings in a new process
    assert warm["other weights"]["hits"] == 1  # weights are no part of compiled code
    for name, run in {"cold": cold, **warm}.items():
        assert run["equal"], name
        assert run["started"] == len(run["planned"]), name  # what runs is what this plan says
        assert run["peak"] <= run["pool"], name
    assert cold["planned"] == warm["same"]["planned"]
    for name in ("other budget", "other lookahead", "other patterns", "another model alive"):
        assert warm[name]["misses"] == 1, name
    assert warm["another model alive"]["store"] != warm["same"]["store"]
    assert len(warm["other budget"]["planned"]) < len(cold["planned"])
