"""Models made without memory for parameters, and buffers that no checkpoint has."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flextensor_fx
from compiling import assert_equal, fresh_compiler, streamed_names
from flextensor_fx.construction import construct, parameters_on_meta
from flextensor_fx.errors import LoadError

__all__ = ["fresh_compiler"]

CONFIG: dict[str, Any] = {"include_patterns": ["layer", "**.layer"], "min_stream_bytes": 0}


class Rotary(nn.Module):
    """A buffer that its constructor computes from arguments that it keeps."""

    def __init__(self, dim: int, base: float = 10000.0, *, device: Any = None) -> None:
        super().__init__()
        self.dim, self.base = dim, base
        value = 1.0 / base ** (torch.arange(0, dim, 2, device=device).float() / dim)
        self.register_buffer("inv_freq", value, persistent=False)


class Forgetful(Rotary):
    """Does not keep its argument."""

    def __init__(self, scale: float) -> None:
        super().__init__(8)
        self.inv_freq.mul_(scale)


class Defaulted(Rotary):
    """Has a default that it does not keep; the buffer looks the same for any."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(8)
        self.inv_freq.mul_(scale)


class Flagged(Rotary):
    """Has a flag that it does not keep."""

    def __init__(self, dim: int, doubled: bool = False) -> None:
        super().__init__(dim)
        if doubled:
            self.inv_freq.mul_(2)


class Shaped(Rotary):
    """Has a flag that shows in its modules, and does not matter to the buffer."""

    def __init__(self, dim: int, projected: bool = True) -> None:
        super().__init__(dim)
        self.projection = nn.Linear(4, 4) if projected else None


class Random(nn.Module):
    """Its buffer is another one at each making."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.randn(4), persistent=False)


class Changed(Rotary):
    """An attribute that was changed after it was made."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.factor = 1.0


class Typed(nn.Module):
    """Computes in the default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", (torch.arange(40) / 7.0).exp(), persistent=False)


class Outer(nn.Module):
    """Keeps what a module in it does not."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.inner = nn.Sequential(nn.ReLU(), Forgetful(scale))


