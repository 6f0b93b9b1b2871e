"""`profile`: what it measures, that it leaves the model as it was, and plans made from what it found."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import flextensor_fx
from compiling import assert_equal, counting, fresh_compiler, mlp, registry, resident, session_of, stream, values
from flextensor_fx import profiling
from flextensor_fx.errors import BudgetError, OffloadError, ProfileError
from flextensor_fx.profile import Profile
from flextensor_fx.recording import record_call

assert fresh_compiler

OPTIONS: dict[str, Any] = {"include_patterns": ["**"], "min_stream_bytes": 0, "inner_backend": "aot_eager"}


class Block(nn.Module):
    """Attention and an MLP, as in a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, bias=False, batch_first=True)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(torch.relu(self.up(x)))


def transformer(width: int = 32) -> nn.Sequential:
    return nn.Sequential(Block(width), Block(width), nn.Linear(width, 8))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures each call a few times only."""
    monkeypatch.setattr(profiling, "_LEAST_CALLS", 2)
    monkeypatch.setattr(profiling, "_MOST_CALLS", 2)


def measured_units(profile: Profile) -> set[str]:
    return {step.unit for graph in profile.graphs for step in graph.steps if step.provenance == "measured"}


class TestMeasuring:
    @pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
    def test_the_model_is_as_before_and_every_step_is_measured(self, inner: str):
        model = transformer()
        x = torch.randn(2, 4, 32)
        with torch.no_grad():
            eager = model(x)
        parameters, before = dict(model.named_parameters()), values(model)
        found = flextensor_fx.profile(model, (x,), OPTIONS | {"inner_backend": inner})
        assert dict(model.named_parameters()).keys() == parameters.keys()
        assert all(p is parameters[name] for name, p in model.named_parameters())
        assert_equal(values(model), before)
        assert not registry.living_sessions()
        with torch.no_grad():
            assert_equal(model(x), eager)
        (graph,) = found.graphs
        assert (graph.name, graph.signature) == ("graph 0", "float32[2, 4, 32]")
        assert {step.provenance for step in graph.steps} == {"measured"}
        assert graph.uses.keys() == parameters.keys() == {weight.name for weight in found.weights}
        assert graph.samples >= 7 and graph.compute_ms > 0
        assert found.link.provenance.startswith("measured while computing") and found.link.points
        assert found.nbytes == sum(p.nbytes for p in parameters.values()) and not found.foreign

    def test_calls_of_two_shapes_are_two_classes(self, quick: None):
        model = mlp()
        found = flextensor_fx.profile(model, [(torch.randn(2, 16),), (torch.randn(5, 16),)], OPTIONS)
        assert [graph.signature for graph in found.graphs] == ["float32[2, 16]", "float32[5, 16]"]
        assert all(step.provenance == "measured" for graph in found.graphs for step in graph.steps)

    def test_keyword_arguments_reach_every_call(self, quick: None):
        class Scaled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(16, 16)

            def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
                return self.layer(x) * scale

        found = flextensor_fx.profile(Scaled(), (torch.randn(2, 16),), OPTIONS, {"scale": torch.ones(16)})
        assert found.graphs[0].signature == "float32[2, 16], float32[16]"

    def test_before_each_is_called_before_every_measured_call(self, quick: None):
        calls: list[int] = []
        model = mlp()
        args = [(torch.randn(2, 16),), (torch.randn(5, 16),)]
        flextensor_fx.profile(model, args, OPTIONS, before_each=lambda: calls.append(1))
        assert len(calls) == 4

    def test_calls_go_on_until_the_median_is_known(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(profiling, "_error", lambda times: 0.0 if len(times) >= 9 else 1.0)
        found = flextensor_fx.profile(mlp(), (torch.randn(2, 16),), OPTIONS)
        assert found.graphs[0].samples == 9
        monkeypatch.setattr(profiling, "_error", lambda times: 1.0)
        found = flextensor_fx.profile(mlp(), (torch.randn(2, 16),), OPTIONS)
        assert found.graphs[0].samples == 30

    def test_calls_may_be_counted(self):
        assert flextensor_fx.profile(mlp(), (torch.randn(2, 16),), OPTIONS, calls=1).graphs[0].samples == 1
        with pytest.raises(ProfileError, match="expected calls of at least 1, found 0"):
            flextensor_fx.profile(mlp(), (torch.randn(2, 16),), OPTIONS, calls=0)

    def test_the_budget_holds_while_measuring(self, monkeypatch: pytest.MonkeyPatch, quick: None):
        kept: list[Any] = []
        monkeypatch.setattr(profiling, "profile_of", lambda s, *_: kept.append((s.engine.stats(), s.plan)) or s)
        model = mlp(6, 64, bias=False)
        nbytes = 64 * 64 * 4
        flextensor_fx.profile(model, (torch.randn(2, 64),), OPTIONS | {"budget": 2 * nbytes})
        ((stats, plan),) = kept
        assert len(plan.streamed) == 6 and not plan.resident
        assert 0 < stats.peak_pool_bytes <= 2 * nbytes and stats.overruns == 0
        assert not registry.living_sessions()

    def test_a_budget_that_cannot_work_is_refused_before_anything_is_moved(self):
        model = mlp(4, 64)
        parameters = list(model.parameters())
        with pytest.raises(BudgetError):
            flextensor_fx.profile(model, (torch.randn(2, 64),), OPTIONS | {"budget": 1000})
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))

    def test_an_error_of_the_model_leaves_it_as_it_was(self, quick: None):
        model = mlp()
        with pytest.raises(Exception, match=r"must have same reduction dim|shapes cannot be multiplied"):
            flextensor_fx.profile(model, [(torch.randn(2, 16),), (torch.randn(2, 17),)], OPTIONS)
        assert all(type(p) is nn.Parameter for p in model.parameters()) and not registry.living_sessions()

    @pytest.mark.parametrize("inference", [False, True])
    def test_buffers_and_the_random_state_are_as_before(self, inference: bool, quick: None):
        class Counting(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 16))
                self.register_buffer("calls", torch.zeros(()))
                self.register_buffer("last", torch.zeros(2, 16))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.calls += 1  # pyright: ignore[reportOperatorIssue]  # a buffer
                self.last = x + 1
                return self.layers(x)

        x = torch.randn(2, 16)
        with torch.inference_mode(inference):
            model = Counting().train()
            buffers, before, state = dict(model.named_buffers()), values(model), torch.get_rng_state()
            flextensor_fx.profile(model, (x,), OPTIONS | {"include_patterns": ["**.weight"]})
        assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
        assert_equal(values(model), before)
        assert_equal(torch.get_rng_state(), state)

    def test_gradients_may_be_on(self, quick: None):
        assert torch.is_grad_enabled()
        found = flextensor_fx.profile(mlp(), (torch.randn(2, 16, requires_grad=True),), OPTIONS)
        assert found.graphs[0].samples == 2


class TestAsItIs:
    def test_a_compiled_model_is_measured_as_it_is(self, quick: None):
        model = mlp(4, 64, bias=False)
        x = torch.randn(2, 64)
        compiled = stream(model, budget="75%")
        with torch.no_grad():
            expected = compiled(x)
        session = session_of(model)
        streamed = set(session.moved)
        before = counters["stats"]["unique_graphs"]
        found = flextensor_fx.profile(compiled, (x,))
        assert counters["stats"]["unique_graphs"] == before
        assert session_of(model) is session and set(session.moved) == streamed != set(dict(model.named_parameters()))
        assert len(found.weights) == 4 and measured_units(found) == {"0", "2", "4", "6"}
        with torch.no_grad():
            assert_equal(compiled(x), expected)
        flextensor_fx.release(model)

    def test_an_offloaded_model_too(self, quick: None):
        model = flextensor_fx.offload(mlp(4, 64), OPTIONS)
        found = flextensor_fx.profile(model, (torch.randn(2, 64),))
        assert len(found.weights) == 8 and found.graphs[0].samples == 2
        assert session_of(model).moved
        flextensor_fx.release(model)

    def test_a_model_that_watches_itself_lets_others_record(self, quick: None):
        compiled = stream(mlp(4, 64, bias=False), budget="75%", profile="auto")
        x = torch.randn(2, 64)
        found = flextensor_fx.profile(compiled, (x,))
        assert found.graphs[0].samples == 2
        with torch.no_grad():
            assert record_call(compiled, x).transfers


class TestRefused:
    def test_what_is_no_module(self):
        with pytest.raises(ProfileError, match=r"profile: expected an nn.Module, found function"):
            flextensor_fx.profile(lambda x: x, (1,), OPTIONS)  # type: ignore[arg-type]

    def test_a_module_without_config(self):
        with pytest.raises(ProfileError, match=r"expected config to say what to offload, found None"):
            flextensor_fx.profile(mlp(), (torch.randn(2, 16),))

    def test_a_compiled_model_with_config(self):
        compiled = stream(mlp())
        with pytest.raises(ProfileError, match=r"a compiled or offloaded one without, found Sequential and a config"):
            flextensor_fx.profile(compiled, (torch.randn(2, 16),), OPTIONS)

    def test_no_calls(self):
        with pytest.raises(ProfileError, match=r"arguments of at least one call, found an empty list"):
            flextensor_fx.profile(mlp(), [], OPTIONS)

    def test_arguments_that_are_no_tuples(self):
        x = torch.randn(2, 16)
        for wrong in (x, [x], [[x]]):
            with pytest.raises(ProfileError, match=r"profile: expected args to be a tuple, or a list of tuples, found"):
                flextensor_fx.profile(mlp(), wrong, OPTIONS)  # type: ignore[arg-type]

    def test_nothing_streamed(self):
        model = mlp()
        with pytest.raises(
            ProfileError, match=r"expected Sequential-\w+ to stream weights, found that all stay in memory"
        ):
            flextensor_fx.profile(model, (torch.randn(2, 16),), OPTIONS | {"min_stream_bytes": 1 << 20})
        assert not registry.living_sessions()

    def test_a_model_compiled_by_another_backend(self):
        with pytest.raises(OffloadError, match=r"profile: expected \w+ to belong to one offloaded model, found none"):
            flextensor_fx.profile(resident(mlp()), (torch.randn(2, 16),))


class TestPlanningFromAFile:
    @pytest.fixture
    def file(self, tmp_path: Path, quick: None) -> str:
        flextensor_fx.profile(mlp(6, 64, bias=False), (torch.randn(2, 64),), OPTIONS).save(tmp_path / "profile.json")
        return str(tmp_path / "profile.json")

    def edit(self, file: str, **changes: Any) -> None:
        dataclasses.replace(Profile.load(file), **changes).save(file)

    def test_the_plan_is_the_profiles(self, file: str):
        model = mlp(6, 64, bias=False)
        x = torch.randn(2, 64)
        with torch.no_grad():
            expected = model(x)
            with counting() as read:
                compiled = stream(model, profile=file, budget="60%")
                assert_equal(compiled(x), expected)
                assert_equal(compiled(x), expected)
                assert read().graphs == 1
        found = Profile.load(file)
        made = found.plan(found.nbytes * 60 // 100, min_stream_bytes=0)
        plan = session_of(model).plan
        assert (plan.streamed, plan.pool, plan.predicted_ms) == (made.streamed, made.pool, made.predicted_ms)

    def test_a_step_that_takes_long_hides_what_comes_after_it(self, file: str):
        found = Profile.load(file)
        (graph,) = found.graphs
        steps = list(graph.steps)
        steps[3] = dataclasses.replace(steps[3], ms=1000.0)
        self.edit(file, graphs=(dataclasses.replace(graph, steps=tuple(steps)),))
        model = mlp(6, 64, bias=False)
        with torch.no_grad():
            stream(model, profile=file, budget="70%")(torch.randn(2, 64))
        assert set(session_of(model).plan.streamed) <= {"8.weight", "10.weight", "6.weight", "4.weight", "2.weight"}
        assert "0.weight" not in session_of(model).plan.streamed

    def test_it_has_the_patterns(self, tmp_path: Path, quick: None):
        model, x = mlp(4, 64, bias=False).requires_grad_(False), torch.randn(2, 64)
        chosen = OPTIONS | {"include_patterns": ["*"], "exclude_patterns": ["0"]}
        flextensor_fx.profile(model, (x,), chosen).save(tmp_path / "p.json")
        without = {"profile": str(tmp_path / "p.json"), "min_stream_bytes": 0, "inner_backend": "aot_eager"}
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=flextensor_fx.flextensor, options=without)
        expected = model(x)
        assert_equal(compiled(x), expected)
        session = session_of(model)
        assert set(session.moved) == {"2.weight", "4.weight", "6.weight"}
        assert session.config.include_patterns == ("*",) and session.config.exclude_patterns == ("0",)
        assert_equal(compiled(x[:1]), model(x[:1]))  # compiles once more, with the same options

    def test_offload_takes_it_too(self, file: str):
        found = Profile.load(file)
        model = flextensor_fx.offload(mlp(6, 64, bias=False), OPTIONS | {"profile": file, "budget": "60%"})
        assert (
            session_of(model).plan.predicted_ms == found.plan(found.nbytes * 60 // 100, min_stream_bytes=0).predicted_ms
        )
        flextensor_fx.release(model)

    def test_an_unfit_one_is_refused_and_nothing_is_moved(self, file: str):
        model = mlp(6, 48, bias=False)
        parameters = list(model.parameters())
        with pytest.raises(Exception, match=r"expected weight '0.weight' to have shape \(64, 64\), found \(48, 48\)"):
            stream(model, profile=file)(torch.randn(2, 48))
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        assert not registry.living_sessions()
        with pytest.raises(ProfileError, match=r"expected 6 weights, found also '12.weight'"):
            flextensor_fx.offload(mlp(7, 64, bias=False), OPTIONS | {"profile": file})
        with pytest.raises(ProfileError, match=r"expected weight '10.weight', found no such weight"):
            flextensor_fx.offload(mlp(5, 64, bias=False), OPTIONS | {"profile": file})

    def test_of_another_torch_it_is_refused(self, file: str):
        self.edit(file, machine=dataclasses.replace(Profile.load(file).machine, torch="2.3.1"))
        with pytest.raises(ProfileError, match=r"expected torch 2\.3\.1, found "):
            flextensor_fx.offload(mlp(6, 64, bias=False), OPTIONS | {"profile": file})

    def test_of_another_machine_it_warns_and_is_taken(self, file: str):
        self.edit(file, machine=dataclasses.replace(Profile.load(file).machine, name="elsewhere"))
        model = mlp(6, 64, bias=False)
        with pytest.warns(UserWarning, match=r"was taken on another machine \(elsewhere, cpu, "):
            flextensor_fx.offload(model, OPTIONS | {"profile": file})
        assert session_of(model).moved
        flextensor_fx.release(model)

    def test_its_own_machine_is_no_matter_for_a_warning(self, file: str):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            flextensor_fx.release(flextensor_fx.offload(mlp(6, 64, bias=False), OPTIONS | {"profile": file}))

    def test_a_missing_or_damaged_file(self, tmp_path: Path):
        with pytest.raises(ProfileError, match=r"lost\.json.* cannot be read"):
            flextensor_fx.offload(mlp(), OPTIONS | {"profile": tmp_path / "lost.json"})
        (tmp_path / "text.json").write_text("no profile")
        with pytest.raises(ProfileError, match="expected JSON"):
            flextensor_fx.offload(mlp(), OPTIONS | {"profile": tmp_path / "text.json"})

    def test_profiling_does_not_plan_from_an_older_profile(self, tmp_path: Path, quick: None):
        options = OPTIONS | {"profile": tmp_path / "not there yet.json"}
        assert flextensor_fx.profile(mlp(), (torch.randn(2, 16),), options).graphs[0].samples == 2
