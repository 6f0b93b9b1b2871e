"""Weights that a model already maps from a safetensors file are served from that file, without a copy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import flextensor_fx
from flextensor_fx.offloading import find_sessions
from flextensor_fx.runtime.in_place import find_in_place

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/pagemap"), reason="needs /proc to see memory maps")


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(128, 128) for _ in range(4))).requires_grad_(False)


def _from_file(path: Path) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(128, 128, device="meta") for _ in range(4))).requires_grad_(False)
    model.load_state_dict(safetensors.torch.load_file(path), assign=True)
    return model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    safetensors.torch.save_file(_model().state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def _offload(model: nn.Module, tmp_path: Path) -> int:
    """Bytes in files of the store's own."""
    config = {"include_patterns": ["*"], "inner_backend": "eager", "store_dir": str(tmp_path / "store")}
    os.makedirs(tmp_path / "store", exist_ok=True)
    flextensor_fx.offload(model, config)
    (session,) = find_sessions(model)
    assert session.engine is not None
    return sum(file.stat().st_size for file in session.engine.store.files if "store" in file.path)


def test_a_mapped_model_is_streamed_from_its_own_file(checkpoint: Path, tmp_path: Path) -> None:
    before = checkpoint.read_bytes()
    model, x = _from_file(checkpoint), torch.randn(3, 128)
    expected = _model()(x)
    assert _offload(model, tmp_path) == 0
    compiled = torch.compile(
        model, backend=flextensor_fx.flextensor, options={"inner_backend": "eager", "include_patterns": ["*"]}
    )
    assert torch.equal(compiled(x), expected)
    assert torch.equal(model(x), expected)
    with torch.no_grad():
        model[1].weight.zero_()
    assert not torch.equal(compiled(x), expected)
    assert torch.equal(compiled(x), model(x))
    assert checkpoint.read_bytes() == before
    flextensor_fx.release(model)
    assert not model[1].weight.any()


def test_a_changed_map_is_copied(checkpoint: Path, tmp_path: Path) -> None:
    model, x = _from_file(checkpoint), torch.randn(3, 128)
    with torch.no_grad():
        model[2].weight[5, 5] = 7.0
    expected = model(x)
    assert 0 < _offload(model, tmp_path) < 2 * 128 * 128 * 4
    assert model[2].weight[5, 5] == 7.0
    assert torch.equal(model(x), expected)
    flextensor_fx.release(model)


def test_a_parameter_that_someone_else_holds_is_copied(checkpoint: Path, tmp_path: Path) -> None:
    model = _from_file(checkpoint)
    held = model[0].weight
    assert _offload(model, tmp_path) > 0
    held.fill_(3.0)
    assert torch.equal(model[0].weight, torch.full((128, 128), 3.0))
    flextensor_fx.release(model)


def test_memory_that_maps_no_file_is_not_found() -> None:
    assert find_in_place({"a": torch.ones(1000)}) == {}
