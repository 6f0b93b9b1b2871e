"""The command line: what it prints, and one line on stderr with exit code 2 for whatever is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from flextensor_fx.cli import COMMANDS, main
from reports import model_report

ROOT = Path(__file__).parent.parent

MODELS = """
import torch
from torch import nn

def tiny():
    model = nn.Sequential()
    model.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
    model.head = nn.Linear(8, 4, bias=False)
    return model, (torch.randn(2, 8),)

def alone():
    return tiny()[0]

def fails():
    raise RuntimeError("no weights here\\nand more")

def number():
    return 3

class made:
    tiny = staticmethod(tiny)

value = 3
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the working directory, another one for each test."""
    name = f"models_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a wrong command line gets."""
    try:
        code = main(arguments)
    except SystemExit as exit:
        code = exit.code
    printed = capsys.readouterr()
    assert code == 2 and printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("flextensor-fx")
    return printed.err


class TestInspect:
    @pytest.mark.parametrize("callable_name", ["tiny", "alone", "made.tiny"])
    def test_it_prints_what_the_patterns_select(
        self, models: str, callable_name: str, capsys: pytest.CaptureFixture[str]
    ):
        arguments = ["inspect", f"{models}:{callable_name}", "--include", "layers.*", "lost.*", "--exclude", "layers.2"]
        assert main(arguments) == 0
        out = capsys.readouterr().out
        assert "selection: 2 units, 2 weights, 512 bytes" in out
        assert "layers.2.weight  layers.2" in out and "'lost.*' matched no module" in out
        assert out.endswith("512 B of the 896 B of the model's parameters (57.1%)\n")

    def test_it_reads_exported_programs(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False))
        torch.export.save(torch.export.export(model, (torch.randn(2, 8),)), tmp_path / "tiny.pt2")
        assert main(["inspect", str(tmp_path / "tiny.pt2"), "--include", "0"]) == 0
        assert "256 B of the 384 B" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("model", "message"),
        [
            ("{}:lost", "expected 'lost' in {}, found no such name"),
            ("{}:value", "expected a callable, found int"),
            ("{}:number", "expected a model, (model, args) or (model, args, kwargs), found (int)"),
            ("{}:fails", "calling it without arguments failed: RuntimeError: no weights here; "),
            ("no_such_module_at_all:tiny", "importing no_such_module_at_all failed: ModuleNotFoundError"),
            ("{}", "expected module:callable or a .pt2 file"),
            ("lost.pt2", "expected a file, found none"),
            ("{}.pt2", "expected what torch.export.save wrote"),
        ],
    )
    def test_a_model_that_cannot_be_had(
        self, models: str, model: str, message: str, capsys: pytest.CaptureFixture[str]
    ):
        Path(f"{models}.pt2").write_text("not a zip archive")
        printed = refused(capsys, "inspect", model.format(models), "--include", "**")
        assert message.format(models).removesuffix("; ") in printed

    @pytest.mark.parametrize(
        ("pattern", "message"), [("lost.*", "selects no weight to offload"), ("a..b", "empty segment")]
    )
    def test_patterns_that_cannot_work(
        self, models: str, pattern: str, message: str, capsys: pytest.CaptureFixture[str]
    ):
        assert message in refused(capsys, "inspect", f"{models}:tiny", "--include", pattern)


class TestReport:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        model_report(2).save(tmp_path / "run.json")
        return tmp_path / "run.json"

    def test_it_prints_the_report(self, run: Path, capsys: pytest.CaptureFixture[str]):
        assert main(["report", str(run)]) == 0
        assert capsys.readouterr().out == f"{model_report(2)}\n"

    def test_it_writes_a_page_and_a_trace(self, run: Path, capsys: pytest.CaptureFixture[str]):
        page, trace = run.with_name("run.html"), run.with_name("run.perfetto.json")
        assert main(["report", str(run), "--html", str(page), "--trace", str(trace)]) == 0
        assert capsys.readouterr().out == f"wrote {page}\nwrote {trace}\n"
        assert page.read_text().startswith("<!doctype html>") and json.loads(trace.read_text())["traceEvents"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["lost.json"], "cannot be read: No such file"),
            (["{run}", "--html", "run.txt"], "--html: expected a name that ends in .html, found 'run.txt'"),
            (["{run}", "--trace", "run.json"], "--trace: expected a name that ends in .perfetto.json"),
            (["{run}", "--html", "/no/such/folder/run.html"], "cannot be written"),
            (["{folder}"], "cannot be read: Is a directory"),
            (["{source}"], "expected JSON"),
        ],
    )
    def test_files_that_cannot_be_used(
        self, run: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ):
        filled = [a.format(run=run, folder=run.parent, source=__file__) for a in arguments]
        assert message in refused(capsys, "report", *filled)


class TestCommandLine:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "arguments are required: COMMAND"),
            (["lost"], "invalid choice: 'lost'"),
            (["inspect", "m:f"], "arguments are required: --include"),
            (["report", "run.json", "--lost"], "unrecognized arguments: --lost"),
        ],
    )
    def test_wrong_arguments(self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
        assert message in refused(capsys, *arguments)

    def test_help_names_every_command(self, capsys: pytest.CaptureFixture[str]):
        with pytest.raises(SystemExit, match="0"):
            main(["--help"])
        text = capsys.readouterr().out
        assert all(add.__name__.removeprefix("add_") in text for add in COMMANDS)

    def test_the_package_runs_as_a_module(self, tmp_path: Path):
        done = subprocess.run(
            [sys.executable, "-m", "flextensor_fx", "report", str(tmp_path / "lost.json")],
            check=False, cwd=ROOT, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
