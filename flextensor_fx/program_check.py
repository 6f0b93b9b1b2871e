"""Sees that a saved graph can only be a graph, before torch is given it.

A torch.export graph is JSON, but what torch makes of some of its texts runs code: expressions go to sympy's parser, guards to
exec, targets are looked up by attribute from the torch module, containers name modules to import, and names stand in generated
Python. Here every text has a rule, by the class and field that it stands in; one without a rule is refused, so that what another
release of torch adds is not trusted unseen.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import json
import re
import types
import typing
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils import _pytree as pytree

from ._torch_versions import has_kernel
from .errors import ProgramError

_NAME = re.compile(r"[^\W\d]\w*")
_PATH = re.compile(r"[\w.\-/ ]*")
_SYMBOL = re.compile(r"[a-z]+_?\d+")
_ARGUMENT = re.compile(r"[^\"\\{}\x00-\x1f\x7f-\x9f\u2028\u2029]*")
_DEVICE = re.compile(r"[a-z]+")
_NUMBER = re.compile(r"-?\d{1,20}(\.\d{1,20})?(e-?\d{1,3})?")
_LONGEST = 4000  # characters of an expression
_MOST_POWERS, _GREATEST_POWER = 4, 8
TORCH_NAMESPACES = frozenset(("aten", "prims"))
_REFUSED_OPS = frozenset(("aten::from_file",))  # reads and makes files
_BODIES = frozenset(
    "cond while_loop scan map_impl associative_scan wrap_with_set_grad_enabled wrap_with_autocast invoke_subgraph "
    "flex_attention auto_functionalized auto_functionalized_v2".split()
)
_OPERATORS = frozenset(
    "getitem add sub mul truediv floordiv mod pow neg pos abs eq ne lt le gt ge and_ or_ xor not_ invert lshift rshift".split()
)
_MATH = frozenset("ceil floor trunc sqrt pow log2".split())
_SYM = frozenset(
    "sym_float sym_int sym_ite sym_max sym_min sym_not sym_sum sym_fresh_size sym_sqrt _sym_sqrt _sym_log2".split()
)
_FUNCTIONS = frozenset(
    "Symbol Integer Float Rational Add Mul Pow Mod Max Min Abs floor ceiling sign Eq Ne Lt Le Gt Ge Equality Unequality "
    "StrictLessThan LessThan StrictGreaterThan GreaterThan And Or Not Piecewise ExprCondPair Tuple FloorDiv ModularIndexing "
    "Where PythonMod CleanDiv CeilToInt FloorToInt CeilDiv LShift RShift PowByNatural FloatPow FloatTrueDiv IntTrueDiv "
    "TruncToFloat TruncToInt RoundToInt RoundDecimal ToFloat Identity".split()
)
_CONSTANTS = frozenset("true false oo nan True False None Half Zero One NegativeOne".split())
_ASSUMPTIONS = frozenset("positive integer nonnegative real negative zero finite rational precision dps".split())
_METHODS = frozenset(("size", "stride", "storage_offset", "dim"))
_CONTAINERS = frozenset(
    ("builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict", "collections.deque")
)
# A container that looks up a factory in any module that the file names.
_NEVER = frozenset(("collections.defaultdict",))

Rule = Callable[[str], None]
Parser = Callable[[Any], Any]


def parsed_graph(data: bytes, schema: ModuleType, namespaces: Collection[str] = ()) -> Any:
    """The ExportedProgram of torch's `schema` that JSON says; what no use is made of is left out.

    Args:
        namespaces: of operators beside torch's own that may be called.

    Raises:
        ProgramError: something in it is not what torch.export writes.
    """
    try:
        program = _Schema(schema, frozenset(namespaces)).parser(schema.ExportedProgram, "ExportedProgram")(
            json.loads(data)
        )
    except RecursionError:
        raise ProgramError(
            "the graph: expected what torch.export writes, found one that is nested too deeply"
        ) from None
    except ValueError as error:
        if isinstance(error, ProgramError):
            raise
        raise ProgramError(f"the graph: expected JSON, found {error}") from None
    _prune(program)
    return program


class _Schema:
    """Parsers of the classes of torch's schema, each made once."""

    def __init__(self, schema: ModuleType, namespaces: frozenset[str]) -> None:
        self._globals = vars(schema)
        self._namespaces = TORCH_NAMESPACES | namespaces
        self._parsers: dict[type, Parser] = {}
        self._rules: dict[str, Rule] = {
            **dict.fromkeys(_NAMED, _name),
            **dict.fromkeys(_PATHS, _path),
            **dict.fromkeys(_TEXTS, _any),
            "SymExpr.expr_str": functools.cache(_expression),
            "ExportedProgram.guards_code": _guard,
            "ExportedProgram.range_constraints key": functools.cache(_expression),
            "Argument.as_string": _argument_text,
            "Argument.as_strings": _argument_text,
            "Node.target": functools.cache(self._target),
            "Argument.as_operator": self._target,
            "ModuleCallSignature.in_spec": _any,  # rewritten by _prune
            "ModuleCallSignature.out_spec": _any,
            "Device.type": _device,
        }

    def parser(self, hint: Any, place: str) -> Parser:
        """What parses a value of a type, as the field `place` has it."""
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin is typing.Annotated:
            return self.parser(arguments[0], place)
        if origin in (types.UnionType, typing.Union):
            (inner,) = (self.parser(a, place) for a in arguments if a is not type(None))
            return lambda value: None if value is None else inner(value)
        if origin is list:
            item = self.parser(arguments[0], place)
            return lambda value: [item(one) for one in _checked(list, value, place)]
        if origin is dict:
            key, item = self._text(f"{place} key"), self.parser(arguments[1], place)
            return lambda value: {key(k): item(one) for k, one in _checked(dict, value, place).items()}
        if hint is str:
            return self._text(place)
        if hint in _NUMBERS:
            return functools.partial(_NUMBERS[hint], place=place)
        if isinstance(hint, type) and issubclass(hint, enum.IntEnum):
            return functools.partial(_integer, place=place)  # torch keeps the number
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            return functools.partial(self._object, hint)
        raise ProgramError(f"the graph: {place}: a {hint} is not known; read the file with the torch that wrote it")

    def _text(self, place: str) -> Parser:
        rule = self._rules.get(place)

        def parse(value: Any) -> str:
            if type(value) is not str:
                raise ProgramError(f"the graph: {place}: expected a text, found {str(value)[:40]!r}")
            if rule is None:
                raise ProgramError(
                    f"the graph: {place}: expected a graph as torch {torch.__version__} writes it, found {value[:40]!r} "
                    "where no text is known; read it with the release that wrote it"
                )
            rule(value)
            return value

        return parse

    def _object(self, cls: type, value: Any) -> Any:
        # Classes hold themselves: what parses one is made when it is first needed.
        return (self._parsers.get(cls) or self._class(cls))(value)

    def _class(self, cls: type) -> Parser:
        name = cls.__name__
        hints = typing.get_type_hints(cls, globalns=self._globals, include_extras=True)
        fields = {f.name: self.parser(hints[f.name], f"{name}.{f.name}") for f in dataclasses.fields(cls)}
        create = getattr(cls, "create", None)  # only unions have it

        def parse(value: Any) -> Any:
            if name in _CLASSES_REFUSED:
                raise ProgramError(f"the graph: expected tensors and numbers, found a {name}; it cannot be saved")
            given = _checked(dict, value, name)
            if create is not None:
                if len(given) != 1 or (kind := next(iter(given))) not in fields:
                    raise ProgramError(f"the graph: expected one of the kinds of a {name}, found {str(value)[:60]!r}")
                return create(**{kind: fields[kind](given[kind])})
            try:
                return cls(**{key: parser(given[key]) for key, parser in fields.items() if key in given})
            except TypeError as error:
                raise ProgramError(f"the graph: {error}; the file is damaged") from None

        self._parsers[cls] = parse
        return parse

    def _target(self, text: str) -> None:
        parts = text.split(".")
        if not all(_NAME.fullmatch(part) for part in parts):
            raise _refused("an operator", text)
        root, rest = parts[0], parts[1:]
        if (root == "_operator" and len(rest) == 1 and rest[0] in _OPERATORS) or (
            root == "math" and len(rest) == 1 and rest[0] in _MATH
        ):
            return
        if root == "torch" and len(rest) == 1 and rest[0] in _SYM:
            return
        if root == "torch" and rest[:2] == ["ops", "higher_order"] and len(rest) == 3 and rest[2] in _BODIES:
            if isinstance(getattr(torch.ops.higher_order, rest[2], None), HigherOrderOperator):
                return
        elif root == "torch" and rest[:1] == ["ops"] and len(rest) == 4:
            _, namespace, name, overload = rest
            if namespace not in self._namespaces:
                raise ProgramError(
                    f"the graph: expected operators of {', '.join(sorted(self._namespaces))}, found {namespace}::{name}; if you "
                    f"trust the file, import what defines it and pass namespaces=[{namespace!r}]"
                )
            packet = getattr(getattr(torch.ops, namespace), name, None)
            found = getattr(packet, overload, None)
            # Without a kernel it is one of the interpreter of TorchScript, some of which write files, as aten::save does.
            if isinstance(found, OpOverload) and found._schema.name not in _REFUSED_OPS and has_kernel(found):
                return
        raise _refused("an operator that a graph may call and this torch has", text)


