"""What the backend does with patterns, budgets and devices: which weights belong to which unit, and refusals with their text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import FakeTensorMode

import flextensor_fx
from compiling import assert_equal, fresh_compiler, mlp, resident, session_of, stream, streamed_names
from flextensor_fx.errors import BudgetError, ConfigError, OffloadError, PatternError, SelectionError
from flextensor_fx.runtime import registry
from flextensor_fx.selection import PatternWarning

__all__ = ["fresh_compiler"]


def refusal(compiled: Any, *args: Any) -> OffloadError:
    """The error with which compiling was refused."""
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled(*args)
    error = caught.value.inner_exception
    assert isinstance(error, OffloadError), repr(error)
    assert str(error) in str(caught.value)  # the user sees it
    return error


class Bare(nn.Module):
    """Parameters of its own beside submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(16))
        self.layers = mlp(2)
        self.scale = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x + self.position) * self.scale


@pytest.mark.parametrize(
    ("include", "units"),
    [
        (["layers.*"], {"layers.0": 2, "layers.2": 2}),
        (["layers"], {"layers": 4}),
        (["position"], {"": 1}),
        (["layers.*", "position"], {"": 1, "layers.0": 2, "layers.2": 2}),
        (["**"], {"": 2, "layers": 4}),
    ],
)
def test_bare_parameters_belong_to_one_unit_or_stay(include: list[str], units: dict[str, int]) -> None:
    model, x = Bare().requires_grad_(False), torch.randn(2, 16)
    expected = resident(model)(x)
    compiled = stream(model, include=include)
    assert_equal(compiled(x), expected)
    report = flextensor_fx.report(model)
    assert {unit.path: unit.weights for unit in report.units} == units
    assert len(streamed_names(model)) == sum(units.values())


