"""Modules made without memory for their parameters, and buffers that only a module's constructor knows how to compute."""

from __future__ import annotations

import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from .errors import LoadError
from .matching import Place
from .tree import walk

_PLAIN = (bool, int, float, complex, str, type(None))
_MOST_CHOICES = 3  # true or false each
_PLACED = ("device", "dtype")  # say where a module is made, not what it computes


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within it, modules made by this thread have their parameters on the meta device, and real buffers."""
    known: dict[int, tuple[weakref.ref[Tensor], nn.Parameter]] = {}
    thread = threading.get_ident()

    def to_meta(module: nn.Module, name: str, parameter: Tensor | None) -> nn.Parameter | None:
        if type(parameter) is not nn.Parameter or parameter.is_meta or threading.get_ident() != thread:
            return None
        reference, empty = known.get(id(parameter), (None, None))
        if empty is None or reference is None or reference() is not parameter:  # one that is registered twice is a tie
            empty = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            vars(empty).update(vars(parameter))
            known[id(parameter)] = weakref.ref(parameter), empty
        return empty

    handle = register_module_parameter_registration_hook(to_meta)  # pyright: ignore[reportArgumentType]  # None keeps it
    try:
        yield
    finally:
        handle.remove()


def construct(make: Callable[[], object]) -> nn.Module:
    """Calls `make` with parameters on the meta device and real buffers, whatever the default device is.

    Raises:
        LoadError: it returns no module.
    """
    with torch.device("cpu"), parameters_on_meta():
        model = make()
    if not isinstance(model, nn.Module):
        raise LoadError(f"load: expected the function to return an nn.Module, found {type(model).__name__}")
    return model


def rebuilt_buffers(root: nn.Module, missing: Iterable[Place]) -> dict[Place, Tensor]:
    """The values of buffers that are on the meta device and in no state dict, as the constructors of their modules compute them.

    1. A module, else the nearest one around it, is made once more, with real buffers.
    2. Its constructor's arguments must be known: each is an attribute of the module of the same name, or true or false, of
       which both are tried. `device` and `dtype` are left out.
    3. What is made must have the same modules, tensors and plain attributes as the module there is.
    4. All makings that fit must agree on the buffers, also from other random numbers and with another default dtype.

    Raises:
        LoadError: names the buffers for which there is no such module.
    """
    missing = list(missing)
    paths: dict[int, str] = {}
    for path, module in walk(root):
        paths.setdefault(id(module), path)
    made: dict[str, Mapping[str, Tensor]] = {}
    found: dict[Place, Tensor] = {}
    for place in missing:
        path = paths[id(place.module)]
        for around in _upwards(path):
            if around not in made:
                made[around] = _buffers_of(_module_at(root, around))
            inner = path[len(around) :].lstrip(".")
            value = made[around].get(f"{inner}.{place.attribute}" if inner else place.attribute)
            if value is not None:
                found[place] = value
                break
    left = [place.name for place in missing if place not in found]
    if left:
        raise LoadError(
            f"load: {len(left)} buffers are on the meta device, in no state dict, and cannot be computed from what their modules "
            f"tell of their constructors' arguments: {', '.join(left[:5])}. Give a function that makes the model instead of the "
            "model: flextensor_fx.load(lambda: Model(config), weights, config); it is called with parameters on the meta device "
            "and real buffers, and the model is returned. Or give their values: load(..., buffers={name: tensor})"
        )
    return found


def _upwards(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _module_at(root: nn.Module, path: str) -> nn.Module:
    return next(module for name, module in walk(root) if name == path)


def _buffers_of(module: nn.Module) -> Mapping[str, Tensor]:
    """The buffers of every making of a module that fits, by name; none where two differ, or none fits."""
    choices = _arguments(module)
    if choices is None:
        return {}
    usual = torch.get_default_dtype()
    floats = {t.dtype for _, t in _tensors(module) if t.dtype.is_floating_point and t.dtype.itemsize in (2, 4, 8)}
    makings = [(arguments, usual, seed) for arguments in choices for seed in (1, 2)]
    makings += [(arguments, dtype, 1) for arguments in choices for dtype in sorted(floats - {usual}, key=str)]
    made = [(dtype, _made(module, arguments, dtype, seed)) for arguments, dtype, seed in makings]
    fitting = [(dtype, _buffers(one)) for dtype, one in made if one is not None]
    wanted = {name: buffer.dtype for name, buffer in _buffers(module).items()}
    if any(dtype is usual and {n: b.dtype for n, b in found.items()} == wanted for dtype, found in fitting):
        # The module was not made with another default dtype, nor converted since.
        fitting = [(dtype, found) for dtype, found in fitting if dtype is usual]
    values = [{name: buffer.to(wanted[name]) for name, buffer in found.items()} for _, found in fitting]
    return {
        name: value
        for name, value in (values[0] if values else {}).items()
        if all(_equal(value, other[name]) for other in values)
    }


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return {
        f"{path}.{name}" if path else name: buffer
        for path, inner in walk(module)
        for name, buffer in inner._buffers.items()
        if buffer is not None
    }


def _arguments(module: nn.Module) -> list[dict[str, Any]] | None:
    """The keyword arguments that the module may have been made with; None if some cannot be known."""
    cls = type(module)
    if cls.__init__ is nn.Module.__init__:
        return None
    try:
        parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    except (TypeError, ValueError):
        return None
    known: dict[str, list[Any]] = {}
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            return None
        if parameter.name in _PLACED and parameter.default is not parameter.empty:
            continue
        if parameter.name in vars(module):
            known[parameter.name] = [vars(module)[parameter.name]]
        elif isinstance(parameter.default, bool):
            known[parameter.name] = [parameter.default, not parameter.default]
        else:
            return None
    if sum(len(values) > 1 for values in known.values()) > _MOST_CHOICES:
        return None
    return [dict(zip(known, values, strict=True)) for values in itertools.product(*known.values())]


def _made(module: nn.Module, arguments: Mapping[str, Any], dtype: torch.dtype, seed: int) -> nn.Module | None:
    """The module made once more; None where that fails, or gives something else."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=()), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(seed)
        torch.set_default_dtype(dtype)
        try:
            with parameters_on_meta():
                made = type(module)(**arguments)
        except Exception:  # noqa: BLE001 - a constructor may raise anything, and then its buffers are called missing
            return None
        finally:
            torch.set_default_dtype(before)
    return made if _alike(made, module) else None


