"""`profile="auto"` where several threads call: the switch waits for compilations, and calls that it overtakes are right."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.convert_frame import compile_lock
from torch.fx import GraphModule

from compiling import assert_equal, fresh_compiler, mlp, resident, session_of, stream, streamed_names
from flextensor_fx import backend
from flextensor_fx.replanning import Replanner
from flextensor_fx.runtime.parameter import OffloadedParameter

assert fresh_compiler

WIDTH = 64
NBYTES = 4 * WIDTH * WIDTH


def swap(model: nn.Module) -> None:
    """Has the session take a plan that streams what is resident now, and keeps as many others."""
    session, before = session_of(model), streamed_names(model)
    after = set(sorted(session.nbytes.keys() - before) + sorted(before)[: 2 * len(before) - len(session.nbytes)])
    session.watcher = None
    made = replace(session.plan, streamed=tuple(sorted(after)), resident=frozenset(session.nbytes.keys() - after))
    session.adopt(session.costs, made)
    assert before - after and after - before


def test_the_switch_waits_while_another_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("flextensor_fx.replanning.replan", lambda *_: asked.append(1))
    model = mlp(8, WIDTH, bias=False)
    compiled = stream(model, budget=6 * NBYTES, profile="auto")
    x = torch.randn(2, WIDTH)
    compiling, end = threading.Event(), threading.Event()

    def compile_for_long() -> None:
        with compile_lock:
            compiling.set()
            end.wait()

    thread = threading.Thread(target=compile_for_long)
    with torch.no_grad():
        compiled(x)
        thread.start()
        try:
            assert compiling.wait(10)
            for _ in range(9):
                compiled(x)
            assert not asked and isinstance(session_of(model).watcher, Replanner)
        finally:
            end.set()
            thread.join()
        compiled(x)
    assert asked == [1] and session_of(model).watcher is None


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_call_that_the_switch_overtakes_is_right(inner: Any) -> None:
    model = mlp(8, WIDTH)
    calls: list[tuple[Any, Sequence[Any]]] = []

    def noting(module: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        run = backend.flextensor(module, inputs, **options)

        def noted(*arguments: Any) -> Any:
            calls.append((run, arguments))
            return run(*arguments)

        return noted

    options = {"include_patterns": ["*.weight"], "min_stream_bytes": 0, "inner_backend": inner, "budget": 6 * NBYTES}
    x = torch.randn(2, WIDTH)
    with torch.no_grad():
        expected = resident(model, inner=inner)(x)
        compiled = torch.compile(model, backend=noting, options=options | {"profile": "auto"})
        assert_equal(compiled(x), expected)
        names = {id(p): name for name, p in model.named_parameters()}
        compiled(x)
        run, early = calls[-1]
        by_name = [names.get(id(a)) for a in early]
        swap(model)
        held = dict(model.named_parameters())
        # As Dynamo passes them if the switch comes after it has checked its guards, and before it has fetched the arguments.
        late = [held.get(name, a) if name else a for name, a in zip(by_name, early, strict=True)]
        assert sum(isinstance(a, OffloadedParameter) for a in late) > 2
        for given in (early, late):
            (result,) = run(*given)
            assert isinstance(result, Tensor)
            assert_equal(result, expected)
        assert_equal(compiled(x), expected)
