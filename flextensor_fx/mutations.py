"""Which placeholders a captured graph changes in place. Such weights stay resident: a fetched copy would lose the change.

A captured graph speaks of functions and methods, which say by their names and arguments that they write, and of ops, whose
schemas say it. What is not known to be pure is taken for a write only where it looks like one: by a trailing underscore.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import Graph, GraphModule, Node

from .passes.aliasing import ALIASING_NAMES
from .passes.metadata import function_name

_IN_PLACE_OPERATORS = frozenset(
    getattr(operator, name)
    for name in "iadd iand iconcat ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor setitem".split()
)
# Views that only a mutation makes worth following; `passes/aliasing.py` has those that also move with a wait.
_MORE_ALIASES = frozenset(
    "view_as_real view_as_complex einsum broadcast_tensors broadcast_to adjoint mH _get_data_attr".split()
)
_NORMS = frozenset(("batch_norm", "instance_norm"))
_LOOK_UPS = frozenset(("embedding", "embedding_bag"))
# Where the look-ups take max_norm, and these functions the flag that makes them work in place, if not by keyword.
_MAX_NORM_AT = 3
_INPLACE_AT = {
    "dropout": 3,
    "alpha_dropout": 3,
    "relu": 1,
    "relu6": 1,
    "silu": 1,
    "hardswish": 1,
    "hardsigmoid": 1,
    "mish": 1,
}


def mutated_placeholders(graph: Graph, placeholders: Iterable[Node]) -> frozenset[Node]:
    """Those of `placeholders` that some node writes to, directly, through a view, or in the body of a higher-order op."""
    return frozenset(placeholder for placeholder in placeholders if _is_mutated(placeholder))


def _is_mutated(placeholder: Node) -> bool:
    aliases, pending = {placeholder}, [placeholder]
    while pending:
        alias = pending.pop()
        for user in alias.users:
            if _writes_to(user, alias) or _body_writes_to(user, alias):
                return True
            name = function_name(user)
            if user not in aliases and (name in ALIASING_NAMES or name in _MORE_ALIASES):
                aliases.add(user)
                pending.append(user)
    return False


def _writes_to(node: Node, tensor: Node) -> bool:
    if _holds(node.kwargs.get("out"), tensor):
        return True
    target = node.target
    if isinstance(target, OpOverloadPacket):
        return any(_schema_writes(getattr(target, name), node, tensor) for name in target.overloads())
    if isinstance(target, OpOverload):
        return _schema_writes(target, node, tensor)
    name, first = function_name(node), node.args[0] if node.args else node.kwargs.get("input")
    if name in _NORMS and any(
        _holds(value, tensor) for value in (*node.args[1:3], *_named(node, "running_mean", "running_var"))
    ):
        return True
    if name in _LOOK_UPS and tensor in (*node.args[:2], *node.kwargs.values()):
        return _argument(node, "max_norm", _MAX_NORM_AT) is not None
    if not _holds(first, tensor):
        return False
    if _argument(node, "inplace", _INPLACE_AT.get(name)):
        return True
    return target in _IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"


def _schema_writes(op: OpOverload, node: Node, tensor: Node) -> bool:
    arguments = op._schema.arguments
    by_name = ((argument, node.kwargs[argument.name]) for argument in arguments if argument.name in node.kwargs)
    given = [*zip(arguments, node.args, strict=False), *by_name]
    return any(a.alias_info is not None and a.alias_info.is_write and _holds(value, tensor) for a, value in given)


def _body_writes_to(node: Node, tensor: Node) -> bool:
    """Whether a body of a higher-order op, such as a checkpointed region, writes to the placeholder that stands for `tensor`."""
    if not isinstance(node.target, HigherOrderOperator):
        return False
    operands = [
        value for argument in node.args for value in (argument if isinstance(argument, (tuple, list)) else (argument,))
    ]
    bodies = [value for value in operands if isinstance(value, Node) and value.op == "get_attr"]
    tensors = [value for value in operands if isinstance(value, Node) and value.op != "get_attr"]
    for body in bodies:
        module: Any = getattr(node.graph.owning_module, str(body.target), None)
        if not isinstance(module, GraphModule):
            continue
        inside = module.graph.find_nodes(op="placeholder")
        # The operands come last, whatever else the op takes before them.
        for stand_in, operand in zip(reversed(inside), reversed(tensors), strict=False):
            if operand is tensor and _is_mutated(stand_in):
                return True
    return False


def _holds(value: Any, tensor: Node) -> bool:
    return value is tensor or (isinstance(value, (tuple, list)) and any(item is tensor for item in value))


def _named(node: Node, *names: str) -> list[Any]:
    return [node.kwargs[name] for name in names if name in node.kwargs]


def _argument(node: Node, name: str, place: int | None) -> Any:
    if name in node.kwargs:
        return node.kwargs[name]
    return node.args[place] if place is not None and len(node.args) > place else None
