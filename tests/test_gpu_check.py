"""The check for machines with a GPU, run here: it must work before a GPU is spent on it, and see what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gpu_check
import gpu_setting
import pytest
import torch
from gpu_setting import WrongNumber, require_equal

SCRIPT = Path(gpu_check.__file__)


def test_one_bit_is_reported_with_its_place() -> None:
    right = torch.linspace(1, 2, 12).view(3, 4).bfloat16()
    wrong = right.clone()
    wrong[1, 2] += 2**-7
    require_equal("result", "somewhere", right.clone(), right)
    with pytest.raises(WrongNumber) as caught:
        require_equal("result", "somewhere", wrong, right, lambda: right)
    text = str(caught.value)
    assert text.startswith(
        "WRONG  what: result; where: somewhere; expected: 1.54688 at (1, 2), as resident; found: 1.55469 there"
    )
    assert "1 of 12 values differ" in text and "computed again by itself it is right" in text


@pytest.mark.parametrize("found", [torch.zeros(2), torch.zeros(3, dtype=torch.float64)])
def test_another_form_is_wrong(found: torch.Tensor) -> None:
    with pytest.raises(WrongNumber, match=r"expected: float32 \(3,\) on cpu"):
        require_equal("result", "somewhere", found, torch.zeros(3))


def test_equal_numbers_that_say_nothing_are_wrong() -> None:
    with pytest.raises(WrongNumber, match="standard deviation 0"):
        gpu_setting.require_telling("somewhere", torch.ones(8))


def test_a_write_that_is_lost_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Stands for any fault of the streaming: the resident model is given a value that the streamed one is not."""
    find = torch.nn.Module.get_parameter

    def another(module: torch.nn.Module, name: str) -> torch.nn.Parameter:
        parameter = find(module, name)
        return torch.nn.Parameter(parameter.detach().clone()) if name == "layers.1.mlp.down.weight" else parameter

    monkeypatch.setattr(torch.nn.Module, "get_parameter", another)
    out = tmp_path / "found.json"
    monkeypatch.setattr(
        sys, "argv", ["gpu_check.py", "--device", "cpu", "--quick", "--part", "correctness", "--out", str(out)]
    )
    threads = torch.get_num_threads()
    try:
        with pytest.raises(SystemExit) as ended:
            gpu_check.main()
    finally:
        torch.set_num_threads(threads)
    assert ended.value.code == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WRONG")]
    assert "what: result 0 after a write to all weights; where: llama, aot_eager, 10% single; expected: " in line
    rows = json.loads(out.read_text())["rows"]
    assert [row["what"] for row in rows if row["table"] == "wrong"] == [line]


def test_no_time_left_is_said_and_counts_as_unchecked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["gpu_check.py", "--device", "cpu", "--limit", "-1", "--out", str(tmp_path / "found.json")]
    )
    monkeypatch.setattr(gpu_check.faulthandler, "dump_traceback_later", lambda *_, **__: None)
    threads = torch.get_num_threads()
    try:
        with pytest.raises(SystemExit) as ended:
            gpu_check.main()
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert ended.value.code == 1
    for case in ("llama, aot_eager", "training", "few tokens, the link is the limit", "host time per transfer"):
        assert f"{case}: no time left" in printed
    assert "not all was checked" in printed


@pytest.mark.slow
def test_the_small_form_runs_through_without_the_package_installed(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--quick", "--out", str(out)]
    run = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=600, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "all that was asked for was checked" in run.stdout
    found = json.loads(out.read_text())
    columns = {row["column"] for row in found["rows"] if "MB held" in row}
    assert {"resident", "25%", "hooks, eager", "hooks, compiled by layer", "plain pinned copies"} <= columns
    held = [check for check in found["checks"] if "held / budget" in check["what"]]
    assert held and all(check["value"] <= check["bound"] for check in held)
