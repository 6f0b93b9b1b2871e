"""Two processes that load the same files: the weights that are streamed take no memory of either beyond its pool."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

pytestmark = pytest.mark.skipif(
    not os.path.exists("/proc/self/smaps_rollup"), reason="needs /proc to tell shared memory"
)

_DEPTH, _WIDTH = 12, 1024
_TOTAL = _DEPTH * _WIDTH * _WIDTH * 4

_PROGRAM = r"""
import json, sys
import torch
from torch import nn
import flextensor_fx


def memory():
    fields = (line.split() for line in open("/proc/self/smaps_rollup").readlines()[1:])
    return {name.rstrip(":"): int(value) * 1024 for name, value, *_ in fields}


path, options = sys.argv[1], json.loads(sys.argv[2])
torch.set_num_threads(1)
torch.set_grad_enabled(False)


def model():
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))


def call(model):
    return torch.compile(model, backend=flextensor_fx.flextensor)(torch.ones(1, WIDTH)).double().sum().item()


config = {"include_patterns": ["*"], "inner_backend": "eager", **options}
small = nn.Sequential(nn.Linear(8, 8)).requires_grad_(False)
torch.compile(small, backend=flextensor_fx.flextensor, options={**config, "budget": None})(torch.ones(1, 8))  # loads code
before = memory()
loaded = flextensor_fx.load(model(), path, config)
total = call(loaded)
report = flextensor_fx.report(loaded)
mapped = sum(unit.streamed_bytes for unit in report.units) - getattr(
    flextensor_fx.offloading.find_sessions(loaded)[0].engine.store, "host_bytes", 0
)
print(json.dumps({"total": total, "peak": report.peak_bytes, "mapped": mapped}), flush=True)
sys.stdin.readline()  # both are loaded
after = memory()
print(json.dumps({name: after[name] - before[name] for name in before}), flush=True)
sys.stdin.readline()  # both have measured
""".replace("DEPTH", str(_DEPTH)).replace("WIDTH", str(_WIDTH))


def both(path: Path, options: dict[str, Any]) -> list[dict[str, Any]]:
    """What each of two processes found while the other was there."""
    command = [sys.executable, "-c", _PROGRAM, str(path), json.dumps(options)]
    root = Path(__file__).parents[1]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": root}
    processes = [subprocess.Popen(command, **pipes) for _ in range(2)]
    found: list[dict[str, Any]] = [{}, {}]
    try:
        for _ in range(2):
            for process, numbers in zip(processes, found, strict=True):
                assert process.stdout is not None
                line = process.stdout.readline()
                assert line, "the process ended"
                numbers.update(json.loads(line))
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A file of 48 MB, and what the model makes of ones."""
    path = tmp_path_factory.mktemp("shared") / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    weights = {f"{n}.weight": torch.randn(_WIDTH, _WIDTH, generator=generator) / 32 for n in range(_DEPTH)}
    safetensors.torch.save_file(weights, path)
    x = torch.ones(1, _WIDTH)
    for weight in weights.values():
        x = x @ weight.t()
    return path, x.double().sum().item()


@pytest.mark.slow
@pytest.mark.parametrize("direct_io", [True, False])
def test_what_is_streamed_is_in_no_process(checkpoint: tuple[Path, float], direct_io: bool) -> None:
    path, expected = checkpoint
    found = both(path, {"budget": "25%", "direct_io": direct_io})
    for numbers in found:
        assert numbers["total"] == pytest.approx(expected, rel=1e-4)
        assert numbers["peak"] <= _TOTAL // 4
        assert numbers["Rss"] <= _TOTAL // 4 + (10 << 20)  # code and threads that the first load needs
    assert found[0]["total"] == found[1]["total"]
    assert sum(numbers["Pss"] for numbers in found) <= _TOTAL // 2 + (16 << 20)


@pytest.mark.slow
def test_host_memory_beyond_its_budget_is_one_copy(checkpoint: tuple[Path, float]) -> None:
    path, expected = checkpoint
    found = both(path, {"store": "host", "host_budget": 8 << 20, "budget": "25%"})
    for numbers in found:
        assert numbers["total"] == pytest.approx(expected, rel=1e-4)
    mapped = min(numbers["mapped"] for numbers in found)
    assert mapped >= _TOTAL // 2
    resident, shares = (sum(numbers[name] for numbers in found) for name in ("Rss", "Pss"))
    assert resident - shares >= 0.9 * mapped  # counted once between the two
