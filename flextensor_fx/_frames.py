"""Finds the modules that a compilation belongs to, from inside the backend call.

A graph names its weights from the frame that Dynamo captured. After a graph break that frame is a submodule's forward, whose
names are not the ones the user writes patterns for. The user's model is further out on the Python stack: between the frame
being compiled and `torch.compile`'s own wrapper.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from torch import nn

from ._torch_versions import is_compile_wrapper, root_frame


def unwrap(value: Any) -> Any:
    """The module or function that a torch.compile wrapper, or a chain of them, stands for."""
    while True:
        inner = getattr(value, "_orig_mod", None)
        if inner is None and not isinstance(value, nn.Module):
            inner = getattr(value, "_torchdynamo_orig_callable", None)
        if inner is None:
            return value
        value = inner


def outer_modules() -> tuple[nn.Module, ...]:
    """The modules on the stack of the compilation that is running, outermost first, each once."""
    found: dict[int, nn.Module] = {}
    for frame in reversed(list(_frames_of_compilation())):
        for value in frame.f_locals.values():
            module = _module_of(value)
            if module is not None:
                found.setdefault(id(module), module)
    return tuple(found.values())


def compiled_callable() -> Any:
    """What the user passed to torch.compile, without wrappers; None where it cannot be told."""
    for frame in _frames_of_compilation():
        if is_compile_wrapper(frame):
            return unwrap(frame.f_locals.get("fn"))
    return None


def compiled_code() -> CodeType | None:
    """The code object that Dynamo is compiling; None outside a compilation."""
    frame = root_frame()
    return None if frame is None else frame.f_code


def _frames_of_compilation() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    inside_dynamo = True
    while frame is not None:
        if not _in_dynamo(frame) or is_compile_wrapper(frame):
            inside_dynamo = False
        if not inside_dynamo:
            yield frame
        if is_compile_wrapper(frame):
            return
        frame = frame.f_back


def _in_dynamo(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return name.startswith(("torch._dynamo", "flextensor_fx", "torch._utils_internal", "contextlib")) or name == "torch"


def _module_of(value: Any) -> nn.Module | None:
    value = unwrap(value)
    bound_to = getattr(value, "__self__", None)
    if isinstance(bound_to, nn.Module):
        value = unwrap(bound_to)
    return value if isinstance(value, nn.Module) else None
