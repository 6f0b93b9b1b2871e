"""What the tests of compiled models share: compiling with streamed weights, counting graphs, and a clean start for each test."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import flextensor_fx
from flextensor_fx.runtime import registry

Inner = Literal["inductor", "aot_eager", "eager"]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Dynamo forgets what it compiled, and no model of an earlier test is offloaded any more."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
    gc.collect()


def stream(
    model: Any, *, inner: Inner = "aot_eager", include: Sequence[str] = ("**",), fullgraph: bool = True, **options: Any
) -> Any:
    """`model` compiled to stream every selected weight, however small, unless `options` say otherwise."""
    dynamic = options.pop("dynamic", None)
    chosen = {"include_patterns": list(include), "min_stream_bytes": 0, "inner_backend": inner, **options}
    return torch.compile(model, backend=flextensor_fx.flextensor, fullgraph=fullgraph, dynamic=dynamic, options=chosen)


def resident(model: Any, *, inner: Inner = "aot_eager", fullgraph: bool = True, dynamic: bool | None = None) -> Any:
    """`model` compiled by the inner backend alone."""
    return torch.compile(model, backend=inner, fullgraph=fullgraph, dynamic=dynamic)


@dataclass(frozen=True)
class Counts:
    """What Dynamo did: graphs compiled, those compiled again because guards failed included, and graph breaks."""

    graphs: int
    breaks: int


@contextlib.contextmanager
def counting() -> Iterator[Callable[[], Counts]]:
    """Counts from here on; Dynamo starts afresh."""
    torch._dynamo.reset()
    counters.clear()

    def read() -> Counts:
        return Counts(counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))

    yield read
    torch._dynamo.reset()


def counts_of(compile_model: Callable[[], Any], use: Callable[[Any], Any]) -> tuple[Counts, Any]:
    """What Dynamo did while `use` used a freshly compiled model, and what `use` returned."""
    with counting() as read:
        result = use(compile_model())
        return read(), result


def session_of(model: Any) -> Any:
    """The one session of an offloaded model."""
    (session,) = flextensor_fx.offloading.find_sessions(model)
    return session


def streamed_names(model: Any) -> set[str]:
    """Names of the weights of `model` that are in a store."""
    return set(session_of(model).moved)


def assert_equal(actual: Any, expected: Any) -> None:
    """Bit for bit, with dtype, shape and stride; tensors, and tuples, lists and dicts of them."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def reader_threads() -> list[str]:
    """Names of the reader threads that are alive."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("flextensor_fx")]


def mlp(depth: int = 4, width: int = 16, bias: bool = True) -> nn.Sequential:
    """`depth` linear layers with a ReLU after each."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers)


def values(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter and buffer."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


__all__ = [
    "Counts",
    "Inner",
    "assert_equal",
    "counting",
    "counts_of",
    "fresh_compiler",
    "mlp",
    "reader_threads",
    "registry",
    "resident",
    "session_of",
    "stream",
    "streamed_names",
    "values",
]
