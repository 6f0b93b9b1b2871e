"""Every op that runs is a kernel of the modelled device: what it reads, what it writes, and whose memory its results are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map

from flextensor_fx.passes.ops import ALL_OPS
from flextensor_fx.runtime import op_implementations
from modelled_device import ModelledDevice
from modelled_queue import BUSY, by_the_model

# Their value is on the host, which therefore waits for the stream.
_HOST_WAITS = frozenset(
    f"aten::{name}" for name in ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2")
)


class Watching(TorchDispatchMode):
    """Takes each op of this thread for a kernel on the current stream of the device that its first tensor is on.

    An op on no device's memory belongs to the first of `devices`. What is not memory of a device is the host's. Ops that move
    weights are no kernels: the engine tells the device what they do.
    """

    def __init__(self, *devices: ModelledDevice) -> None:
        super().__init__()
        self._devices = devices

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else Dynamo would not compile under this mode

    def __enter__(self) -> Any:
        for device in self._devices:
            with device.lock:
                device.watched += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for device in self._devices:
            with device.lock:
                device.watched -= 1
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if BUSY.depth:
            return func(*args, **kwargs)
        if func in ALL_OPS:
            with self:  # what the engine computes is seen too
                return getattr(op_implementations, func._opname)(*args, **kwargs)
        reads, writes = _arguments(func, args, kwargs)
        tensors = reads + writes
        if any(is_traceable_wrapper_subclass(tensor) for tensor in tensors):
            return NotImplemented  # its parts come here next
        if any(isinstance(tensor, FakeTensor) or tensor.device.type != "cpu" for tensor in tensors):
            return func(*args, **kwargs)
        device = next((d for tensor in tensors for d in self._devices if d.block(tensor) is not None), self._devices[0])
        stream = device.current_stream()
        device.land_all(stream.line)
        result = func(*args, **kwargs)
        made = [
            t
            for t in _tensors(result)
            if not isinstance(t, FakeTensor) and t.device.type == "cpu" and t.layout == torch.strided
        ]
        if func._schema.name == "aten::set_":
            return result  # a tensor over memory that is somebody's already
        if device.on_this_host:
            for tensor in writes:
                device.host_wrote(tensor)
            return result
        known = {tensor.untyped_storage()._cdata for tensor in tensors}
        fresh = [t for t in made if t.numel() and t.untyped_storage()._cdata not in known and device.is_new(t)]
        if not writes and not fresh and (made or func._schema.name not in _HOST_WAITS):
            return result  # a view, or a question about a shape
        if stream.graph is not None and fresh:
            result, fresh = _into_the_capture(device, result, fresh)
        for tensor in fresh:
            device.allocate(tensor.untyped_storage())
        if func._schema.name.startswith(("aten::empty", "aten::new_empty")):
            return result
        again = None if stream.graph is None else _again(device, func, args, kwargs, fresh)
        device.launch(str(func), reads, [*writes, *fresh], again)
        from_device = any(not device.is_host(tensor) for tensor in reads)
        if from_device and (func._schema.name in _HOST_WAITS or any(device.is_host(tensor) for tensor in writes)):
            device.host_waits(stream.line.clock)
        return result


@cache
def _written(func: Any) -> tuple[tuple[str, bool], ...]:
    """(name, whether the op writes to it) of each argument."""
    return tuple((a.name, a.alias_info is not None and a.alias_info.is_write) for a in func._schema.arguments)


def _arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors with elements that an op reads only, and that it writes."""
    found: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for index, (name, written) in enumerate(_written(func)):
        value = args[index] if index < len(args) else kwargs.get(name)
        found[written].extend(t for t in _tensors(value) if t.layout == torch.strided and t.numel())
    return found


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def _into_the_capture(
    device: ModelledDevice, result: Any, fresh: Sequence[torch.Tensor]
) -> tuple[Any, list[torch.Tensor]]:
    """Moves new results into memory that the graph keeps, so that a replay finds it again."""
    moved: dict[int, torch.Tensor] = {}
    with by_the_model(), torch.no_grad():
        for tensor in fresh:
            new = device.allocate_captured(tensor.shape, tensor.stride(), tensor.dtype)
            moved[id(tensor)] = new.copy_(tensor)
    return tree_map(lambda part: moved.get(id(part), part), result), list(moved.values())


def _again(
    device: ModelledDevice, func: Any, args: Any, kwargs: dict[str, Any], fresh: Sequence[torch.Tensor]
) -> Callable[[], None]:
    """Computes the op once more from what its arguments' memory then holds, without keeping that memory from its next owner."""
    args, kwargs, into = tree_map(device.kept, (args, kwargs, list(fresh)))

    def again() -> None:
        with by_the_model(), torch.no_grad():
            result = func(*args, **kwargs)
            if into:
                made = [tensor for tensor in _tensors(result) if tensor.numel()]
                for old, new in zip(into, made, strict=True):
                    old.copy_(new)

    return again
