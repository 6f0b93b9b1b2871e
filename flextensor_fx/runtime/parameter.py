"""The parameter a user sees after offloading: an `nn.Parameter` whose value lives in a store.

It has the shape, dtype, stride and requires_grad of the parameter it stands for, and the compute device. Compiled graphs
never read it: the backend turns its placeholder into a `fetch`. Eager code that touches it runs on a memory map of the
store's file, so it gives right numbers slowly, a write through any alias lands in the store, and nothing is loaded whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from flextensor_fx._torch_versions import is_tracing
from flextensor_fx.errors import OffloadError
from flextensor_fx.passes import ops


class ValueSource(Protocol):
    """What holds the values: the engine."""

    instance: str
    """Names this very source: never equal for two sources of one process, one after the other included."""

    @property
    def aliases(self) -> bool:
        """Whether what `mapped` returns is the store's own memory; else it is a copy on the device."""
        ...

    def mapped(self, key: str) -> Tensor:
        """The value of weight `key` as a plain tensor on its device: a write to it is a write to the store."""
        ...

    def borrowed(self, key: str) -> Tensor:
        """As `mapped`, of a source that has copies made, for one op; what becomes of it is told by the next two."""
        ...

    def note_shown(self, key: str) -> None:
        """A tensor over the borrowed memory is in the hands of eager code."""
        ...

    def note_written(self, key: str) -> None:
        """The borrowed tensor was written to."""
        ...

    def host_value(self, key: str) -> Tensor:
        """The value of weight `key` as a plain CPU tensor that is the store's own memory."""
        ...

    def write(self, key: str, tensor: Tensor) -> None:
        """Gives weight `key` a new value, broadcast and converted."""
        ...


_OWN = ("key", "_sources", "identity", "_handle", "_is_param")


_RESHAPING = frozenset(
    overload
    for packet in (torch.ops.aten.set_, torch.ops.aten.resize_, torch.ops.aten.resize_as_)
    for overload in (getattr(packet, name) for name in packet.overloads())
)


