"""What the tests of exported programs share: small models that export, in every form that matters, and their programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

import flextensor_fx
from flextensor_fx import Program


class Block(nn.Module):
    """Two layers with a residual, as in a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks, a head, and a buffer that counts calls."""

    def __init__(self, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 5)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Any]:
        self.calls.add_(1)
        for layer in self.layers:
            x = layer(x)
        return {"y": self.head(x) * scale, "more": [self.calls * 1, 7]}


class Tied(nn.Module):
    """An embedding whose table is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mid, self.head = nn.Embedding(40, 16), nn.Linear(16, 16), nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.mid(self.embed(ids)))


class Branches(nn.Module):
    """Weights inside the bodies of a cond."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cond(x.sum() > 0, self.one, lambda a: self.other(a) + 1, (x,)))


class Repeated(nn.Module):
    """One block three times, another in between."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.between = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.between(self.shared(self.between(self.shared(x)))))


class Constants(nn.Module):
    """A plain tensor attribute, a tensor made in forward, and outputs of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.shift = torch.arange(8.0)
        self.register_buffer("passing", torch.full((8,), 0.5), persistent=False)

    def forward(self, x: Tensor, flag: int, nothing: None = None) -> tuple[Any, ...]:
        y = self.layer(x) + self.shift * torch.tensor([2.0]) + self.passing
        return y, (flag, None), [y.t(), x]


class WritesInput(nn.Module):
    """Writes to the cache that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        y = self.layer(x)
        cache[:, 1:2].copy_(y[:, :1])
        return y + cache.sum()


class Changed(nn.Module):
    """A weight that the graph changes, which must stay."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.moving = nn.Linear(16, 16), nn.Parameter(torch.ones(16, 16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.moving.mul_(0.5)
        return self.layer(x) @ self.moving


class Sizes(nn.Module):
    """Sizes that must be even, which torch.export guards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).view(x.shape[0] // 2 * 2, -1).sum(1)


@dataclass(frozen=True)
class Form:
    """A model, a call of it, and what torch.export is told beside."""

    make: Callable[[], nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: dict[str, Any]

    def exported(self, strict: bool = False) -> tuple[nn.Module, ExportedProgram]:
        """The model and its program."""
        torch.manual_seed(0)
        model = self.make().eval()
        return model, torch.export.export(model, self.args, self.kwargs, strict=strict, **self.options)

    def call(self, program: Any) -> Any:
        """The result of a program for these arguments, of which it gets copies."""
        args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (self.args, self.kwargs))
        return program(*args, **kwargs)


def _x(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


_ROWS = {"dynamic_shapes": {"x": {0: Dim("rows", min=2, max=64)}, "scale": None}}
FORMS = {
    "stack": Form(Stack, (_x(3, 32),), {"scale": torch.full((1,), 2.0)}, {}),
    "dynamic": Form(Stack, (_x(3, 32),), {"scale": torch.full((1,), 2.0)}, _ROWS),
    "tied": Form(Tied, (torch.arange(6).view(2, 3),), {}, {}),
    "branches": Form(Branches, (_x(2, 16),), {}, {}),
    "repeated": Form(Repeated, (_x(2, 16),), {}, {}),
    "constants": Form(Constants, (_x(2, 8), 3), {}, {}),
    "writes-input": Form(WritesInput, (_x(2, 8), torch.zeros(2, 4)), {}, {}),
    "changed": Form(Changed, (_x(2, 16),), {}, {}),
    "sizes": Form(Sizes, (_x(4, 8),), {}, {"dynamic_shapes": ({0: Dim.DYNAMIC},)}),
}


def streaming(program: ExportedProgram, **options: Any) -> Program:
    """`program`, with every selected weight streamed that can be."""
    return flextensor_fx.rewrite(program, {"include_patterns": ["**"], "min_stream_bytes": 0, **options})


def assert_same(found: Any, expected: Any) -> None:
    """Equal bit for bit, in the same containers."""
    values, spec = pytree.tree_flatten(found)
    wanted, wanted_spec = pytree.tree_flatten(expected)
    assert spec == wanted_spec
    for value, want in zip(values, wanted, strict=True):
        assert torch.equal(value, want) if isinstance(want, Tensor) else value == want
