"""Makes Dynamo guard on what the model holds after the backend call instead of what it held when it was traced.

Dynamo builds a compilation's guards after the backend has returned, from a list of intents. Read and changed here and nowhere
else; the same on torch 2.11 to 2.14.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch._guards import TracingContext
from torch.utils.weak import TensorWeakRef

from ._torch_versions import source_name


def other_sources() -> dict[str, list[Any]]:
    """By name of a source in the running compilation: the further sources that must go on giving the very same tensor."""
    context = TracingContext.try_get()
    others: dict[str, list[Any]] = {}
    for guard in context.guards_context.dynamo_guards if context is not None else ():
        intent = guard.create_fn
        other = intent.keywords.get("source_b") if isinstance(intent, functools.partial) else None
        if other is not None:
            first = guard.originating_source
            others.setdefault(source_name(first), []).append(other)
            others.setdefault(source_name(other), []).append(first)
    return others


def guard_on_stand_ins(moved: Mapping[int, Tensor], sources: Iterable[Any]) -> None:
    """Redirects guards of the running compilation.

    Args:
        moved: by id of each tensor that was replaced in the model, while that tensor lives: what replaced it. Without this, a
            tensor that somebody else keeps alive would be guarded on, and the very first call would fail its own guards.
        sources: Dynamo's sources of weights that became fetches. Their keys are in the compiled code, so it must not run for
            another model of the same class, whose weights have other keys.
    """
    from torch._dynamo.guards import GuardBuilder, install_guard

    context = TracingContext.try_get()
    if context is None:
        return  # called by hand, not by Dynamo
    for guard in context.guards_context.dynamo_guards:
        intent = guard.create_fn
        reference = intent.keywords.get("value") if isinstance(intent, functools.partial) else None
        if isinstance(reference, TensorWeakRef) and id(reference()) in moved:
            reference.ref = weakref.ref(moved[id(reference())])
    install_guard(*(source.make_guard(GuardBuilder.TENSOR_SUBCLASS_METADATA_MATCH) for source in sources))
