"""Exported forms of many architectures: rewritten, saved and loaded, they give the numbers of the exported program."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import flextensor_fx
from compiling import fresh_compiler
from model_zoo import CASES, Case
from programs import assert_same, streaming

assert fresh_compiler  # a fixture of every test here
pytestmark = pytest.mark.models

_NAMESPACES = {"mixtral": ["transformers"]}


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_model_is_rewritten_saved_and_loaded(case: Case, tmp_path: Path) -> None:
    model, inputs = case.make()
    exported = torch.export.export(model, (), dict(inputs))
    with torch.no_grad():
        expected = exported.module()(**inputs)
    program = streaming(exported, budget="60%")
    assert 0 < len(program.session.streamed) < len(program.session.nbytes)
    found = program(**inputs)
    assert_same(found, expected)
    program.save(tmp_path / "program")
    program.close()
    again = flextensor_fx.load_program(tmp_path / "program", namespaces=_NAMESPACES.get(case.name, ()))
    assert_same(again(**inputs), expected)
    stats = flextensor_fx.report(again).stats
    assert stats is not None and stats.overruns == 0 and stats.transfers >= len(again.session.streamed)
