"""The profile of a session, from events of its calls."""

from __future__ import annotations

from collections.abc import Sequence

from .graph_times import graph_runs, profile_graphs, read_points
from .link_curve import link_of
from .link_profile import LinkPoint, LinkProfile, fit_link
from .machine import Machine
from .profile import Profile
from .runtime.stats import EngineStats
from .runtime.trace import Event
from .session import Session
from .session_plan import profiled

_LEAST_RATIO = 4  # of the largest size to the smallest: from sizes closer together no latency can be told


def profile_of(session: Session, events: Sequence[Event], before: EngineStats | None = None) -> Profile:
    """The profile of a session, from the events of some of its calls, in order of time.

    Args:
        before: what the engine had done before these calls; None counts all that it has done.
    """
    assert session.engine is not None
    costs = {graph.name: graph.costs for graph in session.captured}
    runs = graph_runs(events, _names(session), costs)
    return Profile(
        session.roots.title,
        Machine.here(str(session.tier.device)),
        profiled(session.candidates(), session.stays, session.costs.fused),
        profile_graphs(runs, costs, session.unit_of),
        _link(session, events, before),
        tuple(session.config.include_patterns),
        tuple(session.config.exclude_patterns),
    )


def _names(session: Session) -> dict[str, str]:
    return {parameter.key: name for name, parameter in session.moved.items()}


def _link(session: Session, events: Sequence[Event], before: EngineStats | None) -> LinkProfile:
    engine = session.engine
    assert engine is not None
    points: Sequence[LinkPoint] = read_points(
        events, {key: session.nbytes[name] for key, name in _names(session).items()}
    )
    after = engine.stats()
    from_cache, from_disk = after.cached_bytes, after.disk_bytes
    if before is not None:
        from_cache, from_disk = from_cache - before.cached_bytes, from_disk - before.disk_bytes
    cached = from_cache / max(1, from_cache + from_disk)
    where = "" if cached < 0.01 else f", {cached:.0%} of the bytes from the page cache"
    provenance = f"measured while computing{where}"
    if points and points[-1].nbytes >= _LEAST_RATIO * points[0].nbytes:
        return fit_link(points, provenance)
    curve = LinkProfile.of(session.costs.link) if session.tier.on_host else link_of(session.config.store_dir)
    if not points:
        return curve
    last = points[-1]
    latency = min(curve.latency_ms, last.ms / 2)
    return LinkProfile(
        tuple(points), latency, last.nbytes / (last.ms - latency), f"{provenance}; latency {curve.provenance}"
    )
