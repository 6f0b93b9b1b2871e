"""Exported programs rewritten: numbers, the source afterwards, what is refused, and the same program through compilers."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flextensor_fx
from compiling import fresh_compiler
from flextensor_fx import BudgetError, ConfigError, GradientError, OffloadError, Program, SelectionError, StoreError
from flextensor_fx.passes import ops
from programs import FORMS, assert_same, streaming

assert fresh_compiler  # a fixture of every test here


def _targets(program: flextensor_fx.Program) -> list[Any]:
    return [node.target for node in program.graph_module.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("name", FORMS)
def test_a_rewritten_program_gives_the_numbers_of_its_source(name: str, strict: bool) -> None:
    form = FORMS[name]
    _, exported = form.exported(strict)
    with torch.no_grad():
        expected = [form.call(FORMS[name].exported(strict)[1].module()) for _ in range(1)]
    program = streaming(exported)
    assert ops.prefetch in _targets(program) and ops.wait in _targets(program) and ops.fetch not in _targets(program)
    assert_same(form.call(program), expected[0])
    assert program.session.engine is not None
    stats = program.session.engine.stats()
    assert stats.transfers >= len(program.session.streamed) > 0 and stats.overruns == 0
    program.close()


@pytest.mark.parametrize("name", ["stack", "branches", "writes-input", "constants"])
def test_a_decomposed_program_is_rewritten_too(name: str) -> None:
    form = FORMS[name]
    _, exported = form.exported()
    exported = exported.run_decompositions()
    with torch.no_grad():
        reference = form.exported()[1].run_decompositions().module()
        expected = [form.call(reference) for _ in range(2)]
    program = streaming(exported)
    for want in expected:
        assert_same(form.call(program), want)


def test_what_a_program_writes_to_its_inputs_is_seen_by_the_caller() -> None:
    _, exported = FORMS["writes-input"].exported()
    for form in (exported, exported.run_decompositions()):
        program = streaming(form)
        x, cache = FORMS["writes-input"].args
        given, want = cache.clone(), cache.clone()
        assert_same(program(x, given), exported.module()(x, want).detach())
        assert torch.equal(given, want) and not torch.equal(given, cache)


def test_the_source_and_its_model_stay_as_they_are() -> None:
    form = FORMS["stack"]
    model, exported = form.exported()
    parameters = dict(model.named_parameters())
    code, state = exported.graph_module.code, {n: t.clone() for n, t in exported.state_dict.items()}
    program = streaming(exported)
    form.call(program)
    form.call(program)
    assert exported.graph_module.code == code
    assert all(torch.equal(t, state[n]) for n, t in exported.state_dict.items())  # the counter too
    assert all(type(p) is nn.Parameter and parameters[n] is p for n, p in model.named_parameters())
    assert_same(form.call(model)["more"][0], torch.ones(1))
    loss = form.call(model)["y"].sum()
    loss.backward()
    assert all(p.grad is not None for p in parameters.values())


def test_a_program_keeps_its_numbers_when_the_model_is_trained_on() -> None:
    form = FORMS["stack"]
    model, exported = form.exported()
    program = flextensor_fx.rewrite(exported, {"include_patterns": ["layers.*"], "budget": "50%"})
    assert 0 < len(program.session.streamed) < len(program.session.nbytes)
    expected = form.call(program)["y"]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert torch.equal(form.call(program)["y"], expected)


def test_buffers_count_on_from_call_to_call() -> None:
    _, exported = FORMS["stack"].exported()
    program = streaming(exported)
    counts = [FORMS["stack"].call(program)["more"][0].item() for _ in range(3)]
    assert counts == [1.0, 2.0, 3.0]
    assert program.state_dict()["calls"].item() == 3.0


def test_patterns_speak_of_modules_and_classes() -> None:
    _, exported = FORMS["stack"].exported()
    by_class = streaming(exported, include_patterns=["class:Block"], exclude_patterns=["*.norm"])
    assert {unit.path for unit in by_class.session.selection.units} == {f"layers.{n}" for n in range(4)}
    assert not any("norm" in name for name in by_class.session.nbytes)
    assert flextensor_fx.report(by_class).store.startswith("Stack-")
    with pytest.raises(SelectionError, match="selects no weight"):
        streaming(exported, include_patterns=["layer.*"])


def test_a_tied_weight_has_one_copy_and_counts_once() -> None:
    model, exported = FORMS["tied"].exported()
    program = streaming(exported)
    assert sum(program.session.nbytes.values()) == sum(p.nbytes for p in model.parameters())
    assert len({id(t) for n, t in program._holder.named_parameters(remove_duplicate=False) if "mid" not in n}) == 1


def test_weights_of_branches_are_fetched_before_them() -> None:
    _, exported = FORMS["branches"].exported()
    program = streaming(exported)
    assert {"one.weight", "other.weight"} <= program.session.streamed
    order = _targets(program)
    branch = next(place for place, target in enumerate(order) if str(target) == "cond")
    waits = [
        node.args[1].partition(":")[2]
        for node in list(program.graph_module.graph.nodes)
        if node.target is ops.wait and order.index(node.target) < branch
    ]
    assert {"one.weight", "other.weight"} <= set(waits)
    assert "streamed: one.weight: fetched before cond, whose body reads it" in str(flextensor_fx.report(program))
    for sign in (1, -1):
        x = sign * torch.ones(2, 16)
        assert torch.equal(program(x), exported.module()(x))


def test_a_weight_that_the_graph_changes_stays_and_the_report_says_why() -> None:
    _, exported = FORMS["changed"].exported()
    program = streaming(exported)
    assert "moving" not in program.session.streamed
    assert ("moving", "the graph changes it in place") in flextensor_fx.report(program).stays


class _Shared(nn.Module):
    """A counter of two names, a view of a weight, and whatever is asked for."""

    def __init__(self, share: str) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(8))
        self.register_buffer("also", self.calls)
        self.register_buffer("seen", self.layer.weight.detach())
        self.share = share
        if share == "in part":
            self.register_buffer("part", self.calls[2:4])
        if share == "in passing":
            self.register_buffer("passing", self.calls, persistent=False)
            self.kept = self.calls

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        if self.share == "a weight":
            self.seen.add_(1)
        if self.share == "in part":
            x = x + self.part.sum()
        if self.share == "in passing":
            x = x + self.passing + self.kept
        return self.layer(x) @ self.seen + self.also


@pytest.mark.parametrize("saved", [False, True])
def test_buffers_of_two_names_are_one_and_those_of_a_weights_memory_are_their_own(saved: bool, tmp_path: Path) -> None:
    x = torch.randn(2, 8)
    exported = torch.export.export(_Shared("nothing"), (x,))
    program = streaming(exported)
    if saved:
        program.save(tmp_path / "p")
        program = flextensor_fx.load_program(tmp_path / "p")
    reference = exported.module()
    for _ in range(3):
        assert torch.equal(program(x), reference(x))
    assert program.state_dict()["calls"].data_ptr() == program.state_dict()["also"].data_ptr()


@pytest.mark.parametrize(
    ("share", "message"),
    [("a weight", "seen: .* shared with layer.weight"), ("in part", "shared with part"), ("in passing", "shared with")],
)
def test_a_write_to_memory_that_others_share_is_refused(share: str, message: str) -> None:
    exported = torch.export.export(_Shared(share), (torch.randn(2, 8),))
    with pytest.raises(OffloadError, match=message):
        streaming(exported)


def test_all_weights_can_stay() -> None:
    form = FORMS["stack"]
    _, exported = form.exported()
    program = streaming(exported, enabled=False)
    assert not program.session.streamed and ops.prefetch not in _targets(program)
    assert_same(form.call(program)["y"], form.call(exported.module())["y"].detach())


def test_sizes_may_vary_as_exported_and_no_further() -> None:
    form = FORMS["dynamic"]
    model, exported = form.exported()
    program = streaming(exported)
    for rows in (2, 7, 64):
        x = torch.randn(rows, 32)
        with torch.no_grad():
            assert torch.equal(program(x, **form.kwargs)["y"], model(x, **form.kwargs)["y"])
    for rows in (1, 65):
        with pytest.raises(
            OffloadError, match=rf"expected size .* of 2 to 64, found {rows} \(in args\[0\], dimension 0\)"
        ):
            program(torch.randn(rows, 32), **form.kwargs)


def test_sizes_are_held_to_the_guards_of_the_export() -> None:
    _, exported = FORMS["sizes"].exported()
    program = streaming(exported)
    x = torch.randn(6, 8)
    assert torch.equal(program(x), exported.module()(x))
    with pytest.raises(OffloadError, match="expected sizes for which the exported graph holds"):
        program(torch.randn(5, 8))


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((torch.ones(3, 32),), {}, r"expected \(\., scale=\.\), found \(\.\)"),
        ((torch.ones(3, 32), torch.ones(1)), {}, r"found \(\., \.\)"),
        (
            (torch.ones(3, 33),),
            {"scale": torch.ones(1)},
            r"args\[0\]: expected float32\[3, 32\] on cpu, found float32\[3, 33\]",
        ),
        ((torch.ones(3, 32).double(),), {"scale": torch.ones(1)}, r"found float64\[3, 32\]"),
        ((torch.ones(3, 32, device="meta"),), {"scale": torch.ones(1)}, "on meta"),
        (([1.0],), {"scale": torch.ones(1)}, r"found \(\[\.\], scale=\.\)"),
        (
            (torch.ones(3, 32).to_sparse(),),
            {"scale": torch.ones(1)},
            r"args\[0\]: expected a tensor of layout torch.strided, found torch.sparse_coo",
        ),
        (
            (torch.nested.nested_tensor([torch.ones(3, 32)]),),
            {"scale": torch.ones(1)},
            r"args\[0\]: expected a tensor of layout torch.strided, found torch.jagged",
        ),
        ((2.0,), {"scale": torch.ones(1)}, r"args\[0\]: expected a tensor, found float"),
        ((torch.ones(3, 32),), {"scale": None}, r"kwargs\['scale'\]: expected a tensor, found NoneType"),
    ],
)
def test_other_arguments_are_refused(args: tuple[Any, ...], kwargs: dict[str, Any], message: str) -> None:
    program = streaming(FORMS["stack"].exported()[1])
    with pytest.raises(OffloadError, match=message):
        program(*args, **kwargs)


def test_another_constant_is_refused() -> None:
    program = streaming(FORMS["constants"].exported()[1])
    with pytest.raises(OffloadError, match=r"args\[1\]: expected 3, the constant that was exported, found 4"):
        program(FORMS["constants"].args[0], 4)


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, by: float) -> Tensor:
        return self.layer(x) * by


def test_a_constant_that_is_no_number_is_itself() -> None:
    x, by = torch.randn(2, 8), float("nan")
    program = streaming(torch.export.export(_Scaled(), (x, by)))
    assert program(x, float("nan")).isnan().all()
    with pytest.raises(OffloadError, match="expected nan, the constant"):
        program(x, 1.0)


@pytest.mark.parametrize("store", ["disk", "host"])
def test_the_default_device_makes_no_difference(store: str, tmp_path: Path) -> None:
    form = FORMS["tied"]
    model, exported = form.exported()
    with torch.device("meta"):
        program = streaming(exported, store=store)
        program.save(tmp_path / "p")
        again = flextensor_fx.load_program(tmp_path / "p")
        found = [program(*form.args), again(*form.args)]
    assert all(torch.equal(one, model(*form.args)) for one in found)


def test_gradients_are_refused() -> None:
    form = FORMS["stack"]
    program = streaming(form.exported()[1])
    x = form.args[0].clone().requires_grad_()
    with pytest.raises(GradientError, match="a program runs forward only"):
        program(x, **form.kwargs)
    with torch.no_grad():
        program(x, **form.kwargs)
    assert not form.call(program)["y"].requires_grad


def test_what_cannot_be_rewritten_is_refused_before_any_work() -> None:
    model, exported = FORMS["stack"].exported()
    program = streaming(exported)
    for wrong, message in (
        (model, "found Stack; for a module use torch.compile"),
        (program, "found a program that is rewritten already"),
        (None, "found NoneType"),
    ):
        with pytest.raises(OffloadError, match=message):
            flextensor_fx.rewrite(wrong, {"include_patterns": ["**"]})
    with pytest.raises(ConfigError, match="found 'auto'"):
        streaming(exported, profile="auto")
    with pytest.raises(OffloadError, match=r"device 'cuda:99': .* sees"):
        streaming(exported, device="cuda:99")
    with pytest.raises(BudgetError) as refused:
        streaming(exported, budget=64)
    streaming(exported, budget=refused.value.least)
    with pytest.raises(BudgetError):
        streaming(exported, budget=refused.value.least - 1)


def test_a_program_with_transfers_in_it_is_not_rewritten_again() -> None:
    program = streaming(FORMS["repeated"].exported()[1])
    again = torch.export.export(program.graph_module, tuple(_inputs(program)))
    with pytest.raises(OffloadError, match="found transfers in it"):
        streaming(again)


def _inputs(program: flextensor_fx.Program) -> list[Any]:
    return [torch.ones(n.meta["val"].shape) for n in program.graph_module.graph.find_nodes(op="placeholder")]


def test_a_closed_program_cannot_be_called() -> None:
    form = FORMS["stack"]
    for end in (Program.close, flextensor_fx.release):
        program = streaming(form.exported()[1])
        compiled, unused = program.compile(inner_backend="eager"), program.compile(inner_backend="eager")
        compiled(*form.args, **form.kwargs)
        end(program)
        end(program)
        for called in (program, compiled, unused):
            with pytest.raises(StoreError, match="expected an open program, found one that was closed or released"):
                called(*form.args, **form.kwargs)
        with pytest.raises(
            OffloadError, match=r"report: expected an open program with values, found .*, which was closed"
        ):
            flextensor_fx.report(program)


def test_a_program_is_saved_and_not_pickled() -> None:
    program = streaming(FORMS["repeated"].exported()[1])
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="use save"):
            copied(program)


def test_two_programs_of_one_export_do_not_meet() -> None:
    form = FORMS["stack"]
    _, exported = form.exported()
    one, other = streaming(exported), streaming(exported, budget="70%")
    assert one.session.uid != other.session.uid
    expected = form.call(one)["y"]
    assert torch.equal(form.call(other)["y"], expected)
    one.close()
    assert torch.equal(form.call(other)["y"], expected)


# --- through compilers -------------------------------------------------------------------------------------------------


def _schedule(owner: Any) -> list[tuple[Any, ...]]:
    made = flextensor_fx.report(owner).graphs[-1].schedule
    return [(t.key.partition(":")[2], t.nbytes, t.issue_at, t.first_use, t.last_use) for t in made.transfers]


@pytest.mark.parametrize("inner", ["inductor", "aot_eager"])
@pytest.mark.parametrize(("name", "budget"), [("stack", "60%"), ("tied", None)])
def test_compiled_it_is_what_the_backend_makes_of_the_model(name: str, budget: str | None, inner: str) -> None:
    form = FORMS[name]
    module, exported = form.exported()
    options = {"include_patterns": ["**"], "budget": budget, "min_stream_bytes": 0, "inner_backend": inner}
    program = flextensor_fx.rewrite(exported, options)
    found = form.call(program.compile())
    backend = torch.compile(module, backend="flextensor", options=options, fullgraph=True)
    with torch.no_grad():
        expected = form.call(backend)
    assert_same(found, expected)
    assert _schedule(program) == _schedule(backend)
    assert flextensor_fx.report(program).plan.streamed == flextensor_fx.report(backend).plan.streamed


class _ReturnsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer.weight, self.layer(x)


def test_a_streamed_weight_that_is_returned_is_the_callers() -> None:
    x = torch.randn(2, 8)
    model = _ReturnsWeight()
    program = streaming(torch.export.export(model, (x,)))
    compiled = program.compile(inner_backend="aot_eager")
    for call in (program, compiled):
        weight, _ = call(x)
        with torch.no_grad():
            weight.zero_()
            assert all(map(torch.equal, call(x), model(x)))
    held, _ = compiled(x)
    program.close()
    assert type(held) is Tensor and torch.equal(held, model.layer.weight)


def test_compiled_it_compiles_once_for_all_sizes() -> None:
    form = FORMS["dynamic"]
    model, exported = form.exported()
    program = streaming(exported)
    compiled = program.compile(inner_backend="aot_eager")
    for rows in (3, 8, 5, 64):
        x = torch.randn(rows, 32)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, **form.kwargs)["y"], model(x, **form.kwargs)["y"])
    assert len(program.session.graphs) == 2  # the interpreted one, and this
    with pytest.raises(OffloadError, match="expected size"):
        compiled(torch.randn(65, 32), **form.kwargs)


def test_any_number_of_programs_can_be_compiled() -> None:
    for size in range(2, torch._dynamo.config.recompile_limit + 4):
        model, x = nn.Linear(size, 3), torch.randn(2, size)
        program = streaming(torch.export.export(model, (x,)))
        assert torch.equal(program.compile(inner_backend="aot_eager")(x), model(x))


def test_options_of_the_plan_are_not_for_compile() -> None:
    program = streaming(FORMS["stack"].exported()[1])
    with pytest.raises(ConfigError, match="found 'budget'"):
        program.compile(budget="50%")


def test_calls_can_be_recorded() -> None:
    from flextensor_fx.recording import record_call

    form = FORMS["stack"]
    program = streaming(form.exported()[1])
    timeline = record_call(program, *form.args, **form.kwargs)
    assert len(timeline.transfers) == len(program.session.streamed)
    assert str(flextensor_fx.report(program, measured=timeline))


def test_the_next_calls_first_weights_can_be_fetched_ahead() -> None:
    form = FORMS["stack"]
    _, exported = form.exported()
    program = streaming(exported, objective="steady", budget="60%")
    assert ops.prefetch_ahead in _targets(program)
    expected = form.call(exported.module())["y"].detach()
    assert all(torch.equal(form.call(program)["y"], expected) for _ in range(4))
    assert program.session.engine is not None and program.session.engine.stats().ahead > 0


def test_it_streams_from_host_memory_too() -> None:
    form = FORMS["stack"]
    _, exported = form.exported()
    program = streaming(exported, store="host")
    assert_same(form.call(program)["y"], form.call(exported.module())["y"].detach())
    assert program.session.tier.on_host
