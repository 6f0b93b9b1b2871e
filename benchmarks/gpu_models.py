"""Models for gpu_check.py, written out so that it needs torch alone: Llama-, DiT- and MoE-shaped, and adapters on a frozen base.

All have their blocks in `layers`, weights that depend on the sizes alone, and compile to one graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

KINDS = ("llama", "dit", "moe")
_TIMES = 64  # sizes of the table of frequencies, and of the DiT's patches
_PATCH = 16


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A model and its input.

    Fields:
        hidden, inner: widths of the stream and of the MLP (of one expert in "moe").
        heads, kv_heads: of attention; `hidden` divides by `heads`, and `heads` by `kv_heads`.
        batch, tokens: of the input.
    """

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    batch: int
    tokens: int
    vocabulary: int = 1024
    experts: int = 4


def build(kind: str, sizes: Sizes, device: torch.device, *, adapters: bool = False) -> nn.Module:
    """A model in bfloat16: in eval mode, or with trainable adapters on a frozen base. Equal arguments give equal weights."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = {"llama": Llama, "dit": DiT, "moe": MoE}[kind](sizes)
            if adapters:
                add_adapters(model, rank=8)
    finally:
        torch.set_default_dtype(before)
    return model if adapters else model.eval().requires_grad_(False)


def inputs(kind: str, sizes: Sizes, device: torch.device, count: int) -> list[tuple[Tensor, ...]]:
    """Arguments of `count` calls, all different."""
    made = torch.Generator().manual_seed(1)
    found: list[tuple[Tensor, ...]] = []
    for _ in range(count):
        if kind == "dit":
            patches = torch.randn(sizes.batch, sizes.tokens, _PATCH, generator=made).bfloat16()
            found.append((patches.to(device), torch.rand(sizes.batch, generator=made).to(device)))
        else:
            ids = torch.randint(sizes.vocabulary, (sizes.batch, sizes.tokens), generator=made)
            found.append((ids.to(device),))
    return found


# --- parts -------------------------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """Computed in float32, as Llama does."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size).uniform_(0.5, 1.5))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


class Attention(nn.Module):
    """Grouped-query attention; with `rotary`, causal."""

    def __init__(self, sizes: Sizes, rotary: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.rotary = sizes.heads, sizes.kv_heads, rotary
        self.size = sizes.hidden // sizes.heads
        self.q = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.k = nn.Linear(sizes.hidden, self.kv_heads * self.size, bias=False)
        self.v = nn.Linear(sizes.hidden, self.kv_heads * self.size, bias=False)
        self.o = nn.Linear(sizes.hidden, sizes.hidden, bias=False)

    def forward(self, x: Tensor, angles: Tensor | None) -> Tensor:
        batch, tokens, width = x.shape
        q = self.q(x).view(batch, tokens, self.heads, self.size).transpose(1, 2)
        k = self.k(x).view(batch, tokens, self.kv_heads, self.size).transpose(1, 2)
        v = self.v(x).view(batch, tokens, self.kv_heads, self.size).transpose(1, 2)
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.rotary, enable_gqa=self.heads != self.kv_heads)
        return self.o(y.transpose(1, 2).reshape(batch, tokens, width))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary position embedding of (batch, heads, tokens, size) by angles (tokens, size / 2)."""
    first, second = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class SwiGLU(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.hidden, sizes.inner, bias=False)
        self.up = nn.Linear(sizes.hidden, sizes.inner, bias=False)
        self.down = nn.Linear(sizes.inner, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Every expert computes every token, and a router's two greatest gates say what counts: one graph for all inputs."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        shape, scale = (sizes.experts, sizes.hidden, sizes.inner), sizes.hidden**-0.5
        self.router = nn.Linear(sizes.hidden, sizes.experts, bias=False)
        self.gate = nn.Parameter(torch.empty(shape).normal_(std=scale))
        self.up = nn.Parameter(torch.empty(shape).normal_(std=scale))
        self.down = nn.Parameter(torch.empty(shape).mT.contiguous().normal_(std=sizes.inner**-0.5))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        gates = self.router(flat).float().softmax(-1)
        kept = torch.where(gates >= gates.topk(2, -1).values[:, 1:], gates, 0).to(x.dtype)
        rows = flat.expand(len(self.gate), -1, -1)
        y = torch.bmm(F.silu(torch.bmm(rows, self.gate)) * torch.bmm(rows, self.up), self.down)
        return (y * kept.T.unsqueeze(-1)).sum(0).view_as(x)


# --- models ------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A block of a language model."""

    def __init__(self, sizes: Sizes, mlp: type[SwiGLU] | type[Experts]) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(sizes.hidden), RMSNorm(sizes.hidden)
        self.attention = Attention(sizes, rotary=True)
        self.mlp = mlp(sizes)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), angles)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """Ids (batch, tokens) to logits of the last token (batch, vocabulary)."""

    frequencies: Tensor

    def __init__(self, sizes: Sizes, mlp: type[SwiGLU] | type[Experts] = SwiGLU) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList(Block(sizes, mlp) for _ in range(sizes.layers))
        self.norm = RMSNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)
        half = sizes.hidden // sizes.heads // 2
        self.register_buffer("frequencies", 10000.0 ** -(torch.arange(half, dtype=torch.float32) / half))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        places = torch.arange(ids.shape[1], device=ids.device, dtype=torch.float32)
        angles = places[:, None] * self.frequencies
        for layer in self.layers:
            x = layer(x, angles)
        return self.head(self.norm(x[:, -1]))


class MoE(Llama):
    """The same with experts."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes, Experts)


class DiTBlock(nn.Module):
    """A diffusion transformer's block: scale, shift and gate of both halves come from the time."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention = Attention(sizes, rotary=False)
        self.modulation = nn.Linear(sizes.hidden, 6 * sizes.hidden)
        self.wide = nn.Linear(sizes.hidden, sizes.inner)
        self.narrow = nn.Linear(sizes.inner, sizes.hidden)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(condition)).unsqueeze(1).chunk(6, -1)
        x = x + gate1 * self.attention(modulated(x, shift1, scale1), None)
        return x + gate2 * self.narrow(F.gelu(self.wide(modulated(x, shift2, scale2)), approximate="tanh"))


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Layer norm without weights of its own, then `scale` and `shift`."""
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


class DiT(nn.Module):
    """Patches (batch, tokens, 16) and times (batch,) to patches."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Linear(_PATCH, sizes.hidden)
        self.time = nn.Linear(_TIMES, sizes.hidden)
        self.layers = nn.ModuleList(DiTBlock(sizes) for _ in range(sizes.layers))
        self.head = nn.Linear(sizes.hidden, _PATCH)

    def forward(self, patches: Tensor, times: Tensor) -> Tensor:
        angles = times[:, None] * torch.arange(_TIMES, device=times.device, dtype=torch.float32)
        condition = self.time(angles.cos().to(patches.dtype))
        x = self.embed(patches)
        for layer in self.layers:
            x = layer(x, condition)
        return self.head(F.layer_norm(x, x.shape[-1:]))


# --- adapters ----------------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen linear layer with a trainable low-rank one beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


def add_adapters(model: nn.Module, rank: int) -> None:
    """Freezes `model`, and puts trainable adapters beside the queries and values of every attention."""
    model.requires_grad_(False)
    for attention in [module for module in model.modules() if isinstance(module, Attention)]:
        attention.q, attention.v = Adapted(attention.q, rank), Adapted(attention.v, rank)  # pyright: ignore[reportAttributeAccessIssue]
