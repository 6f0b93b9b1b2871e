"""Models that are functions of a mapping of names to tensors: selected, stored, streamed and fetched by name."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional

import flextensor_fx
from compiling import Inner, assert_equal, counts_of, fresh_compiler, resident, session_of, stream
from flextensor_fx.errors import OffloadError, SelectionError
from flextensor_fx.runtime import registry
from flextensor_fx.runtime.parameter import OffloadedParameter
from flextensor_fx.selection import PatternWarning

__all__ = ["fresh_compiler"]

CONFIG: dict[str, Any] = {"include_patterns": ["layers.*"], "min_stream_bytes": 0}


def mapping(depth: int = 3, width: int = 160) -> dict[str, Tensor]:
    torch.manual_seed(0)
    weights = {f"layers.{n}.weight": torch.randn(width, width) / width**0.5 for n in range(depth)}
    return weights | {f"layers.{n}.bias": torch.randn(width) for n in range(depth)} | {"scale": torch.rand(width)}


def forward(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    for n in range(3):
        x = functional.linear(x, weights[f"layers.{n}.weight"], weights[f"layers.{n}.bias"]).relu()
    return x * weights["scale"]


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("store", ["disk", "host"])
def test_a_compiled_function_streams_them(inner: Inner, store: str) -> None:
    plain, x = mapping(), torch.randn(4, 160)
    first, expected = counts_of(lambda: resident(forward, inner=inner), lambda f: [f(x, plain), f(x, plain)])
    weights = flextensor_fx.offload(plain, {**CONFIG, "budget": "60%", "store": store})
    streamed = [name for name, value in weights.items() if isinstance(value, OffloadedParameter)]
    assert streamed
    assert "scale" not in streamed
    second, actual = counts_of(
        lambda: stream(forward, inner=inner, include=["layers.*"], budget="60%", store=store),
        lambda f: [f(x, weights), f(x, weights)],
    )
    assert first == second
    assert_equal(actual, expected)
    report = flextensor_fx.report(weights)
    assert report.stats is not None
    assert report.stats.transfers >= len(streamed)
    assert report.peak_bytes <= (report.budget or 0)


def test_the_mapping_that_was_given_stays_as_it_is() -> None:
    plain = mapping()
    before, pointers = {n: v.clone() for n, v in plain.items()}, {n: v.data_ptr() for n, v in plain.items()}
    weights = flextensor_fx.offload(plain, CONFIG)
    assert {name: value.data_ptr() for name, value in plain.items()} == pointers
    with torch.no_grad():
        weights["layers.0.weight"].zero_()
    assert_equal(plain, before)
    assert not weights["layers.0.weight"].any()
    assert list(weights) == list(plain)
    assert weights["scale"] is plain["scale"]
    plain["layers.1.weight"].zero_()
    assert weights["layers.1.weight"].any()


def test_values_by_name_and_eager_use() -> None:
    plain, x = mapping(), torch.randn(4, 160)
    weights = flextensor_fx.offload(plain, CONFIG)
    for name, value in plain.items():
        fetched = weights.fetch(name)
        assert type(fetched) is Tensor
        assert_equal(fetched, value)
        fetched.zero_()
        assert_equal(weights.fetch(name), value)
    assert_equal(forward(x, weights), forward(x, plain))
    assert_equal(forward(x, dict(weights)), forward(x, plain))
    with pytest.raises(KeyError):
        weights.fetch("none")
    for copied in (copy.deepcopy(weights), pickle.loads(pickle.dumps(weights))):
        assert type(copied) is dict
        assert_equal({name: value.detach() for name, value in copied.items()}, plain)
    buffer = io.BytesIO()
    torch.save(dict(weights), buffer)
    buffer.seek(0)
    assert_equal({n: v.detach() for n, v in torch.load(buffer).items()}, plain)


def test_release_gives_plain_tensors_back() -> None:
    plain, x = mapping(), torch.randn(4, 160)
    for by_function in (False, True):
        weights = flextensor_fx.offload(plain, CONFIG)
        compiled = stream(forward, include=["layers.*"])
        assert_equal(compiled(x, weights), resident(forward)(x, plain))
        directory = Path(session_of(weights).engine.store.path)
        kept, weights["layers.2.bias"] = weights["layers.0.weight"], torch.zeros(160)
        flextensor_fx.release(compiled if by_function else weights)
        flextensor_fx.release(weights)
        assert not directory.exists()
        assert all(type(value) is Tensor for value in weights.values())
        assert_equal({**weights, "layers.2.bias": plain["layers.2.bias"]}, plain)
        assert not weights["layers.2.bias"].any()  # the user's own
        assert_equal(kept + 0, plain["layers.0.weight"])
        assert_equal(weights.fetch("layers.0.weight"), plain["layers.0.weight"])
        torch._dynamo.reset()


def test_the_store_goes_with_the_dict() -> None:
    weights = flextensor_fx.offload(mapping(), CONFIG)
    directory, gone = Path(session_of(weights).engine.store.path), weakref.ref(weights)
    del weights
    gc.collect()
    assert gone() is None
    assert not registry.living_sessions()
    assert not directory.exists()


def test_ties_are_one_weight_and_overlaps_stay() -> None:
    base = torch.randn(64, 64)
    both = {
        "a.weight": base,
        "b.weight": base.detach(),
        "c.weight": torch.randn(64, 64),
        "d": base[:8],
        "e": torch.randn(8),
    }
    weights = flextensor_fx.offload(both, {"include_patterns": ["*.weight", "e"], "min_stream_bytes": 0})
    assert flextensor_fx.report(weights).selection.nbytes == 2 * base.nbytes + 32
    assert dict(flextensor_fx.report(weights).stays) == {
        "a.weight": "its memory overlaps another parameter's or a buffer's"
    }
    del both["d"]
    weights = flextensor_fx.offload(both, {"include_patterns": ["*.weight"], "min_stream_bytes": 0})
    assert weights["a.weight"] is weights["b.weight"]
    assert isinstance(weights["a.weight"], OffloadedParameter)
    flextensor_fx.release(weights)
    assert_equal(dict(weights), both)


def test_gradients_are_for_what_stays() -> None:
    plain, x = mapping(), torch.randn(4, 160)
    plain["scale"].requires_grad_()
    weights = flextensor_fx.offload(plain, CONFIG)
    stream(forward, include=["layers.*"])(x, weights).sum().backward()
    actual, plain["scale"].grad = plain["scale"].grad, None
    resident(forward)(x, plain).sum().backward()
    assert actual is not None
    assert_equal(actual, plain["scale"].grad)


# --- patterns ----------------------------------------------------------------------------------------------------------


def test_class_patterns_find_nothing_in_a_mapping() -> None:
    with pytest.raises(ValueError, match="class:Linear"):
        flextensor_fx.offload(mapping(), {"include_patterns": ["class:Linear"]})
    with pytest.warns(PatternWarning, match="class:Linear"):
        weights = flextensor_fx.offload(mapping(), {**CONFIG, "include_patterns": ["layers.*", "class:Linear"]})
    assert isinstance(weights["layers.0.weight"], OffloadedParameter)
    with pytest.warns(PatternWarning, match="class:Linear"):
        flextensor_fx.load(mapping(), mapping(), {**CONFIG, "exclude_patterns": ["class:Linear"]})


def test_names_and_values_that_cannot_be_used() -> None:
    for wrong in ({"a": 3}, {1: torch.ones(2)}, {"a..b": torch.ones(2)}, {"": torch.ones(2)}):
        with pytest.raises(SelectionError):
            flextensor_fx.offload(wrong, {"include_patterns": ["**"]})
    odd = {"a": torch.ones(2), "a.b": torch.ones(3), "c._extra_state": 5}
    weights = flextensor_fx.offload(odd, {"include_patterns": ["**"], "min_stream_bytes": 0})
    assert_equal(weights.fetch("a.b"), torch.ones(3))
    assert weights["c._extra_state"] == 5
    with pytest.raises(OffloadError, match="offloaded already"):
        flextensor_fx.offload(weights, {"include_patterns": ["**"]})
    with pytest.raises(OffloadError, match="offloaded already"):
        flextensor_fx.load(weights, {}, {"include_patterns": ["**"]})
    plain = flextensor_fx.offload(mapping(), {"enabled": False})
    assert not any(isinstance(value, OffloadedParameter) for value in plain.values())


# --- loading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mapping_is_loaded(meta: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    values, x = mapping(), torch.randn(4, 160)
    safetensors.torch.save_file(values, tmp_path / "a.safetensors")
    empty = {
        name: torch.zeros_like(value, device="meta" if meta else "cpu", dtype=dtype) for name, value in values.items()
    }
    before = dict(empty)
    weights = flextensor_fx.load(empty, tmp_path, {**CONFIG, "budget": "60%"})
    assert isinstance(weights, flextensor_fx.OffloadedDict)
    expected = {name: value.to(dtype) for name, value in values.items()}
    assert_equal({name: weights.fetch(name) for name in weights}, expected)
    assert all(empty[name] is value for name, value in before.items())
    assert meta or not any(value.any() for value in empty.values())
    x = x.to(dtype)
    assert_equal(stream(forward, include=["layers.*"], budget="60%")(x, weights), resident(forward)(x, expected))
    if dtype == torch.float32:
        store = session_of(weights).engine.store
        assert [file.path for file in store.files] == [str(tmp_path / "a.safetensors")]
    flextensor_fx.release(weights)
    assert_equal(dict(weights), expected)


def test_a_mapping_that_was_mapped_from_a_file_is_served_from_it(tmp_path: Path) -> None:
    values = mapping()
    safetensors.torch.save_file(values, tmp_path / "a.safetensors")
    mapped = safetensors.torch.load_file(tmp_path / "a.safetensors")
    by_offload = flextensor_fx.offload(mapped, CONFIG)
    by_load = flextensor_fx.load({n: torch.empty_like(v, device="meta") for n, v in values.items()}, mapped, CONFIG)
    for weights in (by_offload, by_load):
        assert [file.path for file in session_of(weights).engine.store.files] == [str(tmp_path / "a.safetensors")]
    with torch.no_grad():
        mapped["layers.0.weight"].zero_()
    for weights in (by_offload, by_load):
        assert_equal(weights.fetch("layers.0.weight"), values["layers.0.weight"])


def test_a_model_and_its_state_dict_are_apart() -> None:
    model = nn.Linear(8, 8)
    weights = flextensor_fx.offload(model.state_dict(), {"include_patterns": ["**"], "min_stream_bytes": 0})
    with torch.no_grad():
        weights["weight"].zero_()
    assert model.weight.any()
