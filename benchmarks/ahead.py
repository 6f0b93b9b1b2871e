"""Is a program that is rewritten ahead of time as good as the compile backend, and what does the rewriting cost?

1. A Llama, streamed at budgets of 25% and 50%: the time of a call of the rewritten program, compiled in process and as a
   package, over that of the same model compiled by the backend; all from the page cache, calls interleaved, medians. The
   schedules must be the same, and the numbers equal bit for bit.
2. Seconds that `rewrite` takes for graphs of up to 100,000 nodes, and whether that grows linearly.
"""

from __future__ import annotations

import argparse
import copy
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _common import Check, Output, build_llama, command_line, finish, interleave, paired
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, TensorArgument
from torch.fx import Graph, GraphModule

import flextensor_fx


def main() -> None:
    parser = command_line("ahead", __doc__)
    options = parser.parse_args()
    output = Output("ahead", options.quick)
    compare(options, output)
    rewriting(options, output)
    finish(output, options.out)


# --- 1. against the backend --------------------------------------------------------------------------------------------


def compare(options: argparse.Namespace, output: Output) -> None:
    """Calls of a program beside calls of the backend."""
    width, layers, tokens, rounds = (64, 2, 8, 3) if options.quick else (1024, 8, 64, 15)
    sizes = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 1024,
    }
    model = build_llama(**sizes).requires_grad_(False)
    ids = torch.randint(0, 1024, (1, tokens), generator=torch.Generator().manual_seed(0))
    exported = torch.export.export(model, (), {"input_ids": ids})
    rows = []
    for budget in ("25%", "50%"):
        rows.append(_compare_at(budget, model, exported, ids, rounds))
        torch._dynamo.reset()
    output.table("the rewritten program / the compile backend, ms a call", rows)
    for row in rows:
        at = row["budget"]
        output.check(
            Check(f"{at}: schedules that differ", float(not row["same schedule"]), 0),
            Check(f"{at}: elements that differ", float(row["elements that differ"]), 0),
            Check(f"{at}: compiled program / backend", row["program / backend"], 1.03),
        )


def _compare_at(budget: str, model: nn.Module, exported: ExportedProgram, ids: Tensor, rounds: int) -> dict[str, Any]:
    config = {"include_patterns": ["model.layers.*"], "budget": budget}
    program = flextensor_fx.rewrite(exported, config)
    compiled = program.compile()
    backend = torch.compile(model, backend="flextensor", options=config, fullgraph=True)
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    try:
        program.package(folder / "package")
        package = flextensor_fx.load_package(folder / "package")
        calls = {
            "backend": lambda: backend(input_ids=ids).logits,
            "program": lambda: compiled(input_ids=ids).logits,
            "package": lambda: package(input_ids=ids).logits,
            "interpreted": lambda: program(input_ids=ids).logits,
        }
        with torch.no_grad():
            results = {name: call() for name, call in calls.items()}
            interleave(calls, 2)
            seconds = interleave(calls, rounds)
        row = {
            "budget": budget,
            **{f"{name} ms": median(times) * 1e3 for name, times in seconds.items()},
            "program / backend": paired(seconds["program"], seconds["backend"]),
            "package / backend": paired(seconds["package"], seconds["backend"]),
            "same schedule": _schedule(program) == _schedule(backend),
            "elements that differ": int((results["program"] != results["backend"]).sum()),
        }
        package.close()
        return row
    finally:
        shutil.rmtree(folder)
        program.close()
        flextensor_fx.release(model)


def _schedule(owner: Any) -> list[tuple[Any, ...]]:
    made = flextensor_fx.report(owner).graphs[-1].schedule
    return [(t.key.partition(":")[2], t.nbytes, t.issue_at, t.first_use, t.last_use) for t in made.transfers]


# --- 2. what rewriting costs -------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A layer of about fifty nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        for _ in range(24):
            y = torch.sin(y + 1)
        return x + y


def rewriting(options: argparse.Namespace, output: Output) -> None:
    """Seconds of `rewrite` by nodes."""
    rows = []
    for layers in (10, 20) if options.quick else (250, 1000, 2000):
        program = chained(layers)
        nodes = len(program.graph.nodes)
        times = [_rewrite_once(program) for _ in range(3)]
        seconds, code = median(t for t, _ in times), median(c for _, c in times)
        rows.append(
            {"nodes": nodes, "rewrite s": seconds, "us a node": seconds / nodes * 1e6, "its code written s": code}
        )
    output.table("rewriting, by nodes of the graph", rows)
    output.check(
        Check("seconds for 100,000 nodes", rows[-1]["us a node"] * 0.1, 10),
        Check("us a node, most nodes / fewest", rows[-1]["us a node"] / rows[0]["us a node"], 1.5),
    )


def _rewrite_once(program: ExportedProgram) -> tuple[float, float]:
    begin = time.perf_counter()
    made = flextensor_fx.rewrite(program, {"include_patterns": ["layers.*"], "budget": "50%", "min_stream_bytes": 0})
    rewritten = time.perf_counter()
    assert "prefetch" in made.graph_module.code
    end = time.perf_counter()
    made.close()
    return rewritten - begin, end - rewritten


def chained(layers: int) -> ExportedProgram:
    """The program of `layers` layers, made by repeating the graph of one: torch.export takes minutes for as many."""
    torch.manual_seed(0)
    one = torch.export.export(Layer().requires_grad_(False), (torch.ones(2, 16),))
    weight, x = one.graph.find_nodes(op="placeholder")
    body = [node for node in one.graph.nodes if node.op == "call_function"]
    graph, state, specs = Graph(), {}, []
    weights = []
    for number in range(layers):
        name = f"layers.{number}.linear.weight"
        node = graph.placeholder(f"p_{number}")
        node.meta = copy.copy(weight.meta)
        state[name] = nn.Parameter(torch.randn(16, 16), requires_grad=False)
        specs.append(InputSpec(InputKind.PARAMETER, TensorArgument(node.name), name))
        weights.append(node)
    value = graph.placeholder("x")
    value.meta = copy.copy(x.meta)
    specs.append(InputSpec(InputKind.USER_INPUT, TensorArgument(value.name), None))
    for number in range(layers):
        copies = {weight: weights[number], x: value}
        for node in body:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            stack = {f"L__self___layers_{number}": (f"layers.{number}", "ahead.Layer")}
            copies[node].meta["nn_module_stack"] = {"L__self__": ("", "ahead.Layers"), **stack}
        value = copies[body[-1]]
    graph.output((value,))
    (result,) = one.graph_signature.output_specs
    result = copy.copy(result)
    result.arg = TensorArgument(value.name)
    return ExportedProgram(
        GraphModule(nn.Module(), graph),
        graph,
        ExportGraphSignature(specs, [result]),
        state,
        {},
        one.module_call_graph,
        verifiers=one.verifiers,
    )


if __name__ == "__main__":
    main()
