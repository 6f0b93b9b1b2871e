"""Each check of generated CUDA code can fail: graphs and texts with one fault each."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.fx import Graph

import cuda_models
from compiling import fresh_compiler
from cuda_checks import check
from cuda_code import Generated, Request, cuda_code
from cuda_events import CodeError
from flextensor_fx.passes import ops

__all__ = ["cuda_code", "fresh_compiler"]

Generate = Callable[[Request], Generated]

TIED = Request(cuda_models.tied)


# --- faults in the graph: Inductor generates code for it all the same --------------------------------------------------


def prefetches_wait_for_nothing(graph: Graph) -> None:
    """And stand at the beginning, as if memory did not count."""
    before = graph.find_nodes(op="placeholder")[-1]
    for prefetch in graph.find_nodes(op="call_function", target=ops.prefetch):
        prefetch.update_arg(2, [])
        before.append(prefetch)
        before = prefetch


def waits_come_first(graph: Graph) -> None:
    """Right behind their prefetch: nothing runs beside a copy."""
    for wait in graph.find_nodes(op="call_function", target=ops.wait):
        wait.update_arg(6, [])
        wait.args[0].append(wait)


def offloads_come_first(graph: Graph) -> None:
    """Right behind their wait, before the weight is read."""
    for offload in graph.find_nodes(op="call_function", target=ops.offload):
        offload.update_arg(2, [])
        offload.args[0].append(offload)


def no_offloads(graph: Graph) -> None:
    for offload in graph.find_nodes(op="call_function", target=ops.offload):
        for user in list(offload.users):
            user.update_arg(2 if user.target is ops.prefetch else 6, [n for n in user.args[-1] if n is not offload])
        graph.erase_node(offload)


def tokens_on_the_cpu(graph: Graph) -> None:
    for prefetch in graph.find_nodes(op="call_function", target=ops.prefetch):
        prefetch.update_arg(1, torch.device("cpu"))
        prefetch.meta["val"] = torch.empty_like(prefetch.meta["val"], device="cpu")


def weights_are_copied(graph: Graph) -> None:
    for wait in graph.find_nodes(op="call_function", target=ops.wait):
        readers = [user for user in wait.users if user.target is not ops.offload]
        with graph.inserting_after(wait):
            copy = graph.call_function(torch.ops.aten.clone.default, (wait,))
        copy.meta["val"] = torch.empty_like(wait.meta["val"])
        for reader in readers:
            reader.replace_input_with(wait, copy)


GRAPHS = [
    (prefetches_wait_for_nothing, "is given up|are held"),
    (waits_come_first, "expected after"),
    (offloads_come_first, "is given up|used outside of its wait and offload"),
    (no_offloads, "offload: expected a call for each transfer"),
    (tokens_on_the_cpu, "one guard"),
    (weights_are_copied, "copies it|a copy in generated code"),
]


@pytest.mark.parametrize(("damage", "message"), GRAPHS, ids=[damage.__name__ for damage, _ in GRAPHS])
def test_a_damaged_graph(cuda_code: Generate, damage: Callable[[Graph], None], message: str) -> None:
    with pytest.raises(CodeError, match=message):
        check(cuda_code(replace(TIED, damage=damage)))


def test_cuda_graphs_are_refused_for_a_token_on_the_cpu(cuda_code: Generate) -> None:
    request = replace(TIED, mode="reduce-overhead", options={"graph_partition": False}, damage=tokens_on_the_cpu)
    found = cuda_code(request)
    assert found.cuda_graphs is not None and "cpu" in found.cuda_graphs.refusal


# --- faults in the text ------------------------------------------------------------------------------------------------


def _lines(code: str) -> list[str]:
    return code.splitlines()


def _place(lines: list[str], pattern: str, start: int = 0) -> int:
    return next(n for n in range(start, len(lines)) if re.search(pattern, lines[n]))


def a_reader_before_its_wait(code: str) -> str:
    lines = _lines(code)
    wait = _place(lines, r"wait\.default\.direct\(.*'m:layers\.1\.weight'")
    lines.insert(wait, lines.pop(_place(lines, r"extern_kernels\.mm\(", wait)))
    return "\n".join(lines)


def one_weight_in_the_place_of_another(code: str) -> str:
    """The second product reads the first weight's memory, which is kept for it."""
    lines = _lines(code)
    products = [n for n, line in enumerate(lines) if "extern_kernels.mm(" in line]
    first, second = (re.search(r"reinterpret_tensor\((buf\d+)", lines[n]) for n in products[:2])
    assert first is not None and second is not None
    lines[products[1]] = lines[products[1]].replace(second[1], first[1])
    lines = [line for line in lines if line.strip() != f"del {first[1]}"]
    return "\n".join(lines)


