"""Programs of calls, writes and captures for a transfer engine over a modelled device, and random ones.

An engine has `start(key) -> transfer`, `finish(transfer) -> tensor`, `start_ahead(key)`, `write(key, value)` and `close()`.
A transfer is dropped with its last reference.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from modelled_device import ModelledDevice
from modelled_queue import Stream, by_the_model
from modelled_races import Race

MakeEngine = Callable[[ModelledDevice, Mapping[str, torch.Tensor]], Any]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """One call of a graph: its weights one after the other, each read by a kernel.

    Attributes:
        keys: of the weights, in the order of use.
        lookahead: how many transfers are under way beyond the one that is waited for.
        stream: the index of the user's stream.
        ordered: the stream waits for the one of the call before.
        drops: places in `keys` whose transfers are dropped unread.
        late: places in `keys` of weights that are read once more at the end.
        ahead: keys that the next call is expected to begin with.
        captured: into a graph, which is then replayed; `written` gets a new value in between.
    """

    keys: tuple[str, ...]
    lookahead: int = 1
    stream: int = 0
    ordered: bool = True
    drops: frozenset[int] = frozenset()
    late: frozenset[int] = frozenset()
    ahead: tuple[str, ...] = ()
    captured: bool = False
    written: str | None = None


@dataclass(frozen=True)
class Write:
    """A weight gets a new value."""

    key: str


@dataclass(frozen=True)
class Program:
    shapes: tuple[tuple[str, Shape], ...]
    steps: tuple[Call | Write, ...]
    streams: int = 1


@dataclass(frozen=True)
class Outcome:
    """What was found: races, and how many tensors did not hold what they should."""

    races: tuple[Race, ...]
    wrong: int


def random_program(seed: int) -> Program:
    """A few units of few sizes, so that memory is reused, on up to three streams."""
    rng = random.Random(seed)
    sizes = [(8, 8), (8, 16), (16, 16), (3, 5)][: rng.randint(1, 4)]
    shapes = tuple((f"w{index}", rng.choice(sizes)) for index in range(rng.randint(2, 6)))
    keys = [key for key, _ in shapes]
    streams = rng.randint(1, 3)
    steps: list[Call | Write] = []
    for _ in range(rng.randint(2, 5)):
        if rng.random() < 0.3:
            steps.append(Write(rng.choice(keys)))
        length = rng.randint(1, 6)
        captured = rng.random() < 0.25
        steps.append(
            Call(
                tuple(rng.choice(keys) for _ in range(length)),
                lookahead=rng.randint(0, 3),
                stream=rng.randrange(streams),
                ordered=rng.random() < 0.5,
                drops=_some(rng, length, 0.15),
                late=_some(rng, length, 0.2),
                ahead=() if captured else tuple(rng.sample(keys, rng.randint(0, min(2, len(keys))))),
                captured=captured,
                written=rng.choice([None, *keys]) if captured else None,
            )
        )
    return Program(shapes, tuple(steps), streams)


def run_program(program: Program, device: ModelledDevice, make_engine: MakeEngine) -> Outcome:
    """Runs a program to its end and closes the engine."""
    return _Run(program, device, make_engine).outcome()


class _Run:
    def __init__(self, program: Program, device: ModelledDevice, make_engine: MakeEngine) -> None:
        self.program, self.device = program, device
        # What a kernel makes of a weight that has not arrived is NaN, never an expected value.
        self.values = {key: torch.full(shape, float(index)) for index, (key, shape) in enumerate(program.shapes)}
        self.streams: list[Stream] = [device.default_stream]
        self.streams += [device.user_stream() for _ in range(program.streams - 1)]
        self.engine = make_engine(device, self.values)
        self.wrong = self.writes = 0

    def outcome(self) -> Outcome:
        device, last = self.device, None
        with device.watching():
            for step in self.program.steps:
                if isinstance(step, Write):
                    self.write(step.key)
                    continue
                stream = self.streams[step.stream]
                if step.ordered and last is not None and last is not stream:
                    event = device.new_event()
                    ModelledDevice.record(device, event, last)
                    ModelledDevice.wait(device, stream, event)
                with device.stream(stream):
                    self.call(step)
                last = stream
            with self.phase("close"):
                self.engine.close()
        return Outcome(device.races, self.wrong)

    def call(self, call: Call) -> None:
        with self.device.capture() if call.captured else nullcontext() as graph:
            results = self.body(call)
        if graph is not None:
            if call.written is not None:
                self.write(call.written)
            graph.replay()
            self.check(results)

    def body(self, call: Call) -> list[tuple[str, int, torch.Tensor]]:
        """Returns (key, what was added to the weight, sum) of each kernel."""
        engine, started, held = self.engine, {}, {}
        results: list[tuple[str, int, torch.Tensor]] = []
        for place, key in enumerate(call.keys):
            for ahead in range(place, min(place + call.lookahead + 1, len(call.keys))):
                if ahead not in started:
                    with self.phase("start"):
                        started[ahead] = engine.start(call.keys[ahead])
            if place in call.drops:
                with self.phase("drop"):
                    started[place] = None
                continue
            with self.phase("finish"):
                weight = engine.finish(started[place])
            started[place] = None
            results.append((key, 1, weight + 1))
            if place in call.late:
                held[place] = key, weight
            del weight
        results += [(key, 2, weight + 2) for key, weight in held.values()]
        held.clear()
        self.check(results)
        with self.phase("ahead"):
            for key in call.ahead:
                engine.start_ahead(key)
        return results

    def write(self, key: str) -> None:
        self.writes += 1
        value = torch.full_like(self.values[key], 100.0 * self.writes)
        self.values[key] = value
        with self.phase("write"):
            self.engine.write(key, value)

    def check(self, results: list[tuple[str, int, torch.Tensor]]) -> None:
        with by_the_model():  # the comparison is no part of the program
            self.wrong += sum(not torch.equal(made, self.values[key] + added) for key, added, made in results)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before, self.device.phase = self.device.phase, name
        try:
            yield
        finally:
            self.device.phase = before


def _some(rng: random.Random, length: int, share: float) -> frozenset[int]:
    return frozenset(place for place in range(length) if rng.random() < share)
