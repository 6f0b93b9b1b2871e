"""The inner compilers: each gets the graph after capture, and lowers its fetches where that compiler's graph is nearly final.

Inductor's patterns match values with one reader (a product and the sum behind it become one call), and an `after` edge is a
reader: so its graph is lowered behind all patterns. Its cache is asked before that. The limits that shape the schedule are in the
cache's key, and where the cache answers, a preview stands for the schedule that was written.
"""

from __future__ import annotations

import functools
import hashlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch.fx import Graph, GraphModule

from .config import OffloadConfig
from .direct_calls import lower_to_direct_calls
from .errors import ConfigError
from .passes.metadata import value_of
from .passes.realized import Realized, all_realized, aten_realized
from .passes.tag_recompute import tag_recompute

Kind = Literal["inference", "forward", "backward"]
"""What a graph is: one by itself, the forward of one with a backward, or that backward."""


class Lowering(Protocol):
    """The lowering of one graph."""

    def preview(self) -> str:
        """Schedules the graph as it is now and changes nothing. Returns all that shapes the lowered graph beside the graph."""
        ...

    def run(self, module: GraphModule) -> None:
        """Lowers the fetches of `module`, in place: the same graph, or what the inner compiler has made of it."""
        ...

    def record(self) -> None:
        """Notes what came of the graph: what `run` did, or the preview where a cache had the result."""
        ...


Lower = Callable[[GraphModule, Realized, Kind], Lowering]
"""Begins the lowering of a graph."""

Check = Callable[[GraphModule, Realized], None]
"""Looks at a backward graph when it is made. It is lowered at its first call, which is too late to plan for a larger pool."""

Compiled = Callable[..., Any]

Inner = Callable[[GraphModule, Sequence[Any], OffloadConfig, Lower, Check], Compiled]
"""An inner compiler, called as `compile_inner`."""


def compile_inner(
    module: GraphModule, inputs: Sequence[Any], config: OffloadConfig, lower: Lower, check: Check
) -> Compiled:
    """Compiles `module` with the configured inner backend.

    Args:
        module: a graph as Dynamo captured it, fetches placed; it is taken over.
        inputs: one example per placeholder.
        lower: called once per graph that the inner backend makes of it; see `Lowering`.
        check: called with each backward graph before that.
    """
    return {"inductor": _inductor, "aot_eager": _aot_eager, "eager": _eager}[config.inner_backend](
        module, inputs, config, lower, check
    )


def _eager(module: GraphModule, inputs: Sequence[Any], config: OffloadConfig, lower: Lower, check: Check) -> Compiled:
    if torch.is_grad_enabled():
        # Autograd would save every fetched weight for the backward; only a joint graph can fetch it again instead.
        return _aot_eager(module, inputs, config, lower, check)
    _lower_now(lower(module, all_realized, "inference"), module)
    return module.forward


def _lower_now(lowering: Lowering, module: GraphModule) -> None:
    lowering.run(module)
    lowering.record()


def _aot_eager(
    module: GraphModule, inputs: Sequence[Any], config: OffloadConfig, lower: Lower, check: Check
) -> Compiled:
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    def compiler(graph: GraphModule, _: Sequence[Any], *, kind: Kind) -> Compiled:
        _lower_now(lower(graph, all_realized, kind), graph)
        return make_boxed_func(graph.forward)

    def partition(joint: GraphModule, joint_inputs: Sequence[Any], **options: Any) -> Any:
        tag_recompute(joint.graph)
        forward, backward = min_cut_rematerialization_partition(joint, joint_inputs, **options)
        check(backward, all_realized)
        return forward, backward

    with _without_autograd_cache():
        return aot_autograd(
            fw_compiler=functools.partial(compiler, kind="forward"),
            bw_compiler=functools.partial(compiler, kind="backward"),
            inference_compiler=functools.partial(compiler, kind="inference"),
            partition_fn=partition,
            keep_inference_input_mutations=True,
        )(module, inputs)