class Model(nn.Module):
    """A layer to load, and a module with a buffer."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.rotary = module

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def weights() -> dict[str, Tensor]:
    return {f"layer.{name}": value for name, value in nn.Linear(4, 4).state_dict().items()}


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_buffers())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Rotary(8),
        lambda: Rotary(16, base=500.0),
        lambda: Outer(3.0),
        lambda: nn.Sequential(Rotary(8, 7.0), Outer(2.0), Rotary(4)),
    ],
)
def test_a_buffer_is_what_its_constructor_makes_it(make: Any) -> None:
    with torch.device("meta"):
        model = Model(make())
    values, state = weights(), torch.random.get_rng_state()
    flextensor_fx.load(model, values, CONFIG)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert_equal(buffers(model), buffers(Model(make())))
    assert streamed_names(model)


@pytest.mark.parametrize("projected", [True, False])
def test_a_flag_that_shows_is_found_out(projected: bool) -> None:
    with torch.device("meta"):
        model = Model(Shaped(8, projected))
    values = weights() | {f"rotary.{name}": value for name, value in Shaped(8, projected).state_dict().items()}
    flextensor_fx.load(model, values, CONFIG)
    assert_equal(buffers(model), buffers(Model(Shaped(8))))


def changed() -> nn.Module:
    module = Changed(8)
    module.factor = 2.0
    return module


@pytest.mark.parametrize(
    "make",
    [lambda: Forgetful(2.0), lambda: Defaulted(2.0), lambda: Flagged(8, True), Random, changed],
    ids=lambda make: "",
)
def test_what_is_not_known_for_sure_is_an_error_that_names_the_way_out(make: Any) -> None:
    with torch.device("meta"):
        model = Model(make())
    with pytest.raises(
        LoadError, match=r"rotary\.inv_freq.* flextensor_fx\.load\(lambda: Model\(config\), weights, config\)"
    ):
        flextensor_fx.load(model, weights(), CONFIG)
    assert all(parameter.is_meta for parameter in model.parameters())
    values = weights()
    given = {name: value for name, value in Model(make()).named_buffers() if name not in values}
    with torch.device("meta"):
        other = Model(make())
    flextensor_fx.load(other, values, CONFIG, buffers=given)
    assert all(torch.equal(value, given[name]) for name, value in other.named_buffers() if name in given)
    torch.manual_seed(3)
    loaded = flextensor_fx.load(lambda: Model(make()), values, CONFIG)
    torch.manual_seed(3)
    with parameters_on_meta():  # parameters take no random numbers there
        assert_equal(buffers(loaded), buffers(Model(make())))


def test_a_buffer_that_hangs_on_the_default_dtype() -> None:
    with torch.device("meta"):
        model = Model(Typed())
    flextensor_fx.load(model, weights(), CONFIG)
    assert_equal(buffers(model), buffers(Model(Typed())))
    with torch.device("meta"):
        model = Model(Typed()).to(torch.bfloat16)  # cast, or made so: two values
    assert not torch.equal(Typed().to(torch.bfloat16).inv_freq, (torch.arange(40) / 7.0).bfloat16().exp())
    with pytest.raises(LoadError, match=r"rotary\.inv_freq"):
        flextensor_fx.load(model, weights(), CONFIG)
    with torch.device("meta"):
        model = Model(Rotary(8)).to(torch.bfloat16)  # one value, whichever way
    flextensor_fx.load(model, weights(), CONFIG)
    assert_equal(buffers(model), buffers(Model(Rotary(8)).to(torch.bfloat16)))


def test_a_value_in_the_checkpoint_or_in_the_model_counts_more() -> None:
    for make, value in ((lambda: Forgetful(2.0), torch.rand(4)), (lambda: Rotary(8), torch.rand(4))):
        with torch.device("meta"):
            model = Model(make())
        flextensor_fx.load(model, {**weights(), "rotary.inv_freq": value}, CONFIG)
        assert_equal(model.rotary.inv_freq, value)
    model = Model(Rotary(8))
    model.rotary.inv_freq.fill_(5.0)
    flextensor_fx.load(model, weights(), CONFIG)
    assert_equal(model.rotary.inv_freq, torch.full((4,), 5.0))
    with torch.device("meta"):
        model = Model(Rotary(8))
    with pytest.raises(
        LoadError, match=r'Unexpected key\(s\) in state_dict: "rotary\.inv_freq"'
    ):  # rounded: not the value
        flextensor_fx.load(model, {**weights(), "rotary.inv_freq": torch.rand(4).half()}, CONFIG)


def test_a_function_is_called_with_parameters_on_meta_and_real_buffers() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rotary = Rotary(8)
            own = nn.Parameter(torch.zeros(3, 3))
            own.mark = 7
            self.a, self.b = own, own
            self.first = nn.Linear(3, 3)
            self.second = nn.Linear(3, 3)
            self.second.weight = self.first.weight

    with torch.device("meta"):
        model = construct(Tied)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.a is model.b
    assert model.a.mark == 7
    assert model.second.weight is model.first.weight
    assert_equal(buffers(model), buffers(Tied()))
    assert not Tied().a.is_meta
    with pytest.raises(ZeroDivisionError):
        construct(lambda: 1 / 0)  # pyright: ignore[reportArgumentType]
    assert not nn.Linear(2, 2).weight.is_meta


def test_other_threads_go_on_making_real_parameters() -> None:
    found: list[Any] = []
    with parameters_on_meta():
        thread = threading.Thread(target=lambda: found.append(nn.Linear(2, 2).weight.is_meta))
        thread.start()
        thread.join()
        assert nn.Linear(2, 2).weight.is_meta
    assert found == [False]
