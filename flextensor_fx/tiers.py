"""Where a session's weights lie and where they are computed with: the choice of a tier, and its engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from .candidates import Candidate
from .config import OffloadConfig
from .device_memory import DeviceMemory
from .errors import ConfigError, OffloadError
from .runtime.device import Device, open_device
from .runtime.engine import Engine
from .runtime.host_engine import HostEngine
from .runtime.host_store import HostStore, Pack
from .runtime.layout import WeightSpec
from .runtime.session_dir import SessionDir
from .runtime.store import Store

_META = torch.device("meta")


class Tier:
    """Disk to RAM, or host memory to a device.

    Args:
        config: says which, where it says anything; else it hangs on where the weights are.
        candidates: the selected weights.
        moves: whether the model is moved to the configured device, as `offload` does.

    Attributes:
        device: where the model computes; with its index.

    Raises:
        OffloadError, ConfigError: the weights are not where they would have to be, there is no such device, or it does not go
            with the configured store.
    """

    def __init__(self, config: OffloadConfig, candidates: Sequence[Candidate], *, moves: bool = False) -> None:
        movable = [candidate for candidate in candidates if candidate.stays is None]
        found = next((c.parameter.device for c in movable if not c.parameter.is_meta), torch.device("cpu"))
        wanted = found if config.device is None else torch.device(config.device)
        self.accelerator: Device = open_device(wanted)
        self.device = self.accelerator.device
        self.on_host = config.store == "host" or self.device.type != "cpu"
        if config.store == "disk" and self.on_host:
            raise ConfigError(
                f"option 'store': expected 'host' or None for weights that are computed with on {self.device}, found 'disk'; "
                "files are read to the memory of the CPU only"
            )
        if not moves:
            self.check(candidates)

    def check(self, candidates: Iterable[Candidate]) -> None:
        """Sees that weights are where the model computes.

        Raises:
            OffloadError: one is elsewhere.
        """
        for candidate in candidates:
            if candidate.stays is None and candidate.parameter.device not in (self.device, _META):
                raise OffloadError(
                    f"offload: expected the weights on {self.device}, found {candidate.name} on {candidate.parameter.device}; "
                    "call flextensor_fx.offload(model, config) before compiling, which moves the model, or leave the option "
                    "'device' out"
                )

    def stays(self, candidates: Iterable[Candidate]) -> dict[str, str]:
        """Why weights cannot be in this tier, by name."""
        if not self.on_host or self.accelerator.shares_memory:
            return {}
        why = "its module keeps a list of its weights of its own, which would hold host tensors"
        return {c.name: why for c in candidates if any(isinstance(slot.module, nn.RNNBase) for slot in c.slots)}

    def memory(
        self, candidates: Iterable[Candidate], activation_bytes: int | None, coming_bytes: int = 0
    ) -> DeviceMemory:
        """What "auto" and shares of the device go by; `coming_bytes` of the model that is not selected have yet to move there."""
        free, total = self.accelerator.memory()
        there = {
            id(c.parameter): c.parameter.nbytes
            for c in candidates
            if c.stays is None and c.parameter.device == self.device
        }
        return DeviceMemory(
            str(self.device), max(0, free + sum(there.values()) - coming_bytes), total, activation_bytes
        )

    def open_engine(self, config: OffloadConfig, uid: str, pool_bytes: int) -> Engine | HostEngine:
        """An engine whose store is empty so far."""

        def files() -> Store:
            return Store.create(SessionDir(config.store_dir), direct_io=config.direct_io)

        if not self.on_host:
            return Engine(uid, files(), pool_bytes, read_threads=config.read_threads)
        limit = config.host_budget
        assert limit is None or isinstance(limit, int)  # stored as bytes
        store = HostStore(self.accelerator, files, limit, pin=config.pin_memory)
        return HostEngine(uid, store, self.accelerator, pool_bytes)


def add_weights(
    engine: Engine | HostEngine,
    specs: Sequence[WeightSpec],
    packs: Sequence[Pack],
    files: Mapping[str, tuple[str, str]],
) -> None:
    """Makes room for weights in the store of an engine; only host memory packs.

    Args:
        specs: of all weights that are in no pack.
        files: by key, the (file, name in it) that has a weight just as the store would. On disk it is served from there; of host
            memory only what has no room is.

    Raises:
        StoreError: there is no room.
    """
    if isinstance(engine, HostEngine):
        engine.store.add(specs, packs, files)
        return
    engine.store.add(spec for spec in specs if spec.key not in files)
    for path in sorted({path for path, _ in files.values()}):
        engine.store.attach(path, {key: name for key, (file, name) in files.items() if file == path})
