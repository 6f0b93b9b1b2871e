"""Which placeholders a captured graph changes in place. Such weights stay resident: a fetched copy would lose the change."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from torch._ops import OpOverload
from torch.fx import Graph, Node

from .passes.aliasing import ALIASING_NAMES

_IN_PLACE_FUNCTIONS = frozenset((operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv))


def mutated_placeholders(graph: Graph, placeholders: Iterable[Node]) -> frozenset[Node]:
    """Those of `placeholders` that some node writes to, directly or through a view."""
    return frozenset(placeholder for placeholder in placeholders if _is_mutated(placeholder))


def _is_mutated(placeholder: Node) -> bool:
    aliases, pending = {placeholder}, [placeholder]
    while pending:
        alias = pending.pop()
        for user in alias.users:
            if _writes_to(user, alias):
                return True
            if user not in aliases and _name(user) in ALIASING_NAMES:
                aliases.add(user)
                pending.append(user)
    return False


def _writes_to(node: Node, tensor: Node) -> bool:
    if node.kwargs.get("out") is tensor:
        return True
    if isinstance(node.target, OpOverload):
        arguments = node.target._schema.arguments
        by_name = ((argument, node.kwargs[argument.name]) for argument in arguments if argument.name in node.kwargs)
        given = [*zip(arguments, node.args, strict=False), *by_name]
        return any(a.alias_info is not None and a.alias_info.is_write and value is tensor for a, value in given)
    if not node.args or node.args[0] is not tensor:
        return False
    name = _name(node)
    return (
        node.target in _IN_PLACE_FUNCTIONS or (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    )


def _name(node: Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    if isinstance(node.target, OpOverload):
        return node.target._schema.name.split("::")[1]
    return getattr(node.target, "__name__", "")
