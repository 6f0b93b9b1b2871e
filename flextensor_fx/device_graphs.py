"""CUDA graphs: whether the inner compiler is asked for them, and why a model must do without."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from .config import OffloadConfig
from .runtime.host_engine import HostEngine

if TYPE_CHECKING:
    from .session import Session

_OPTION = "triton.cudagraphs"


def wants_graphs(config: OffloadConfig) -> bool:
    """Whether Inductor would capture CUDA graphs: by its mode, by its options, or by its own configuration."""
    if config.inner_backend != "inductor":
        return False
    from torch._inductor import config as inductor_config

    from .inner import user_options

    return bool(user_options(config).get(_OPTION, inductor_config.triton.cudagraphs))


def without_graphs(config: OffloadConfig) -> OffloadConfig:
    """The same configuration with CUDA graphs off."""
    return replace(config, inner_options={**(config.inner_options or {}), _OPTION: False})


def why_no_graphs(sessions: Iterable[Session]) -> str | None:
    """Why what these sessions stream cannot be captured, as the end of a sentence; None if it can."""
    for session in sessions:
        if session.tier.device.type == "cpu":
            return "the model computes on the CPU"
        if session.config.objective == "steady":
            return 'objective "steady" hands copies from one call to the next, which a graph that is replayed cannot'
        engine = session.engine
        if isinstance(engine, HostEngine) and engine.store.pageable_bytes:
            return f"weights lie in memory that is not pinned ({engine.store.unpinned_because})"
    return None
