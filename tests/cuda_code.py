"""Inductor's code for a CUDA device, generated on any machine: a model goes in, its wrapper's text and its schedule come out.

    found = cuda_code(Request(llama_like, share=0.4))

It is the way of the product: Dynamo captures, `place_fetches` puts the fetches in, `inner._inductor` compiles. Only the session
is left out, which has a store: the bytes that may be held come from the request.

The code is generated in a process of its own. What `pretended_cuda` puts back, it puts back, but Inductor keeps patterns and
answers for each device that it has seen, and later tests must not find those, nor this code depend on earlier tests.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from flextensor_fx import inner
from flextensor_fx.config import OffloadConfig
from flextensor_fx.passes.fetches import FetchSpec
from flextensor_fx.passes.pipeline import Limit, Pipeline, PoolTooSmall, lower, preview
from flextensor_fx.passes.place_fetches import place_fetches
from flextensor_fx.passes.realized import Realized
from flextensor_fx.passes.schedule import Schedule
from flextensor_fx.passes.steady_schedule import SteadySchedule
from pretended_cuda import module_on_device, on_device, pretended_cuda

STORE = "m"

Build = Callable[[], tuple[nn.Module, tuple[Any, ...]]]


@dataclass(frozen=True)
class Request:
    """What to generate code for. Everything in it is pickled: functions must be a module's.

    Fields:
        build: makes a model and its inputs; it is called on the meta device.
        share: of the streamed bytes that may be held together; the least that works where that is more. None streams nothing.
        lookahead: as in `Limit`.
        least_bytes: smaller weights stay resident.
        steady: as in `pipeline.lower`.
        index: of the CUDA device.
        mode, options: Inductor's, as in `OffloadConfig`.
        damage: changes the lowered graph, for checks of the checks.
    """

    build: Build
    share: float | None = 0.4
    lookahead: int | None = None
    least_bytes: int = 1024
    steady: bool = False
    index: int = 0
    mode: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    damage: Callable[[Graph], None] | None = None

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index)


@dataclass(frozen=True)
class CudaGraphs:
    """What Inductor found when CUDA graphs were asked for.

    Fields:
        on: whether they stayed on.
        refusal: why it will use none; "" where it will.
        doubts: what it found that a call must keep to, such as no changed input.
    """

    on: bool
    refusal: str
    doubts: tuple[str, ...]


@dataclass(frozen=True)
class Generated:
    """The code of one graph.

    Fields:
        request: it was generated for.
        code: of the wrapper, kernels included.
        schedule: that was written into the graph; None where nothing is streamed.
        weights: what is streamed, by key.
        graph: the lowered graph, as text.
        cuda_graphs: None where they were not asked for.
    """

    request: Request
    code: str
    schedule: Schedule | SteadySchedule | None
    weights: Mapping[str, FetchSpec]
    graph: str
    cuda_graphs: CudaGraphs | None


@pytest.fixture(scope="session")
def cuda_code() -> Iterator[Callable[[Request], Generated]]:
    """Generates the code of a request, once per session; its errors are raised here."""
    pytest.importorskip("triton", reason="Inductor's code for CUDA needs the triton package, which is not installed")
    found: dict[str, Generated] = {}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:

        def of(request: Request) -> Generated:
            name = repr(request)
            if name not in found:
                found[name] = process.submit(generate, request).result()
            return found[name]

        yield of


def generate(request: Request) -> Generated:
    """The code for `request`; in this process, so best in one that does nothing else."""
    with pretended_cuda():
        return _Generation(request).run()


class _Generation:
    def __init__(self, request: Request) -> None:
        self.request = request
        self.codes: list[str] = []
        self.weights: dict[str, FetchSpec] = {}
        self.schedule: Schedule | SteadySchedule | None = None
        self.graph = ""
        self.compiled: list[Any] = []

    def run(self) -> Generated:
        from torch._inductor import compile_fx
        from torch._inductor import config as inductor_config
        from torch._inductor.graph import GraphLowering
        from torch._subclasses import FakeTensorMode

        mode, device = FakeTensorMode(), self.request.device
        with torch.device("meta"):
            model, inputs = self.request.build()
        # Attributes that are tensors but no buffers would stay on the meta device: none of the models has one.
        model = module_on_device(mode, model.to(torch.bfloat16).eval().requires_grad_(False), device)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        given = [on_device(mode, _narrow(value), device) for value in inputs]
        inner_compile = compile_fx.compile_fx_inner

        def kept(*arguments: Any, **options: Any) -> Any:
            self.compiled.append(inner_compile(*arguments, **options))
            return self.compiled[-1]

        torch._dynamo.reset()
        with (
            mode,
            torch.no_grad(),
            # A cache would give text without running what is looked at; a pool of processes would compile kernels.
            inductor_config.patch(force_disable_caches=True, compile_threads=1),
            mock.patch.object(GraphLowering, "save_output_code", staticmethod(self.codes.append)),
            mock.patch.object(compile_fx, "compile_fx_inner", kept),
        ):
            torch.compile(model, backend=partial(self._compile, names), fullgraph=True, dynamic=False)(*given)
        (code,), (compiled,) = self.codes, self.compiled
        return Generated(self.request, code, self.schedule, self.weights, self.graph, self._cuda_graphs(compiled))

    def _compile(self, names: Mapping[int, str], module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        request = self.request
        # Whether it pays to pad a product's operands is measured on the device.
        options = {"shape_padding": False, **request.options}
        config = OffloadConfig(include_patterns=("**",), inner_mode=request.mode, inner_options=options)
        placeholders = module.graph.find_nodes(op="placeholder")
        specs: dict[Node, FetchSpec] = {}
        if request.share is not None:
            for node, value in zip(placeholders, inputs, strict=True):
                if id(value) in names and value.nbytes >= request.least_bytes:
                    key = f"{STORE}:{names[id(value)]}"
                    specs[node] = FetchSpec(key, tuple(value.shape), tuple(value.stride()), value.dtype, value.device)
        self.weights = {spec.key: spec for spec in specs.values()}
        kept = [value for node, value in zip(placeholders, inputs, strict=True) if node not in specs]
        Pipeline(module, "captured").apply(partial(place_fetches, weights=specs))
        results = torch.fx.node.map_arg(module.graph.output_node().args[0], lambda node: node.meta["example_value"])
        inner.compile_inner(
            module, kept, config, lambda graph, realized, _: _Lowering(self, graph, realized), _no_check
        )
        return lambda *_: results  # what is generated cannot be called

    def _cuda_graphs(self, compiled: Any) -> CudaGraphs | None:
        if self.request.mode != "reduce-overhead":
            return None
        info = compiled.cudagraph_info  # None where they are refused
        refusal = compiled.disabled_cudagraphs_reason or ""
        doubts = () if info is None else tuple(info.cudagraph_fail_reasons)
        return CudaGraphs(bool(compiled.fx_kwargs["cudagraphs"]), refusal, doubts)


class _Lowering:
    """As the backend's own, with the request's limit; see `inner.Lowering`."""

    def __init__(self, generation: _Generation, module: GraphModule, realized: Realized) -> None:
        self.generation, self.module, self.realized = generation, module, realized
        request = generation.request
        total = sum(spec.nbytes for spec in generation.weights.values())
        self.limits = {STORE: Limit(int((request.share or 0) * total), request.lookahead)}

    def preview(self) -> str:
        steady = self.generation.request.steady
        try:
            preview(self.module.graph, self.realized, self.limits, steady=steady)
        except PoolTooSmall as error:
            self.limits = {STORE: Limit(error.least, self.generation.request.lookahead)}
        return repr(self.limits)

    def run(self, module: GraphModule) -> None:
        request = self.generation.request
        made = lower(Pipeline(module, "lowered"), self.realized, self.limits, steady=request.steady)
        self.generation.schedule = made.get(STORE)
        if request.damage is not None:
            request.damage(module.graph)
            module.graph.lint()
            module.recompile()
        self.generation.graph = module.print_readable(print_output=False)

    def record(self) -> None:
        pass


def _no_check(module: GraphModule, realized: Realized) -> None:
    pass


def _narrow(value: Any) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(torch.bfloat16) if floating else value
