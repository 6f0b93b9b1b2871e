"""The ops by themselves: schemas, fake values, dispatch, and what an interrupted call gives back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from flextensor_fx.errors import StoreError
from flextensor_fx.passes import ops
from flextensor_fx.passes.realized import all_realized
from flextensor_fx.runtime import op_implementations, registry
from flextensor_fx.runtime.engine import Engine
from flextensor_fx.runtime.layout import spec_of
from flextensor_fx.runtime.session_dir import SessionDir
from flextensor_fx.runtime.store import Store
from graphs import CPU, lowered, nodes, trace, weight

assert op_implementations  # importing it registers the implementations
PAGE = 4096
KEY = "m:a"
SPEC = ([32, 32], [32, 1], torch.float32, CPU)  # one page


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """Serves the weights m:a, m:b and m:c, of one page each, through a pool of two."""
    values = {f"m:{name}": torch.full((32, 32), float(number)) for number, name in enumerate("abc", 1)}
    store = Store.create(SessionDir(tmp_path), [spec_of(key, value) for key, value in values.items()])
    for key, value in values.items():
        store.write(key, value)
    engine = Engine("m", store, 2 * PAGE)
    registry.register(engine)
    yield engine
    registry.unregister(engine)
    engine.close()


def held(engine: Engine) -> int:
    """Bytes of the pool that are taken now."""
    gc.collect()
    return engine._reader.arena.stats().live_bytes


def arguments(op: Any) -> tuple[Any, ...]:
    """A right call of `op`."""
    some = [torch.ones(3)]
    if op is ops.fetch:
        return KEY, *SPEC
    if op in (ops.prefetch, ops.prefetch_ahead):
        return KEY, CPU, some
    if op is ops.wait:
        return ops.prefetch(KEY, CPU, []), KEY, *SPEC, some
    return ops.wait(ops.prefetch(KEY, CPU, []), KEY, *SPEC, []), KEY, some


def call(x: Tensor) -> Tensor:
    """Three weights, one after the other, by hand."""
    token, after = ops.prefetch(KEY, CPU, []), []
    for name, following in zip("abc", "bc ", strict=True):
        w = ops.wait(token, f"m:{name}", *SPEC, after)
        x = x @ w
        done = ops.offload(w, f"m:{name}", [x])
        if following.strip():
            token = ops.prefetch(f"m:{following}", CPU, [token, done])
        after = [x]
    return x


@pytest.mark.parametrize("op", ops.ALL_OPS, ids=str)
def test_opcheck(op: Any, engine: Engine) -> None:
    checks = ["test_autograd_registration"]
    if op is not ops.wait:  # the others call the op on copies of its token, which carry no transfer; see the next test
        checks += ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(op, arguments(op), test_utils=checks)


@pytest.mark.filterwarnings("error:.*may not alias:UserWarning")
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_chain_equals_the_eager_one(dynamic: bool, engine: Engine) -> None:
    x = torch.eye(32)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for _ in range(2):
        assert torch.equal(compiled(x), call(x))
    real = ops.wait(ops.prefetch(KEY, CPU, []), KEY, *SPEC, [])
    with FakeTensorMode():
        fake = ops.wait(ops.prefetch(KEY, CPU, []), KEY, *SPEC, [])
    assert (fake.shape, fake.stride(), fake.dtype, fake.device) == (real.shape, real.stride(), real.dtype, real.device)


@pytest.mark.parametrize("op", ops.ALL_OPS, ids=str)
def test_schemas_alias_and_mutate_nothing(op: Any) -> None:
    schema = op._schema
    assert not schema.is_mutable
    assert all(value.alias_info is None for value in (*schema.arguments, *schema.returns))
    assert torch.Tag.pt2_compliant_tag in op.tags and torch.Tag.flexible_layout in op.tags


def test_functionalization_changes_nothing(engine: Engine) -> None:
    x = torch.eye(32)
    plain = make_fx(call, tracing_mode="fake")(x)
    functional = make_fx(torch.func.functionalize(call), tracing_mode="fake")(x)
    assert functional.code == plain.code
    assert torch.equal(functional(x), call(x))


def test_the_ops_carry_no_gradient(engine: Engine) -> None:
    x = torch.eye(32, requires_grad=True)
    y = call(x)
    assert y.requires_grad
    y.sum().backward()
    frozen = [torch.full((32, 32), float(number)) for number in (1, 2, 3)]
    assert x.grad is not None and torch.equal(x.grad, torch.ones(32, 32) @ (frozen[0] @ frozen[1] @ frozen[2]).t())
    assert not ops.prefetch(KEY, CPU, [x]).requires_grad


@pytest.mark.parametrize("stride", [(3, 1), (1, 2)])
def test_fake_values_come_from_the_node_alone(stride: tuple[int, int]) -> None:
    """No store is open: a fake call that asked one would fail."""
    spec = ([2, 3], list(stride), torch.float16, CPU)
    with FakeTensorMode():
        token = ops.prefetch("nowhere:w", CPU, [])
        for value in (ops.fetch("nowhere:w", *spec), ops.wait(token, "nowhere:w", *spec, [token])):
            assert (tuple(value.shape), value.stride(), value.dtype, value.device) == (
                (2, 3),
                stride,
                torch.float16,
                CPU,
            )
        done = ops.offload(value, "nowhere:w", [token])
    for empty in (token, done):
        assert (tuple(empty.shape), empty.dtype, empty.device) == ((0,), torch.uint8, CPU)
    with FakeTensorMode():
        assert ops.fetch("nowhere:w", [2, 3], list(stride), torch.float16, torch.device("cuda")).device.type == "cuda"


def test_calls_without_a_tensor_argument_are_dispatched(engine: Engine) -> None:
    assert ops.prefetch(KEY, CPU, []).numel() == 0
    assert torch.equal(ops.fetch(KEY, *SPEC), torch.ones(32, 32))


def test_no_stream_is_recorded_in_any_graph() -> None:
    module, _ = lowered(trace(lambda x: x @ weight("a") @ weight("b")), pool=64, realized=all_realized)
    assert not [node for node in module.graph.nodes if "record_stream" in str(node.target)]
    assert len(nodes(module.graph, ops.wait)) == 2


# --- lives -------------------------------------------------------------------------------------------------------------


def test_a_token_that_is_dropped_gives_its_memory_back(engine: Engine) -> None:
    tokens = [ops.prefetch(key, CPU, []) for key in ("m:a", "m:b")]
    assert held(engine) == 2 * PAGE
    del tokens
    engine.finish(engine.start("m:c"))  # the reads under way have ended
    assert held(engine) == 0


def test_an_interrupted_call_gives_its_memory_back(engine: Engine) -> None:
    def fail() -> None:
        first, second = ops.prefetch("m:a", CPU, []), ops.prefetch("m:b", CPU, [])
        ops.wait(first, "m:a", *SPEC, [second])
        raise KeyboardInterrupt

    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            fail()
        assert torch.equal(call(torch.eye(32)), torch.full((32, 32), 6.0 * 32 * 32))
    assert held(engine) == 0
    assert engine.stats().overruns == 0


def test_a_weight_lives_as_long_as_its_readers(engine: Engine) -> None:
    """After its offload it counts no longer, but a late reader still finds its bytes."""
    w = ops.wait(ops.prefetch("m:a", CPU, []), "m:a", *SPEC, [])
    view = w.t()
    ops.offload(w, "m:a", [])
    assert held(engine) == 0
    del w
    for _ in range(3):
        for key in ("m:b", "m:c"):
            ops.offload(ops.wait(ops.prefetch(key, CPU, []), key, *SPEC, []), key, [])
    assert torch.equal(view, torch.ones(32, 32))


def test_a_token_serves_one_wait(engine: Engine) -> None:
    token = ops.prefetch(KEY, CPU, [])
    ops.wait(token, KEY, *SPEC, [])
    with pytest.raises(AssertionError, match="its token carries no transfer"):
        ops.wait(token, KEY, *SPEC, [])
    with pytest.raises(
        AssertionError, match=r"compiled for torch.float32 \(4, 4\), the store holds torch.float32 \(32, 32\)"
    ):
        ops.wait(ops.prefetch(KEY, CPU, []), KEY, [4, 4], [4, 1], torch.float32, CPU, [])


def test_a_store_that_is_closed_is_named() -> None:
    with pytest.raises(StoreError, match="expected the store 'gone' to be open"):
        ops.prefetch("gone:a", CPU, [])
