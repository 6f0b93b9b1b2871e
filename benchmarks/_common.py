"""What the benchmarks share: options, the machine, a model, interleaved timing, tables and JSON."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

RESULTS = Path(__file__).parent / "results"


def command_line(name: str, description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has: `quick` and `out`."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it works, measures nothing")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json", help="where the JSON goes (%(default)s)")
    return parser


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor()
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": round(os.getloadavg()[0], 2),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


# --- results -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """A bound that a measurement must keep."""

    what: str
    value: float
    bound: float
    at_most: bool = True

    @property
    def holds(self) -> bool:
        return self.value <= self.bound if self.at_most else self.value >= self.bound

    def __str__(self) -> str:
        sign = "<=" if self.at_most else ">="
        return f"{'ok    ' if self.holds else 'MISSED'}  {self.what}: {self.value:.4g} {sign} {self.bound:.4g}"


@dataclass
class Output:
    """What a benchmark has found; printed as it comes, and written as JSON at the end."""

    name: str
    quick: bool
    machine: Mapping[str, Any] = field(default_factory=machine)
    rows: list[dict[str, Any]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    def __post_init__(self) -> None:
        print(
            f"{self.name}{' --quick' if self.quick else ''}: " + ", ".join(f"{k} {v}" for k, v in self.machine.items())
        )

    def table(self, title: str, rows: Sequence[dict[str, Any]]) -> None:
        """Prints rows of equal keys, and keeps them."""
        print(f"\n{title}\n{format_rows(rows)}", flush=True)
        self.rows += [{"table": title, **row} for row in rows]

    def check(self, *checks: Check) -> None:
        """Prints bounds, and keeps them."""
        for check in checks:
            print(check, flush=True)
        self.checks += checks

    def write(self, path: Path) -> int:
        """Writes the JSON; returns the exit status: 1 where a bound was missed, though not with `quick`."""
        self.save(path)
        missed = sum(not check.holds for check in self.checks)
        print(f"\n{len(self.checks) - missed} of {len(self.checks)} bounds kept; written to {path}")
        return 0 if self.quick or not missed else 1

    def save(self, path: Path) -> None:
        """Writes the JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**asdict(self), "missed": [c.what for c in self.checks if not c.holds]}, indent=1))


def format_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """A text table: the first column aligned left, numbers to four digits."""
    header = list(rows[0])
    cells = [header, *([_cell(row[name]) for name in header] for row in rows)]
    widths = [max(len(line[c]) for line in cells) for c in range(len(header))]
    return "\n".join(
        "  ".join(cell.rjust(n) if c else cell.ljust(n) for c, (cell, n) in enumerate(zip(line, widths, strict=True)))
        for line in cells
    )


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "-" if value is None else str(value)


# --- timing ------------------------------------------------------------------------------------------------------------


def rotated(names: Sequence[str], round_number: int) -> list[str]:
    """`names`, beginning with another one each round, so that drift meets all alike."""
    shift = round_number % len(names)
    return [*names[shift:], *names[:shift]]


def interleave(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every call, one per round."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in rotated(list(calls), number):
            begin = time.perf_counter()
            calls[name]()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def paired(numerators: Iterable[float], denominators: Iterable[float]) -> float:
    """Median of the ratios of one round each."""
    return median(a / b for a, b in zip(numerators, denominators, strict=True))


# --- models ------------------------------------------------------------------------------------------------------------


def build_llama(**sizes: Any) -> LlamaForCausalLM:
    """A Llama in eval mode with random float32 weights, the same at every call with the same sizes."""
    # transformers imports torchao where it is installed, and that warns at import of every GPU kernel it cannot load.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(use_cache=False, **sizes)).eval()


def finish(output: Output, path: Path) -> None:
    """Writes the results and ends the process."""
    sys.exit(output.write(path))
