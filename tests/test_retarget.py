"""Moving a graph to another device: the pass by itself, and programs that are exported on one device and run on another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import flextensor_fx
from compiling import fresh_compiler
from flextensor_fx import LoadError, OffloadError, ProgramError
from flextensor_fx.exported import flatten
from flextensor_fx.passes.retarget import retarget

assert fresh_compiler  # a fixture of every test here

CPU, META = torch.device("cpu"), torch.device("meta")


class Makes(nn.Module):
    """Makes tensors on the device of its input, in a branch too, and converts with a device."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.shift = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = (
            self.layer(x)
            + torch.arange(8, device=x.device)
            + torch.ones(8, device=x.device).to(x.device, torch.float64)
        )
        return torch.cond(x.sum() > 0, lambda a: a + torch.ones(8, device=a.device), lambda a: a - self.shift, (y,))


def _on(device: torch.device) -> tuple[Makes, torch.export.ExportedProgram, Tensor]:
    torch.manual_seed(0)
    model, x = Makes(), torch.ones(2, 8)
    exported = torch.export.export(model.to(device), (x.to(device),))
    torch.manual_seed(0)
    return Makes(), exported, x


@pytest.mark.parametrize(("source", "target"), [(CPU, META), (META, CPU)], ids=["from the cpu", "to the cpu"])
def test_every_device_of_a_graph_moves_and_its_source_does_not(source: torch.device, target: torch.device) -> None:
    _, exported, _ = _on(source)
    before = exported.graph_module.print_readable(print_output=False)
    module = flatten(exported).module
    retarget(module.graph, source, target)
    module.recompile()
    code = "".join(part.code for part in module.modules())  # the bodies of the branches too
    assert f"device(type='{target}')" in code and f"device(type='{source}')" not in code
    for part in module.modules():
        assert isinstance(part, GraphModule)
        for node in part.graph.nodes:
            value = node.meta.get("val")
            assert not isinstance(value, Tensor) or value.device == target
    assert exported.graph_module.print_readable(print_output=False) == before


def test_values_that_share_memory_still_do() -> None:
    class Views(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.t()[1:].transpose(0, 1) + x[:, 1:]

    graph = flatten(torch.export.export(Views(), (torch.ones(3, 4),))).module.graph
    retarget(graph, CPU, META)
    memories = [n.meta["val"].untyped_storage()._cdata for n in graph.nodes if isinstance(n.meta.get("val"), Tensor)]
    assert len(set(memories)) == 2  # the argument with all its views, and the sum


def test_with_nothing_to_move_nothing_changes() -> None:
    module = flatten(_on(CPU)[1]).module
    before, values = str(module.graph), [node.meta.get("val") for node in module.graph.nodes]
    retarget(module.graph, CPU, CPU)
    assert str(module.graph) == before
    assert all(node.meta.get("val") is value for node, value in zip(module.graph.nodes, values, strict=True))


def test_an_export_on_meta_runs_on_the_cpu_once_it_has_values() -> None:
    model, exported, x = _on(META)
    program = flextensor_fx.rewrite(exported, {"include_patterns": ["layer"], "min_stream_bytes": 0})
    assert "device(type='meta')" not in program.graph_module.code
    for act in (lambda: program(x), lambda: program.compile()(x)):
        with pytest.raises(ProgramError, match=r"call flextensor_fx\.load\(program, files\)"):
            act()
    with pytest.raises(ProgramError, match="has no value yet"):
        program.save("program.pt2")
    assert flextensor_fx.load(program, model.state_dict()) is program
    assert program.session.streamed == {"layer.weight", "layer.bias"}
    for sign in (1, -1):
        assert torch.equal(program(sign * x), model(sign * x))
    with pytest.raises(ProgramError, match="found one with values"):
        program.fill(model.state_dict())


def test_loading_a_program_reports_like_load_state_dict_and_can_be_done_again() -> None:
    model, exported, x = _on(META)
    program = flextensor_fx.rewrite(exported, {"include_patterns": ["layer"], "min_stream_bytes": 0})
    state = model.state_dict()
    with pytest.raises(LoadError, match=r'Missing key\(s\) in state_dict: "shift"'):
        flextensor_fx.load(program, {name: value for name, value in state.items() if name != "shift"})
    with pytest.raises(LoadError, match=r'Unexpected key\(s\) in state_dict: "more"'):
        flextensor_fx.load(program, state | {"more": x})
    with pytest.raises(OffloadError, match="expected no config for a program"):
        flextensor_fx.load(program, state, {"budget": 1})
    flextensor_fx.load(program, state)
    assert torch.equal(program(x), model(x))


class Passing(nn.Module):
    """A buffer that is in no state dict, and a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shift = nn.Linear(8, 8), torch.arange(8.0)
        self.register_buffer("passing", torch.full((8,), 0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.passing + self.shift


def test_buffers_that_no_state_dict_has_must_be_given() -> None:
    model, x = Passing(), torch.ones(2, 8)
    with torch.device("meta"):
        empty = Passing()
    program = flextensor_fx.rewrite(
        torch.export.export(empty, (x.to("meta"),)), {"include_patterns": ["**"], "min_stream_bytes": 0}
    )
    with pytest.raises(LoadError, match=r"expected values of .*passing.*buffers="):
        flextensor_fx.load(program, model.state_dict())
    for wrong in (model.passing[:1], model.passing.double(), model.passing.to("meta"), 3):
        with pytest.raises(LoadError, match=r"buffer 'passing': expected .*, found"):
            program.fill(model.state_dict(), {"passing": wrong, "shift": model.shift})
    flextensor_fx.load(program, model.state_dict(), buffers={"passing": model.passing, "shift": model.shift})
    with torch.no_grad():
        assert torch.equal(program(x), model(x))


def test_a_program_on_two_devices_is_refused() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.here, self.there = nn.Linear(4, 4), nn.Linear(4, 4, device="meta")

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return self.here(x), self.there(y)

    exported = torch.export.export(Split(), (torch.ones(2, 4), torch.ones(2, 4, device="meta")))
    with pytest.raises(OffloadError, match="expected a program on one device, found cpu, meta"):
        flextensor_fx.rewrite(exported, {"include_patterns": ["**"]})


def test_a_saved_program_of_a_meta_export_is_like_any_other(tmp_path: object) -> None:
    model, exported, x = _on(META)
    program = flextensor_fx.rewrite(exported, {"include_patterns": ["layer"], "min_stream_bytes": 0})
    flextensor_fx.load(program, model.state_dict())
    program.save(f"{tmp_path}/program.pt2")
    again = flextensor_fx.load_program(f"{tmp_path}/program.pt2")
    assert torch.equal(again(x), model(x))
