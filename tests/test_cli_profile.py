"""The command `flextensor-fx profile`: what it prints and saves, and one line for whatever is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from compiling import fresh_compiler, registry
from flextensor_fx.cli import main
from flextensor_fx.profile import Profile
from test_cli import models, refused

assert fresh_compiler and models

MORE = """
def keywords():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
        def forward(self, x, *, scale):
            return self.layer(x) * scale
    return Scaled(), torch.randn(2, 8), {"scale": torch.ones(8)}

def layered():
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), (torch.randn(2, 64),)

def wrong():
    return layered()[0], (torch.randn(2, 3),)

def raises():
    class Raises(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
        def forward(self, x):
            raise KeyError("not today")
    return Raises(), torch.randn(2, 8)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXTENSOR_FX_INNER_BACKEND", "aot_eager")
    monkeypatch.setenv("FLEXTENSOR_FX_MIN_STREAM_BYTES", "0")


@pytest.fixture
def module(models: str, tmp_path: Path) -> str:
    with open(tmp_path / f"{models}.py", "a") as file:
        file.write(MORE)
    return models


def test_it_prints_and_saves(module: str, capsys: pytest.CaptureFixture[str]):
    arguments = [
        "profile",
        f"{module}:layered",
        "--include",
        "**",
        "--exclude",
        "3",
        "--out",
        "found.json",
        "--calls",
        "2",
    ]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    found = Profile.load("found.json")
    assert out == f"{found}\nwrote found.json\n"
    assert [weight.name for weight in found.weights] == [f"{n}.{kind}" for n in range(3) for kind in ("weight", "bias")]
    assert [(graph.samples, graph.signature) for graph in found.graphs] == [(2, "float32[2, 64]")]
    assert main(["plan", "found.json", "--budget", "60%"]) == 0
    assert not registry.living_sessions()


def test_keyword_arguments(module: str):
    assert main(["profile", f"{module}:keywords", "--out", "found.json", "--calls", "1"]) == 0
    assert Profile.load("found.json").graphs[0].signature == "float32[2, 8], float32[8]"


def test_exported_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    torch.export.save(torch.export.export(model, (torch.randn(2, 8),)), "model.pt2")
    assert main(["profile", "model.pt2", "--include", "**", "--out", "found.json", "--calls", "2"]) == 0
    found = Profile.load("found.json")
    assert {weight.name for weight in found.weights} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    (graph,) = found.graphs
    assert {step.provenance for step in graph.steps} == {"measured"} and graph.uses.keys() == dict(
        model.named_parameters()
    ).keys()


def test_a_program_without_example_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    program = torch.export.export(nn.Linear(8, 8), (torch.randn(2, 8),))
    program.example_inputs = None
    torch.export.save(program, "model.pt2")
    assert "expected example arguments" in refused(capsys, "profile", "model.pt2", "--include", "**", "--out", "p.json")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("alone", [], "expected example arguments to call it with, found none; return (model, arguments)"),
        ("layered", ["--budget", "1KiB"], "expected a budget of at least"),
        ("layered", ["--budget", "5 apples"], "found str '5 apples'"),
        ("layered", ["--calls", "0"], "--calls: expected a whole number of at least 1, found 0"),
        (
            "layered",
            ["--out", "lost/p.json"],
            "--out: expected a file name in a directory that exists, found 'lost/p.json'",
        ),
        ("layered", ["--out", "."], "--out: expected a file name in a directory that exists, found '.'"),
        ("layered", ["--include", "lost.*"], "lost.*"),
        ("wrong", [], "calling it with its example arguments failed"),
        ("raises", [], "not today"),
        ("nothing", [], "expected 'nothing' in"),
    ],
)
@pytest.mark.filterwarnings("ignore::flextensor_fx.selection.PatternWarning")
def test_what_is_wrong_is_said_in_one_line(module: str, name: str, arguments: list[str], message: str, capsys):
    given = ["profile", f"{module}:{name}", "--include", "**", "--out", "p.json", "--calls", "1", *arguments]
    assert message in refused(capsys, *given)
    assert not Path("p.json").exists() and not registry.living_sessions()
