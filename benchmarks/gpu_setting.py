"""What the parts of gpu_check.py share: the device, the two ways to compile a model, equality to the bit, and the time left."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gpu_models
import torch
from _common import Output
from gpu_models import Sizes
from torch import Tensor, nn

import flextensor_fx

TIER: dict[str, Any] = {"store": "host"}  # on the CPU the default is the tier with files
GPU = Sizes(layers=6, hidden=1024, inner=2816, heads=16, kv_heads=4, batch=2, tokens=256)
CPU = Sizes(layers=3, hidden=192, inner=480, heads=4, kv_heads=2, batch=2, tokens=16)  # smaller weights travel together
INCLUDE = ["layers.*"]
NO_ADAPTERS = ["**.lora_a", "**.lora_b"]
GRAPHS = "reduce-overhead"
_CYCLES = 8_000_000  # of a GPU's clock: about 4 ms, longer than copying a small model's weights takes
_PATCHED: dict[str, Any] = {"recompile_limit": 64}  # models of one class share the code that Dynamo counts by

Call = Callable[..., Tensor]


class WrongNumber(Exception):
    """Something that was computed is not what it must be."""

    def __init__(self, what: str, where: str, expected: str, found: str) -> None:
        super().__init__(f"WRONG  what: {what}; where: {where}; expected: {expected}; found: {found}")


class Clock:
    """Seconds since the start, and when to leave things out."""

    def __init__(self, limit: float) -> None:
        self._begin = time.monotonic()
        self.limit = limit

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._begin

    def has(self, seconds: float, share: float = 1.0) -> bool:
        """Whether so much is left of a share of the limit."""
        return self.elapsed + seconds <= self.limit * share


@dataclass
class Setting:
    """Where and how the checks run, and what they have found.

    Fields:
        inner: the inner compiler: "inductor" or "aot_eager".
        wrong: with `keep_going`, what was wrong so far; else the first is raised.
        skipped: what there was no time for.
        replayed: by name of a plan under CUDA graphs: whether its later calls ran without a transfer being started by the host.
    """

    device: torch.device
    inner: str
    quick: bool
    keep_going: bool
    clock: Clock
    output: Output
    out: Path
    wrong: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    replayed: dict[str, bool] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return self.device.type != "cpu"

    def save(self) -> None:
        """Writes what there is, so that a run that is cut short leaves it."""
        self.output.save(self.out)

    def note(self, error: Exception) -> None:
        """Keeps what went wrong, and raises it unless the setting keeps going."""
        self.wrong.append(str(error) if isinstance(error, WrongNumber) else f"FAILED  {type(error).__name__}: {error}")
        if not self.keep_going:
            raise error
        print("".join(traceback.format_exception(error)) if not isinstance(error, WrongNumber) else error, flush=True)

    # --- compiling

    def resident(self, model: nn.Module, mode: str | None = None, inner: str | None = None) -> Call:
        """The model under the inner compiler alone."""
        inner = inner or self.inner
        chosen: dict[str, Any] = {"mode": mode} if inner == "inductor" else {}
        return marked(torch.compile(model, backend=inner, fullgraph=True, dynamic=False, **chosen), mode)

    def ours(self, model: nn.Module, mode: str | None = None, inner: str | None = None, **options: Any) -> Call:
        """The model under flextensor with the same inner compiler; without `options`, one that is offloaded already."""
        given: dict[str, Any] = {"inner_backend": inner or self.inner, "inner_mode": mode, **options}
        if options:
            given = {"include_patterns": INCLUDE, **TIER, **given}
        backend = flextensor_fx.flextensor
        return marked(torch.compile(model, backend=backend, fullgraph=True, dynamic=False, options=given), mode)

    def sizes(self, kind: str) -> Sizes:
        """A model for checking bits, in which no weight is more than a tenth of all, so that a budget of that much can work."""
        sizes = GPU if self.on_gpu else CPU
        if kind == "moe":
            return replace(sizes, inner=sizes.hidden)
        return replace(sizes, inner=4 * sizes.hidden, kv_heads=sizes.heads) if kind == "dit" else sizes

    def build(self, kind: str, sizes: Sizes, *, adapters: bool = False) -> nn.Module:
        return gpu_models.build(kind, sizes, self.device, adapters=adapters)

    def inputs(self, kind: str, sizes: Sizes, count: int) -> list[tuple[Tensor, ...]]:
        return gpu_models.inputs(kind, sizes, self.device, count)

    @contextmanager
    def fresh(self) -> Iterator[None]:
        """Code that was compiled before is forgotten, and so are its guards; afterwards as well."""
        forget()
        with torch._dynamo.config.patch(_PATCHED):
            yield
        forget()

    # --- the device

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def begin_peak(self) -> int:
        """Bytes allocated on the device now, garbage apart; what `peak` counts from."""
        if not self.on_gpu:
            return 0
        self.synchronize()
        gc.collect()
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        """Most bytes allocated on the device since `begin_peak`."""
        return torch.cuda.max_memory_allocated(self.device) if self.on_gpu else 0

    def stream(self) -> Any:
        """A stream behind what is queued on the current one; None on the CPU."""
        if not self.on_gpu:
            return None
        made = torch.cuda.Stream(self.device)
        made.wait_stream(torch.cuda.current_stream(self.device))
        return made

    def under(self, stream: Any) -> AbstractContextManager[Any]:
        """`stream` is current."""
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    def join(self, stream: Any) -> None:
        """What is queued on the current stream from now on runs behind `stream`."""
        if stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(stream)

    def hold_back(self) -> None:
        """Makes the current stream fall behind the host, so that what does not wait for it runs too early."""
        if self.on_gpu:
            torch.cuda._sleep(_CYCLES)

    def poison(self, sizes: Sequence[int]) -> None:
        """Queues writes of NaN to memory that is given back at once: a copy into it that does not wait for them is lost."""
        taken = [torch.full((nbytes // 2,), float("nan"), dtype=torch.bfloat16, device=self.device) for nbytes in sizes]
        del taken


def marked(compiled: Any, mode: str | None) -> Call:
    """Calls that tell CUDA graphs where a step begins: results of the one before may be overwritten from there."""

    def call(*arguments: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(*arguments)

    return call if mode == GRAPHS else compiled


def forget() -> None:
    """Drops compiled code, and what only it held."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --- equality ----------------------------------------------------------------------------------------------------------


