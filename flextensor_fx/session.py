"""One offloaded model: its selection, its plan, its store, and the moves between memory and store.

All state that lasts from one compilation to the next is here, in an object that `release` closes.
"""

from __future__ import annotations

import threading
import time
import uuid
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from ._torch_versions import recompile_limit
from .candidates import Candidate, Roots, Slot, find_candidates
from .captured import CapturedGraph, Costs
from .config import OffloadConfig
from .device_memory import DeviceMemory
from .device_rates import link_for
from .errors import BudgetError, OffloadError
from .graph_record import GraphRecord
from .packing import find_packs, places
from .passes.fetches import Packed
from .planner import Plan
from .profile import Profile
from .runtime import op_implementations, registry
from .runtime.engine import Engine
from .runtime.host_engine import HostEngine
from .runtime.host_store import Pack
from .runtime.in_place import find_in_place
from .runtime.layout import WeightSpec
from .runtime.parameter import OffloadedParameter
from .runtime.trace import Recorder
from .selection import Selection, select
from .session_facts import (
    ReturnedValues,
    bytes_elsewhere,
    facts_of,
    fingerprint_of,
    held_elsewhere,
    is_plain,
    reference,
    signature_of,
)
from .session_plan import check_profile, completed, costs_of, plan_weights
from .state_dicts import give_host_values
from .tiers import Tier, add_weights

AUTO = "auto"
"""The profile of a session that measures its first calls."""

assert op_implementations  # importing it registers the ops


Files = Callable[[Sequence[Candidate]], dict[str, tuple[str, str]]]
"""The (file, name in it) of each weight that is in a file just as the store would have it, by name."""