_NAMED = (
    "TensorArgument.name TokenArgument.name SymIntArgument.as_name SymFloatArgument.as_name SymBoolArgument.as_name "
    "GraphArgument.name Node.name InputToConstantInputSpec.name UserInputMutationSpec.user_input_name NamedArgument.name "
    "GradientToUserInputSpec.user_input_name ModuleCallSignature.forward_arg_names Argument.as_string_to_argument "
    "Graph.tensor_values Graph.sym_int_values Graph.sym_bool_values Graph.sym_float_values Graph.custom_obj_values"
).split()
_NAMED = [*_NAMED, *(f"{name} key" for name in _NAMED if name.startswith(("Graph.", "Argument.")))]
_PATHS = (
    "InputToParameterSpec.parameter_name InputToBufferSpec.buffer_name InputToTensorConstantSpec.tensor_constant_name "
    "BufferMutationSpec.buffer_name ParameterMutationSpec.parameter_name GradientToParameterSpec.parameter_name "
    "ModuleCallEntry.fqn ExportedProgram.verifiers ExportedProgram.torch_version"
).split()
_PATHS += ["ExportedProgram.opset_version key"]
# Values of the graph, and texts that only people read.
_TEXTS = (
    "GraphModule.metadata NamedTupleDef.field_names CustomObjArgument.name CustomObjArgument.class_fqn "
    "ConstantValue.as_string Node.metadata InputToCustomObjSpec.custom_obj_name"
).split()
_TEXTS += ["GraphModule.metadata key", "GraphModule.treespec_namedtuple_fields key", "Node.metadata key"]
_CLASSES_REFUSED = frozenset(("CustomObjArgument", "InputToCustomObjSpec"))


