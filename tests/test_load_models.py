"""Models of transformers, loaded from what `save_pretrained` wrote: the same numbers as the model that was saved."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flextensor_fx
from compiling import assert_equal, fresh_compiler, resident, session_of, streamed_names
from model_zoo import CASES

pytestmark = pytest.mark.models

__all__ = ["fresh_compiler"]

CONFIG: dict[str, Any] = {"include_patterns": ["**"], "min_stream_bytes": 0, "budget": "70%"}
NAMES = ("llama", "llama_bf16", "bert", "qwen3", "gpt2", "t5", "clip", "whisper", "mamba")


def built(name: str) -> tuple[Any, dict[str, Any]]:
    return next(case for case in CASES if case.name == name).make()  # pyright: ignore[reportReturnType]


def empty(model: nn.Module) -> Any:
    with torch.device("meta"):
        made = type(model)(model.config)
    return made.to(next(model.parameters()).dtype).eval()


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_buffers())


def output_of(model: Any, inputs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        out = model(**inputs)
    return next(value for value in out.values() if isinstance(value, Tensor))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("by_function", [False, True], ids=["meta", "function"])
def test_loaded_shards_compute_as_the_model_that_was_saved(name: str, by_function: bool, tmp_path: Path) -> None:
    model, inputs = built(name)
    expected = output_of(resident(model, inner="aot_eager"), inputs)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    dtype = next(model.parameters()).dtype
    target = (lambda: type(model)(model.config).to(dtype).eval()) if by_function else empty(model)
    loaded = flextensor_fx.load(target, tmp_path, {**CONFIG, "inner_backend": "aot_eager"})
    assert not any(tensor.is_meta for tensor in [*loaded.parameters(), *loaded.buffers()])
    assert_equal(buffers(loaded), buffers(model))
    assert streamed_names(loaded)
    compiled = torch.compile(loaded, backend=flextensor_fx.flextensor, fullgraph=True)
    assert_equal(output_of(compiled, inputs), expected)
    assert {name for name, _ in loaded.named_parameters()} == {name for name, _ in model.named_parameters()}
    assert_equal(dict(loaded.state_dict()), dict(model.state_dict()))
    flextensor_fx.release(loaded)
    assert_equal(output_of(loaded, inputs), output_of(model, inputs))


@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.parametrize("store", ["disk", "host"])
def test_through_inductor(name: str, store: str, tmp_path: Path) -> None:
    model, inputs = built(name)
    expected = output_of(resident(model, inner="inductor"), inputs)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    loaded = flextensor_fx.load(empty(model), tmp_path, {**CONFIG, "budget": "90%", "store": store})
    paths = {Path(file.path).parent for file in session_of(loaded).engine.store.files} if store == "disk" else set()
    compiled = torch.compile(loaded, backend=flextensor_fx.flextensor, fullgraph=True)
    assert_equal([output_of(compiled, inputs), output_of(compiled, inputs)], [expected, expected])
    if store == "disk":
        assert paths == {tmp_path} == {Path(file.path).parent for file in session_of(loaded).engine.store.files}


_ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 32},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 10000.0,
        "original_max_position_embeddings": 32,
    },
}  # fmt: skip


@pytest.mark.parametrize("rope", _ROPES)
@pytest.mark.parametrize("bfloat16", [False, True])
def test_rotary_frequencies(rope: str, bfloat16: bool, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, rope_parameters=_ROPES[rope], use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(copy.deepcopy(config)).eval()
    if bfloat16:
        model.to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = flextensor_fx.load(empty(model), tmp_path, CONFIG)
    assert_equal(buffers(loaded), buffers(model))
    assert loaded.model.rotary_emb.attention_scaling == model.model.rotary_emb.attention_scaling
    ids = torch.randint(0, 64, (1, 40))
    assert_equal(output_of(loaded, {"input_ids": ids}), output_of(model, {"input_ids": ids}))


def test_a_profile_decides_before_anything_is_read(tmp_path: Path) -> None:
    model, inputs = built("llama")
    model.save_pretrained(tmp_path / "weights")
    config = {"include_patterns": ["model.layers.*"], "min_stream_bytes": 0}
    with torch.no_grad():
        flextensor_fx.profile(model, (inputs["input_ids"],), config).save(tmp_path / "profile.json")
    loaded = flextensor_fx.load(
        empty(model), tmp_path / "weights", {"profile": tmp_path / "profile.json", "min_stream_bytes": 0}
    )
    assert streamed_names(loaded)
    assert all(name.startswith("model.layers.") for name in streamed_names(loaded))
    assert flextensor_fx.report(loaded).timelines[0].provenance == "predicted"
    assert_equal(output_of(loaded, inputs), output_of(model, inputs))
