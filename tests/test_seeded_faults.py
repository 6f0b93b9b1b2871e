"""A transfer engine on the modelled device: no race where it is right, and each seeded fault found."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

from engine_faults import FAULTS, Fault
from engine_programs import Call, MakeEngine, Program, Write, random_program, run_program
from modelled_device import ModelledDevice
from modelled_session import host_engine
from reference_engine import ReferenceEngine

KEYS = ("a", "b", "c", "d")
TYPICAL = Program(
    tuple((key, (8, 8)) for key in KEYS),
    (
        Call(KEYS, lookahead=2, ahead=("a",)),
        Call(KEYS, lookahead=1, stream=1, ordered=False, late=frozenset({0}), drops=frozenset({2}), ahead=("b",)),
        Call(KEYS, lookahead=3, ordered=False, drops=frozenset({1})),
        Write("c"),
        Call(KEYS, lookahead=1, captured=True, written="d"),
        Call(KEYS, lookahead=0, stream=1, drops=frozenset({1})),
    ),
    streams=2,
)


ENGINES = [pytest.param(ReferenceEngine, id="reference"), pytest.param(host_engine, id="real")]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_right_engine_has_no_race(engine: MakeEngine) -> None:
    device = ModelledDevice()
    outcome = run_program(TYPICAL, device, engine)
    device.assert_no_race()
    assert outcome.wrong == 0 and device.pinned_bytes == 0 and device.events_made < 8


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_each_fault_is_found(fault: Fault, engine: MakeEngine) -> None:
    outcome = run_program(TYPICAL, fault.device(), engine)
    assert fault.kind in {race.kind for race in outcome.races}, "\n".join(map(str, outcome.races))
    assert outcome.wrong > 0 or not fault.wrong


@pytest.mark.parametrize("pool", [1 << 20, 600])  # in the second there is no room for copies ahead of most calls
@pytest.mark.parametrize("first", range(0, 320, 80))
def test_the_real_engine_has_no_race_in_random_programs(first: int, pool: int) -> None:
    for seed in range(first, first + 80):
        device = ModelledDevice()
        outcome = run_program(random_program(seed), device, partial(host_engine, pool_bytes=pool))
        assert not outcome.races and not outcome.wrong, f"seed {seed}: {outcome.wrong} wrong, {outcome.races[:3]}"


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_random_programs_find_each_fault(fault: Fault) -> None:
    found = (run_program(random_program(seed), fault.device(), host_engine) for seed in range(120))
    assert any(fault.kind in {race.kind for race in outcome.races} for outcome in found)


def test_threads_on_streams_of_their_own() -> None:
    device, wrong = ModelledDevice(), []
    engine = host_engine(device, {key: torch.full((8, 8), float(index)) for index, key in enumerate(KEYS)})

    def work() -> None:
        with device.watching(), device.stream(device.user_stream()):
            for round_ in range(50):
                index = round_ % len(KEYS)
                weight = engine.finish(engine.start(KEYS[index]))
                wrong.append(bool((weight + 1).ne(index + 1).any()))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [False] * 150
    device.assert_no_race()


def test_programs_read_back_weights_more_than_once() -> None:
    """Else an engine that moved nothing would pass."""
    programs = [random_program(seed) for seed in range(320)]
    calls = [step for program in programs for step in program.steps if isinstance(step, Call)]
    assert sum(call.captured for call in calls) > 100
    assert sum(bool(call.drops) for call in calls) > 100
    assert sum(bool(call.ahead) for call in calls) > 100
    assert sum(program.streams > 1 for program in programs) > 100
