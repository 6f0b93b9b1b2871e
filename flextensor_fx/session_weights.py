"""The weights of an offloaded model that are in its store, and the moves between memory and store."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from .candidates import Candidate, Roots, Slot, find_candidates
from .config import OffloadConfig
from .packing import find_packs, places
from .passes.fetches import Packed
from .planner import Plan
from .runtime import registry
from .runtime.engine import Engine
from .runtime.host_engine import HostEngine
from .runtime.host_store import Pack
from .runtime.in_place import find_in_place
from .runtime.layout import WeightSpec
from .runtime.parameter import OffloadedParameter
from .selection import Selection
from .session_facts import ReturnedValues, held_elsewhere, is_plain
from .state_dicts import give_host_values
from .tiers import Tier, add_weights

Files = Callable[[Sequence[Candidate]], dict[str, tuple[str, str]]]
"""The (file, name in it) of each weight that is in a file just as the store would have it, by name."""


@dataclass(eq=False, kw_only=True)
class StoredWeights:
    """The weights of a model that a plan streams: where they are, and what the model holds in their place.

    Fields:
        uid: of the store; keys begin with it.
        selection: what the patterns chose.
        plan: for the whole model.
        tier: where the weights lie, and the device that computes.
        lock: held by a call, which uses the pool.
        engine: None while nothing has been moved.
        packs_small: whether small weights travel together, where the store is host memory.
    """

    uid: str
    config: OffloadConfig
    selection: Selection
    plan: Plan
    tier: Tier
    lock: threading.RLock = field(default_factory=threading.RLock)
    engine: Engine | HostEngine | None = None
    packs_small: bool = True
    _roots: dict[str, weakref.ref[nn.Module]] = field(default_factory=dict)
    _moved: dict[str, OffloadedParameter] = field(default_factory=dict)
    _stand_ins: weakref.WeakValueDictionary[str, OffloadedParameter] = field(
        default_factory=weakref.WeakValueDictionary
    )
    _originals: dict[str, TensorWeakRef] = field(default_factory=dict)
    _filled: Set[str] = frozenset()
    _page_pool: int = 0
    _packed: Mapping[str, Packed] = field(default_factory=dict)
    _hooked: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = field(default_factory=weakref.WeakKeyDictionary)

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

    # --- to the store ----------------------------------------------------------------------------------------------
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

    # --- and back --------------------------------------------------------------------------------------------------
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
