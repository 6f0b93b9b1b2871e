"""Refuses gradients that a streamed weight would have to receive: this version streams frozen weights only."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph

from .errors import GradientError


class GradientWarning(UserWarning):
    """A streamed weight has requires_grad set in a call that records gradients."""


def differentiable_outputs(graph: Graph) -> tuple[int, ...]:
    """Places of the outputs of a captured graph that require a gradient."""
    outputs = graph.output_node().args[0]
    assert isinstance(outputs, (tuple, list))
    values = (getattr(output, "meta", {}).get("example_value") for output in outputs)
    return tuple(place for place, value in enumerate(values) if isinstance(value, Tensor) and value.requires_grad)


def refuse_gradients(
    compiled: Callable[..., Any], weights: Sequence[str], places: Sequence[int], written: Sequence[int]
) -> Callable[..., Any]:
    """`compiled` with its outputs at `places`, and its arguments at `written`, made to raise a GradientError in backward.

    The forward is right. A backward would leave the streamed `weights` without a gradient, and training would go silently
    wrong: an output that looked like a constant, or one whose other gradients came through.
    """
    message = (
        f"backward: {len(weights)} streamed weights require a gradient and cannot receive one, the first is {weights[0]!r}. "
        "Freeze them (requires_grad_(False)), leave them out with exclude_patterns, or run under torch.no_grad()"
    )
    warnings.warn(
        message.replace("backward:", "flextensor: backward() will be refused:", 1), GradientWarning, stacklevel=2
    )

    def refuse(gradient: Tensor) -> None:
        raise GradientError(message)

    def run(*arguments: Any) -> Any:
        outputs = list(compiled(*arguments))
        if not torch.is_grad_enabled():
            return outputs
        anchor = torch.empty(0, requires_grad=True)
        for place in places:
            outputs[place] = _Refusal.apply(outputs[place], anchor, message)
        for argument in (arguments[place] for place in written):
            if isinstance(argument, Tensor) and argument.requires_grad:  # what the graph wrote there has a history now
                argument.register_hook(refuse)
        return outputs

    return run


class _Refusal(torch.autograd.Function):
    """The identity, whose backward raises. `anchor` makes the result require a gradient even where nothing else does."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, message: str) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.message = message
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise GradientError(ctx.message)
