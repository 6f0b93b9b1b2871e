"""Models and orders of calls that were found to go wrong, each mended as a kind."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flextensor_fx
from flextensor_fx.runtime.parameter import OffloadedParameter

OPTIONS: dict[str, Any] = {"include_patterns": ["**"], "min_stream_bytes": 0, "inner_backend": "aot_eager"}
X = torch.ones(2, 16)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def chain(count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(count)]).requires_grad_(False)


def stream(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend=flextensor_fx.flextensor, options=OPTIONS | options)


class Writes(nn.Module):
    def __init__(self, write: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((4, 4), -1.0), requires_grad=False)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.w)
        return x @ self.w


def _by_operator(w: Tensor) -> None:
    w **= 2


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "write",
    [
        lambda w: torch._foreach_add_([w], 1.0),
        lambda w: F.relu(w, inplace=True),
        lambda w: F.dropout(w, 1.0, True, True),
        lambda w: torch.add(w, 1.0, out=w),
        lambda w: torch.einsum("ij->ji", w).mul_(2.0),
        lambda w: w.data.mul_(2.0),
        lambda w: torch.ops.aten.mul_(w, 2.0),
        lambda w: torch.view_as_real(torch.view_as_complex(w.view(4, 2, 2))).mul_(2.0),
        lambda w: F.batch_norm(
            torch.randn(3, 4, generator=torch.Generator().manual_seed(1)), w[0], w[1], training=True
        ),
        _by_operator,
    ],
    ids=[
        "foreach",
        "inplace",
        "inplace_by_place",
        "out",
        "einsum",
        "data",
        "packet",
        "view_as_real",
        "norm",
        "operator",
    ],
)
def test_a_weight_that_the_graph_writes_to_keeps_what_is_written(write: Any, inner: str) -> None:
    plain, model = Writes(write), Writes(write)
    expected_by, found_by = torch.compile(plain, backend=inner), stream(model, inner_backend=inner)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(found_by(torch.eye(4)), expected_by(torch.eye(4)))
    assert torch.equal(model.w + 0, plain.w + 0)


def test_a_look_up_that_renormalises_its_table_keeps_it() -> None:
    torch.manual_seed(0)
    model = nn.Embedding(20, 8, max_norm=0.5).requires_grad_(False)
    with torch.no_grad():
        stream(model)(torch.tensor([1, 2, 3]))
    assert model.weight[1].norm() <= 0.5001
    assert dict(flextensor_fx.report(model).stays) == {"weight": "the graph changes it in place"}


class ReadsOutside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.listed = [layer.weight for layer in self.layers[:2]]

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.listed:
            x = x @ weight
        return self.layers[0](x) + self.layers[2](x)


def test_a_weight_that_a_list_holds_too_stays_with_a_reason() -> None:
    torch.manual_seed(0)
    model = ReadsOutside().requires_grad_(False)
    expected = model(X)
    assert torch.equal(stream(model)(X), expected)
    stays = dict(flextensor_fx.report(model).stays)
    assert set(stays.values()) == {"the graph reads it from outside its module too"}
    assert "layers.2.weight" not in stays


def test_parameters_given_to_a_functional_call_stay() -> None:
    model = chain()
    given, expected = dict(model.named_parameters()), model(X)
    call = stream(lambda p, x: torch.func.functional_call(model, p, (x,)))
    with torch.no_grad():
        assert torch.equal(call(given, X), expected)


def test_a_buffer_that_views_a_weight_keeps_seeing_it() -> None:
    model = chain()
    model.register_buffer("top", model[0].weight.data[:8])
    with torch.no_grad():
        stream(model)(X)
        model[0].weight.mul_(2)
    assert torch.equal(model.top, model[0].weight[:8])
    assert "buffer" in dict(flextensor_fx.report(model).stays)["0.weight"]


@pytest.mark.parametrize("by", ["compile", "offload"])
def test_a_model_of_which_a_part_is_offloaded(by: str) -> None:
    model = chain()
    expected = model(X)
    if by == "compile":
        stream(model[1])(X)
    else:
        flextensor_fx.offload(model[1], OPTIONS)
    assert torch.equal(stream(model)(X), expected)
    assert all(isinstance(p, OffloadedParameter) for p in model.parameters())
    flextensor_fx.release(model)
    flextensor_fx.release(model[1])
    assert torch.equal(model(X), expected)
    assert not any(isinstance(p, OffloadedParameter) for p in model.parameters())


def test_an_optimizer_made_before_offloading_trains_after_release() -> None:
    model = chain().requires_grad_(True)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    flextensor_fx.offload(model, OPTIONS)
    flextensor_fx.release(model)
    assert all(now is before for now, before in zip(model.parameters(), parameters, strict=True))
    before = model[0].weight.detach().clone()
    model(X).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model[0].weight)


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.adapter = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.adapter(x).sin()).sum()


def test_a_backward_never_reads_another_models_weights() -> None:
    model, other = Adapted(), Adapted()
    with torch.no_grad():
        other.frozen.weight.mul_(3)
    loss = stream(model, include_patterns=["frozen"])(X)
    flextensor_fx.release(model)
    flextensor_fx.offload(other, OPTIONS | {"include_patterns": ["frozen"]})
    with pytest.raises(flextensor_fx.StoreError, match="released"):
        loss.backward()


class WritesToItsArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, buffer: Tensor, x: Tensor) -> Tensor:
        buffer.add_(self.layer(x))
        return x * 2


def test_a_gradient_through_a_written_argument_is_refused() -> None:
    model, buffer = WritesToItsArgument(), nn.Linear(16, 16)(X)
    with pytest.warns(UserWarning, match="backward"):
        stream(model)(buffer, X)
    with pytest.raises(flextensor_fx.GradientError, match=r"layer\.weight"):
        buffer.sum().backward()


@pytest.mark.parametrize(
    "change",
    [lambda w: w.set_(torch.zeros(16, 16)), lambda w: w.unsqueeze_(0), lambda w: w.t_(), lambda w: w.resize_(4, 4)],
)
def test_what_would_change_a_stand_ins_shape_or_memory_is_refused(change: Any) -> None:
    model = chain()
    flextensor_fx.offload(model, OPTIONS)
    with torch.no_grad(), pytest.raises(flextensor_fx.OffloadError, match="release"):
        change(model[0].weight)


def test_a_failed_first_move_can_be_tried_again_elsewhere(tmp_path: Path) -> None:
    model = chain()
    missing = OPTIONS | {"store_dir": str(tmp_path / "missing")}
    with pytest.raises(Exception, match="directory"):
        flextensor_fx.offload(model, missing)
    with pytest.raises(Exception, match="directory"):
        stream(model, store_dir=str(tmp_path / "missing"))(X)
    expected = model(X)
    flextensor_fx.offload(model, OPTIONS)
    assert torch.equal(model(X), expected)


def test_release_waits_for_a_call_on_another_thread() -> None:
    model = chain(8)
    expected, compiled = model(X), stream(model)
    errors: list[Exception] = []

    def call() -> None:
        try:
            with torch.no_grad():
                for _ in range(50):
                    assert torch.equal(compiled(X), expected)
        except (RuntimeError, AssertionError, ValueError) as error:
            errors.append(error)

    compiled(X)
    thread = threading.Thread(target=call)
    thread.start()
    flextensor_fx.release(model)
    thread.join()
    assert not errors


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


def test_running_into_dynamos_limit_is_said() -> None:
    model = nn.Sequential(*[Block() for _ in range(10)]).requires_grad_(False)
    expected = model(X)
    flextensor_fx.offload(model, OPTIONS)
    for block in model:
        block.compile(backend=flextensor_fx.flextensor)
    with warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        assert torch.equal(model(X), expected)
    assert any("recompile_limit" in str(warning.message) for warning in said)
