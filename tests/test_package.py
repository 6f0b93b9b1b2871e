"""Programs compiled by AOTInductor, in packages that another process loads without a compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flextensor_fx
from compiling import fresh_compiler
from flextensor_fx import OffloadError, ProgramError
from programs import FORMS, assert_same, streaming

assert fresh_compiler  # a fixture of every test here
pytestmark = pytest.mark.slow

_LOADER = """
import sys, torch, flextensor_fx
path, call = sys.argv[1:]
package = flextensor_fx.load_package(path)
results = [package(*args, **kwargs) for args, kwargs in torch.load(call)]
assert "programs" not in sys.modules
stats = flextensor_fx.report(package).stats
torch.save((results, stats.transfers, stats.overruns), path + ".out")
package.close()
"""


def _run(package: Path, calls: list[Any]) -> tuple[list[Any], int, int]:
    call = package.parent / "calls"
    torch.save(calls, call)
    subprocess.run([sys.executable, "-c", _LOADER, package, call], check=True, timeout=300)
    return torch.load(f"{package}.out")


def test_a_package_runs_in_another_process_with_the_compiled_programs_numbers(tmp_path: Path) -> None:
    form = FORMS["dynamic"]
    _, exported = form.exported()
    program = streaming(exported, budget="60%")
    program.package(tmp_path / "package")
    compiled = program.compile()
    calls = [((torch.randn(rows, 32),), form.kwargs) for rows in (3, 9, 64)]
    expected = [compiled(*args, **kwargs) for args, kwargs in calls]
    found, transfers, overruns = _run(tmp_path / "package", calls)
    for one, want in zip(found, expected, strict=True):
        assert_same(one, want)
    assert transfers == 3 * len(program.session.streamed) and overruns == 0


def test_what_a_package_writes_to_its_inputs_is_seen_and_it_checks_them(tmp_path: Path) -> None:
    form = FORMS["writes-input"]
    program = streaming(form.exported()[1])
    program.package(tmp_path / "package")
    package = flextensor_fx.load_package(tmp_path / "package")
    x, cache = form.args
    mine, theirs = cache.clone(), cache.clone()
    torch.testing.assert_close(package(x, mine), program(x, theirs))
    torch.testing.assert_close(mine, theirs)
    with pytest.raises(OffloadError, match=r"args\[0\]: expected float32\[2, 8\]"):
        package(x.double(), mine)
    with pytest.raises(ProgramError, match="is open already"):
        flextensor_fx.load_package(tmp_path / "package")
    package.close()
    flextensor_fx.load_package(tmp_path / "package").close()


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    program = streaming(FORMS["repeated"].exported()[1])
    program.package(tmp_path / "package")
    with pytest.raises(
        ProgramError, match=r"expected the name of a directory that can be made.*which is there already"
    ):
        program.package(tmp_path / "package")
    with pytest.raises(ProgramError, match="in no directory"):
        program.package(tmp_path / "absent" / "package")
    other = streaming(FORMS["repeated"].exported()[1], budget="90%")
    other.save(tmp_path / "package" / "program.safetensors")
    with pytest.raises(ProgramError, match="expected the program that its graph was compiled from"):
        flextensor_fx.load_package(tmp_path / "package")
    with pytest.raises(ProgramError, match="cannot be read"):
        flextensor_fx.load_package(tmp_path)
    with pytest.raises(ProgramError, match=r"found a file; .* flextensor_fx\.load_program"):
        flextensor_fx.load_package(tmp_path / "package" / "program.safetensors")
    with pytest.raises(ProgramError, match="found nothing; check the path"):
        flextensor_fx.load_package(tmp_path / "absent")
    assert [folder.name for folder in tmp_path.iterdir()] == ["package"]


class _Parts(nn.Module):
    """Tensors that are parts of others, and one that repeats an element."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(8, 16)
        self.part = nn.Parameter(whole[:, 3:11], requires_grad=False)
        self.swapped = nn.Parameter(torch.randn(8, 8).t(), requires_grad=False)
        self.register_buffer("gaps", whole[::2, :8])
        self.register_buffer("expanded", torch.ones(1).expand(8))
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) @ self.part @ self.swapped + self.gaps.sum(0) + self.expanded


def test_layouts_are_those_that_a_compiled_graph_takes_for_granted(tmp_path: Path) -> None:
    model, x = _Parts(), torch.randn(6, 8)
    program = streaming(torch.export.export(model, (x,)))
    program.package(tmp_path / "package")
    package = flextensor_fx.load_package(tmp_path / "package")
    with torch.no_grad():
        expected = model(x)
    torch.testing.assert_close(program(x), expected)
    torch.testing.assert_close(package(x), expected)
    torch.testing.assert_close(package(x.t().contiguous().t()), expected)
    package.close()


def test_an_argument_that_is_written_to_must_be_laid_out_as_exported(tmp_path: Path) -> None:
    form = FORMS["writes-input"]
    program = streaming(form.exported()[1])
    program.package(tmp_path / "package")
    package = flextensor_fx.load_package(tmp_path / "package")
    with pytest.raises(OffloadError, match=r"args\[1\]: expected stride of a contiguous tensor"):
        package(form.args[0], torch.zeros(4, 2).t())
    package.close()
