"""One offloaded model: its selection, its plan, its store, and the moves between memory and store.

All state that lasts from one compilation to the next is here, in an object that `release` closes.
"""

from __future__ import annotations

import uuid
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any, Protocol

from ._torch_versions import recompile_limit
from .candidates import Roots, find_candidates
from .captured import CapturedGraph, Costs
from .config import OffloadConfig
from .device_memory import DeviceMemory
from .device_rates import link_for
from .errors import BudgetError, OffloadError
from .graph_record import GraphRecord
from .planner import Plan
from .profile import Profile
from .runtime import op_implementations, registry
from .runtime.engine import Engine
from .runtime.parameter import OffloadedParameter
from .runtime.trace import Recorder
from .selection import select
from .session_facts import (
    bytes_elsewhere,
    facts_of,
    fingerprint_of,
    reference,
    signature_of,
)
from .session_plan import check_profile, completed, costs_of, plan_weights
from .session_weights import StoredWeights
from .tiers import Tier

AUTO = "auto"
"""The profile of a session that measures its first calls."""

assert op_implementations  # importing it registers the ops


class Watcher(Protocol):
    """Sees the calls of a session."""

    def watch(self, session: Session, graph: str, inner: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Calls `inner(*arguments)`, a run of `graph`."""
        ...


@dataclass(eq=False, kw_only=True)
class Session(StoredWeights):
    """An offloaded model, from `open` to `close`.

    Fields:
        nbytes, unit_of: by name of each selected weight.
        stays: why weights must stay resident, by name.
        costs: that the plan was made from.
        memory: of the device, as it was before anything was moved.
        graphs: one record per compiled graph, in the order compiled.
        captured: one per graph that Dynamo captured and that streams something, in the same order.
        watcher: sees the calls of a session that is to plan from what they take.
        replanned: whether it has.
    """

    nbytes: Mapping[str, int]
    stays: Mapping[str, str]
    unit_of: Mapping[str, str]
    costs: Costs
    memory: DeviceMemory
    streams_all: bool = False
    graphs: list[GraphRecord] = field(default_factory=list)
    captured: list[CapturedGraph] = field(default_factory=list)
    watcher: Watcher | None = None
    replanned: bool = False
    _callables: list[weakref.ref[Any]] = field(default_factory=list)
    _compilations: Counter[CodeType | None] = field(default_factory=Counter)
    _stays_by_graph: Mapping[str, str] = field(default_factory=dict)
    _signature: object = None
    _pool_floor: int = 0

    # --- making one ------------------------------------------------------------------------------------------------
    @classmethod
    def open(
        cls,
        roots: Roots,
        config: OffloadConfig,
        costs: Costs | None,
        stays: Mapping[str, str],
        streams_all: bool = False,
        *,
        moves: bool = False,
        filled: Set[str] = frozenset(),
        plan: Plan | None = None,
    ) -> Session:
        """Selects and plans; moves nothing.

        Args:
            costs: from a captured graph, by weight name; None plans by the order of the parameters. Weights without steps
                there are planned behind it, in the model's order.
            stays: weights that cannot be offloaded for a reason that only the graph knows.
            streams_all: plans as if there were no budget, unless that would exceed the budget.
            moves: whether the model is about to be moved to the configured device.
            filled: names of parameters that are about to get a value, see `fill`; they may be on the meta device.
            plan: a plan for these very weights, kept as it is; None makes one.

        Raises:
            SelectionError, PatternError: nothing is selected, or a pattern is malformed.
            ProfileError: the profile to plan from cannot be read, or is of another model.
            BudgetError: no schedule exists within the budget.
            OffloadError, ConfigError: the weights lie on several devices, or not where the options say.
        """
        profile = None if config.profile in (None, AUTO) else Profile.load(str(config.profile))
        if profile is not None and not config.include_patterns:
            patterns = profile.include_patterns, profile.exclude_patterns
            config = replace(
                config, include_patterns=patterns[0], exclude_patterns=config.exclude_patterns or patterns[1]
            )
        selection = select(roots.tree(), config.include_patterns, config.exclude_patterns)
        candidates = find_candidates(roots, selection, filled=filled)
        tier = Tier(config, candidates, moves=moves)
        unit_of, nbytes, fixed = facts_of(candidates, {**stays, **tier.stays(candidates)})
        uid = registry.free_uid(fingerprint_of(roots, candidates))
        if profile is not None:
            check_profile(profile, str(config.profile), candidates, fixed, str(tier.device))
            costs = costs_of(profile)
        costs = completed(costs or Costs({}, (), link_for(config, tier.device)), nbytes)
        coming = bytes_elsewhere(roots, tier.device, nbytes.keys(), bool(filled)) if moves else 0
        memory = tier.memory(candidates, costs.activation_bytes, coming)
        plan = plan or plan_weights(config, costs, nbytes, fixed, memory, 0, streams_all=streams_all)
        session = cls(
            uid=uid,
            config=config,
            selection=selection,
            nbytes=nbytes,
            stays=fixed,
            unit_of=unit_of,
            costs=costs,
            plan=plan,
            tier=tier,
            memory=memory,
            streams_all=streams_all,
        )
        session._roots = {prefix: weakref.ref(module) for prefix, module in roots.modules.items()}
        session._stays_by_graph = dict(stays)
        session._signature = signature_of(roots)
        session._filled = filled
        return session

    def rename(self, uid: str | None) -> None:
        """Gives the store another name before anything is in it; None leaves it.

        Raises:
            OffloadError: another store has that name.
        """
        if uid is None:
            return
        if registry.free_uid(uid) != uid:
            raise OffloadError(f"store {uid!r} is open already; close what has it first")
        self.uid = uid

    def refresh(self) -> None:
        """Takes up what the user has changed in the model since: parameters replaced, and modules put in, out or elsewhere.

        A replaced parameter is a new weight with a key of its own: whoever kept the old one still reads the old value, and may
        put it back. Selects and plans again if the model's names, shapes, dtypes or ties are no longer the same.

        Raises:
            SelectionError, BudgetError, OffloadError: as `open`; the session is as it was then.
        """
        roots = self.roots
        held = {name: slot.parameter for name, slot in roots.slots().items()}
        moved = {
            name: parameter
            for name, parameter in held.items()
            if isinstance(parameter, OffloadedParameter) and self._stand_ins.get(parameter.key) is parameter
        }
        signature = signature_of(roots)
        if signature != self._signature:
            selection = select(roots.tree(), self.config.include_patterns, self.config.exclude_patterns)
            candidates = find_candidates(roots, selection, "" if self.engine is None else self.engine.instance)
            self.tier.check(candidates)
            stays = {**self._stays_by_graph, **self.tier.stays(candidates)}
            unit_of, nbytes, stays = facts_of(candidates, stays)
            costs = completed(self.costs, nbytes)
            known = frozenset(moved.keys() & nbytes.keys())
            self.plan = plan_weights(
                self.config, costs, nbytes, stays, self.memory, self._pool_floor, known, self.streams_all
            )
            self.selection, self.costs, self.unit_of, self.nbytes, self.stays = selection, costs, unit_of, nbytes, stays
            self._signature = signature
        self._moved = {name: parameter for name, parameter in moved.items() if name in self.nbytes}

    def note_callable(self, value: Any) -> None:
        """Notes what the user compiled, so that a report can be asked for by it."""
        if value is not None and not self.has_callable(value):
            self._callables.append(reference(value))

    def note_compilation(self, code: CodeType | None) -> None:
        """Counts the graphs made of one code object, and warns when Dynamo will make no more of them."""
        limit = recompile_limit()
        self._compilations[code] += 1
        if code is not None and self._compilations[code] == limit:
            warnings.warn(
                f"flextensor: {limit} graphs of {code.co_qualname} were compiled for {self.uid}, and Dynamo compiles no more "
                "(torch._dynamo.config.recompile_limit); further ones run uncompiled, right but slow. The keys of streamed "
                "weights are in a graph, so a block that is compiled by itself, or holds a graph break, needs one graph for each "
                "of its instances: raise the limit, or compile the whole model without breaks",
                UserWarning,
                stacklevel=3,
            )

    def has_callable(self, value: Any) -> bool:
        return value is not None and any(ref() == value for ref in self._callables)

    @property
    def recorder(self) -> Recorder | None:
        """What notes the events of a call that is being recorded."""
        return None if self.engine is None else self.engine.recorder

    @contextmanager
    def recording(self, graph: str) -> Iterator[None]:
        """Notes when a graph begins and ends, if events are being recorded."""
        recorder = self.recorder
        if recorder is not None:
            recorder.note("enters", graph)
        yield
        if recorder is not None:
            recorder.note("leaves", graph)

    # --- planning --------------------------------------------------------------------------------------------------
    def require_pool(self, least: int, *, again: bool = False) -> None:
        """Plans again with a pool of at least `least` bytes, which a graph was found to need; or, where small weights would
        travel together, lets them travel one by one: a pack is in the pool as a whole, for as long as any part of it is used.

        Args:
            again: whether the graph has had a larger pool already. More is streamed then, and a pack grows with that.

        Raises:
            BudgetError: the budget cannot hold it beside the weights that must stay, nor are there packs that could be undone.
        """
        if least <= self._pool_floor:
            raise AssertionError(f"a pool of {self._pool_floor} bytes was refused, although only {least} are needed")
        packs = bool(self._packs(self._pending()))
        try:
            if not (again and packs):
                moved = frozenset(self._moved)
                self.plan = plan_weights(
                    self.config, self.costs, self.nbytes, self.stays, self.memory, least, moved, self.streams_all
                )
                self._pool_floor = least
                return
        except BudgetError:
            if not packs:
                raise
        self.packs_small = False

    def planned(self, costs: Costs) -> Plan:
        """The plan from other costs, which need not leave a weight where it is.

        Raises:
            BudgetError: the budget cannot work with them.
        """
        return plan_weights(self.config, costs, self.nbytes, self.stays, self.memory, self._pool_floor)

    def adopt(self, costs: Costs, plan: Plan) -> None:
        """Takes a plan from `planned`: moves weights to the store and back, and has every graph compiled anew.

        Raises:
            StoreError: a weight could not be moved; those moved so far stay where they are, and all are right.
        """
        engine = self.engine
        assert engine is not None
        before = self.costs, self.plan
        self.costs, self.plan, self.replanned = costs, plan, True
        returning = self._moved.keys() - set(plan.streamed)
        moving = {name: self._moved.pop(name) for name in returning}
        self.graphs.clear()
        self.captured.clear()
        self._page_pool = plan.pool
        engine.set_pool(plan.pool)
        try:
            try:
                self.commit()
            except Exception:
                # Else every compilation would try once more to move what the store did not take.
                self.costs, self.plan = before
                self._page_pool = self.plan.pool
                engine.set_pool(self.plan.pool)
                raise
            self._bring_back({stand_in.key for stand_in in moving.values()}, engine)
        finally:
            for name, stand_in in moving.items():
                if stand_in.key in self._stand_ins:
                    self._moved[name] = stand_in
            # What was compiled for the old plan is guarded by the identity of what it fetches.
            for stand_in in self._moved.values():
                stand_in.identity = (stand_in.key, uuid.uuid4().hex)

    def record(self, graph: GraphRecord) -> None:
        """Notes a compiled graph, and gives the engine memory for it, in whole pages."""
        self.graphs.append(graph)
        store = self.engine.store if isinstance(self.engine, Engine) else None
        slab_bytes = {} if store is None else {key: store.slab_bytes(key) for key in store}
        self._page_pool = max(self._page_pool, self.pool, graph.paged_peak(slab_bytes))
        if self.engine is not None:
            self.engine.set_pool(self._page_pool)
            self.engine.note_compilation()
            self.engine.serves_backwards |= graph.name.startswith("backward")

    def note_filled(self) -> None:
        """The model has its values and is where it computes: a plan for what it is now is there."""
        self._filled = frozenset()
        self._signature = signature_of(self.roots)

    def drop(self) -> None:
        """Removes the store without bringing anything back: whoever held the weights is done. Calling it again does nothing."""
        with self.lock:
            self.abandon()
        registry.forget(self)
