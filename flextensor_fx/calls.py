"""What Dynamo calls in the place of a captured graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .captured import signature
from .runtime import registry
from .runtime.parameter import OffloadedParameter
from .session import Session


def of_open_stores(compiled: Callable[..., Any], uids: Sequence[str]) -> Callable[..., Any]:
    """Calls `compiled` while its stores are open: a graph that is replayed would copy from memory that is no longer there."""

    def call(*arguments: Any) -> Any:
        for uid in uids:
            registry.engine_of(uid)
        return compiled(*arguments)

    return call


def runner(
    compiled: Callable[..., Any],
    kept: Sequence[int],
    mapped: bool,
    sessions: Mapping[str, Session],
    name: str,
    inputs: Sequence[int],
) -> Callable[..., Any]:
    """What Dynamo calls: leaves out the arguments that became fetches, and lets one call at a time use a session's pool.

    Args:
        mapped: whether any argument that is left is an offloaded weight.
        name: of the captured graph.
        inputs: places of the arguments whose shapes tell one class of calls from another.
    """
    locks = [session.lock for _, session in sorted(sessions.items())]

    def call(*arguments: Any) -> Any:
        return compiled(*[a.plain() if isinstance(a := arguments[p], OffloadedParameter) else a for p in kept])

    def call_unmapped(*arguments: Any) -> Any:
        return compiled(*[arguments[p] for p in kept])

    inner = call if mapped else call_unmapped
    if len(locks) == 1:
        (lock,) = locks
        # Dynamo keeps what is compiled for as long as it likes, and must not keep the weights.
        (session_of,) = (weakref.ref(session) for session in sessions.values())
        (replanned,) = (session.replanned for session in sessions.values())

        def run(*arguments: Any) -> Any:
            session = session_of()
            with lock:
                if session is not None and session.engine is not None:
                    session.engine.settle()
                if session is not None and session.replanned is not replanned:
                    # Another thread has planned anew since Dynamo checked its guards: these may be stand-ins by now.
                    return call(*arguments)
                if session is None or (session.recorder is None and session.watcher is None):
                    return inner(*arguments)
                graph = f"{name}: {signature(arguments, inputs)}"
                # A call that somebody records is theirs: a watcher's trace inside of it would take its events.
                if session.watcher is not None and session.recorder is None:
                    return session.watcher.watch(session, graph, inner, arguments)
                with session.recording(graph):
                    return inner(*arguments)

        return run

    refs = [weakref.ref(session) for session in sessions.values()]

    def run_with_all(*arguments: Any) -> Any:
        for lock in locks:
            lock.acquire()
        try:
            for session in (ref() for ref in refs):
                if session is not None and session.engine is not None:
                    session.engine.settle()
            return call(*arguments)  # one of them may have been planned anew as well
        finally:
            for lock in reversed(locks):
                lock.release()

    return run_with_all
