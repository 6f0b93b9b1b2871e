"""Lookups in streamed tables: the rows are taken out at once, and what the compiler sees keeps its form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flextensor_fx
from compiling import assert_equal, fresh_compiler, resident, stream
from conftest import Golden
from flextensor_fx.passes import ops
from flextensor_fx.passes.gather_rows import gather_rows
from flextensor_fx.runtime import op_implementations
from graphs import code, lowered, nodes, trace, weight

__all__ = ["fresh_compiler"]
assert op_implementations  # importing it registers the implementations


def test_gather_rows(golden: Golden) -> None:
    module = trace(
        lambda ids: F.embedding(ids, weight("table", 10, 4), padding_idx=1) * 2, torch.zeros(2, 3, dtype=torch.int64)
    )
    gather_rows(module.graph)
    module.graph.lint()
    module.recompile()
    golden(code(module))


@pytest.mark.parametrize("symbolic", [False, True])
def test_the_table_is_given_up_after_its_lookup(symbolic: bool) -> None:
    def look_up(ids: Tensor, x: Tensor) -> Tensor:
        found = F.embedding(ids, weight("table", 10, 4))
        return (found @ weight("a") + found) @ weight("b")

    ids = torch.zeros(2, 3, dtype=torch.int64)
    module, _ = lowered(trace(look_up, ids, torch.ones(1), symbolic=symbolic), pool=160)
    (taken,) = nodes(module.graph, ops.rows)
    (given_up,) = (node for node in nodes(module.graph, ops.offload) if node.args[1] == "m:table")
    after = [node for node in given_up.all_input_nodes if node.target is not ops.wait]
    assert len(after) == 2 and all(node.args[0] is taken for node in after)


def test_a_graph_without_streamed_tables_is_left_untouched() -> None:
    tables = (
        lambda ids, table: F.embedding(ids, table) @ weight("a"),  # resident
        lambda ids, table: F.embedding(torch.arange(3), weight("table", 10, 4)),  # positions: no input feeds them
        lambda ids, table: F.embedding(ids, weight("table", 10, 4) * 2),  # not looked up itself
    )
    for function in tables:
        module = trace(function, torch.zeros(2, 3, dtype=torch.int64), torch.ones(10, 4))
        before = code(module)
        gather_rows(module.graph)
        module.recompile()
        assert code(module) == before


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_rows(dtype: torch.dtype) -> None:
    table, indices = torch.randn(10, 4), torch.tensor([[3, 0, 9], [3, 3, 1]], dtype=dtype).t()
    rows, places = ops.rows(table, indices)
    assert rows.shape == (6, 4) and places.dtype == dtype
    assert_equal(rows[places.long()], table[indices.long()])
    torch.library.opcheck(ops.rows, (table, indices))


def test_values_of_16_bits_are_rounded_where_a_resident_table_has_them_rounded() -> None:
    """A chain of sums over the looked-up values: the compiler keeps it in 32 bits up to the sum that it writes out."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(40, 48)
            self.layers = nn.ModuleList(nn.Linear(48, 48, bias=False) for _ in range(5))

        def forward(self, ids: Tensor) -> Tensor:
            x = self.table(ids)
            for layer in self.layers:
                x = x + layer(F.rms_norm(x, (48,)))
            return x

    model = Residual().to(torch.bfloat16).requires_grad_(False)
    ids = torch.randint(0, 40, (2, 9))
    expected = resident(model, inner="inductor")(ids)
    compiled = stream(model, inner="inductor", budget="60%")
    assert_equal(compiled(ids), expected)
    assert "table.weight" in flextensor_fx.report(model).plan.streamed
    with pytest.raises((IndexError, RuntimeError)):
        compiled(ids + 40)
    assert_equal(compiled(ids), expected)