def _checked(kind: type, value: Any, place: str) -> Any:
    if type(value) is not kind:
        raise ProgramError(f"the graph: {place}: expected a {kind.__name__}, found {str(value)[:40]!r}")
    return value


def _integer(value: Any, place: str) -> int:
    if type(value) is not int or abs(value) >= 1 << 63:
        raise ProgramError(f"the graph: {place}: expected a whole number, found {str(value)[:40]!r}")
    return value


def _real(value: Any, place: str) -> float:
    if value in ("Infinity", "-Infinity", "NaN"):  # torch writes them so, and expects them back so
        return float(value)
    if type(value) not in (int, float):
        raise ProgramError(f"the graph: {place}: expected a number, found {str(value)[:40]!r}")
    return float(value)


def _truth(value: Any, place: str) -> bool:
    return _checked(bool, value, place)


_NUMBERS: dict[type, Callable[..., Any]] = {int: _integer, float: _real, bool: _truth}


def _refused(expected: str, found: str) -> ProgramError:
    return ProgramError(
        f"the graph: expected {expected}, found {found[:80]!r}; the file is damaged, or was made to do harm"
    )


def _any(text: str) -> None:
    pass


def _name(text: str) -> None:
    if text and not (_NAME.fullmatch(text) and text.isidentifier()):
        raise _refused("a name", text)


