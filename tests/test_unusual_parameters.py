"""Parameters that are small, sparse, empty, wrapped, parametrized or strided: streamed where they can be, else said to stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import flextensor_fx
from compiling import assert_equal, fresh_compiler, resident, session_of, stream, streamed_names, values

__all__ = ["fresh_compiler"]


class Scaled(Tensor):
    """A weight of two tensors: 8-bit integers and a scale per row."""

    @staticmethod
    def __new__(cls, integers: Tensor, scale: Tensor) -> Scaled:
        return Tensor._make_wrapper_subclass(cls, integers.shape, dtype=scale.dtype, device=integers.device)

    def __init__(self, integers: Tensor, scale: Tensor) -> None:
        self.integers, self.scale = integers, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["integers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: Any, size: Any, stride: Any) -> Scaled:
        return Scaled(inner["integers"], inner["scale"])

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Scaled({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].integers, args[0].scale)
        plain = pytree.tree_map_only(Scaled, lambda w: w.integers.to(w.scale.dtype) * w.scale, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def test_a_wrapper_subclass_stays_resident_with_a_message_and_is_not_unpacked() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).requires_grad_(False)
    packed = Scaled(torch.randint(-8, 8, (16, 16), dtype=torch.int8), torch.rand(16, 1))
    model[0].weight = nn.Parameter(packed, requires_grad=False)
    x = torch.randn(2, 16)
    expected = resident(model)(x)
    compiled = stream(model)
    assert_equal(compiled(x), expected)
    assert type(model[0].weight) is Scaled
    assert streamed_names(model) == {"0.bias", "2.weight", "2.bias"}
    (stays,) = flextensor_fx.report(model).stays
    assert stays[0] == "0.weight"
    assert "Scaled" in stays[1]


def test_a_weight_with_its_scale_as_parameters_of_their_own_is_streamed() -> None:
    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.randint(0, 16, (16, 16), dtype=torch.uint8), requires_grad=False)
            self.levels = nn.Parameter(torch.randn(16), requires_grad=False)
            self.scale = nn.Parameter(torch.rand(16, 1), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.levels[self.codes.long()] * self.scale).t()

    model, x = Quantized(), torch.randn(2, 16)
    expected = resident(model)(x)
    assert_equal(stream(model)(x), expected)
    assert streamed_names(model) == {"codes", "levels", "scale"}


class Scales(nn.Module):
    """A large weight beside one of no dimensions and a frozen base with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.down = nn.Linear(64, 2, bias=False)
        self.up = nn.Linear(2, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * self.up(self.down(x))


def test_scalars_and_adapters_beside_a_large_weight_stay_resident() -> None:
    model, x = Scales(), torch.randn(2, 64)
    expected = resident(model)(x)
    compiled = stream(model, min_stream_bytes=None)
    actual = compiled(x)
    assert_equal(actual, expected)
    assert "scale" not in streamed_names(model)
    assert "base.weight" in streamed_names(model)


def test_a_unit_of_scalars_alone() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.tensor(0.5), requires_grad=False)
            self.b = nn.Parameter(torch.tensor(1.5), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.a + self.b

    x = torch.randn(4)
    for least in (0, None):
        model = Two()
        expected = resident(model)(x)
        assert_equal(stream(model, min_stream_bytes=least)(x), expected)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_tensors_stay_resident_with_a_message(layout: str) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            dense = torch.eye(8)
            self.matrix = nn.Parameter(
                dense.to_sparse() if layout == "coo" else dense.to_sparse_csr(), requires_grad=False
            )
            self.register_buffer("mask", dense.to_sparse() if layout == "coo" else dense.to_sparse_csr())
            self.linear = nn.Linear(8, 8).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    model, x = Sparse(), torch.randn(2, 8)
    expected = model(x)
    assert_equal(stream(model, inner="eager")(x), expected)
    assert streamed_names(model) == {"linear.weight", "linear.bias"}
    (stays,) = flextensor_fx.report(model).stays
    assert stays[0] == "matrix"
    assert f"sparse_{layout}" in stays[1]


def test_empty_tensors_are_skipped_and_kept_as_they_are() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.none = nn.Linear(0, 4)
            self.also = nn.Parameter(torch.empty(0, 3))
            self.register_buffer("nothing", torch.empty(0))
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + self.none(x[:, :0]) + self.also.sum() + self.nothing.sum()

    model, x = Empty().requires_grad_(False), torch.randn(2, 4)
    expected, weight, also = resident(model)(x), model.none.weight, model.also
    assert_equal(stream(model)(x), expected)
    assert model.none.weight is weight
    assert model.also is also
    assert streamed_names(model) == {"none.bias", "linear.weight", "linear.bias"}
    assert dict(flextensor_fx.report(model).stays) == {"none.weight": "it is empty", "also": "it is empty"}


@pytest.mark.parametrize(
    ("kind", "streams"), [("transposed", True), ("channels_last", True), ("expanded", False), ("gaps", False)]
)
def test_strides_are_kept_or_the_weight_stays(kind: str, streams: bool) -> None:
    value = {
        "transposed": torch.randn(6, 4).t(),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.randn(1, 6).expand(4, 6),
        "gaps": torch.randn(8, 12)[:, ::2],
    }[kind]

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(value, requires_grad=False)
            self.bias = nn.Parameter(torch.randn(1), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight + self.bias

    model, x = One(), torch.randn(value.shape)
    expected, stride = resident(model)(x), model.weight.stride()
    assert_equal(stream(model)(x), expected)
    assert model.weight.stride() == stride
    assert ("weight" in streamed_names(model)) is streams


def test_meta_weights_stay_and_the_report_says_so() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)
    model[0].to_empty(device="cpu")
    flextensor_fx.offload(model, {"include_patterns": ["*"], "min_stream_bytes": 0})
    assert streamed_names(model) == {"0.weight", "0.bias"}
    assert all("meta" in why for why in session_of(model).stays.values())


@pytest.mark.parametrize("kind", ["weight_norm", "parametrize", "spectral"])
def test_parametrized_weights(kind: str) -> None:
    class Symmetric(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.triu() + weight.triu(1).mT

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).requires_grad_(False).eval()
    for layer in (model[0], model[2]):
        if kind == "weight_norm":
            nn.utils.parametrizations.weight_norm(layer)
        elif kind == "spectral":
            nn.utils.parametrizations.spectral_norm(layer)
        else:
            nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
    model.requires_grad_(False).eval()
    before, x = values(model), torch.randn(2, 8)
    expected = resident(model)(x)
    compiled = stream(model)
    assert_equal(compiled(x), expected)
    assert_equal(compiled(x), expected)
    assert streamed_names(model) == {name for name, _ in model.named_parameters()}
    assert_equal(values(model), before)


def test_old_style_weight_norm() -> None:
    model = nn.Sequential(nn.Linear(8, 8)).requires_grad_(False)
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(model[0])
    model.requires_grad_(False)
    x = torch.randn(2, 8)
    expected = resident(model, inner="eager", fullgraph=False)(x)
    assert_equal(stream(model, inner="eager", fullgraph=False)(x), expected)


@pytest.mark.parametrize("offload_first", [False, True])
def test_lazy_parameters_are_taken_up_once_they_have_a_shape(offload_first: bool) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(4)), torch.randn(2, 8)
    if offload_first:
        flextensor_fx.offload(model, {"include_patterns": ["**"], "min_stream_bytes": 0, "inner_backend": "aot_eager"})
        assert {name for name, _ in flextensor_fx.report(model).stays} == {"1.weight", "1.bias"}
        model(x)
    compiled = stream(model)
    with torch.no_grad():
        actual = compiled(x)
        assert_equal(compiled(x), actual)
        assert streamed_names(model) == {"0.weight", "0.bias", "1.weight", "1.bias"}
        flextensor_fx.release(model)
        assert_equal(resident(model)(x), actual)
