"""Models for the checks of CUDA code: whole transformer blocks, and configurations of real ones. Made on the meta device."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Inputs = tuple[Any, ...]

WIDTH, HEADS, TOKENS = 64, 4, 16


class RMSNorm(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


class Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (p(x).view(batch, tokens, HEADS, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal and mask is None)
        return self.o(mixed.transpose(1, 2).reshape(batch, tokens, WIDTH))


class LlamaLikeBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = RMSNorm(), RMSNorm()
        self.attention = Attention(causal=True)
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        h = self.between(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class DiTLikeBlock(nn.Module):
    """Six modulations from the condition: shift, scale and gate around attention and around the MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)
        self.attention = Attention(causal=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        parts = self.modulation(F.silu(condition)).unsqueeze(1).chunk(6, dim=-1)
        h = F.layer_norm(x, (WIDTH,)) * (1 + parts[1]) + parts[0]
        x = x + parts[2] * self.attention(h)
        h = F.layer_norm(x, (WIDTH,)) * (1 + parts[4]) + parts[3]
        return x + parts[5] * self.down(F.gelu(self.up(h), approximate="tanh"))


class MoELikeBlock(nn.Module):
    """Experts in two stacked tensors, every token through all of them and weighted by a router."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.norm, self.attention = RMSNorm(), Attention(causal=True)
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(torch.empty(experts, 2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        flat = x.reshape(-1, WIDTH)
        best, chosen = self.router(flat).float().softmax(-1).topk(2, dim=-1)
        weight = torch.zeros_like(best[:, :1].expand(-1, self.up.shape[0])).scatter(1, chosen, best)
        out = torch.bmm(F.silu(torch.bmm(flat.expand(self.up.shape[0], -1, -1), self.up)), self.down)
        mixed = (out * weight.t().unsqueeze(-1).to(out.dtype)).sum(0)
        return x + mixed.view_as(x)


class Stack(nn.Module):
    """Blocks one after another, each with the same further arguments."""

    def __init__(self, block: type[nn.Module], depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(depth))

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, *others)
        return x


class Tied(nn.Module):
    """One weight at both ends, so that it stays or is fetched twice; and one that only elementwise work reads."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth))
        self.layers[-1].weight = self.layers[0].weight
        self.scale = nn.Parameter(torch.ones(2 * TOKENS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) * self.scale
        return x


def llama_like() -> tuple[nn.Module, Inputs]:
    return Stack(LlamaLikeBlock, 3), (torch.empty(2, TOKENS, WIDTH),)


def dit_like() -> tuple[nn.Module, Inputs]:
    return Stack(DiTLikeBlock, 3), (torch.empty(2, TOKENS, WIDTH), torch.empty(2, WIDTH))


def moe_like() -> tuple[nn.Module, Inputs]:
    return Stack(MoELikeBlock, 3), (torch.empty(2, TOKENS, WIDTH),)


def tied() -> tuple[nn.Module, Inputs]:
    return Tied(), (torch.empty(2 * TOKENS, WIDTH),)


def square() -> tuple[nn.Module, Inputs]:
    """Activations as large as weights."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))), (torch.empty(WIDTH, WIDTH),)


_DECODER = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "use_cache": False,
}  # fmt: skip


def _ids(columns: int = TOKENS) -> Tensor:
    return torch.empty(2, columns, dtype=torch.int64)


def llama() -> tuple[nn.Module, Inputs]:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_DECODER)), (_ids(),)


def qwen3_moe() -> tuple[nn.Module, Inputs]:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(**_DECODER, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
    return Qwen3MoeForCausalLM(config), (_ids(),)


def whisper() -> tuple[nn.Module, Inputs]:
    from transformers import WhisperConfig, WhisperModel

    config = WhisperConfig(
        vocab_size=128, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, num_mel_bins=16, max_source_positions=16, max_target_positions=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, use_cache=False,
    )  # fmt: skip
    return WhisperModel(config), (torch.empty(2, 16, 32), None, _ids(8))