class Watcher(Protocol):
    """Sees the calls of a session."""

    def watch(self, session: Session, graph: str, inner: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Calls `inner(*arguments)`, a run of `graph`."""
        ...


@dataclass(eq=False)
class Session:
    """An offloaded model, from `open` to `close`.

    Fields:
        roots: held weakly; see `Roots`.
        selection, candidates: what the patterns chose.
        plan: for the whole model; None until the first.
        tier: where the weights lie, and the device that computes.
        memory: of the device, as it was before anything was moved.
        graphs: one record per compiled graph, in the order compiled.
        captured: one per graph that Dynamo captured and that streams something, in the same order.
        watcher: sees the calls of a session that is to plan from what they take.
        replanned: whether it has.
    """

    uid: str
    config: OffloadConfig
    selection: Selection
    nbytes: Mapping[str, int]
    stays: Mapping[str, str]
    unit_of: Mapping[str, str]
    costs: Costs
    plan: Plan
    tier: Tier
    memory: DeviceMemory
    streams_all: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)
    engine: Engine | HostEngine | None = None
    graphs: list[GraphRecord] = field(default_factory=list)
    captured: list[CapturedGraph] = field(default_factory=list)
    watcher: Watcher | None = None
    replanned: bool = False
    _callables: list[weakref.ref[Any]] = field(default_factory=list)
    _roots: dict[str, weakref.ref[nn.Module]] = field(default_factory=dict)
    _moved: dict[str, OffloadedParameter] = field(default_factory=dict)
    _stand_ins: weakref.WeakValueDictionary[str, OffloadedParameter] = field(
        default_factory=weakref.WeakValueDictionary
    )
    _compilations: Counter[CodeType | None] = field(default_factory=Counter)
    _originals: dict[str, TensorWeakRef] = field(default_factory=dict)
    _stays_by_graph: Mapping[str, str] = field(default_factory=dict)
    _signature: object = None
    _filled: Set[str] = frozenset()
    _pool_floor: int = 0
    _page_pool: int = 0
    _packed: Mapping[str, Packed] = field(default_factory=dict)
    packs_small: bool = True
    _hooked: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = field(default_factory=weakref.WeakKeyDictionary)

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
        session = cls(uid, config, selection, nbytes, fixed, unit_of, costs, plan, tier, memory, streams_all)
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

    @property
    def roots(self) -> Roots:
        living = {prefix: ref() for prefix, ref in self._roots.items()}
        return Roots({prefix: module for prefix, module in living.items() if module is not None})

    @property
    def pool(self) -> int:
        """Bytes that the transfers of one graph may hold together."""
        return self.plan.pool

    @property
    def streamed(self) -> frozenset[str]:
        """Names of the weights that live in the store, or will once the first graph is compiled."""
        return frozenset(self.plan.streamed) | self._moved.keys()

    @property
    def moved(self) -> Mapping[str, OffloadedParameter]:
        """By name of each weight in the store: what the model holds in its place."""
        return self._moved

    def key(self, name: str) -> str:
        """The key of weight `name` in graphs; of one that is still in memory, the key that it will have."""
        if name in self._moved:
            return self._moved[name].key
        wanted = key = f"{self.uid}:{name}"
        number = 1
        while self.engine is not None and key in self.engine.store:  # taken by a parameter that this one has replaced
            number += 1
            key = f"{wanted}#{number}"
        return key

    def candidates(self) -> tuple[Candidate, ...]:
        instance = "" if self.engine is None else self.engine.instance
        return find_candidates(self.roots, self.selection, instance, self._filled)

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

    # --- moving ----------------------------------------------------------------------------------------------------
    def commit(self, in_place: bool = False) -> list[tuple[Tensor, OffloadedParameter]]:
        """Moves what the plan streams and is still in memory to the store, one weight at a time.

        Args:
            in_place: weights that are unchanged memory maps of a safetensors file are served from that file, without a copy.
                Not where others may hold the parameters: what they write to their map would not reach the store.

        Returns:
            (parameter, what the model holds in its place) for each that was moved.

        Raises:
            StoreError: the disk is full or fails. Weights moved so far stay moved and right; the rest stays in memory.
        """
        pending = self._pending()
        if not pending:
            return []
        begin = time.perf_counter()
        unshared = [c for c in pending if not held_elsewhere(c)] if in_place and not self.tier.on_host else []
        files = self.files_of(unshared)
        engine, keys = self._make_room(pending, files)
        pairs = [pair for c in pending for pair in self._move(c, keys[c.name], engine, c.name in files)]
        engine.seal()
        engine.setup_seconds += time.perf_counter() - begin
        return pairs

    def fill(self, write: Callable[[Candidate, str, Engine | HostEngine], None], files: Files) -> dict[str, str]:
        """Writes what the plan streams to the store, and leaves the model as it is; `put_stand_ins` changes it.

        Args:
            write: writes the value of a weight, whatever is in the model, under a key.
            files: finds the (file, name in it) that has a weight just as the store would, by the names of weights.

        Returns:
            The keys of the weights by name.

        Raises:
            StoreError: the disk is full or fails; what `write` raises. There is no store then, as before.
        """
        begin, pending = time.perf_counter(), self._pending()
        if not pending:
            return {}
        uses_files = not self.tier.on_host or self.config.host_budget is not None
        engine, keys = self._make_room(pending, files(pending) if uses_files else {})
        try:
            for candidate in pending:
                if not engine.store.version(keys[candidate.name]):
                    write(candidate, keys[candidate.name], engine)
            engine.seal()
        except BaseException:
            self.abandon()
            raise
        engine.setup_seconds += time.perf_counter() - begin
        return keys

    def put_stand_ins(self, keys: Mapping[str, str]) -> None:
        """Has the model hold stand-ins of the weights that `fill` wrote; what it held goes on holding what it has."""
        engine = self.engine
        for candidate in self.candidates():
            if candidate.name in keys:
                assert engine is not None
                self._put_stand_in(candidate, keys[candidate.name], engine)

    def note_filled(self) -> None:
        """The model has its values and is where it computes: a plan for what it is now is there."""
        self._filled = frozenset()
        self._signature = signature_of(self.roots)

    def abandon(self) -> None:
        """Removes the store of a session of which the model holds nothing (any more)."""
        engine, self.engine = self.engine, None
        for hook in self._hooked.values():
            hook.remove()
        if engine is not None:
            registry.unregister(engine)
            engine.close()

    def _make_room(
        self, pending: Sequence[Candidate], files: Mapping[str, tuple[str, str]]
    ) -> tuple[Engine | HostEngine, dict[str, str]]:
        """The engine, with room for all that is pending, or a place in `files`, and the keys by name."""
        keys = {c.name: self.key(c.name) for c in pending}  # as the graph has them: the store is still without them
        packs = self._packs(pending)
        packed = places(packs, self.tier.device)
        alone = [c for c in pending if keys[c.name] not in packed]
        new = [WeightSpec(keys[c.name], tuple(p.shape), p.stride(), p.dtype) for c in alone for p in [c.parameter]]
        engine = self.engine
        if engine is None:
            engine = self.tier.open_engine(self.config, self.uid, max(self._page_pool, self.pool))
        try:
            add_weights(engine, new, packs, {keys[name]: entry for name, entry in files.items()})
        except BaseException:
            if self.engine is None:
                engine.close()
            raise
        if self.engine is None:
            self.engine = engine
            registry.register(engine)
        self._packed = {**self._packed, **packed}
        return engine, keys

    def _pending(self) -> list[Candidate]:
        """What the plan streams and is still in memory."""
        streamed = self.streamed
        return [c for c in self.candidates() if c.name in streamed and not isinstance(c.parameter, OffloadedParameter)]

    def _packs(self, pending: Sequence[Candidate]) -> tuple[Pack, ...]:
        if not self.tier.on_host or not self.packs_small:
            return ()
        return find_packs(pending, self.key, lambda group: self.key(f"{group} together"))

    def packed(self) -> Mapping[str, Packed]:
        """The place in its pack of each weight that does not travel alone, or will not once it has moved; by its key."""
        return {**self._packed, **places(self._packs(self._pending()), self.tier.device)}

    def files_of(self, pending: Sequence[Candidate]) -> dict[str, tuple[str, str]]:
        """The (file, name in it) of each weight that is an unchanged memory map of a safetensors file, by name."""
        return find_in_place({c.name: c.parameter for c in pending if c.parameter.is_contiguous()})

    def _move(
        self, candidate: Candidate, key: str, engine: Engine | HostEngine, in_place: bool
    ) -> list[tuple[Tensor, OffloadedParameter]]:
        olds = [slot.parameter for slot in candidate.slots]
        if not in_place:
            engine.write(key, olds[0].detach())
        stand_in = self._put_stand_in(candidate, key, engine)
        if not in_place:
            alias = engine.host_value(key)
            for old in olds:
                # Whoever else holds the old parameter now holds the stored value: it stays right, and its memory is free.
                old.data = alias
        return [(old, stand_in) for old in olds]

    def _put_stand_in(self, candidate: Candidate, key: str, engine: Engine | HostEngine) -> OffloadedParameter:
        old = candidate.parameter
        stand_in = OffloadedParameter.of(old, key, engine, self.tier.device)
        self._moved[candidate.name] = self._stand_ins[key] = stand_in
        if is_plain(old) and not old.is_meta:
            self._originals[key] = TensorWeakRef(old)
        for slot in candidate.slots:
            slot.put(stand_in)
            if not engine.aliases and slot.module not in self._hooked:
                self._hooked[slot.module] = slot.module.register_state_dict_post_hook(give_host_values)
        return stand_in

    def close(self) -> None:
        """Brings the weights back as plain parameters, one at a time, and removes the store. Calling it again does nothing.

        Raises:
            StoreError: a weight cannot be read. Those brought back so far stay; the others and the store are as they were.
        """
        with self.lock:  # a call on another thread still needs the store
            self._close()

    def _close(self) -> None:
        engine = self.engine
        if engine is None:
            return
        self._bring_back(set(self._stand_ins), engine)
        self._moved = {}
        for hook in self._hooked.values():
            hook.remove()
        self._hooked.clear()
        registry.unregister(engine)
        self.engine = None
        engine.close()

    def drop(self) -> None:
        """Removes the store without bringing anything back: whoever held the weights is done. Calling it again does nothing."""
        with self.lock:
            self.abandon()
        registry.forget(self)

    def _bring_back(self, keys: Set[str], engine: Engine | HostEngine) -> None:
        """Puts plain parameters in the place of stand-ins, one at a time."""
        returned = ReturnedValues()
        slots: dict[int, list[Slot]] = {}
        for slot in self.roots.slots().values():
            slots.setdefault(id(slot.parameter), []).append(slot)
        # An inference tensor could not be trained, nor be read where gradients are recorded.
        with torch.inference_mode(False):
            for key, stand_in in [(k, s) for k, s in self._stand_ins.items() if k in keys]:
                value = engine.read(key)
                parameter = self._original(key, stand_in, value)
                returned.values[key] = value
                for slot in slots.get(id(stand_in), ()):
                    slot.put(parameter)
                stand_in.source = returned  # references that the user kept go on working
                del self._stand_ins[key]

    def _original(self, key: str, stand_in: OffloadedParameter, value: Tensor) -> Tensor:
        """The parameter that was moved away, with `value`, if anybody still holds it: an optimizer must find it in the model."""
        reference = self._originals.pop(key, None)
        original = None if reference is None else reference()
        if original is None:
            return stand_in.replaced_by(value)
        original.data = value
        original.requires_grad_(stand_in.requires_grad)
        return original