def test_a_pattern_that_matches_nothing_is_named_with_the_nearest_names() -> None:
    model, x = Bare().requires_grad_(False), torch.randn(2, 16)
    expected = resident(model)(x)
    compiled = stream(model, include=["layers.*", "laers.*", "position"])
    with pytest.warns(
        PatternWarning, match=r"'laers\.\*' matched no module and no parameter; nearest: .*'layers"
    ) as caught:
        assert_equal(compiled(x), expected)
    assert len([w for w in caught if w.category is PatternWarning]) == 1
    (unmatched,) = flextensor_fx.report(model).selection.unmatched
    assert unmatched.pattern == "laers.*"


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"include": ["laers.*"]}, SelectionError, r"selects no weight(.|\n)*nearest: 'layers"),
        ({"include": []}, SelectionError, "expected at least one include pattern"),
        ({"include": ["layers..0"]}, PatternError, r"'layers\.\.0' has an empty segment"),
        ({"exclude_patterns": ["*"]}, SelectionError, "excluded"),
        ({"budgett": 3}, ConfigError, r"budgett.*nearest is 'budget'"),
        ({"budget": "much"}, ConfigError, "budget"),
        ({"budget": 100}, BudgetError, r"expected a budget of at least \d+ bytes.*raise the budget"),
        ({"lookahead": -1}, ConfigError, "lookahead"),
        ({"device": "cuda:1"}, OffloadError, "sees 0 CUDA devices here"),
        ({"inner": "nvfuser"}, ConfigError, "inner_backend"),
        ({"inner": "inductor", "inner_options": {"no_such_option": 1}}, ConfigError, "no_such_option"),
        ({"inner": "inductor", "inner_mode": "fastest"}, ConfigError, "max-autotune"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_moved(options: dict[str, Any], kind: type, text: str) -> None:
    model, x = Bare().requires_grad_(False), torch.randn(2, 16)
    expected, before = resident(model)(x), dict(model.named_parameters())
    error = refusal(stream(model, **options), x)
    assert type(error) is kind
    with pytest.raises(kind, match=text):
        raise error
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    torch._dynamo.reset()
    assert_equal(stream(model)(x), expected)  # nothing is left that is in the way


def test_the_least_budget_that_the_refusal_names_works_and_one_byte_less_does_not() -> None:
    model, x = Bare().requires_grad_(False), torch.randn(2, 16)
    expected = resident(model)(x)
    least = refusal(stream(model, budget=1), x)
    assert isinstance(least, BudgetError)
    assert isinstance(refusal(stream(model, budget=least.least - 1), x), BudgetError)
    assert_equal(stream(model, budget=least.least)(x), expected)
    assert flextensor_fx.report(model).peak_bytes <= least.least


class Weighted(nn.Module):
    """x * w1 + w2 + w3 + w4: a compiler fuses all of it into one kernel, which needs the four weights at once."""

    def __init__(self, independent: bool) -> None:
        super().__init__()
        self.independent = independent
        for number in range(4):
            self.register_parameter(f"w{number}", nn.Parameter(torch.randn(64)))

    def forward(self, x: Tensor) -> Any:
        if self.independent:
            return x * self.w0, x * self.w1, x * self.w2, x * self.w3
        return x * self.w0 + self.w1 + self.w2 + self.w3


@pytest.mark.parametrize("independent", [False, True])
def test_weights_that_one_kernel_needs_together_under_a_budget_of_two(independent: bool) -> None:
    model, x = Weighted(independent).requires_grad_(False), torch.randn(64)
    expected = resident(model, inner="inductor")(x)
    try:
        actual = stream(model, inner="inductor", budget=2 * 256)(x)
    except BackendCompilerFailed as caught:
        error = caught.inner_exception
        assert isinstance(error, BudgetError)
        assert error.least > 2 * 256
        torch._dynamo.reset()
        actual = stream(model, inner="inductor", budget=error.least)(x)
        assert flextensor_fx.report(model).peak_bytes <= error.least
    else:
        assert flextensor_fx.report(model).peak_bytes <= 2 * 256
    assert_equal(actual, expected)


def test_a_budget_for_everything_streams_nothing() -> None:
    model, x = Bare().requires_grad_(False), torch.randn(2, 16)
    expected, before = resident(model)(x), dict(model.named_parameters())
    for budget in ("100%", "1GiB"):
        torch._dynamo.reset()
        flextensor_fx.release(model)
        assert_equal(stream(model, budget=budget)(x), expected)
        assert all(parameter is before[name] for name, parameter in model.named_parameters())
        report = flextensor_fx.report(model)
        assert report.resident_bytes == report.selection.nbytes
        assert report.plan.streamed == ()


def test_disabled_compiles_with_the_inner_backend_alone() -> None:
    model, x = Bare().requires_grad_(False), torch.randn(2, 16)
    expected, before = resident(model)(x), dict(model.named_parameters())
    compiled = stream(model, enabled=False)
    assert_equal(compiled(x), expected)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert not registry.living_sessions()
    with pytest.raises(OffloadError, match="call the compiled model once first"):
        flextensor_fx.report(compiled)


def test_the_report_counts_units_and_bytes() -> None:
    model, x = mlp(4, 64).requires_grad_(False), torch.randn(2, 64)
    compiled = stream(model, budget="50%")
    compiled(x)
    report = flextensor_fx.report(compiled)
    total = sum(parameter.nbytes for parameter in model.parameters())
    streamed = sum(dict(model.named_parameters())[name].nbytes for name in streamed_names(model))
    assert report.selection.nbytes == total
    assert sum(unit.streamed_bytes for unit in report.units) == streamed
    assert report.resident_bytes == total - streamed
    assert report.peak_bytes <= total // 2
    text = str(report)
    assert all(word in text for word in ("budget", "resident", "streamed", "unit", "pattern"))


def test_memory_is_freed_although_the_user_keeps_references() -> None:
    model, x = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)).requires_grad_(False), torch.randn(2, 1024)
    kept, pointers = list(model.parameters()), {parameter.data_ptr() for parameter in model.parameters()}
    expected = resident(model)(x)
    compiled = stream(model)
    assert_equal(compiled(x), expected)
    # What the user kept now looks at the store's file; the memory that held the weights is nobody's.
    assert not pointers & {parameter.data_ptr() for parameter in kept}
    assert_equal(kept[0].clone(), model[0].weight.clone())


def test_selected_weights_on_two_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from flextensor_fx import candidates

    monkeypatch.setattr(candidates, "check_storable", lambda tensor: None)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with FakeTensorMode():
        model[1].weight = nn.Parameter(torch.empty(8, 8, device="cuda:1"))
    with pytest.raises(OffloadError, match=r"on one device, found them on cpu, cuda:1; move the model to one device"):
        flextensor_fx.offload(model, {"include_patterns": ["*"]})
    with pytest.raises(OffloadError, match=r"device 'cuda:1': torch .* sees 0 CUDA devices here"):
        flextensor_fx.offload(model, {"include_patterns": ["1.weight"]})
    assert not registry.living_sessions()


def test_a_mapping_or_a_config_may_be_given_and_mean_the_same() -> None:
    model, x = mlp().requires_grad_(False), torch.randn(2, 16)
    options = {"include_patterns": ["*"], "min_stream_bytes": 0, "inner_backend": "aot_eager"}
    for given in (options, flextensor_fx.OffloadConfig(**options)):
        torch._dynamo.reset()
        flextensor_fx.release(model)
        expected = resident(model)(x)
        flextensor_fx.offload(model, given)
        assert_equal(stream(model, include=["*"])(x), expected)
        assert session_of(model).config == flextensor_fx.OffloadConfig(**options)
