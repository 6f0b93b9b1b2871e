"""Copies that arrive late, into memory full of NaN: whoever reads a weight without a wait before it is seen by its numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compiling import Inner, assert_equal, fresh_compiler, mlp, resident, stream
from flextensor_fx.runtime.engine import Engine
from flextensor_fx.runtime.layout import tensor_over
from flextensor_fx.runtime.reader import Transfer

__all__ = ["fresh_compiler"]

_DELAY = "FLEXTENSOR_FX_TEST_DELAY_MS"


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_every_reader_follows_its_wait(inner: Inner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_DELAY, "20")
    model, x = mlp(depth=4, width=32).requires_grad_(False), torch.randn(2, 32)
    expected = resident(model, inner=inner)(x)
    torch._dynamo.reset()
    compiled = stream(model, inner=inner, budget="50%")
    for _ in range(2):
        assert_equal(compiled(x), expected)


def test_a_wait_that_does_not_wait_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mode itself: with this fault seeded, the numbers must be wrong."""
    monkeypatch.setenv(_DELAY, "200")

    def finish_at_once(self: Engine, transfer: Transfer) -> torch.Tensor:
        block = transfer.block
        assert block is not None
        return tensor_over(self.store.spec(transfer.key), block.array, transfer.shift)

    model, x = mlp(depth=2, width=32).requires_grad_(False), torch.randn(2, 32)
    expected = model(x)
    compiled = stream(model, budget="60%")
    assert_equal(compiled(x), expected)
    with monkeypatch.context() as patched:
        patched.setattr(Engine, "finish", finish_at_once)
        assert compiled(x).isnan().any()
    assert_equal(compiled(x), expected)


@pytest.mark.slow
def test_the_core_of_the_tests_passes_with_late_copies() -> None:
    here = Path(__file__).parent
    chosen = [str(here / name) for name in ("test_ops.py", "test_properties.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *chosen]
    done = subprocess.run(
        command,
        env={**os.environ, _DELAY: "2"},
        cwd=here.parent,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
