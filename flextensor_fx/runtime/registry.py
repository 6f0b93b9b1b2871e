"""The tables of the process: which engine serves the keys in compiled graphs, and which session a model has.

Compiled code names a weight by a string and nothing else, and its op implementations belong to the process; a backend is
called with a graph and nothing else. So tables have to lead from the one to the other. They keep nothing alive: engines belong
to sessions, and a session lives as long as its model.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn

from flextensor_fx.errors import StoreError
from flextensor_fx.runtime.transfers import TransferEngine

if TYPE_CHECKING:
    from flextensor_fx.session import Session

sessions: weakref.WeakKeyDictionary[nn.Module, Session] = weakref.WeakKeyDictionary()
"""The session of each offloaded model; of several modules offloaded together, under each of them."""

_engines: weakref.WeakValueDictionary[str, TransferEngine] = weakref.WeakValueDictionary()
_retained: set[str] = set()
"""Uids in backward graphs. Such a graph may outlive its engine, and must never find another one by its keys."""


def register(engine: TransferEngine) -> None:
    """Makes `engine` serve the keys "<engine.uid>:..."."""
    _engines[engine.uid] = engine


def unregister(engine: TransferEngine) -> None:
    """Ends that, if `engine` still serves its keys."""
    if _engines.get(engine.uid) is engine:
        del _engines[engine.uid]


def free_uid(wanted: str) -> str:
    """`wanted`, or the first of `wanted-2`, `wanted-3`, ... that no living engine and no backward graph has."""
    uid, number = wanted, 1
    while uid in _engines or uid in _retained:
        number += 1
        uid = f"{wanted}-{number}"
    return uid


def retain(uid: str) -> None:
    """Gives `uid` to no other engine: a backward graph has it in its keys."""
    _retained.add(uid)


def engine_of(key: str) -> TransferEngine:
    """The engine that serves `key`.

    Raises:
        StoreError: there is none, or no longer.
    """
    uid = key.partition(":")[0]
    try:
        return _engines[uid]
    except KeyError:
        raise StoreError(
            f"weight {key!r}: expected the store {uid!r} to be open, found it released (or its model deleted); "
            "compile the model again"
        ) from None


def forget(session: Session) -> None:
    """Its models are offloaded no more."""
    for root in session.roots.modules.values():
        if sessions.get(root) is session:
            del sessions[root]


def living_sessions() -> list[Session]:
    """Every open session, each once."""
    return list(dict.fromkeys(sessions.values()))
