"""Measuring a model: compiled graphs that stream all they can, run a few times while events are noted."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from . import _frames
from ._torch_versions import BackendCompilerFailed
from .backend import flextensor, stream_all
from .config import OffloadConfig
from .errors import OffloadError, ProfileError, StoreError
from .offloading import find_sessions, release
from .profile import Profile
from .recording import one_session
from .runtime.trace import Event
from .session import Session
from .session_profile import profile_of

_WARM_UP = 3
_LEAST_CALLS = 7
_MOST_CALLS = 30
_MOST_SECONDS = 60.0
_ENOUGH = 0.01  # error of the median of a graph's time, relative, at which it has been measured often enough


def profile(
    model: nn.Module,
    args: tuple[Any, ...] | list[tuple[Any, ...]],
    config: OffloadConfig | Mapping[str, Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    calls: int | None = None,
    before_each: Callable[[], object] | None = None,
    progress: bool = True,
) -> Profile:
    """Measures what the steps of `model` cost, and its link, for `options={"profile": ...}` and for planning.

    1. The model is compiled to stream every selected weight that can be streamed, as far as the budget of `config` allows.
    2. Each call is run three times to warm up, then seven times, and on until the median of its time is known to 1%, at most
       30 times or a minute; or as often as `calls` says.
    3. Medians are kept, by graph and class of input shapes; the curve of the link is that of the very reads that ran beside
       compute. Where they cannot tell a latency, it is taken from the machine's own curve.

    Args:
        model: a module; afterwards its parameters, buffers and the random state of the CPU are as before. What else calls change
            (attributes in Python, arguments that they write) stays changed. Or a compiled one that has been offloaded: it is
            measured as it is.
        args: positional arguments of a call; a list of such tuples measures several calls, such as prefill and decode.
        config: what `torch.compile` would get as options. Not for a model that is offloaded already.
        kwargs: keyword arguments of each call.
        calls: how often each call is measured; None: as often as it takes.
        before_each: called before each measured call, such as one that drops pages, to measure the disk and not the page cache.
        progress: show a progress bar where stderr is a terminal.

    Raises:
        ProfileError: nothing is streamed, `config` is missing, or `calls` is below 1.
        OffloadError: (one of its kinds) the configuration, the patterns or the budget cannot work.
        StoreError: the store cannot be written.
        Exception: whatever the model raises.
    """
    given = args if isinstance(args, list) else [args]
    if wrong := [type(one).__name__ for one in given if not isinstance(one, tuple)]:
        raise ProfileError(
            f"profile: expected args to be a tuple, or a list of tuples, found {wrong[0]}; write (x,) for a single argument"
        )
    if calls is not None and calls < 1:
        raise ProfileError(f"profile: expected calls of at least 1, found {calls}; None measures as often as it takes")
    runs = [(one, dict(kwargs or {})) for one in given]
    if not runs:
        raise ProfileError("profile: expected arguments of at least one call, found an empty list")
    with torch.no_grad(), _plain_errors(), _unchanged(model), _compiled(model, config) as call:
        for one, named in runs:
            for _ in range(_WARM_UP):
                call(*one, **named)
        session = one_session(call, "profile")
        if session.engine is None:
            raise ProfileError(
                f"profile: expected {session.uid} to stream weights, found that all stay in memory; lower the budget or name "
                "more in include_patterns"
            )
        events: list[Event] = []
        before = session.engine.stats()
        with _progress(len(runs) * (calls or _MOST_CALLS), progress) as step:
            for one, named in runs:
                events += _measure(session, partial(call, *one, **named), calls, before_each, step)
        return profile_of(session, events, before)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raises our own errors as they are: the caller compiles nothing, and need not know that Dynamo wraps them."""
    try:
        yield
    except BackendCompilerFailed as error:
        if isinstance(error.inner_exception, OffloadError | StoreError):
            raise error.inner_exception from None
        raise


@contextmanager
def _compiled(model: Any, config: OffloadConfig | Mapping[str, Any] | None) -> Iterator[Callable[..., Any]]:
    """What to call; a model that is offloaded only for this is released afterwards."""
    root = _frames.unwrap(model)
    if find_sessions(model) or root is not model:
        if config is not None:
            raise ProfileError(
                f"profile: expected a plain module with config, or a compiled or offloaded one without, found "
                f"{type(root).__name__} and a config; leave one of them out"
            )
        yield model if root is not model else torch.compile(model, backend=flextensor)
        return
    if not isinstance(model, nn.Module):
        raise ProfileError(f"profile: expected an nn.Module, found {type(model).__name__}")
    if config is None:
        raise ProfileError(
            "profile: expected config to say what to offload, found None; give {'include_patterns': [...]}"
        )
    options = OffloadConfig.resolve(config).asdict() | {"profile": None, "enabled": True}
    try:
        yield torch.compile(model, backend=stream_all, options=options)
    finally:
        release(model)


@contextmanager
def _unchanged(model: Any) -> Iterator[None]:
    """Undoes what calls do to buffers, such as running statistics and caches, and to the random state of the CPU."""
    root = _frames.unwrap(model)
    modules = list(root.modules()) if isinstance(root, nn.Module) else []
    held = [(module, name, buffer) for module in modules for name, buffer in module._buffers.items()]
    known = {id(b): b for _, _, b in held if b is not None and not nn.parameter.is_lazy(b) and not b.is_meta}
    with torch.inference_mode(False):
        copies = {key: buffer.clone() for key, buffer in known.items()}
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            for module, name, buffer in held:
                module._buffers[name] = buffer
            for key, buffer in known.items():
                if not torch.equal(buffer, copies[key]):
                    with torch.inference_mode(buffer.is_inference()):
                        buffer.copy_(copies[key])


def _measure(
    session: Session,
    call: Callable[[], Any],
    calls: int | None,
    before_each: Callable[[], object] | None,
    step: Callable[[], object],
) -> list[Event]:
    """The events of calls, as many as are wanted or as it takes to know their times."""
    engine = session.engine
    assert engine is not None
    found: list[Event] = []
    totals: defaultdict[str, list[float]] = defaultdict(list)
    begin = time.perf_counter()
    for number in range(1, (calls or _MOST_CALLS) + 1):
        if before_each is not None:
            before_each()
        with session.lock, engine.trace() as recorder:
            call()
        events = recorder.events()
        found += events
        step()
        _note_totals(events, totals)
        known = calls is None and number >= _LEAST_CALLS and all(_error(times) <= _ENOUGH for times in totals.values())
        if known or (calls is None and time.perf_counter() - begin > _MOST_SECONDS):
            break
    return found


def _note_totals(events: Sequence[Event], totals: Mapping[str, list[float]]) -> None:
    begun: dict[str, float] = {}
    for event in events:
        if event.kind == "enters":
            begun[event.key] = event.at_s
        elif event.kind == "leaves" and event.key in begun:
            totals[event.key].append(event.at_s - begun.pop(event.key))


def _error(times: Sequence[float]) -> float:
    """Of the median, relative: the standard error that the median absolute deviation of normal times stands for."""
    middle = median(times)
    deviation = 1.4826 * median(abs(t - middle) for t in times)
    return 1.2533 * deviation / len(times) ** 0.5 / max(middle, 1e-9)


@contextmanager
def _progress(total: int, wanted: bool) -> Iterator[Callable[[], object]]:
    from torch.hub import tqdm  # that of the package of this name, where it is installed

    with tqdm(total=total, desc="profile", disable=not (wanted and sys.stderr.isatty())) as bar:
        yield lambda: bar.update(1)


__all__ = ["profile"]
