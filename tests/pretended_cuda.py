"""A CUDA device that is not there: what Inductor must be told to generate code for one on a machine without any.

Nothing is compiled for it and nothing runs on it. Tensors on it are fake; questions about it are answered with an H100's numbers.
Whatever is replaced here is put back at the end. What cannot be put back is what torch remembers by itself: Inductor registers
its patterns once per device, and caches much of what it was told. So `cuda_code.py` uses this in a process of its own.

What differs between versions of torch:

- 2.11, 2.13: FakeTensorMode puts an empty device guard in place where torch is built with CUDA and finds no device; a build for
  the CPU alone has none, and `x[0]` of a fake tensor fails. 2.14 has no such function. Here all of them are given a guard.
- 2.13, 2.14: a wrapper is a class `Runner`, with functions `partition_<n>` beside it where CUDA graphs are asked for.
- 2.14: what an op gives is one variable, and one call asserts its size, stride and dtype; before, it is renamed first.
"""

from __future__ import annotations

import contextlib
import ctypes
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

DEVICES = 2
CAPABILITY = (9, 0)

# As torch reports them for an H100.
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100",
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=80 << 30,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10,
    L2_cache_size=50 << 20,
    gcnArchName="",
)


@contextlib.contextmanager
def pretended_cuda() -> Iterator[None]:
    """Inductor finds two CUDA devices. Code that it generates is not loaded: calling it raises."""
    with contextlib.ExitStack() as stack:
        for enter in (_device_guard, _triton_driver, _attention, _constants, _answers, _modules):
            stack.enter_context(enter())
        yield


def on_device(mode: FakeTensorMode, value: Any, device: torch.device) -> Any:
    """A fake tensor of `mode` on `device` with the shape, stride and dtype of `value`, a tensor on the meta device."""
    if not isinstance(value, Tensor):
        return value
    return mode.fake_tensor_converter.from_meta_and_device(mode, value.detach(), device)


def module_on_device(mode: FakeTensorMode, module: nn.Module, device: torch.device) -> nn.Module:
    """`module`, made on the meta device, with its parameters and buffers fake and on `device`; ties stay ties."""
    moved: dict[int, Tensor] = {}
    for part in module.modules():
        for slots in (part._parameters, part._buffers):
            for name, value in slots.items():
                if value is None:
                    continue
                if id(value) not in moved:
                    fake = on_device(mode, value, device)
                    moved[id(value)] = nn.Parameter(fake, False) if isinstance(value, nn.Parameter) else fake
                slots[name] = moved[id(value)]  # pyright: ignore[reportArgumentType]
    return module


@contextlib.contextmanager
def _device_guard() -> Iterator[None]:
    """Switching to a CUDA device does nothing: its guard is the CPU's.

    Indexing takes a guard in C++ even for fake tensors, and none of this is within reach of Python.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    cpu, cuda = 0, 1  # c10::DeviceType
    guards = (ctypes.c_void_p * (cuda + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before = guards[cuda]
    guards[cuda] = guards[cpu]
    try:
        yield
    finally:
        guards[cuda] = before


@contextlib.contextmanager
def _triton_driver() -> Iterator[None]:
    # Not installed everywhere: users of this module skip without triton.
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.runtime.driver import driver  # pyright: ignore[reportMissingImports]

    class Driver:
        utils = types.SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": PROPERTIES.shared_memory_per_block_optin}
        )

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], PROPERTIES.warp_size)

        def get_current_device(self) -> int:
            return 0

    before = driver._active
    driver.set_active(Driver())  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        driver._active = before


@contextlib.contextmanager
def _attention() -> Iterator[None]:
    """Attention is one fused op, as on a device: torch asks a library for the choice that a build for the CPU lacks."""
    op = torch.ops.aten.scaled_dot_product_attention.default
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    assert key not in op.py_kernels
    op.py_impl(key)(_fused_attention)
    op._dispatch_cache.clear()
    try:
        yield
    finally:
        del op.py_kernels[key]
        op._dispatch_cache.clear()


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Flash attention without a mask, memory-efficient attention with one."""
    aten = torch.ops.aten
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    if attn_mask is None:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(query.dtype)
    bias = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, False, dropout_p, is_causal, scale=scale
    )[0]


@contextlib.contextmanager
def _constants() -> Iterator[None]:
    """Inductor computes tensors of one repeated value with one element on the device: it shall do so on the CPU."""
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
    from torch.utils._python_dispatch import TorchDispatchMode

    class OnCpu(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs or {}))
            return func(*args, **kwargs)

    run = UniformValueConstantFolder.run

    def run_on_cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        with OnCpu():
            return run(self, *args, **kwargs)

    with mock.patch.object(UniformValueConstantFolder, "run", run_on_cpu):
        yield


@contextlib.contextmanager
def _answers() -> Iterator[None]:
    """What torch says about its CUDA devices.

    `torch.cuda.is_available()` goes on saying no: FakeTensorMode would make a real tensor on the device. Inductor asks its
    interface, which says yes.
    """
    from torch._dynamo import device_interface
    from torch._inductor.runtime.hints import DeviceProperties
    from torch.utils import _triton

    answers: dict[str, Callable[..., Any]] = {
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_device_capability": lambda device=None: CAPABILITY,
        "current_device": lambda: 0,
        "device_count": lambda: DEVICES,
        "is_bf16_supported": lambda including_emulation=True: True,
    }
    interface = device_interface.CudaInterface
    caches = (DeviceProperties.create, _triton.has_triton, _triton.triton_backend, _triton.triton_hash_with_backend)
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
            if hasattr(interface, name):
                stack.enter_context(mock.patch.object(interface, name, staticmethod(answer)))
        stack.enter_context(mock.patch.object(interface, "is_available", staticmethod(lambda: True)))
        for name in ("get_device_properties", "current_device"):
            answer = staticmethod(answers[name])
            stack.enter_context(mock.patch.object(interface.Worker, name, answer))
        for cache in caches:
            cache.cache_clear()
            stack.callback(cache.cache_clear)
        yield


@contextlib.contextmanager
def _modules() -> Iterator[None]:
    """Loading a wrapper compiles its kernels; instead of a module there is one whose calls raise."""
    from torch._inductor.codecache import PyCodeCache

    def never(*_: Any) -> Any:
        raise AssertionError("code for a pretended device was called")

    def load(key: str, path: str, *_: Any, **__: Any) -> Any:
        runner = types.SimpleNamespace(partitions=[never], call=never, recursively_apply_fns=lambda functions: None)
        return types.SimpleNamespace(__file__=path, call=never, runner=runner)

    with mock.patch.object(PyCodeCache, "load_by_key_path", load):
        yield