def _inductor(
    module: GraphModule, inputs: Sequence[Any], config: OffloadConfig, lower: Lower, check: Check
) -> Compiled:
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    lower_to_direct_calls()

    def lower_then_compile(graph: GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        kind = "backward" if options.get("is_backward") else "inference" if options.get("is_inference") else "forward"
        lowering = lower(graph, aten_realized, kind)
        after_patterns = _lowering_pass(inductor_config.post_grad_custom_post_pass, lowering)
        patch = inductor_config.patch(
            post_grad_custom_post_pass=after_patterns,
            # Both have run, and the pass's name may differ from call to call: in the cache's key nothing would hit.
            joint_custom_pre_pass=None,
            custom_partitioner_fn=None,
        )
        with patch:
            try:
                compiled = compile_fx_inner(graph, example_inputs, **options)
            except Exception:
                if after_patterns.error is not None:  # Inductor wraps it
                    raise after_patterns.error from None
                raise
        lowering.record()
        return compiled

    options = _inductor_options(config, check)
    with _without_autograd_cache():
        compiled: Any = compile_fx(module, inputs, inner_compile=lower_then_compile, config_patches=options)
    return compiled


def compile_ahead(
    module: GraphModule, inputs: Sequence[Any], config: OffloadConfig, lower: Lower, check: Check, *, file: str
) -> Compiled:
    """As `compile_inner`, by AOTInductor to a package of its own in `file`; with gradients off.

    Args:
        inputs: not used: fake values are in the graph.
    """
    from torch._inductor import aot_compile
    from torch._inductor.package import package_aoti

    lower_to_direct_calls()

    def lower_and_record(graph: Graph) -> None:
        assert graph.owning_module is not None
        lowering = lower(graph.owning_module, aten_realized, "inference")
        try:
            lowering.run(graph.owning_module)
        except Exception as error:  # Inductor wraps it
            made.error = error
            raise
        lowering.record()

    options = user_options(config)
    made: Any = _followed_by(options.get("post_grad_custom_post_pass"), lower_and_record, uuid.uuid4().hex)
    made.error = None
    options |= {"post_grad_custom_post_pass": made, "aot_inductor.package": True}
    examples = tuple(value_of(node) for node in module.graph.find_nodes(op="placeholder"))
    try:
        parts = aot_compile(module, examples, options=options)
    except Exception:
        if made.error is not None:
            raise made.error from None
        raise
    assert isinstance(parts, list)
    package_aoti(file, parts)
    return module.forward


def compile_alone(module: GraphModule, inputs: Sequence[Any], config: OffloadConfig) -> Compiled:
    """The inner backend alone, for a graph without offloaded weights."""
    if config.inner_backend == "inductor":
        from torch._inductor.compile_fx import compile_fx

        compiled: Any = compile_fx(module, inputs, config_patches=user_options(config))
        return compiled
    if config.inner_backend == "aot_eager":
        from torch._dynamo.backends.registry import lookup_backend

        return lookup_backend("aot_eager")(module, list(inputs))
    return module.forward


def _without_autograd_cache() -> Any:
    # AOTAutograd's cache is keyed by the graph before lowering and would return a graph with another budget's schedule.
    # Inductor's own cache is keyed by the lowered graph and stays on.
    from torch._functorch import config as autograd_config

    return autograd_config.patch(enable_autograd_cache=False)


def user_options(config: OffloadConfig) -> dict[str, Any]:
    """Inductor's options: those of the mode, and over them the user's.

    Raises:
        ConfigError: Inductor knows no such mode or option.
    """
    import torch._inductor
    from torch._inductor import config as inductor_config

    options: dict[str, Any] = {}
    if config.inner_mode is not None:
        modes: Mapping[str, Any] = torch._inductor.list_mode_options()
        if config.inner_mode not in modes and config.inner_mode != "default":
            raise ConfigError(
                f"option 'inner_mode': expected one of {sorted([*modes, 'default'])}, found {config.inner_mode!r}"
            )
        options |= modes.get(config.inner_mode, {})
    for name, value in (config.inner_options or {}).items():
        name = name.replace("-", "_")
        if not hasattr(inductor_config, name.split(".")[0]):
            raise ConfigError(
                f"option 'inner_options': Inductor has no option {name!r}; see torch._inductor.list_options()"
            )
        options[name] = value
    return options


def _inductor_options(config: OffloadConfig, check: Check) -> dict[str, Any]:
    from torch._functorch import config as autograd_config
    from torch._inductor import config as inductor_config

    options = user_options(config)
    # TORCHINDUCTOR_AUTOGRAD_CACHE=1 overrides the switch that turns AOTAutograd's cache off. A name of its own for every
    # compilation keeps that cache from returning another budget's schedule.
    salt = uuid.uuid4().hex if autograd_config.enable_autograd_cache else ""
    before = options.get("joint_custom_pre_pass", inductor_config.joint_custom_pre_pass)
    options["joint_custom_pre_pass"] = _followed_by(before, tag_recompute, f"1{salt}")
    partition = options.get("custom_partitioner_fn", inductor_config.custom_partitioner_fn)
    options["custom_partitioner_fn"] = _checking_partitioner(partition, check)
    return options


def _checking_partitioner(partition: Any, check: Check) -> Any:
    """An Inductor partitioner that does what `partition`, or Inductor's own where it is None, does, and checks the backward."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class CheckBackward(CustomPartitionerFn):
        def __call__(
            self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
        ) -> tuple[GraphModule, GraphModule]:
            forward, backward = (partition or min_cut_rematerialization_partition)(gm, joint_inputs, **kwargs)
            check(backward, aten_realized)
            return forward, backward

        def uuid(self) -> Any:
            return f"flextensor_fx.check_backward.1:{partition.uuid() if partition is not None else None}"

    return CheckBackward()


def _lowering_pass(first: Any, lowering: Lowering) -> Any:
    """An Inductor pass that runs the user's pass or passes `first`, then lowers; `error` is what that raised."""

    def lower(graph: Graph) -> None:
        module = graph.owning_module
        assert module is not None
        try:
            lowering.run(module)
        except Exception as error:
            made.error = error
            raise

    made = _followed_by(first, lower, f"{_code_digest()}:{lowering.preview()}")
    made.error = None
    return made


@functools.cache
def _code_digest() -> str:
    """Of the code that lowers a graph: another release, or an edited one, must not be served what this one has compiled."""
    here = Path(__file__).parent
    files = [*sorted((here / "passes").glob("*.py")), here / "inner.py", here / "direct_calls.py"]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def _followed_by(first: Any, own: Callable[[Graph], None], version: str) -> Any:
    """An Inductor pass that runs the user's pass or passes `first` and then `own`, known to Inductor's cache by a name."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Followed(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            for one in first if isinstance(first, (list, tuple)) else [first] if first is not None else []:
                one(graph)
            own(graph)

        def uuid(self) -> Any:
            theirs = first.uuid() if isinstance(first, CustomGraphPass) else repr(first)
            return f"flextensor_fx.{own.__name__}.{version}:{theirs}"

    return Followed()