def _path(text: str) -> None:
    if not _PATH.fullmatch(text) and not re.fullmatch(r"[\w.+<=]*", text):
        raise _refused("a dotted path", text)


def _argument_text(text: str) -> None:
    """A mode, an equation, a message: compilers write such texts into code, not all of them with care."""
    if not _ARGUMENT.fullmatch(text) or "''" in text:
        raise _refused("a text without quotes, braces and line ends as an argument", text)


def _device(text: str) -> None:
    if not _DEVICE.fullmatch(text):
        raise _refused("a device", text)


def _parsed(text: str) -> ast.expr:
    if len(text) > _LONGEST:
        raise _refused(f"an expression of at most {_LONGEST} characters", text)
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError):
        raise _refused("an expression", text) from None


def _expression(text: str) -> None:
    """An expression over symbols, as sympy's srepr writes it: calls of known functions, symbols, numbers."""
    powers = 0
    pending: list[ast.expr] = [_parsed(text)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
            _check_assumptions(node, text)
            if node.func.id == "Symbol":
                _check_literal(node, _SYMBOL, text)
                continue
            if node.func.id in ("Float", "Integer", "Rational") and any(_is_text(a) for a in node.args):
                _check_literal(node, _NUMBER, text)
                continue
            if node.func.id in ("Pow", "PowByNatural", "FloatPow", "LShift", "RoundDecimal"):
                powers += 1
                _check_power(node, text)
            pending += node.args
        elif isinstance(node, ast.Tuple):
            pending += node.elts
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            pending.append(node.operand)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div):
            pending += [node.left, node.right]
        elif not (_is_number(node) or (isinstance(node, ast.Name) and _is_known(node.id))):
            raise _refused("an expression over symbols", text)
    if powers > _MOST_POWERS:
        raise _refused(f"an expression with at most {_MOST_POWERS} powers", text)


def _check_assumptions(call: ast.Call, text: str) -> None:
    for keyword in call.keywords:
        if keyword.arg not in _ASSUMPTIONS or not isinstance(keyword.value, ast.Constant):
            raise _refused("an expression over symbols", text)
        if not isinstance(keyword.value.value, bool) and not 0 <= _number(keyword.value) <= 1000:
            raise _refused("an expression over symbols", text)


def _check_literal(call: ast.Call, pattern: re.Pattern[str], text: str) -> None:
    values = [a.value for a in call.args if isinstance(a, ast.Constant)]
    if len(values) != 1 or len(call.args) != 1 or not isinstance(values[0], str) or not pattern.fullmatch(values[0]):
        raise _refused("an expression over symbols", text)


def _check_power(call: ast.Call, text: str) -> None:
    exponent = call.args[-1] if len(call.args) == 2 else None
    if isinstance(exponent, ast.Call) and isinstance(exponent.func, ast.Name) and exponent.func.id == "Integer":
        exponent = exponent.args[0] if len(exponent.args) == 1 else None
    if isinstance(exponent, ast.Name) or (
        isinstance(exponent, ast.Call) and getattr(exponent.func, "id", "") == "Symbol"
    ):
        return  # of a size: what it comes to is not worked out
    if exponent is None or abs(_number(exponent)) > _GREATEST_POWER:
        raise _refused(f"a power of at most {_GREATEST_POWER}", text)


def _number(node: ast.expr) -> float:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    return node.value if _is_number(node) else float("inf")  # pyright: ignore[reportAttributeAccessIssue]


def _is_number(node: ast.expr) -> bool:
    value = node.value if isinstance(node, ast.Constant) else None
    return isinstance(value, int | float) and abs(value) < 1 << 64


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_known(name: str) -> bool:
    return name in _CONSTANTS or _SYMBOL.fullmatch(name) is not None


