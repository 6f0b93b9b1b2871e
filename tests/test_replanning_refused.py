"""`profile="auto"` where the measured plan cannot be taken: the calls go on as before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import flextensor_fx
from compiling import assert_equal, fresh_compiler, mlp, session_of, stream
from flextensor_fx import replanning
from flextensor_fx.captured import Costs
from flextensor_fx.errors import BudgetError
from flextensor_fx.planner import Plan
from flextensor_fx.runtime.store import Store
from flextensor_fx.session import Session
from test_replanning import CALLS, NBYTES, WIDTH, eight, mlp_like

assert fresh_compiler


def test_a_store_that_takes_no_more_weights_leaves_the_first_plan(monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> None:
        raise flextensor_fx.StoreError("the disk is full")

    def others(session: Session, _: Costs) -> Plan:
        streamed = sorted(
            session.nbytes.keys() - set(list(session.moved)[1:])
        )  # one that is in the store, and all others
        resident = frozenset(session.nbytes.keys() - set(streamed))
        return replace(session.plan, streamed=tuple(streamed), resident=resident, predicted_ms=0.0)

    model, compiled = eight()
    x = torch.randn(2, WIDTH)
    plain = mlp_like(model)
    with torch.no_grad():
        compiled(x)
        plan = session_of(model).plan
        monkeypatch.setattr(Session, "planned", others)
        monkeypatch.setattr(Store, "add", full)
        for _ in range(CALLS - 2):
            assert_equal(compiled(x), plain(x))
        with pytest.warns(UserWarning, match="goes on with its first plan"):
            result = compiled(x)
        assert_equal(result, plain(x))
        for _ in range(3):
            assert_equal(compiled(x), plain(x))
    session = session_of(model)
    assert session.plan is plan and session.moved.keys() == set(plan.streamed)
    stats = session.engine.stats()
    assert stats.overruns == 0 and stats.peak_pool_bytes <= stats.pool_bytes


def test_a_plan_that_the_budget_does_not_allow_leaves_the_first_plan(monkeypatch: pytest.MonkeyPatch):
    refused: list[BudgetError] = []
    planned = Session.planned

    def noting(session: Session, *arguments: Any) -> Any:
        try:
            return planned(session, *arguments)
        except BudgetError as error:
            refused.append(error)
            raise

    class BothWays(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp(6, WIDTH, bias=False)

        def forward(self, x: torch.Tensor, forth: bool) -> torch.Tensor:
            for layer in self.layers if forth else reversed(self.layers):
                x = layer(x)
            return self.layers[0](x) if forth else x

    monkeypatch.setattr(Session, "planned", noting)
    monkeypatch.setattr(replanning, "_WORTH_IT", -1e9)
    model = BothWays()
    compiled = stream(model, budget=NBYTES, profile="auto")
    x = torch.randn(2, WIDTH)
    with torch.no_grad():
        for _ in range(CALLS + 3):
            for forth in (True, False):
                assert_equal(compiled(x, forth), model(x, forth))
    assert refused and not session_of(model).replanned
