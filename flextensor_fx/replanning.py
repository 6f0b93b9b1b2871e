"""`options={"profile": "auto"}`: measures the first calls, and plans and compiles once more where that promises enough."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ._torch_versions import compile_lock
from .captured import Costs
from .errors import BudgetError, StoreError
from .passes.schedule import least_pool, schedule, windows_of
from .passes.steady_schedule import circular_windows, least_steady_pool, steady_schedule
from .runtime.stats import EngineStats
from .runtime.trace import Event
from .session import Session
from .session_plan import costs_of
from .session_profile import profile_of
from .simulate import simulate
from .steady import simulate_steady

log = logging.getLogger("flextensor_fx")

_WARM_UP = 2
_CALLS = 5
_VARYING = 20
_WORTH_IT = 0.03  # of the time that a call is predicted to take


class Replanner:
    """Watches the calls of one session until it knows enough, then plans anew, at most once.

    1. The first two calls of each graph and class of input shapes warm up, and five more are measured. A graph whose shapes go on
       changing, as with a cache that grows, is measured from its third call on, and after 20 is known by the medians over all.
       While another thread compiles, measuring goes on.
    2. The plan made from what was measured is taken if it is predicted, from the same numbers, to be at least 3% faster than
       the one in force. The weights that change places are moved, and the next call compiles.
    """

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._measured: Counter[str] = Counter()
        self._events: list[Event] = []
        self._before: EngineStats | None = None

    def watch(self, session: Session, graph: str, inner: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Calls `inner(*arguments)`, a run of `graph`, which the session's lock protects."""
        engine = session.engine
        name = graph.partition(": ")[0]
        new = not self._calls[graph]
        self._calls.update((graph, name))
        warm = self._calls[graph] > _WARM_UP or (new and self._calls[name] > _WARM_UP)
        if engine is None or not warm:
            return inner(*arguments)
        self._before = self._before or engine.stats()
        with engine.trace() as recorder, session.recording(graph):
            result = inner(*arguments)
        self._events += recorder.events()
        self._measured.update((graph, name))
        if self._measured[graph] >= _CALLS or self._measured[name] >= _VARYING:
            with _no_compilation() as free:
                if free:
                    session.watcher = None
                    enough = self._measured[graph] >= _CALLS
                    replan(session, self._events if enough else [_of_any_shape(e) for e in self._events], self._before)
        return result


@contextmanager
def _no_compilation() -> Iterator[bool]:
    """Whether no other thread compiles; then none does before the block ends. One that did would find parameters replaced."""
    free = compile_lock.acquire(blocking=False)  # one that waited could wait for a thread that waits for the session
    try:
        yield free
    finally:
        if free:
            compile_lock.release()


def _of_any_shape(event: Event) -> Event:
    if event.kind not in ("enters", "leaves"):
        return event
    return Event(event.at_s, event.kind, event.key.partition(": ")[0] + ": several shapes")


def replan(session: Session, events: Sequence[Event], before: EngineStats | None = None) -> bool:
    """Plans from the events of some calls; whether the session has taken the new plan.

    Args:
        events, before: as in `profile_of`.

    A plan that the budget does not allow, or that the store cannot follow, is no failure of the call that was measured last: the
    one in force stays, with a warning in the second case. Weights moved so far stay where they are then, and all are right.
    """
    costs = costs_of(profile_of(session, events, before))
    try:
        planned = session.planned(costs)
    except BudgetError as error:  # all graphs one after another may need more together than each by itself
        log.info("%s: measured; the plan in force is left as it is: %s", session.uid, error)
        return False
    now_ms = time_in_force(session, costs)
    better = planned.predicted_ms < (1 - _WORTH_IT) * now_ms
    log.info(
        "%s: measured; the plan in force is predicted to take %.1f ms, a new one %.1f ms: %s",
        session.uid, now_ms, planned.predicted_ms, "taken" if better else "left as it is",
    )  # fmt: skip
    if not better:
        return False
    try:
        session.adopt(costs, planned)
    except StoreError as error:
        warnings.warn(
            f"flextensor: {session.uid} goes on with its first plan, as the store could not follow the measured one: {error}",
            UserWarning,
            stacklevel=2,
        )
        return False
    return True


def time_in_force(session: Session, costs: Costs) -> float:
    """What a call is predicted to take under the plan in force, at other costs than it was made from; ms."""
    uses = [(n, session.nbytes[n], costs.steps_of[n]) for n in session.nbytes if n in session.streamed]
    lookahead = session.config.lookahead
    if session.config.objective == "steady":
        steps = len(costs.step_ms)
        repeated = circular_windows(uses, steps)
        pool = max(session.pool, least_steady_pool(repeated, steps))
        return simulate_steady(steady_schedule(repeated, steps, pool, lookahead), costs.step_ms, costs.link).period_ms
    windows = windows_of(uses)
    made = schedule(windows, max(session.pool, least_pool(windows)), lookahead)
    return simulate(made, costs.step_ms, costs.link).total_ms
