"""Tiny models of many architectures, random weights from a fixed seed: what the backend must leave unchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Inputs = Mapping[str, Any]

_TEXT = {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_DECODER = {**_TEXT, "intermediate_size": 80, "num_key_value_heads": 2, "head_dim": 12, "use_cache": False}


@dataclass(frozen=True, slots=True)
class Case:
    """A model to compile.

    Fields:
        name: of the test.
        build: makes the model and keyword arguments for one call.
        tables: patterns of tables of which every row is looked up, so that loops read them: they stay resident where kernels are
            counted.
        fused: patterns of weights that stay resident unless a budget or `min_stream_bytes` says otherwise: the loops that they
            are fused into would be others, and so would the last bit.
        more_loops: how many loops more than Inductor alone are made. It merges equal loops of several layers, also where each
            waits for a weight of its layer (dit); and it never writes out a table's rows at positions counted from 0 (gpt2).
        breaks: why torch itself cannot capture the model as one graph; "" where it can.
    """

    name: str
    build: Callable[[], tuple[nn.Module, Inputs]]
    tables: tuple[str, ...] = ()
    fused: tuple[str, ...] = ()
    more_loops: int = 0
    breaks: str = ""

    def make(self) -> tuple[nn.Module, Inputs]:
        """The model in eval mode and its inputs, the same at every call."""
        torch.manual_seed(0)
        model, inputs = self.build()
        return model.eval(), inputs


def _ids(rows: int = 2, columns: int = 9) -> torch.Tensor:
    return torch.randint(0, 96, (rows, columns))


def _causal(config: str, model: str, **changes: Any) -> Callable[[], tuple[nn.Module, Inputs]]:
    def build() -> tuple[nn.Module, Inputs]:
        import transformers

        made = getattr(transformers, model)(getattr(transformers, config)(**{**_DECODER, **changes}))
        return made, {"input_ids": _ids(), "use_cache": False}

    return build


def llama(**changes: Any) -> tuple[nn.Module, Inputs]:
    return _causal("LlamaConfig", "LlamaForCausalLM", **changes)()


def _llama_bf16() -> tuple[nn.Module, Inputs]:
    model, inputs = llama()
    return model.to(torch.bfloat16), inputs


def _gpt2() -> tuple[nn.Module, Inputs]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=96, n_embd=48, n_layer=2, n_head=4, n_positions=32, use_cache=False)
    return GPT2LMHeadModel(config), {"input_ids": _ids()}


def _bert() -> tuple[nn.Module, Inputs]:
    from transformers import BertConfig, BertModel

    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, 6:] = 0
    model = BertModel(BertConfig(**_TEXT, intermediate_size=80, max_position_embeddings=32))
    return model, {"input_ids": _ids(), "attention_mask": mask}


def _t5() -> tuple[nn.Module, Inputs]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=96, d_model=48, d_kv=12, d_ff=80, num_layers=2, num_heads=4, use_cache=False)
    return T5ForConditionalGeneration(config), {"input_ids": _ids(), "decoder_input_ids": _ids(2, 5)}


def _whisper() -> tuple[nn.Module, Inputs]:
    from transformers import WhisperConfig, WhisperModel

    config = WhisperConfig(
        vocab_size=96, d_model=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=80, decoder_ffn_dim=80, num_mel_bins=16, max_source_positions=16, max_target_positions=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, use_cache=False,
    )  # fmt: skip
    return WhisperModel(config), {"input_features": torch.randn(2, 16, 32), "decoder_input_ids": _ids(2, 5)}


def _vit() -> tuple[nn.Module, Inputs]:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=80, image_size=16, patch_size=4
    )
    return ViTModel(config), {"pixel_values": torch.randn(2, 3, 16, 16)}


def _clip() -> tuple[nn.Module, Inputs]:
    from transformers import CLIPConfig, CLIPModel

    part = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {
        **part,
        "vocab_size": 96,
        "max_position_embeddings": 16,
        "eos_token_id": 95,
        "bos_token_id": 94,
        "pad_token_id": 1,
    }
    config = CLIPConfig(text_config=text, vision_config={**part, "image_size": 16, "patch_size": 4}, projection_dim=32)
    return CLIPModel(config), {"input_ids": _ids(), "pixel_values": torch.randn(2, 3, 16, 16)}


def _convnext() -> tuple[nn.Module, Inputs]:
    from transformers import ConvNextConfig, ConvNextModel

    config = ConvNextConfig(hidden_sizes=[16, 32], depths=[2, 2], num_stages=2)
    return ConvNextModel(config), {"pixel_values": torch.randn(2, 3, 32, 32)}


def _mamba() -> tuple[nn.Module, Inputs]:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=8, use_cache=False)
    return MambaForCausalLM(config), {"input_ids": _ids(2, 5)}


def _rwkv() -> tuple[nn.Module, Inputs]:
    from transformers import RwkvConfig, RwkvForCausalLM

    config = RwkvConfig(
        vocab_size=96, context_length=16, hidden_size=32, num_hidden_layers=2, rescale_every=0, use_cache=False
    )
    model = RwkvForCausalLM(config)
    model.rwkv.layers_are_rescaled = True  # as its first call sets it, or the second call would be compiled anew
    return model, {"input_ids": _ids(2, 4), "use_cache": False}


def _recurrent_gemma() -> tuple[nn.Module, Inputs]:
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    config = RecurrentGemmaConfig(
        vocab_size=96, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, lru_width=48,
        num_key_value_heads=1, attention_window_size=16, use_cache=False,
    )  # fmt: skip
    return RecurrentGemmaForCausalLM(config), {"input_ids": _ids(2, 5), "use_cache": False}


def _dit() -> tuple[nn.Module, Inputs]:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=12, in_channels=4, out_channels=8, num_layers=2, sample_size=8,
        patch_size=2, num_embeds_ada_norm=10, norm_num_groups=4,
    )  # fmt: skip
    labels, steps = torch.tensor([1, 2]), torch.tensor([7, 9])
    return model, {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": steps, "class_labels": labels}


def _flux() -> tuple[nn.Module, Inputs]:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 6, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(6, 3),
    }


def unet() -> tuple[nn.Module, Inputs]:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8, block_out_channels=(16,), layers_per_block=1, norm_num_groups=4, cross_attention_dim=24,
        attention_head_dim=8, down_block_types=("CrossAttnDownBlock2D",), up_block_types=("CrossAttnUpBlock2D",),
        mid_block_type=None,
    )  # fmt: skip
    hidden = torch.randn(1, 5, 24)
    return model, {"sample": torch.randn(1, 4, 8, 8), "timestep": torch.tensor(3), "encoder_hidden_states": hidden}


CASES = (
    Case("llama", llama),
    Case(
        "llama_bf16", _llama_bf16
    ),  # values of 16 bits are rounded where the compiler writes them out, and nowhere else
    Case("qwen2", _causal("Qwen2Config", "Qwen2ForCausalLM")),
    Case("qwen3", _causal("Qwen3Config", "Qwen3ForCausalLM")),
    Case("mistral", _causal("MistralConfig", "MistralForCausalLM", sliding_window=4)),
    Case("mixtral", _causal("MixtralConfig", "MixtralForCausalLM", num_local_experts=3, num_experts_per_tok=2)),
    Case("gpt2", _gpt2, more_loops=1),
    Case("bert", _bert),
    Case("t5", _t5),
    Case("whisper", _whisper, tables=("**.embed_positions",)),
    Case("vit", _vit, fused=("**.position_embeddings",)),
    Case("clip", _clip),
    Case("convnext", _convnext),
    Case("mamba", _mamba, fused=("**.A_log", "**.D", "**.dt_proj.bias")),
    Case("rwkv", _rwkv),
    Case("recurrent_gemma", _recurrent_gemma),
    Case("dit", _dit, more_loops=2),
    Case("flux", _flux),
    Case("unet", unet),
)
