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

_STARTS = (ops.prefetch, ops.prefetch_ahead)
_ORDER = "_flextensor_fx_order"


def _direct(op: OpOverload, implementation: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        return op(*arguments) if profiler_enabled() else implementation(*arguments)

    return call


# Generated code may come out of a cache: it must find these in a process that has compiled nothing.
for _op, _implementation in _IMPLEMENTATIONS.items():
    setattr(_op, ATTRIBUTE, _direct(_op, _implementation))


class _Order:
    """Keeps kernels behind the prefetch that the lowered graph puts before them.

    Inductor reorders for the peak of memory, and attention reads no weight: it would be moved before a prefetch. A copy that
    comes behind what was queued before it would then begin after attention, and not run beside it.
    """

    def __init__(self) -> None:
        self._since = 0
        self._token: str | None = None

    def hold(self, graph: Any) -> None:
        """Kernels made since the last op of ours come after the last prefetch."""
        from torch._inductor.ir import ExternKernel

        for operation in graph.operations[self._since :] if self._token is not None else ():
            if isinstance(operation, ExternKernel):
                graph.additional_buffer_deps[operation.get_operation_name()].add(self._token)

    def begin(self, graph: Any, token: str | None) -> None:
        """An op of ours was made; `token` is what it yields if it starts a copy."""
        self._since, self._token = len(graph.operations), token or self._token


def _order_of(graph: Any) -> _Order:
    """One per graph that is being lowered."""
    if not hasattr(graph, _ORDER):
        setattr(graph, _ORDER, _Order())
    return getattr(graph, _ORDER)


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

        order = _order_of(V.graph)
        order.hold(V.graph)
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
        order.begin(V.graph, kernel.get_name() if op in _STARTS else None)
        return result

    return lower
