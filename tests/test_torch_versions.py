"""What is taken of torch's internals is in few places, and means on this release what the package takes it for."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flextensor_fx
from flextensor_fx import _frames, _torch_versions

PACKAGE = Path(flextensor_fx.__file__).parent

# By module of the package, what it may name of torch that is private, with what is below it.
ALLOWED = {
    "_torch_versions.py": ("torch",),
    "_guards.py": ("torch._guards", "torch._dynamo.guards"),
    "inner.py": ("torch._inductor", "torch._functorch.config", "torch._dynamo.backends"),
    "direct_calls.py": ("torch._inductor",),
    "device_graphs.py": ("torch._inductor.config",),
    "runtime/parameter.py": ("torch._C._disabled_torch_function_impl", "torch._subclasses.fake_tensor.FakeTensor"),
    # passes/ imports torch and itself only.
    "passes/retarget.py": ("torch._subclasses.fake_tensor.FakeTensor",),
    "passes/metadata.py": ("torch._guards.detect_fake_mode",),
    "passes/gather_rows.py": ("torch._guards.detect_fake_mode",),
}
# Types of what stands in a graph, and what torch itself documents as the way to walk nested values.
EVERYWHERE = (
    "torch._ops.HigherOrderOperator",
    "torch._ops.OpOverload",
    "torch._ops.OpOverloadPacket",
    "torch.utils._pytree",
    "torch.ops",
)


_PRIVATE = re.compile(r"\._(?!_)")


def private_names(tree: ast.Module) -> Iterator[str]:
    """Dotted names under torch with a part that starts with an underscore; what is imported from a module, with its name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names if not node.level]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        yield from (n for n in names if n.startswith("torch.") and _PRIVATE.search(n))


def is_under(name: str, allowed: tuple[str, ...]) -> bool:
    # An attribute chain is seen with each of its beginnings too.
    return any(name == one or name.startswith(f"{one}.") or one.startswith(f"{name}.") for one in allowed)


def test_internals_are_named_where_they_may_be_and_nowhere_else() -> None:
    strays = {}
    for file in sorted({*PACKAGE.rglob("*.py"), *(PACKAGE / "passes").glob("*.py")}):  # rglob follows no link
        place = str(file.relative_to(PACKAGE))
        allowed = (*ALLOWED.get(place, ()), *EVERYWHERE)
        found = sorted({n for n in private_names(ast.parse(file.read_text())) if not is_under(n, allowed)})
        if found:
            strays[place] = found
    assert strays == {}, "take it from _torch_versions.py, or say here why it is named there"


def test_the_scan_sees_imports_and_attributes() -> None:
    text = "import torch._dynamo\nfrom torch._C import x\nfrom torch.utils._python_dispatch import y\nz = torch.autograd._w()\n"
    assert list(private_names(ast.parse(text))) == [
        "torch._dynamo", "torch._C.x", "torch.utils._python_dispatch.y", "torch.autograd._w",
    ]  # fmt: skip


def test_uses_of_memory_are_those_of_tensors_and_of_the_question() -> None:
    tensor = torch.zeros(4)
    alone = _torch_versions.storage_uses(tensor)
    view = tensor[1:]
    assert (alone, _torch_versions.storage_uses(tensor)) == (2, 3)
    del view
    assert _torch_versions.storage_uses(tensor) == 2


def test_nothing_is_compiled_outside_a_compilation() -> None:
    assert _torch_versions.root_frame() is None
    assert not _torch_versions.profiler_enabled()
    with torch.profiler.profile():
        assert _torch_versions.profiler_enabled()


def test_the_compilation_that_runs_is_seen() -> None:
    seen = {}

    def backend(module: torch.fx.GraphModule, _: object) -> object:
        (node, *_) = (n for n in module.graph.find_nodes(op="placeholder") if "weight" in str(n.target))
        seen["code"] = _torch_versions.root_frame().f_code
        seen["source"] = _torch_versions.source_name(_torch_versions.source_of(node))
        return module.forward

    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        torch.compile(model, backend=backend)(torch.ones(2, 4))
    assert seen["code"].co_name in ("forward", "inner")
    assert eval(seen["source"], {"L": {"fn": model, "self": model}}) is model[0].weight


@pytest.mark.parametrize("wrap", [lambda backend: backend, torch.compiler.disable], ids=["bare", "disabled"])
def test_the_model_is_found_through_what_wraps_the_backend(wrap: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    seen = []

    def backend(module: torch.fx.GraphModule, _: object) -> object:
        seen.append((_frames.compiled_callable(), _frames.outer_modules()))
        return module.forward

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    model = Model()
    torch.compile(model, backend=wrap(backend))(torch.ones(2))
    ((callable_, outer),) = seen
    assert _frames.unwrap(getattr(callable_, "__self__", callable_)) is model
    assert outer[0] is model
