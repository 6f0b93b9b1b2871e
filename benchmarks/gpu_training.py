"""Training in gpu_check.py: adapters learn, and the frozen base under them is streamed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from gpu_setting import GRAPHS, NO_ADAPTERS, Call, Setting, judge_report, require_equal, require_telling
from torch import Tensor, nn

import flextensor_fx

STEPS = 4  # under CUDA graphs the first warms up, the second is captured, and the others are replayed


def training(mode: str | None, setting: Setting) -> str:
    """Steps of a model with trainable adapters whose base is streamed: losses, gradients and adapters as resident."""
    sizes, where = setting.sizes("llama"), f"llama, training{', CUDA graphs' if mode == GRAPHS else ''}, 25%"
    batches = setting.inputs("llama", sizes, STEPS)
    with deterministic(setting.on_gpu):
        model, streamed = (setting.build("llama", sizes, adapters=True).train() for _ in range(2))
        wanted = steps(setting.resident(model, mode), model, batches)
        ours = setting.ours(streamed, mode, budget="25%", exclude_patterns=NO_ADAPTERS)
        found = steps(ours, streamed, batches)

        def resident_again(name: str) -> Tensor:
            """From a second resident run, which tells whether these numbers can be had twice at all."""
            other = setting.build("llama", sizes, adapters=True).train()
            return steps(setting.resident(other, mode), other, batches)[name]

        require_telling(where, next(value for name, value in wanted.items() if "gradient" in name))
        for name, value in wanted.items():
            require_equal(
                f"{name} (again: of another resident run)", where, found[name], value, partial(resident_again, name)
            )
    judge_report(where, streamed)
    flextensor_fx.release(streamed)
    return f"25%, {STEPS} steps, {len(wanted)} losses, gradients and adapters"


def steps(call: Call, model: nn.Module, batches: Sequence[tuple[Tensor, ...]]) -> dict[str, Tensor]:
    """Steps of plain gradient descent; by name, every loss and gradient, and the adapters in the end."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found: dict[str, Tensor] = {}
    for number, arguments in enumerate(batches):
        loss = call(*arguments).float().square().mean()
        loss.backward()
        found[f"loss of step {number + 1}"] = loss.detach().clone()
        for name, p in trained.items():
            assert p.grad is not None
            found[f"gradient of {name} in step {number + 1}"] = p.grad.clone()
        with torch.no_grad():
            for p in trained.values():
                p.sub_(p.grad, alpha=0.1)  # pyright: ignore[reportArgumentType]
                p.grad = None
    return found | {f"{name} in the end": p.detach().clone() for name, p in trained.items()}


@contextmanager
def deterministic(on_gpu: bool) -> Iterator[None]:
    """Attention's backward adds in any order otherwise, and not even two resident runs agree."""
    settings: Any = torch.utils.deterministic  # a module whose attribute is a property
    fill = settings.fill_uninitialized_memory
    if on_gpu:
        torch.use_deterministic_algorithms(True)
        settings.fill_uninitialized_memory = False  # it would write memory that copies are meant for
    try:
        yield
    finally:
        if on_gpu:
            torch.use_deterministic_algorithms(False)
            settings.fill_uninitialized_memory = fill
