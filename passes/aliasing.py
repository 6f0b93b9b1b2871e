"""Which nodes may return memory of an argument: views, and calls that hand their argument back where nothing changes."""

from __future__ import annotations

import operator

import torch
from torch._ops import OpOverload
from torch.fx import Node

from .metadata import is_tensor

# Functions and methods in graphs as Dynamo captured them, which have no schema. All are pure: no random number, no mutation.
ALIASING_NAMES = frozenset(
    "t T mT H view view_as reshape reshape_as transpose permute unsqueeze squeeze flatten unflatten expand expand_as narrow "
    "chunk split unbind getitem getattr swapaxes swapdims movedim select slice as_strided detach alias contiguous to float "
    "half bfloat16 double type diagonal real imag data ravel unfold tensor_split hsplit vsplit requires_grad_".split()
)
_WITHOUT_ALIAS_IN_SCHEMA = frozenset((torch.ops.aten._unsafe_view.default,))


def may_alias(node: Node) -> bool:
    """Whether what `node` returns may be memory of an argument that it does not write to."""
    if node.op == "call_method":
        return node.target in ALIASING_NAMES
    if node.op != "call_function":
        return False
    if isinstance(node.target, OpOverload):
        returned = (value.alias_info for value in node.target._schema.returns)
        return node.target in _WITHOUT_ALIAS_IN_SCHEMA or any(alias and not alias.is_write for alias in returned)
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, Node) and (is_tensor(source) or may_alias(source))
    return getattr(node.target, "__name__", "") in ALIASING_NAMES
