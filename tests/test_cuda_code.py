"""The code that Inductor generates for CUDA: what `cuda_checks` asks of it holds, for whole blocks and for real models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

import cuda_models
from compiling import fresh_compiler
from cuda_checks import check, delays, in_call, kernel_kinds, stays_of
from cuda_code import Generated, Request, cuda_code
from cuda_events import read
from flextensor_fx.passes.steady_schedule import SteadySchedule

__all__ = ["cuda_code", "fresh_compiler"]

Generate = Callable[[Request], Generated]

LLAMA, DIT, MOE, TIED = (
    Request(build) for build in (cuda_models.llama_like, cuda_models.dit_like, cuda_models.moe_like, cuda_models.tied)
)
BLOCKS = pytest.mark.parametrize("request_", [LLAMA, DIT, MOE], ids=["llama", "dit", "moe"])


# How many loops more than with resident weights, as in model_zoo.py: equal loops of several layers stay apart in dit_like.
MORE_LOOPS = {DIT.build: 1}


@BLOCKS
def test_blocks(cuda_code: Generate, request_: Request) -> None:
    """And the kernels are those of the same compiler with all weights resident."""
    found, resident = cuda_code(request_), cuda_code(replace(request_, share=None))
    wrapper = check(found)
    expected = kernel_kinds(read(resident.code)) + Counter(triton_poi=MORE_LOOPS.get(request_.build, 0))
    assert kernel_kinds(wrapper) == expected
    schedule = in_call(found)
    assert len(schedule.transfers) == len(found.weights)  # each once
    assert any(t.issue_at for t in schedule.transfers)  # some had to wait for room
    assert resident.schedule is None and not read(resident.code).transfers


@pytest.mark.parametrize("lookahead", [0, 1])
def test_lookahead(cuda_code: Generate, lookahead: int) -> None:
    found = cuda_code(replace(LLAMA, lookahead=lookahead))
    wrapper = check(found)
    ahead = most = 0
    for transfer in wrapper.transfers:
        ahead += transfer.startswith("prefetch ")
        most = max(most, ahead)
        ahead -= transfer.startswith("wait ")
    assert most == lookahead + 1


def test_a_weight_with_several_stays_and_one_that_loops_read(cuda_code: Generate) -> None:
    """The tied weight is fetched for both ends; `scale` is read by Triton's kernels, which count on its alignment."""
    found = cuda_code(TIED)
    wrapper = check(found)
    keys = [stay.key for stay in stays_of(found, wrapper)]
    assert keys.count("m:layers.0.weight") == 2 and keys.count("m:scale") > 1
    scales = {stay.memory for stay in stays_of(found, wrapper) if stay.key == "m:scale"}
    hints = [a.aligned for e in wrapper.events for a in e.reads if e.kind == "kernel" and a.memory in scales]
    assert hints and all(hints)


@pytest.mark.parametrize("lookahead", [0, None])
def test_a_weight_as_large_as_an_activation(cuda_code: Generate, lookahead: int | None) -> None:
    """Inductor would save the weight's memory for the activation, past the prefetch that counts on it."""
    found = cuda_code(Request(cuda_models.square, lookahead=lookahead))
    assert not any(stay.reused for stay in stays_of(found, check(found)))


def test_another_device(cuda_code: Generate) -> None:
    wrapper = check(cuda_code(replace(TIED, index=1)))
    assert wrapper.guards == [1] and "cuda:1" in wrapper.devices


@BLOCKS
def test_cuda_graphs_and_copies_for_the_next_call(cuda_code: Generate, request_: Request) -> None:
    """All transfers are captured, in one graph; `check` asserts that Inductor found nothing against it."""
    found = cuda_code(replace(request_, mode="reduce-overhead", steady=True))
    wrapper = check(found)
    assert found.cuda_graphs is not None and found.cuda_graphs.on
    assert isinstance(found.schedule, SteadySchedule) and found.schedule.ahead
    assert sum(t.startswith("prefetch_ahead ") for t in wrapper.transfers) == len(found.schedule.ahead)
    assert wrapper.partitions == ["partition_0"]


def test_cuda_graphs_without_partitions(cuda_code: Generate) -> None:
    """Inductor's other way, which refuses a graph as a whole for what partitions would leave outside."""
    found = cuda_code(replace(TIED, mode="reduce-overhead", options={"graph_partition": False}))
    wrapper = check(found)
    assert found.cuda_graphs is not None and found.cuda_graphs.on
    assert wrapper.partitions == []


def test_prefetches_start_where_the_schedule_says(cuda_code: Generate) -> None:
    """Inductor reorders for the peak of memory: attention, which reads no weight, would be moved before a prefetch, whose copy
    would then start behind it on the device: four of 28 here. A norm that is fused with the sum before it may still be."""
    found = cuda_code(LLAMA)
    wrapper = check(found)
    late = [kernels for _, kernels in delays(wrapper, stays_of(found, wrapper)) if kernels]
    assert late in ([], [1])


@pytest.mark.models
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "whisper"])
def test_real_models(cuda_code: Generate, name: str) -> None:
    """Weights of a layer are as large as its activations here: Inductor would like to use their memory again."""
    pytest.importorskip("transformers")
    found = cuda_code(Request(getattr(cuda_models, name), least_bytes=8000))
    wrapper = check(found)
    assert len(in_call(found).transfers) >= 12
    assert not any(stay.reused for stay in stays_of(found, wrapper))
