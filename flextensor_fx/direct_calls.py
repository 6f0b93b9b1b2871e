"""How Inductor lowers our ops: it calls their implementations directly, and gives a weight's memory up at the weight's offload.

By way of the dispatcher a transfer takes half as long again. The ops run some hundred times in a call of a model, from Python,
with arguments that are Python's: all that the dispatcher does for them is to turn these into its own form and back. While a
profiler runs, which wants to see every op, it is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload

from ._torch_versions import profiler_enabled
from .passes import ops
from .runtime import op_implementations

ATTRIBUTE = "direct"
"""Of an op: what generated code calls in its place."""

_IMPLEMENTATIONS: dict[OpOverload, Callable[..., Any]] = {
    ops.prefetch: op_implementations.prefetch,
    ops.prefetch_ahead: op_implementations.prefetch_ahead,
    ops.wait: op_implementations.wait,
    ops.offload: op_implementations.offload,
}


def _direct(op: OpOverload, implementation: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        return op(*arguments) if profiler_enabled() else implementation(*arguments)

    return call


# Generated code may come out of a cache: it must find these in a process that has compiled nothing.
for _op, _implementation in _IMPLEMENTATIONS.items():
    setattr(_op, ATTRIBUTE, _direct(_op, _implementation))


@functools.cache
def lower_to_direct_calls() -> None:
    """Tells Inductor; once per process."""
    from torch._inductor.lowering import fallback_handler, register_lowering

    for op in _IMPLEMENTATIONS:
        register_lowering(op, type_promotion_kind=None)(_lowering(op, fallback_handler(op)))


def _lowering(op: OpOverload, fallback: Callable[..., Any]) -> Callable[..., Any]:
    def lower(*arguments: Any) -> Any:
        from torch._inductor.ir import FallbackKernel
        from torch._inductor.virtualized import V

        made = len(V.graph.operations)
        result = fallback(*arguments)
        (kernel,) = (o for o in V.graph.operations[made:] if isinstance(o, FallbackKernel))
        if not V.graph.cpp_wrapper:
            kernel.python_kernel_name = f"{kernel.python_kernel_name}.{ATTRIBUTE}"
        if op is ops.wait:
            # Inductor would save a weight's memory for a later buffer of the same size, and hold it from the offload until
            # that is made. A prefetch in between counts on the memory: the pool would be exceeded. What aliases another buffer
            # is freed behind its last use; the token, which holds no bytes, stands for that buffer.
            kernel.alias_names.append(arguments[0].get_name())
        return result

    return lower
