"""What a program may be called with: the structure of its arguments, their dtypes and shapes, and how sizes hang together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils import _pytree as pytree

from ._torch_versions import mark_free
from .errors import GradientError, OffloadError
from .passes.metadata import value_of

_NUMBERS = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
_LARGEST = 1 << 40  # bounds beyond this are how "no limit" is written


@dataclass(frozen=True)
class Leaf:
    """One leaf of the arguments.

    Fields:
        path: in the arguments, "args[0]" or "kwargs['mask']['rows']".
        kind: Tensor, the type of a number that may vary, or None for a constant that was traced.
        value: of a constant.
        dtype, device, layout, shape: of a tensor; a size that may vary is an expression over symbols.
        stride: of a tensor that was not traced as contiguous; None of others. One that hangs on a size that may vary is -1.
        written: whether the program writes to it.
    """

    path: str
    kind: type | None
    value: Any = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    layout: torch.layout | None = None
    shape: tuple[Any, ...] = ()
    stride: tuple[Any, ...] | None = None
    written: bool = False


@dataclass(frozen=True)
class ProgramInputs:
    """The arguments of a program.

    Fields:
        spec: the structure of (args, kwargs).
        leaves: in order.
        ranges: least and greatest value of each symbol.
        guards: what torch.export found that sizes must also be, as a function of all leaves that raises AssertionError; None
            where there is nothing.
    """

    spec: pytree.TreeSpec
    leaves: tuple[Leaf, ...]
    ranges: Mapping[sympy.Symbol, tuple[Any, Any]]
    guards: Callable[..., object] | None

    @staticmethod
    def of(program: ExportedProgram, placeholders: Sequence[Node]) -> ProgramInputs:
        """Those of an exported program whose `placeholders` stand for them."""
        spec = program.call_spec.in_spec
        assert spec is not None
        values = [value_of(node) for node in placeholders]
        paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(len(values))), spec))
        leaves = tuple(_leaf(_told(path), value) for (path, _), value in zip(paths, values, strict=True))
        ranges = {symbol: (found.lower, found.upper) for symbol, found in program.range_constraints.items()}
        return ProgramInputs(spec, leaves, ranges, _guards(program, values, spec))

    def moved(self, device: torch.device, written: Sequence[bool]) -> ProgramInputs:
        """The same on another device; `written` says of each leaf whether the program writes to it."""
        leaves = zip(self.leaves, written, strict=True)
        return replace(
            self, leaves=tuple(replace(leaf, device=leaf.device and device, written=w) for leaf, w in leaves)
        )

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The leaves of a call's arguments, checked.

        Raises:
            OffloadError: structure, dtype, shape, device or a constant is not as exported.
            GradientError: an argument requires a gradient.
        """
        names = self._keywords
        if set(names) == kwargs.keys():
            kwargs = {name: kwargs[name] for name in names}
        values, spec = pytree.tree_flatten((args, dict(kwargs)))
        if spec != self.spec:
            raise OffloadError(
                f"program: expected {_told_spec(self.spec)}, found {_told_spec(spec)}; pass arguments as they were exported, "
                "by position or by keyword, in the same containers"
            )
        sizes: dict[sympy.Symbol, int] = {}
        for leaf, value in zip(self.leaves, values, strict=True):
            _check(leaf, value, sizes)
        self._check_sizes(values, sizes)
        if self.guards is not None:
            try:
                self.guards(*values)
            except AssertionError as error:
                raise OffloadError(
                    f"program: expected sizes for which the exported graph holds, found others: {error}; export with sizes "
                    "like these"
                ) from None
        return values

    def laid_out(self, values: Sequence[Any]) -> list[Any]:
        """The leaves of a call in the layout that they were exported in, for code that takes it for granted.

        Raises:
            OffloadError: one is in another layout and cannot be copied, since the program writes to it or expects strides of its
                own.
        """
        found = list(values)
        for place, (leaf, value) in enumerate(zip(self.leaves, values, strict=True)):
            if leaf.kind is not Tensor or value.layout is not torch.strided:
                continue
            fits = value.is_contiguous() if leaf.stride is None else value.stride() == leaf.stride
            if not fits and (leaf.stride is not None or leaf.written):
                raise OffloadError(
                    f"program: {leaf.path}: expected stride {leaf.stride or 'of a contiguous tensor'}, as it was exported, found "
                    f"{value.stride()}; pass it in that layout"
                )
            found[place] = value if fits else value.contiguous()
        return found

    def with_free_sizes(self, values: Sequence[Any]) -> list[Any]:
        """The leaves of a call, with the sizes that may vary marked for Dynamo, which then compiles once for all of them."""
        found = list(values)
        for place, leaf in enumerate(self.leaves):
            free = [dim for dim, size in enumerate(leaf.shape) if not isinstance(size, int)]
            if free and leaf.kind is Tensor:
                found[place] = values[place].detach()  # the mark is an attribute, and the caller's tensor is not ours
                mark_free(found[place], free)
        return found

    @property
    def _keywords(self) -> list[str]:
        _, keywords = self.spec.children()
        return list(keywords.context)

    def _check_sizes(self, values: Sequence[Any], sizes: dict[sympy.Symbol, int]) -> None:
        for symbol, size in sizes.items():
            least, most = self.ranges.get(symbol, (0, sympy.oo))
            if not least <= size <= most:
                bound = f"at least {least}" if most > _LARGEST else f"{least} to {most}"
                raise OffloadError(
                    f"program: expected size {symbol} of {bound}, found {size} (in {self._where(symbol)}); export with another "
                    "range"
                )
        for leaf, value in zip(self.leaves, values, strict=True):
            for dim, expected in enumerate(leaf.shape):
                if isinstance(expected, int | sympy.Symbol):
                    continue
                wanted = expected.subs(sizes)
                if wanted.is_number and wanted != value.shape[dim]:
                    raise OffloadError(
                        f"program: {leaf.path}: expected a size of {expected} = {wanted} in dimension {dim}, found "
                        f"{list(value.shape)}"
                    )

    def _where(self, symbol: sympy.Symbol) -> str:
        return next(
            (f"{leaf.path}, dimension {leaf.shape.index(symbol)}" for leaf in self.leaves if symbol in leaf.shape),
            "an argument",
        )


