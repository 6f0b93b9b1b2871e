"""What a weight looks like, and its bytes in physical order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import nn

from flextensor_fx._torch_versions import storage_uses
from flextensor_fx.errors import OffloadError

# Only names that old safetensors readers know: one unknown name makes such a reader refuse the whole file.
NATIVE_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
}

# Stored as U8 with the dtype in the file's metadata.
RAW_DTYPES: tuple[torch.dtype, ...] = (
    torch.complex64,
    torch.complex128,
    torch.float8_e5m2fnuz,
    torch.float8_e4m3fnuz,
    torch.float8_e8m0fnu,
)


@dataclass(frozen=True)
class WeightSpec:
    """The shape of one weight, without its value.

    Attributes:
        key: name of the weight, unique in its store.
        shape: sizes, as Python sees them.
        stride: in elements; dense and not overlapping, in any order of dimensions.
        dtype: element type.
    """

    key: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the value, without padding."""
        return math.prod(self.shape) * self.dtype.itemsize

    @cached_property
    def byte_stride(self) -> tuple[int, ...]:
        """`stride` in bytes."""
        return tuple(step * self.dtype.itemsize for step in self.stride)

    @cached_property
    def array_dtype(self) -> np.dtype:
        """What numpy calls the dtype; an integer of its width where numpy has no name for it."""
        try:
            return torch.empty(0, dtype=self.dtype, device="cpu").numpy().dtype
        except TypeError:
            return np.dtype(f"u{self.dtype.itemsize}")

    def __str__(self) -> str:
        return f"{self.key}: {str(self.dtype).removeprefix('torch.')}{list(self.shape)} ({self.nbytes} bytes)"


def spec_of(key: str, tensor: torch.Tensor) -> WeightSpec:
    """The spec of `tensor` under the name `key`. Reads no data, so a meta tensor will do."""
    return WeightSpec(key, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major stride of `shape`, in elements."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def physical_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...] | None:
    """Dimensions from the outermost to the innermost in memory; None if elements overlap or leave gaps."""
    order = tuple(sorted(range(len(shape)), key=lambda d: (-stride[d], -shape[d], d)))
    step = 1
    for d in reversed(order):
        if shape[d] == 1:
            continue
        if stride[d] != step:
            return None
        step *= shape[d]
    return order


def check_storable(tensor: torch.Tensor, *, filled: bool = False) -> str | None:
    """Why `tensor` cannot be kept in a store, as the end of a sentence; None if it can.

    Args:
        filled: whether it is about to get a value, so that it may be on the meta device.
    """
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        return f"it is a {type(tensor).__name__}, a tensor subclass whose parts a store does not know"
    if tensor.layout != torch.strided:
        return f"its layout is {str(tensor.layout).removeprefix('torch.')}, not strided"
    if tensor.is_quantized:
        return "it is quantized, and its scale is not part of its bytes"
    if tensor.device.type == "meta" and not filled:
        return "it is on the meta device and has no data"
    if tensor.numel() == 0:
        return "it is empty"
    if tensor.dtype not in NATIVE_NAMES and tensor.dtype not in RAW_DTYPES:
        return f"its dtype is {tensor.dtype}"
    if tensor.is_conj() or tensor.is_neg():
        return "it is a lazily conjugated or negated view"
    if physical_order(tensor.shape, tensor.stride()) is None:
        return f"its stride {tuple(tensor.stride())} for shape {tuple(tensor.shape)} overlaps itself or leaves gaps"
    if tensor.untyped_storage().nbytes() < (tensor.storage_offset() + tensor.numel()) * tensor.dtype.itemsize:
        return "its storage was resized and no longer holds its data"
    return None


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a storable tensor in physical order: 1-d uint8 of nbytes elements, sharing memory with it."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def tensor_over(spec: WeightSpec, memory: np.ndarray, shift: int) -> torch.Tensor:
    """A tensor of the weight's shape, stride and dtype that aliases `memory` from byte `shift` on, and keeps it alive."""
    # In one step by numpy: from_numpy, untyped_storage, empty and set_ take three times as long.
    array = np.ndarray(spec.shape, spec.array_dtype, memory, shift, spec.byte_stride)  # pyright: ignore[reportArgumentType]
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype == spec.dtype else tensor.view(spec.dtype)


def converted(spec: WeightSpec, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as a value of the weight, as `weight.copy_(tensor)` takes it: broadcast and converted.

    Raises:
        OffloadError: the shape cannot be broadcast to the weight's.
    """
    if tuple(tensor.shape) == spec.shape and tensor.dtype == spec.dtype:
        return tensor
    value = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="cpu")
    try:
        return value.copy_(tensor)
    except RuntimeError as error:
        raise OffloadError(f"weight {spec}: cannot be given a value of shape {list(tensor.shape)}: {error}") from error


def has_other_holders(tensor: torch.Tensor) -> bool:
    """Whether any tensor but this one refers to its memory."""
    return storage_uses(tensor) > 2  # the tensor's own reference, and that of who asks
