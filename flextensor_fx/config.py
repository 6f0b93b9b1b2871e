"""The configuration: one frozen value, from keywords, a file and the environment."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from . import _config_sources, _config_values
from .device_memory import DeviceMemory
from .errors import ConfigError


def _checked(check: Callable[[str, Any], Any], *, shapes_graph: bool) -> dict[str, Any]:
    """Describe a field: the checker of its values, and whether the rewritten graph depends on it."""
    return {"check": check, "shapes_graph": shapes_graph}


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """What to offload, within which budget, and how. Values are checked once, here, and stored in one form.

    Raises:
        ConfigError: a value of the wrong type or out of range (PatternError for a malformed pattern).
    """

    include_patterns: Sequence[str] = field(
        default=(), metadata=_checked(partial(_config_values.patterns, "include"), shapes_graph=True)
    )
    """Patterns of the modules and parameters to offload; there is no default choice, so `select` refuses ()."""

    exclude_patterns: Sequence[str] = field(
        default=(), metadata=_checked(partial(_config_values.patterns, "exclude"), shapes_graph=True)
    )
    """Patterns of what stays resident all the same."""

    budget: int | float | str | None = field(default=None, metadata=_checked(_config_values.budget, shapes_graph=True))
    """Most bytes of selected weights on the device: an int or "2GiB"; a share of them: "25%", 0.25; a share of the device's
    memory: "80% of device"; "auto": what the device has free beside activations and a margin; None: chosen."""

    device: str | torch.device | None = field(
        default=None, metadata=_checked(_config_values.optional_device, shapes_graph=True)
    )
    """The compute device, such as "cuda"; None is where the model's weights are. `offload` moves the model there."""

    lookahead: int | None = field(
        default=None, metadata=_checked(partial(_config_values.optional_count, 0), shapes_graph=True)
    )
    """How many transfers may run ahead of the step that needs them; None: chosen."""

    min_stream_bytes: int | None = field(
        default=None, metadata=_checked(partial(_config_values.optional_count, 0), shapes_graph=True)
    )
    """Weights of fewer bytes stay resident; None: chosen."""

    objective: str = field(
        default="single",
        metadata=_checked(partial(_config_values.one_of, ("single", "steady")), shapes_graph=True),
    )
    """"single": a call starts with nothing prefetched. "steady": calls follow one another, and the end of one starts the first
    copies of the next."""

    store: str | None = field(
        default=None,
        metadata=_checked(partial(_config_values.optional_one_of, ("disk", "host")), shapes_graph=True),
    )
    """Where offloaded weights lie: "disk", in files, or "host", in host memory; None: in files where the device is the CPU, else
    in host memory."""

    host_budget: int | str | None = field(
        default=None, metadata=_checked(_config_values.optional_size, shapes_graph=False)
    )
    """Most bytes of host memory that a store there may take; what goes beyond lies in mapped files. None: no limit."""

    pin_memory: bool = field(default=True, metadata=_checked(_config_values.flag, shapes_graph=False))
    """Pin the host memory of a store, so that copies run beside the host."""

    store_dir: str | os.PathLike[str] | None = field(
        default=None, metadata=_checked(_config_values.optional_path, shapes_graph=False)
    )
    """The directory of the files that hold offloaded weights; None is a temporary one."""

    inner_backend: str = field(
        default="inductor",
        metadata=_checked(partial(_config_values.one_of, ("inductor", "aot_eager", "eager")), shapes_graph=True),
    )
    """The compiler that gets the rewritten graph: "inductor", "aot_eager" or "eager"."""

    inner_mode: str | None = field(default=None, metadata=_checked(_config_values.optional_text, shapes_graph=True))
    """The inner compiler's mode, such as "max-autotune"; read by Inductor alone."""

    inner_options: Mapping[str, Any] | None = field(
        default=None, metadata=_checked(_config_values.optional_options, shapes_graph=True)
    )
    """Options passed on to Inductor, JSON values; stored immutable."""

    profile: str | os.PathLike[str] | None = field(
        default=None, metadata=_checked(_config_values.optional_path, shapes_graph=True)
    )
    """The file of a profile to plan from, or "auto": measure the first calls, and plan once more. None: estimate."""

    read_threads: int = field(default=1, metadata=_checked(partial(_config_values.count, 1), shapes_graph=False))
    """Threads that read weights from disk."""

    direct_io: bool = field(default=True, metadata=_checked(_config_values.flag, shapes_graph=False))
    """Read past the page cache where the file system can."""

    dump_dir: str | os.PathLike[str] | None = field(
        default=None, metadata=_checked(_config_values.optional_path, shapes_graph=False)
    )
    """A directory for numbered dumps of the graph before and after each pass; None writes none."""

    enabled: bool = field(default=True, metadata=_checked(_config_values.flag, shapes_graph=True))
    """False compiles with the inner compiler alone."""

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(self):
            checked = entry.metadata["check"](f"option {entry.name!r}", getattr(self, entry.name))
            object.__setattr__(self, entry.name, checked)

    @classmethod
    def resolve(
        cls,
        overrides: Mapping[str, Any] | OffloadConfig | None = None,
        file: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> OffloadConfig:
        """Return the configuration in force: `overrides` over the file's values over the environment's.

        Args:
            overrides: values by field name; or a whole OffloadConfig, and then neither file nor environment is read.
            file: a .toml, .yaml, .yml or .json file; None reads the one that FLEXTENSOR_FX_CONFIG names, if any.
            env: the environment; None is the process's. ``FLEXTENSOR_FX_<FIELD>`` sets a field: lists comma-separated
                or JSON, booleans as 0/1/true/false/yes/no, "none" for None, inner_options as JSON.

        Raises:
            ConfigError: an unknown name, a value out of range, or an unreadable file.
        """
        if isinstance(overrides, OffloadConfig):
            if file is not None:
                raise ConfigError(
                    f"configuration: expected a file or a whole OffloadConfig, found both (file {os.fspath(file)!r}); "
                    "pass a mapping of the values that should override the file's"
                )
            return overrides
        if overrides is not None and not isinstance(overrides, Mapping):
            _config_values.refuse(
                "options", "a mapping or an OffloadConfig", overrides, "write {'include_patterns': [...]}"
            )
        env = os.environ if env is None else env
        prefix = _config_sources.ENV_PREFIX
        named = {key.removeprefix(prefix): text for key, text in env.items() if key.startswith(prefix)}
        # Read by the project's own scripts and tests, not fields of a configuration.
        named = {name: text for name, text in named.items() if name != "VENV" and not name.startswith("TEST_")}
        file = file if file is not None else named.get("CONFIG") or None
        named.pop("CONFIG", None)
        merged: dict[str, Any] = {}
        fields = {entry.name: entry for entry in dataclasses.fields(cls)}
        _refuse_unknown(named, {name.upper() for name in fields} | {"CONFIG"}, prefix, "the environment")
        for name, text in named.items():
            who = f"environment variable {prefix + name!r}"
            value = _config_sources.from_text(text, fields[name.lower()].default, name.lower(), who)
            merged[name.lower()] = fields[name.lower()].metadata["check"](who, value)
        sources = [] if file is None else [(f"file {os.fspath(file)!r}", _config_sources.read_file(file))]
        sources.append(("the options", overrides or {}))
        for origin, values in sources:
            _refuse_unknown(values, set(fields), "", origin)
            for name, value in values.items():
                merged[name] = fields[name].metadata["check"](f"option {name!r} in {origin}", value)
        return cls(**merged)

    def overlaid(self, options: Mapping[str, Any] | OffloadConfig | None, store: str) -> OffloadConfig:
        """Return the configuration for compiling a model that was offloaded with this one: `options` for the inner compiler.

        Args:
            options: as given to the backend; what they leave out is as it is here.
            store: of the model, for messages.

        Raises:
            ConfigError: `options` ask for another selection or plan than the model was offloaded with.
        """
        if options is None or options == self:
            return self
        given = options.asdict() if isinstance(options, OffloadConfig) else dict(options)
        changed = OffloadConfig(**{**self.asdict(), **given})
        for name in (
            "include_patterns",
            "exclude_patterns",
            "budget",
            "device",
            "lookahead",
            "min_stream_bytes",
            "objective",
            "profile",
            "store",
            "host_budget",
            "pin_memory",
            "store_dir",
        ):
            if getattr(changed, name) != getattr(self, name):
                raise ConfigError(
                    f"option {name!r}: {store} is offloaded with {getattr(self, name)!r}, found {getattr(changed, name)!r}; "
                    "leave the option out, or call flextensor_fx.release(model) first"
                )
        return changed

    def budget_bytes(self, selected_bytes: int, memory: DeviceMemory | None = None) -> int | None:
        """Return the budget in bytes, rounded down; None when none is set.

        Args:
            selected_bytes: what a share of the weights is taken of.
            memory: what a share of the device and "auto" go by; these need it.
        """
        budget = self.budget
        assert not isinstance(budget, float)  # stored as percent text
        if not isinstance(budget, str) or not self.budget_is_of_device:
            return _config_values.share_of(budget, selected_bytes)
        assert memory is not None
        if budget == _config_values.AUTO:
            return memory.room
        return _config_values.share_of(budget.removesuffix(_config_values.OF_DEVICE), memory.total)

    @property
    def budget_is_of_device(self) -> bool:
        """Whether the budget hangs on the memory of the device."""
        budget = self.budget
        return isinstance(budget, str) and (budget == _config_values.AUTO or budget.endswith(_config_values.OF_DEVICE))

    def asdict(self) -> dict[str, Any]:
        """Return all fields as JSON values; `OffloadConfig` of them, also after a trip through JSON, is equal."""
        return {entry.name: _plain(getattr(self, entry.name)) for entry in dataclasses.fields(self)}

    def digest(self) -> str:
        """Return 16 hexadecimal digits of the fields that shape the graph, the same in every process."""
        shaping = {
            e.name: _plain(getattr(self, e.name)) for e in dataclasses.fields(self) if e.metadata["shapes_graph"]
        }
        return hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        width = max(len(entry.name) for entry in dataclasses.fields(self))
        rows = (f"{name.ljust(width)}  {value!r}" for name, value in self.asdict().items())
        return "\n".join(["configuration:", *rows])


def _plain(value: Any) -> Any:
    if isinstance(value, _config_values.Options):
        return value.plain()
    return list(value) if isinstance(value, tuple) else value


def _refuse_unknown(names: Iterable[str], known: set[str], prefix: str, origin: str) -> None:
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(str(name), sorted(known), n=1, cutoff=0.0)
            raise ConfigError(
                f"{prefix}{name} in {origin} is no option: the nearest is {prefix + close[0]!r}; "
                f"expected one of {', '.join(prefix + k for k in sorted(known))}"
            )