def _leaf(path: str, value: Any) -> Leaf:
    if isinstance(value, Tensor):
        shape = tuple(size if isinstance(size, int) else size.node.expr for size in value.shape)
        if value.layout is not torch.strided or value.is_contiguous():
            return Leaf(path, Tensor, None, value.dtype, value.device, value.layout, shape)
        stride = tuple(step if isinstance(step, int) else -1 for step in value.stride())
        return Leaf(path, Tensor, None, value.dtype, value.device, value.layout, shape, stride)
    number = _NUMBERS.get(type(value))
    return Leaf(path, number, None if number else value, shape=(value.node.expr,) if number is int else ())


def _check(leaf: Leaf, value: Any, sizes: dict[sympy.Symbol, int]) -> None:
    if leaf.kind is None:
        if type(value) is not type(leaf.value) or (value != leaf.value and repr(value) != repr(leaf.value)):  # nan
            raise OffloadError(
                f"program: {leaf.path}: expected {leaf.value!r}, the constant that was exported, found {value!r}; export once "
                "more for another value"
            )
        return
    if leaf.kind is not Tensor:
        if type(value) is not leaf.kind and not (leaf.kind is float and type(value) is int):
            raise OffloadError(f"program: {leaf.path}: expected {leaf.kind.__name__}, found {type(value).__name__}")
        if leaf.shape and isinstance(leaf.shape[0], sympy.Symbol):
            sizes.setdefault(leaf.shape[0], value)
        return
    if not isinstance(value, Tensor):
        raise OffloadError(f"program: {leaf.path}: expected a tensor, found {type(value).__name__}")
    layout = torch.jagged if value.is_nested else value.layout
    if layout is not leaf.layout:
        raise OffloadError(
            f"program: {leaf.path}: expected a tensor of layout {leaf.layout}, found {layout}; convert it, as by to_dense()"
        )
    if torch.is_grad_enabled() and value.requires_grad:
        raise GradientError(
            f"program: {leaf.path}: expected a tensor without gradients, found one that requires them; a program runs forward "
            'only. Detach it, call under torch.no_grad(), or train the model with torch.compile(model, backend="flextensor")'
        )
    fits = value.dtype == leaf.dtype and value.dim() == len(leaf.shape) and _on(value.device, leaf.device)
    for size, expected in zip(value.shape, leaf.shape, strict=False):
        if isinstance(expected, int):
            fits &= size == expected
        elif isinstance(expected, sympy.Symbol):
            fits &= sizes.setdefault(expected, size) == size
    if not fits:
        known = ", ".join(f"{symbol} = {size}" for symbol, size in sizes.items() if symbol in leaf.shape)
        raise OffloadError(
            f"program: {leaf.path}: expected {_told_tensor(leaf.dtype, leaf.shape, leaf.device)}"
            f"{f' with {known}' if known else ''}, found {_told_tensor(value.dtype, value.shape, value.device)}; convert it, or "
            "export with dynamic_shapes for sizes that vary"
        )


def _on(found: torch.device, wanted: torch.device | None) -> bool:
    return wanted is not None and found.type == wanted.type and (wanted.index is None or found.index == wanted.index)


def _guards(program: ExportedProgram, values: Sequence[Any], spec: pytree.TreeSpec) -> Callable[..., object] | None:
    if not getattr(program, "_guards_code", None):
        return None
    light = copy.copy(program)
    light._example_inputs = pytree.tree_unflatten(list(values), spec)  # read for its structure alone
    return getattr(light.module(), "_guards_fn", None)


def _told(path: Sequence[Any]) -> str:
    first, *rest = path
    return ("args", "kwargs")[first.idx] + pytree.keystr(tuple(rest))


def _told_tensor(dtype: object, shape: Sequence[Any], device: object) -> str:
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}] on {device}"


def _told_spec(spec: pytree.TreeSpec) -> str:
    filled = pytree.tree_unflatten(["."] * spec.num_leaves, spec)
    args, kwargs = filled
    named = [f"{name}={_plain(value)}" for name, value in kwargs.items()]
    return "(" + ", ".join([*map(_plain, args), *named]) + ")"


def _plain(value: object) -> str:
    return repr(value).replace("'.'", ".")
