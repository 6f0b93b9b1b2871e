"""The command `flextensor-fx plan`: one row per budget, equal to the planner's plans, and one line for whatever is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flextensor_fx.cli import main
from flextensor_fx.cli_plan import LINKS
from flextensor_fx.profile import Machine
from flextensor_fx.simulate import Link
from profiles import MACHINE, MIB, model_profile
from test_cli import refused

PROFILE = model_profile(8, graphs=2)


@pytest.fixture
def file(tmp_path: Path) -> str:
    PROFILE.save(tmp_path / "profile.json")
    return str(tmp_path / "profile.json")


def rows(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> list[list[str]]:
    """The table's rows, cell by cell."""
    assert main(["plan", *arguments]) == code
    lines = capsys.readouterr().out.splitlines()
    (header,) = (at for at, line in enumerate(lines) if line.startswith("budget "))
    return [
        line.replace(" MiB", "MiB").replace(" GiB", "GiB").split(maxsplit=9) for line in lines[header + 1 :] if line
    ]


def test_plan_table(file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, golden):
    monkeypatch.setattr(
        Machine, "here", staticmethod(lambda device="cpu": replace(MACHINE, name="loud", device=device))
    )
    assert main(["plan", file, "--budget", "4MiB, 12MiB,25%,100%"]) == 0
    golden(capsys.readouterr().out)


@pytest.mark.parametrize("objective", ["single", "steady"])
@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("profile", None),
        ("nvme", LINKS["nvme"]),
        ("c2c", LINKS["c2c"]),
        ("100:0.5", Link(0.1, 0.5e6, "given: 100:0.5")),
    ],
)
def test_rows_are_the_planners(file: str, capsys: pytest.CaptureFixture[str], objective, text: str, link: Link | None):
    budget = PROFILE.nbytes * 30 // 100
    made = PROFILE.plan(budget, link=link, objective=objective, lookahead=4)
    (row,) = rows(
        capsys, file, "--budget", "30%", "--link", text, "--objective", objective, "--lookahead", "4"
    )  # fmt: skip
    assert row[0] == "30%" and row[2:4] == [f"{made.predicted_ms:.3f}", f"{made.predicted_stall_ms:.3f}"]
    assert row[5:] == [
        str(len(made.resident)), str(len(made.streamed)), f"{made.lower_bound_ms:.3f}", f"{made.gap:.1%}"
    ]  # fmt: skip


def test_a_budget_that_cannot_work_names_the_least_that_does(file: str, capsys: pytest.CaptureFixture[str]):
    least = PROFILE.plan(None).least_budget
    refused_row, works, below = rows(capsys, file, "--budget", f"1MiB,{least},{least - 1}")
    assert refused_row[:2] == ["1MiB", "1.00MiB"] and works[0] == str(least) and works[2] != "-"
    assert refused_row[9] == below[9] == f"cannot work; the least is {least} bytes ({least / MIB:.2f}MiB)"


def test_where_no_budget_works_the_exit_code_says_so(file: str, capsys: pytest.CaptureFixture[str]):
    assert [row[2] for row in rows(capsys, file, "--budget", "1MiB,2%", code=2)] == ["-", "-"]


def test_many_budgets_are_all_shown(file: str, capsys: pytest.CaptureFixture[str]):
    shares = [f"{share}%" for share in range(30, 60)]
    assert [row[0] for row in rows(capsys, file, "--budget", ",".join(shares))] == shares


def test_explain_gives_every_weight_its_reason(file: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", file, "--budget", "25%", "--explain"]) == 0
    out = capsys.readouterr().out
    why = PROFILE.plan(PROFILE.nbytes // 4).why
    assert len(why) == len(PROFILE.weights) and all(f"{name} " in out and reason in out for name, reason in why.items())
    assert main(["plan", file, "--budget", "1MiB", "--explain"]) == 2
    assert "why" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "1,,2"], "--budget: expected None, bytes as an int, a size such as '2GiB'"),
        (["--budget", "5 apples"], "found str '5 apples'"),
        (["--budget", "120%"], "a share above 0% and up to 100%"),
        (["--budget", "0"], "at least 1 byte"),
        (["--budget", "25%", "--link", "usb"], "--link: expected profile, nvme, pcie4, pcie5, c2c or LATENCY_US:GB_PER_S"),
        (["--budget", "25%", "--link", "1:0"], "found '1:0'"),
        (["--budget", "25%", "--link", "-1:5"], "expected"),
        (["--budget", "25%", "--link", "nan:5"], "found 'nan:5'"),
        (["--budget", "25%", "--link", "1:inf"], "found '1:inf'"),
        (["--budget", "25%", "--link", "1:2:3"], "found '1:2:3'"),
        (["--budget", "25%", "--lookahead", "-1"], "expected"),
        (["--budget", "25%", "--lookahead", "many"], "invalid int value: 'many'"),
        (["--budget", "25%,50%", "--explain"], "--explain: expected a single budget, found 2"),
        (["--budget", "25%", "--objective", "both"], "invalid choice: 'both'"),
        ([], "the following arguments are required: --budget"),
    ],
)  # fmt: skip
def test_wrong_arguments(file: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert message in refused(capsys, "plan", file, *arguments)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lost.json", "cannot be read: No such file"),
        (".", "cannot be read: Is a directory"),
        ("text", "expected JSON"),
        ("other", "give a file that Profile.save wrote"),
    ],
)
def test_files_that_are_no_profiles(tmp_path: Path, name: str, message: str, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "text").write_text("no JSON\nat all")
    (tmp_path / "other").write_text("{}")
    assert message in refused(capsys, "plan", str(tmp_path / name), "--budget", "25%")


def test_help_says_what_the_links_are(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        main(["plan", "--help"])
    out = capsys.readouterr().out
    assert all(f"  {name} " in out and link.provenance in out for name, link in LINKS.items())