def require_equal(
    what: str, where: str, found: Tensor, expected: Tensor, again: Callable[[], Tensor] | None = None
) -> None:
    """Equal to the bit, but that every NaN equals every other.

    Args:
        again: computes `found` anew with nothing else under way. That it gives the right bits then points to a race.

    Raises:
        WrongNumber: they differ.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype or found.device != expected.device:
        raise WrongNumber(what, where, described(expected), described(found))
    differ = found != expected
    differ &= ~(found.isnan() & expected.isnan())
    if not bool(differ.any()):
        return
    place = tuple(int(n) for n in differ.nonzero()[0])
    gap = (found.double() - expected.double()).abs()[differ].max()
    seen = (
        f"{float(found[place]):.6g} there; {int(differ.sum())} of {differ.numel()} values differ, by up to {float(gap):.3g}, "
        f"and {int(found.isnan().sum())} are NaN"
    )
    if again is not None:
        seen += "; computed again by itself it is " + ("right" if torch.equal(again(), expected) else "wrong too")
    raise WrongNumber(what, where, f"{float(expected[place]):.6g} at {place}, as resident", seen)


def described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device}"


def require_telling(where: str, value: Tensor) -> None:
    """A result that equality means something for: finite, and not the same everywhere.

    Raises:
        WrongNumber: it is not.
    """
    if not bool(value.isfinite().all()) or float(value.float().std()) < 1e-5:
        found = f"{int((~value.isfinite()).sum())} not finite, standard deviation {float(value.float().std()):.3g}"
        raise WrongNumber("the resident result", where, "finite values that differ", found)


# --- what a plan did ---------------------------------------------------------------------------------------------------


def started(streamed: nn.Module) -> int:
    """Transfers that the host has started so far."""
    stats = flextensor_fx.report(streamed).stats
    return 0 if stats is None else stats.transfers


def judge_report(where: str, streamed: nn.Module) -> None:
    """What must hold of any plan that has run, before a weight is written.

    Raises:
        WrongNumber: nothing was streamed, more was held than allowed, or a weight came back from the device.
    """
    report = flextensor_fx.report(streamed)
    if started(streamed) == 0:
        raise WrongNumber("transfers started", where, "some", "none")
    assert report.budget is not None
    if report.peak_bytes > report.budget:
        raise WrongNumber(
            "bytes that the plan holds", where, f"at most the budget of {report.budget}", str(report.peak_bytes)
        )
    assert report.stats is not None
    returned = 0 if report.stats.device is None else report.stats.device.returned_bytes
    if report.stats.overruns or returned:
        raise WrongNumber(
            "times that memory beyond the plan was taken, and bytes of weights that came back from the device",
            where,
            "0 and 0",
            f"{report.stats.overruns} and {returned}",
        )