def memory_is_kept(code: str) -> str:
    """A weight's names go only at the end."""
    lines = _lines(code)
    offload = _place(lines, r"offload\.default\.direct\(buf\d+, 'm:layers\.1\.weight'")
    name = re.search(r"direct\((buf\d+)", lines[offload])
    assert name is not None
    drop = _place(lines, rf"del {name[1]}$", offload)
    line = lines.pop(drop)
    lines.insert(_place(lines, r"^        return \(", drop), line)
    return "\n".join(lines)


def memory_is_written_while_it_is_a_weight(code: str) -> str:
    """A product writes into the weight that it reads."""
    lines = _lines(code)
    product = _place(lines, r"extern_kernels\.mm\(")
    weight = re.search(r"reinterpret_tensor\((buf\d+)", lines[product])
    assert weight is not None
    lines[product] = re.sub(r"out=buf\d+", f"out={weight[1]}", lines[product])
    return "\n".join(lines)


def two_guards(code: str) -> str:
    lines = _lines(code)
    place = _place(lines, r"with torch\.cuda\._DeviceGuard\(0\):")
    indent = lines[place][: len(lines[place]) - len(lines[place].lstrip())]
    lines.insert(place, f"{indent}with torch.cuda._DeviceGuard(1):\n{indent}    torch.cuda.set_device(1)")
    return "\n".join(lines)


def memory_on_the_cpu(code: str) -> str:
    return re.sub(r"(buf\d+ = empty_strided_)cuda", r"\1cpu", code, count=1)


def no_assertion_of_alignment(code: str) -> str:
    lines = _lines(code)
    del lines[_place(lines, r"assert_alignment\(buf\d+, 16, 'torch\.ops\.flextensor_fx\.wait")]
    return "\n".join(lines)


def no_hint_of_alignment(code: str) -> str:
    return code.replace("(1,): [['tt.divisibility', 16]], ", "")


def a_copy_to_the_host(code: str) -> str:
    lines = _lines(code)
    product = _place(lines, r"extern_kernels\.mm\(")
    weight = re.search(r"reinterpret_tensor\((buf\d+)", lines[product])
    assert weight is not None
    indent = lines[product][: len(lines[product]) - len(lines[product].lstrip())]
    lines.insert(product, f"{indent}buf999 = torch.ops.aten._to_copy.default({weight[1]}, device=device(type='cpu'))")
    return "\n".join(lines)


TEXTS = [
    (a_reader_before_its_wait, "no memory of that name"),
    (one_weight_in_the_place_of_another, "given up|used outside|kept after"),
    (memory_is_kept, "given up|kept after its offload"),
    (memory_is_written_while_it_is_a_weight, "written while it is a weight"),
    (two_guards, "one guard"),
    (memory_on_the_cpu, "expected only cuda:0"),
    (no_assertion_of_alignment, "nothing asserts"),
    (no_hint_of_alignment, "hint says False"),
    (a_copy_to_the_host, "cpu|a copy in generated code"),
]


@pytest.mark.parametrize(("damage", "message"), TEXTS, ids=[damage.__name__ for damage, _ in TEXTS])
def test_a_damaged_text(cuda_code: Generate, damage: Callable[[str], str], message: str) -> None:
    found = cuda_code(TIED)
    check(found)
    changed = damage(found.code)
    assert changed != found.code
    with pytest.raises(CodeError, match=message):
        check(replace(found, code=changed))