def _guard(text: str) -> None:
    """A comparison of sizes: of `L['x'].size()[0]`, by arithmetic and by known functions."""
    powers = 0
    pending: list[ast.AST] = [_parsed(text)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Call):
            method = node.func
            if isinstance(method, ast.Attribute) and method.attr in _METHODS and not node.keywords:
                pending += [method.value, *node.args]
            elif _is_function(method):
                pending += node.args
                pending += [_refuse_node(text) for _ in node.keywords]
            else:
                raise _refused("a guard on sizes", text)
        elif isinstance(node, ast.Subscript):
            pending += [node.value, node.slice]
        elif isinstance(node, ast.BinOp) and not isinstance(node.op, ast.Pow | ast.LShift | ast.MatMult):
            pending += [node.left, node.right]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            powers += 1
            if powers > _MOST_POWERS or abs(_number(node.right)) > _GREATEST_POWER:
                raise _refused("a guard on sizes", text)
            pending.append(node.left)
        elif isinstance(node, ast.UnaryOp):
            pending.append(node.operand)
        elif isinstance(node, ast.BoolOp):
            pending += node.values
        elif isinstance(node, ast.Compare):
            pending += [node.left, *node.comparators]
        elif isinstance(node, ast.Constant):
            # The text of a guard stands in a message between double quotes.
            if isinstance(node.value, str) and not _NAME.fullmatch(node.value):
                raise _refused("a guard on sizes", text)
        elif not (isinstance(node, ast.Name) and (node.id == "L" or _is_known(node.id))):
            raise _refused("a guard on sizes", text)
    if '"' in text or "\n" in text or "{" in text or "\\" in text:
        raise _refused("a guard on sizes", text)


def _is_function(node: ast.expr) -> bool:
    if isinstance(node, ast.Name):
        return node.id in _FUNCTIONS or node.id in ("float", "int", "abs")
    known = {"math": _MATH, "torch": _SYM}
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.attr in known.get(node.value.id, ())
    )


def _refuse_node(text: str) -> ast.AST:
    raise _refused("a guard on sizes", text)


def _prune(program: Any) -> None:
    """Takes out what is not needed to run, and makes containers of unknown classes plain ones."""
    module = program.graph_module
    module.metadata = {}
    module.treespec_namedtuple_fields = {}
    graphs = [module.graph]
    while graphs:
        graph = graphs.pop()
        for node in graph.nodes:
            kept = {name: node.metadata[name] for name in ("nn_module_stack",) if name in node.metadata}
            node.metadata = kept
            for given in node.inputs:
                kind = getattr(given.arg, "type", None)
                if kind == "as_graph":
                    graphs.append(given.arg.value.graph)
                for option in given.arg.value.values() if kind == "as_string_to_argument" else ():
                    if option.type == "as_string" and not re.fullmatch(r"\w*", option.value):
                        raise _refused("an option of a kernel", option.value)  # templates write it as it is
    entries = [entry for entry in module.module_call_graph if entry.fqn == "" and entry.signature is not None]
    if len(entries) != 1:
        raise ProgramError(f"the graph: expected one signature of its call, found {len(entries)}")
    module.module_call_graph = entries
    signature = entries[0].signature
    signature.in_spec = _known_containers(signature.in_spec)
    signature.out_spec = _known_containers(signature.out_spec)


def _known_containers(text: str) -> str:
    try:
        protocol, tree = json.loads(text)
        if protocol != 1:
            raise ValueError(f"protocol {protocol!r}")
        return json.dumps([protocol, _known_container(tree)])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ProgramError(
            f"the graph: expected the structure of arguments, found {str(text)[:60]!r}: {error}"
        ) from None


def _known_container(tree: Any) -> Any:
    kind, context, children = tree["type"], tree["context"], tree["children_spec"]
    inner = [_known_container(child) for child in children]
    if kind is None:
        if context is not None or inner:
            raise ValueError("a leaf with contents")
        return {"type": None, "context": None, "children_spec": []}
    if not isinstance(kind, str) or kind in _NEVER:
        raise ValueError(f"a container {kind!r}")
    value = json.loads(context)
    if "__enum__" in context:
        raise ValueError("keys that are enums")
    if kind not in _CONTAINERS and kind not in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE:
        named = isinstance(value, list) and len(value) == len(inner) and all(isinstance(key, str) for key in value)
        kind, context = ("builtins.dict", json.dumps(value)) if named else ("builtins.tuple", "null")
    return {"type": kind, "context": context, "children_spec": inner}
