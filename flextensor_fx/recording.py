"""Timelines of calls that ran: recording one, and reading its events."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import OffloadError
from .offloading import find_sessions
from .runtime.trace import Event
from .session import Session
from .timeline import START, ComputeSpan, Stall, Timeline, TransferSpan, joined, levels


def record_call(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Timeline:
    """Calls `compiled(*args, **kwargs)` once, and tells when it computed, copied and waited.

    Nothing is synchronised within the call. Other threads wait with their own calls of this model until it is over. Call the
    model a few times before: a call that compiles is recorded as it is.

    Raises:
        OffloadError: `compiled` does not belong to one offloaded model, or streams nothing.
        Exception: whatever the call raises.
    """
    session = one_session(compiled, "record_call")
    engine = session.engine
    if engine is None:
        raise OffloadError(
            f"record_call: expected {session.uid} to stream weights, found that all stay in memory; lower the budget, or call "
            "the compiled model once first"
        )
    with session.lock, engine.trace() as recorder:
        engine.quiesce()
        begin = time.perf_counter()
        compiled(*args, **kwargs)
        engine.quiesce()
        end = time.perf_counter()
    weights = {
        parameter.key: Weight(name, session.unit_of[name] or "(root)", session.nbytes[name])
        for name, parameter in session.moved.items()
    }
    resident = sum(nbytes for name, nbytes in session.nbytes.items() if name not in session.streamed)
    return measured_timeline(
        recorder.events(), begin, end, weights, resident_bytes=resident, budget=session.plan.budget
    )


def one_session(compiled: Any, who: str) -> Session:
    """The session of the one offloaded model that `compiled` belongs to; `who` asks.

    Raises:
        OffloadError: it belongs to none (a compiled model is offloaded from its first call on), or to several.
    """
    sessions = find_sessions(compiled)
    if len(sessions) == 1:
        return sessions[0]
    own = getattr(compiled, "session", None)
    if isinstance(own, Session):
        raise OffloadError(
            f"{who}: expected an open program with values, found {own.uid}, which was closed or has none yet; call "
            "flextensor_fx.load(program, files) first, or make it once more"
        )
    what = getattr(compiled, "__name__", type(compiled).__name__)
    found = "none" if not sessions else ", ".join(session.uid for session in sessions)
    advice = "call the compiled model once first" if not sessions else f"{who} takes each model by itself"
    raise OffloadError(f"{who}: expected {what} to belong to one offloaded model, found {found}; {advice}")


@dataclass(frozen=True, slots=True)
class Weight:
    """What a key in events stands for: a weight's name, its unit and its bytes."""

    name: str
    unit: str
    nbytes: int


@dataclass(slots=True)
class _Stay:
    """One stay of a weight on the device, as far as its events have been read; times in ms."""

    weight: Weight
    reads: list[list[float]] = field(default_factory=list)  # [begin] while it runs, then [begin, end]
    taken: bool = False
    waits: float | None = None
    waited: float | None = None

    def was_late(self) -> bool:
        """Whether bytes arrived, or a read of them began, after compute had come to the wait."""
        return self.waits is not None and any(read[-1] > self.waits for read in self.reads)


def measured_timeline(
    events: Iterable[Event],
    begin_s: float,
    end_s: float,
    weights: Mapping[str, Weight],
    *,
    resident_bytes: int,
    budget: int | None,
    name: str = "one call",
    source: str = "recorded while it ran",
) -> Timeline:
    """The call whose engine noted `events`.

    1. A copy is a read, from its begin to its end. It belongs to the call in which it ends: what lies before that is cut off,
       and what a call only begins for the next one is left out.
    2. A wait is a stall if the weight had not arrived when compute came to it.
    3. All other time is compute, and counts for the unit waited for last, up to the next wait. What resident units compute
       in between is in it: they are never waited for.
    4. Memory is taken when a transfer gets its block, which for a copy that the call before has begun is at the start, and given
       back when the graph offloads the weight, or when a copy for the next call makes room. Bytes of the weight are counted;
       blocks are whole pages, so that weights that are no multiple of 4096 bytes take a little more.

    Args:
        events: in order of time. Those of keys that are not in `weights` are left out.
        begin_s, end_s: of the call, on the events' clock.
        weights: by key.
        resident_bytes, budget: as in `Timeline`.
    """
    total = (end_s - begin_s) * 1000
    stays: dict[str, deque[_Stay]] = {}
    waits: list[_Stay] = []
    transfers: list[TransferSpan] = []
    changes: list[tuple[float, int]] = []
    for event in events:
        weight = weights.get(event.key)
        if weight is None:
            continue
        if event.at_s > end_s:
            break
        now = max((event.at_s - begin_s) * 1000, 0.0)
        of_key = stays.setdefault(event.key, deque())
        if event.kind == "issued":
            of_key.append(_Stay(weight))
        elif event.kind == "taken" and (stay := _first(of_key, lambda s: not s.taken)):
            stay.taken = True
            changes.append((now, weight.nbytes))
        elif event.kind == "read" and of_key:
            # A weight that was written after its prefetch is read once more, while compute waits for it.
            (_first(of_key, lambda s: not s.reads) or of_key[0]).reads.append([now])
        elif event.kind == "arrived" and (stay := _first(of_key, lambda s: bool(s.reads) and len(s.reads[-1]) == 1)):
            stay.reads[-1].append(now)
            transfers.append(TransferSpan(stay.reads[-1][0], now, weight.name, weight.unit, weight.nbytes))
        elif event.kind == "waits" and (stay := _first(of_key, lambda s: s.waits is None)):
            stay.waits = now
        elif event.kind == "waited" and (stay := _first(of_key, lambda s: s.waits is not None and s.waited is None)):
            stay.waited = now
            waits.append(stay)
        elif event.kind in ("offloaded", "dropped") and (stay := _first(of_key, _ENDED_BY[event.kind])):
            if stay.taken:
                changes.append((now, -weight.nbytes))
            of_key.remove(stay)
    transfers.sort(key=lambda span: span.start_ms)
    compute, stalls = _cut(waits, total)
    return Timeline(
        name, "measured", source, total, budget, resident_bytes,
        compute, tuple(transfers), stalls, levels(changes, resident_bytes),
    )  # fmt: skip


_ENDED_BY: dict[str, Callable[[_Stay], bool]] = {
    "offloaded": lambda stay: stay.waited is not None,
    "dropped": lambda stay: stay.taken and stay.waits is None,
}


def _first(stays: Iterable[_Stay], wanted: Callable[[_Stay], bool]) -> _Stay | None:
    return next((stay for stay in stays if wanted(stay)), None)


def _cut(waits: Iterable[_Stay], total: float) -> tuple[tuple[ComputeSpan, ...], tuple[Stall, ...]]:
    """Compute and stalls of a call, from its waits in order."""
    compute: list[ComputeSpan] = []
    stalls: list[Stall] = []
    since, label = 0.0, START
    for stay in waits:
        assert stay.waits is not None and stay.waited is not None
        late = stay.was_late()
        until = stay.waits if late else stay.waited
        if until > since:
            compute.append(ComputeSpan(since, until, label))
        if late:
            stalls.append(Stall(stay.waits, stay.waited, stay.weight.name))
        since, label = stay.waited, stay.weight.unit
    if total > since:
        compute.append(ComputeSpan(since, total, label))
    return joined(compute), tuple(stalls)


__all__ = ["Weight", "measured_timeline", "one_session", "record_call"]