class OffloadedParameter(Tensor):
    """A parameter whose value is in the store of `source` under `key`."""

    key: str
    identity: tuple[str, str]
    _handle: Tensor
    _sources: list[ValueSource | None]  # one, which detached copies share

    # Subclasses without this get every result wrapped into themselves; ours must be plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]  # torch's own idiom

    @staticmethod
    def __new__(
        cls,
        key: str,
        source: ValueSource | None,
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        requires_grad: bool,
        handle: Tensor | None = None,
    ) -> OffloadedParameter:
        parameter = Tensor._make_wrapper_subclass(
            cls, size, strides=stride, dtype=dtype, device=device, requires_grad=requires_grad
        )
        parameter.key = key
        parameter._sources = [source]
        parameter.identity = (key, "" if source is None else source.instance)
        # A tensor without elements: what tells a fake copy, made for tracing, from the real parameter.
        parameter._handle = torch.empty(0, dtype=dtype, device=device) if handle is None else handle
        parameter._is_param = True
        return parameter

    @classmethod
    def of(cls, parameter: Tensor, key: str, source: ValueSource, device: torch.device) -> OffloadedParameter:
        """The stand-in of `parameter`, on the device that computes."""
        with torch.inference_mode(False):
            new = cls(
                key,
                source,
                parameter.shape,
                parameter.stride(),
                parameter.dtype,
                device,
                parameter.requires_grad,
            )
        for name, value in vars(parameter).items():  # marks that libraries leave on parameters
            if name not in vars(new):
                setattr(new, name, value)
        return new

    # --- tracing ---------------------------------------------------------------------------------------------------
    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, str]]:
        return ["_handle"], self.identity

    @classmethod
    def __tensor_unflatten__(
        cls, inner: Mapping[str, Tensor], identity: tuple[str, str], size: Sequence[int], stride: Sequence[int]
    ) -> OffloadedParameter:
        handle = inner["_handle"]
        traced = cls(identity[0], None, size, stride, handle.dtype, handle.device, False, handle)
        traced.identity = identity
        return traced

    @classmethod
    def __metadata_guard__(cls, traced: tuple[str, str], current: tuple[str, str]) -> bool:
        # The key and the plan of its store are in the compiled code: another key or store must not run it.
        return traced == current

    def _stable_hash_for_caching(self) -> str:
        # Without it AOTAutograd's cache falls back to hashing a pickle, and with that the whole value.
        return repr(self.identity)

    @property
    def _in_foreign_graph(self) -> bool:
        """Whether another backend traces the graph that uses this; the graph then gets to the value by itself."""
        return self.source is None and not isinstance(self._handle, FakeTensor)

    @property
    def source(self) -> ValueSource | None:
        """Where the value is; None while it is traced."""
        return self._sources[0]

    @source.setter
    def source(self, source: ValueSource) -> None:
        self._sources[0] = source

    # --- eager use -------------------------------------------------------------------------------------------------
    @property
    def _is_copied(self) -> bool:
        """Whether the value on the device is a copy, made for every use."""
        return self.source is not None and not self.source.aliases

    def host_value(self) -> Tensor:
        """The value as a plain CPU tensor that is the store's own memory."""
        assert self.source is not None
        return self.source.host_value(self.key)

    def _detached(self) -> OffloadedParameter:
        """The same weight without gradients, still in the store: whoever collects them all may have no room for values."""
        with torch.inference_mode(False):
            new = OffloadedParameter(self.key, self.source, self.shape, self.stride(), self.dtype, self.device, False)
        new.identity = self.identity
        new._sources = self._sources  # it goes on having the value when the store is closed
        new._is_param = False
        return new

    def plain(self) -> Tensor:
        """The value as a plain tensor that aliases the store (or, while tracing, a fake tensor like it)."""
        if isinstance(self._handle, FakeTensor):
            return self._handle.new_empty_strided(self.shape, self.stride())
        if self._in_foreign_graph:
            return ops.fetch(self.key, list(self.shape), list(self.stride()), self.dtype, self.device)
        assert self.source is not None
        return self.source.mapped(self.key)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _RESHAPING or torch.Tag.inplace_view in func.tags:
            raise OffloadError(
                f"{func}: an offloaded weight keeps its shape and its memory; call flextensor_fx.release(model) first, or "
                "copy_() a new value into it"
            )
        first = args[0] if args else None
        if isinstance(first, OffloadedParameter) and first._is_copied:
            if func is torch.ops.aten.detach.default:
                return first._detached()
            if func is torch.ops.aten.copy_.default and not isinstance(args[1], OffloadedParameter):
                assert first.source is not None
                first.source.write(first.key, args[1])
                return first
        stands_for: dict[int, OffloadedParameter] = {}

        def value_of(parameter: OffloadedParameter) -> Tensor:
            if parameter._in_foreign_graph and func._schema.is_mutable:
                raise OffloadError(
                    f"{parameter.key}: {func} may write to an offloaded weight in a graph of another backend, and the change "
                    'would be lost; compile with backend="flextensor", or call flextensor_fx.release(model) first'
                )
            value = parameter.source.borrowed(parameter.key) if parameter._is_copied else parameter.plain()  # pyright: ignore[reportOptionalMemberAccess]
            stands_for[id(value)] = parameter
            return value

        values: Any = pytree.tree_map_only(OffloadedParameter, value_of, args)
        named: Any = pytree.tree_map_only(OffloadedParameter, value_of, dict(kwargs or {}))
        result = func(*values, **named)
        if any(parameter._is_copied for parameter in stands_for.values()):
            _note_use(func, args, kwargs or {}, stands_for, values, named, result)
        # An in-place op returns its argument: the caller must get its own object back.
        return pytree.tree_map_only(Tensor, lambda out: stands_for.get(id(out), out), result)

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.plain()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype or value.device != self.device:
            raise ValueError(
                f"{self.key}: an offloaded weight keeps its shape, dtype and device: expected {self.dtype} "
                f"{tuple(self.shape)} on {self.device}, found {value.dtype} {tuple(value.shape)} on {value.device}. "
                "Call flextensor_fx.release(model) before converting, moving or resizing it (.half(), .to(), .data = ...)."
            )
        own = self.plain()
        if value is self or (value.data_ptr() == own.data_ptr() and _alike(value, own)):
            return
        # What is read in another order than it is written, as `parameter.data.t()`, must be read first.
        value = value.detach()
        own.copy_(value.clone() if value.untyped_storage().data_ptr() == own.untyped_storage().data_ptr() else value)

    def numpy(self, **options: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.requires_grad:
            raise RuntimeError(
                "Can't call numpy() on a Tensor that requires grad. Use tensor.detach().numpy() instead."
            )
        return self.plain().numpy(**options)

    def untyped_storage(self) -> torch.UntypedStorage:
        if is_tracing():  # to tell tensors apart, for which a file of the user would be copied whole
            return super().untyped_storage()
        return self.plain().untyped_storage()

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        # Tensor.to returns `self` where nothing changes; Module.to would then swap the parameter with itself, which fails
        # while compiled code holds a weak reference to it. With a plain tensor it sets `.data`, which changes nothing.
        return self.plain().to(*args, **kwargs)

    def type(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain().type(*args, **kwargs)

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.host_value().clone() if self._is_copied else self.plain().cpu(*args, **kwargs)

    def float(self, **kwargs: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.plain().float(**kwargs)

    def double(self, **kwargs: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.plain().double(**kwargs)

    def half(self, **kwargs: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.plain().half(**kwargs)

    def bfloat16(self, **kwargs: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.plain().bfloat16(**kwargs)

    def replaced_by(self, value: Tensor) -> nn.Parameter:
        """A plain parameter of this one's requires_grad and marks around `value`."""
        plain = nn.Parameter(value, requires_grad=self.requires_grad)
        for name, mark in vars(self).items():
            if name not in _OWN:
                setattr(plain, name, mark)
        return plain

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = self.replaced_by(self.plain().clone())
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.replaced_by(self.plain()).__reduce_ex__(protocol)

    def __repr__(self, **options: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        if isinstance(self._handle, FakeTensor):
            return f"OffloadedParameter({self.key!r}, {tuple(self.shape)}, {self.dtype})"
        return f"Parameter containing (offloaded as {self.key!r}):\n{self.plain()!r}"


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether tensors of one address, shape and dtype have the same value."""
    return a.stride() == b.stride() and a.is_conj() == b.is_conj() and a.is_neg() == b.is_neg()


def _note_use(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    stands_for: Mapping[int, OffloadedParameter],
    values: Any,
    named: Any,
    result: Any,
) -> None:
    """Tells the sources of copied values which of them `func` has written to, and which of them lie under its result."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            for parameter in pytree.tree_leaves(given):
                if isinstance(parameter, OffloadedParameter) and parameter._is_copied:
                    assert parameter.source is not None
                    parameter.source.note_written(parameter.key)
    given_out = {
        out.untyped_storage()._cdata
        for out in pytree.tree_leaves(result)
        if isinstance(out, Tensor) and id(out) not in stands_for and out.layout is torch.strided
    }
    for value in pytree.tree_leaves((values, named)):
        parameter = stands_for.get(id(value))
        if parameter is not None and parameter._is_copied and value.untyped_storage()._cdata in given_out:
            assert parameter.source is not None
            parameter.source.note_shown(parameter.key)
