"""Random graphs, lowered and run by the real engine on a modelled device: right numbers, no race, within the pool."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from flextensor_fx.passes.realized import all_realized
from flextensor_fx.runtime import op_implementations, registry
from flextensor_fx.runtime.host_engine import HostEngine
from graphs import lowered, trace, weight
from modelled_device import ModelledDevice
from modelled_session import host_engine

assert op_implementations  # importing it registers the ops

SIDE = 4
NBYTES = 4 * SIDE * SIDE


def random_function(seed: int) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
    """A function of one input that reads weights once or more often, some late, some together, and the weights."""
    chance = random.Random(seed)
    names = [f"w{n}" for n in range(chance.randint(1, 7))]
    steps = [
        (chance.choice(names), chance.choice(["mm", "add", "both", "keep", "recall"]))
        for _ in range(chance.randint(1, 12))
    ]
    generator = torch.Generator().manual_seed(seed)
    weights = {f"m:{name}": torch.randn(SIDE, SIDE, generator=generator) for name in names}

    def function(x: Tensor, value_of: Callable[[str], Tensor]) -> Tensor:
        kept: list[Tensor] = []
        values: dict[str, Tensor] = {}
        for name, kind in steps:
            w = values[name] if name in values else values.setdefault(name, value_of(name))
            if kind == "mm":
                x = torch.mm(x, w).tanh()
            elif kind == "add":
                x = x + w * 0.5
            elif kind == "both":
                x = torch.mm(x + w, w.t()).sigmoid()
            elif kind == "keep":
                kept.append(torch.mm(w, x))
            elif kept:
                x = x + kept.pop()
        return x

    return function, weights


@pytest.fixture(autouse=True)
def _unregistered() -> Iterator[None]:
    yield
    assert "m" not in registry._engines


@pytest.mark.parametrize("first", range(0, 240, 40))
def test_numbers_order_and_memory(first: int) -> None:
    for seed in range(first, first + 40):
        chance = random.Random(-seed)
        function, weights = random_function(seed)
        x = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(seed))
        steady, lookahead = chance.random() < 0.3, chance.choice([None, 0, 1, 2])
        module, schedules = lowered(
            trace(partial(function, value_of=weight)), 8 * NBYTES, lookahead, all_realized, steady=steady
        )
        pool = schedules["m"].peak_bytes if "m" in schedules else 0

        device = ModelledDevice()
        engine = host_engine(device, weights, max(pool, NBYTES))
        engine.uid = "m"
        registry.register(engine)
        try:
            found = _run(module, x, device, engine)
        finally:
            registry.unregister(engine)
        want = function(x, {name.removeprefix("m:"): value for name, value in weights.items()}.__getitem__)
        assert all(torch.equal(one, want) for one in found), f"seed {seed}: wrong numbers"
        assert not device.races, f"seed {seed}: {device.races[:3]}"
        assert engine.stats().peak_pool_bytes <= max(pool, NBYTES), f"seed {seed}"


def _run(module: torch.fx.GraphModule, x: Tensor, device: ModelledDevice, engine: HostEngine) -> list[Tensor]:
    found = []
    with torch.no_grad(), device.watching():
        given = device.adopt(x.clone())
        side = device.user_stream()
        for call in range(4):
            if call == 2:  # the user's part of going to another stream
                ready = device.new_event()
                device.record(ready, device.current_stream())
                device.wait(side, ready)
                with device.stream(side):
                    found.append(module(given))
                done = device.new_event()
                device.record(done, side)
                device.wait(device.current_stream(), done)
            else:
                found.append(module(given))
    device.synchronize()
    return found