def _alike(made: nn.Module, module: nn.Module) -> bool:
    ours, theirs = list(walk(module)), list(walk(made))
    if [(path, type(m)) for path, m in ours] != [(path, type(m)) for path, m in theirs]:
        return False
    if any(_plain(a) != _plain(b) for (_, a), (_, b) in zip(ours, theirs, strict=True)):
        return False
    ours, theirs = _tensors(module), _tensors(made)
    return len(ours) == len(theirs) and all(
        name == other
        and a.shape == b.shape
        and (a.dtype == b.dtype or (a.dtype.is_floating_point and b.dtype.is_floating_point))
        and (isinstance(a, nn.Parameter) or not b.is_meta)
        for (name, a), (other, b) in zip(ours, theirs, strict=True)
    )


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers by their paths."""
    return [
        (f"{path}.{name}" if path else name, tensor)
        for path, inner in walk(module)
        for table in (inner._parameters, inner._buffers)
        for name, tensor in table.items()
        if tensor is not None
    ]


def _plain(module: nn.Module) -> dict[str, Any]:
    """The attributes that are numbers, texts, or tuples and lists of these; without what libraries note for themselves."""
    named = {name: value for name, value in vars(module).items() if name != "training" and not name.startswith("_")}
    return {name: value for name, value in named.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, (tuple, list)) and all(_is_plain(item) for item in value))


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
