"""Reads a generated wrapper: what it does, in order, and with which memory.

A wrapper is a function body of few forms: allocations, calls, names for the same memory, and `del`. Each name is followed to the
memory behind it, so that a view, a second name or a reuse of freed memory is known for what it is. A form that is not known here
is an error, so that nothing is passed over.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["prefetch", "wait", "offload", "prefetch_ahead", "kernel", "alloc", "reuse", "free"]

_TRANSFERS = ("prefetch", "wait", "offload", "prefetch_ahead")
_HARMLESS = (
    "assert_size_stride",
    "assert_tensor_metadata",
    "assert_alignment",
    "get_raw_stream",
    "run_intermediate_hooks",
)


class CodeError(AssertionError):
    """Generated code that does not keep to its schedule, or that treats a weight otherwise than it should."""


@dataclass(frozen=True, slots=True)
class Argument:
    """Memory that a kernel is given, from element `start` on.

    Fields:
        aligned: whether the kernel counts on an alignment to 16 bytes; None where it has no say.
    """

    memory: int
    start: int
    aligned: bool | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that the wrapper does.

    Fields:
        kind: "alloc" makes memory, "reuse" gives memory a new value in place of one that is not needed any more, "free" is when
            the last name of a memory goes.
        what: the key of a transfer, or the name of a kernel.
        reads: memory that is read; of an offload, the weight.
        after: memory of the tensors that a transfer must come after.
        writes: memory that is written or made.
        code: the statement.
    """

    kind: Kind
    what: str
    reads: tuple[Argument, ...] = ()
    after: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    code: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.what}: {self.code}" if self.code else f"{self.kind} {self.what}"


@dataclass
class Wrapper:
    """What `read` finds.

    Fields:
        events: in order, those of partitions where they are called.
        guards: the indices of the device guards that are entered.
        devices: all devices that a statement names.
        partitions: functions that CUDA graphs capture.
        outside: kernels that run in no partition, where there are partitions.
        checked: memory whose alignment is asserted, as (memory, bytes).
        wholes: of the results of a call that has several: that of the call.
    """

    events: list[Event] = field(default_factory=list)
    guards: list[int] = field(default_factory=list)
    devices: set[str] = field(default_factory=set)
    partitions: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    checked: set[tuple[int, int]] = field(default_factory=set)

    wholes: dict[int, int] = field(default_factory=dict)

    @property
    def transfers(self) -> list[str]:
        """The transfers in order, as "prefetch layers.0.weight"."""
        return [f"{e.kind} {e.what.partition(':')[2]}" for e in self.events if e.kind in _TRANSFERS]

    @property
    def kernels(self) -> list[str]:
        """The names of the kernels in order."""
        return [e.what for e in self.events if e.kind == "kernel"]


def read(code: str) -> Wrapper:
    """The events of the code that Inductor generated for one graph."""
    return _Reader(ast.parse(code)).wrapper


@dataclass(frozen=True)
class _TritonKernel:
    parameters: tuple[str, ...]
    aligned: frozenset[int]


class _Reader:
    def __init__(self, module: ast.Module) -> None:
        self.wrapper = Wrapper()
        self.triton = dict(_triton_kernels(module))
        self.new = itertools.count()
        self.memory: dict[str, tuple[int, ...]] = {}  # several where a name holds a tuple
        self.parts: dict[tuple[int, object], int] = {}  # results of a call that has several
        self.inputs: set[int] = set()
        self.dead: set[int] = set()
        functions = {n.name: n for n in ast.walk(module) if isinstance(n, ast.FunctionDef)}
        self.partitions = {name: f for name, f in functions.items() if name.startswith("partition_")}
        self.wrapper.partitions = sorted(self.partitions, key=lambda name: int(name.partition("_")[2]))
        self.inside = ""
        self._body(functions["call"].body)

    # --- statements ------------------------------------------------------------------------------------------------------

    def _body(self, statements: Sequence[ast.stmt]) -> None:
        for place, statement in enumerate(statements):
            following = statements[place + 1] if place + 1 < len(statements) else None
            self._statement(statement, following)

    def _statement(self, statement: ast.stmt, following: ast.stmt | None) -> None:
        match statement:
            case ast.With(items=[ast.withitem(context_expr=guard)], body=body):
                name, arguments = _called(guard)
                if name != "torch.cuda._DeviceGuard":
                    raise _unknown(statement)
                self.wrapper.guards.append(ast.literal_eval(arguments[0]))
                self._body(body)
            case ast.Delete(targets=targets):
                for target in targets:
                    self._free(ast.unparse(target))
            case ast.Return(value=value):
                for name in {n.id for n in ast.walk(value) if isinstance(n, ast.Name)} if value else set():
                    self.inputs.update(self.memory.get(name, ()))  # the caller's from now on
            case ast.Assign(targets=[target], value=value):
                self._assign(statement, target, value, following)
            case ast.Expr(value=ast.Call() as call):
                self._call(statement, call)
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                pass
            case _:
                raise _unknown(statement)

    def _assign(self, statement: ast.Assign, target: ast.expr, value: ast.expr, following: ast.stmt | None) -> None:
        names = [ast.unparse(t) for t in target.elts] if isinstance(target, ast.Tuple) else [ast.unparse(target)]
        if isinstance(value, ast.Name) and value.id == "args":
            for name in names:
                self._name_input(name)
        elif isinstance(value, ast.Call):
            called, arguments = _called(value)
            if called == "reinterpret_tensor":
                self._second_name(statement, names[0], arguments[0], following)
            elif called == "copy_if_misaligned":
                pass  # an input; the same unless the caller's is misaligned
            elif called in _HARMLESS:
                pass
            elif called.startswith("empty_strided_"):
                self.wrapper.devices.add(called.removeprefix("empty_strided_"))
                self._make(names[0], statement)
            elif called.startswith("self.partitions["):
                self._partition(int(called.partition("[")[2].partition("]")[0]), names)
            else:
                self._call(statement, value, names)
        elif isinstance(value, (ast.Name, ast.Subscript)):
            self._second_name(statement, names[0], value, following)
        elif isinstance(value, ast.List):
            self.memory[names[0]] = tuple(m for element in value.elts for m in self._memory(element))
        else:
            raise _unknown(statement)

    def _partition(self, number: int, results: Sequence[str]) -> None:
        """Runs a partition in place: its own names begin with its arguments, which have the names that they have outside."""
        name = f"partition_{number}"
        self.inside = name
        self._body(self.partitions[name].body)
        self.inside = ""
        for result in results:
            if result not in self.memory:
                raise AssertionError(f"{name} gives back {result}, which it does not make")

    def _name_input(self, name: str) -> None:
        if name not in self.memory:
            memory = next(self.new)
            self.memory[name] = (memory,)
            self.inputs.add(memory)

    def _make(self, name: str, statement: ast.stmt) -> None:
        memory = next(self.new)
        self.memory[name] = (memory,)
        self._event("alloc", name, writes=(memory,), code=ast.unparse(statement))

    def _second_name(self, statement: ast.stmt, name: str, value: ast.expr, following: ast.stmt | None) -> None:
        """Another name for memory; with a `del` of the old name right behind it, a reuse, unless only the name changes."""
        if (
            isinstance(value, ast.Subscript)
            and isinstance(value.slice, ast.Constant)
            and isinstance(value.value, ast.Name)
        ):
            (whole,) = self._memory(value.value)
            part = self.parts.setdefault((whole, value.slice.value), next(self.new))
            self.wrapper.wholes[part] = whole
            self.memory[name] = (part,)
            return
        old = ast.unparse(value)
        self.memory[name] = self._memory(value)
        if isinstance(following, ast.Delete) and [ast.unparse(t) for t in following.targets] == [old]:
            self._event("reuse", name, writes=self.memory[name], code=ast.unparse(statement))

    def _free(self, name: str) -> None:
        if name not in self.memory:
            raise CodeError(f"del {name}: no memory of that name")
        for memory in self.memory.pop(name):
            if not any(memory in others for others in self.memory.values()) and memory not in self.inputs:
                self.dead.add(memory)
                self._event("free", name, writes=(memory,))

    # --- calls -----------------------------------------------------------------------------------------------------------

    def _call(self, statement: ast.stmt, call: ast.Call, results: Sequence[str] = ()) -> None:
        called, arguments = _called(call)
        code = ast.unparse(statement)
        if called == "assert_alignment":
            for memory in self._memory(arguments[0]):
                self.wrapper.checked.add((memory, ast.literal_eval(arguments[1])))
            return
        if called in _HARMLESS or called in ("torch.cuda.set_device", "args.clear") or called.endswith(".clear"):
            return
        self.wrapper.devices.update(_devices(call))
        out = next((k.value for k in call.keywords if k.arg == "out"), None)
        made = tuple(next(self.new) for _ in results)
        if called.startswith("torch.ops.flextensor_fx."):
            self._transfer(called, arguments, made, code)
        elif called.endswith(".run"):
            self._triton(called.removesuffix(".run"), arguments, code)
        else:
            reads = [a for argument in arguments for a in self._arguments(argument)]
            reads += [a for k in call.keywords if k.arg != "out" for a in self._arguments(k.value)]
            written = self._memory(out) if out is not None else ()
            if not results and out is None:
                raise _unknown(statement)
            self._event("kernel", called, tuple(reads), writes=(*made, *written), code=code)
        for name, memory in zip(results, made, strict=True):
            self.memory[name] = (memory,)

    def _transfer(self, called: str, arguments: Sequence[ast.expr], made: tuple[int, ...], code: str) -> None:
        op = called.removeprefix("torch.ops.flextensor_fx.")
        kind = op.partition(".")[0]
        if kind == "rows":  # no transfer: it looks rows up
            reads = tuple(a for argument in arguments for a in self._arguments(argument))
            self._event("kernel", "rows", reads, writes=made, code=code)
            return
        if op != f"{kind}.default.direct" or kind not in _TRANSFERS:
            raise AssertionError(f"expected a direct call of a transfer, found {code}")
        key = next(a.value for a in arguments if isinstance(a, ast.Constant) and isinstance(a.value, str))
        assert isinstance(arguments[-1], ast.List)
        after = tuple(memory for element in arguments[-1].elts for memory in self._memory(element))
        reads = self._arguments(arguments[0]) if kind in ("wait", "offload") else ()
        self._event(kind, key, tuple(reads), after, made, code)  # pyright: ignore[reportArgumentType]  # checked above

    def _triton(self, name: str, arguments: Sequence[ast.expr], code: str) -> None:
        kernel = self.triton[name]
        reads, writes = [], []
        for place, (parameter, argument) in enumerate(zip(kernel.parameters, arguments, strict=False)):
            if "ptr" not in parameter:
                continue
            (given,) = self._arguments(argument)
            if parameter.startswith(("in_ptr", "in_out_ptr")):
                reads.append(Argument(given.memory, given.start, place in kernel.aligned))
            if parameter.startswith(("out_ptr", "in_out_ptr")):
                writes.append(given.memory)
            if not parameter.startswith(("in_", "out_")):
                raise AssertionError(f"{name}: unknown parameter {parameter}")
        self._event("kernel", name, tuple(reads), writes=tuple(writes), code=code)

    # --- values ----------------------------------------------------------------------------------------------------------

    def _arguments(self, value: ast.expr) -> list[Argument]:
        """The memory that an argument names, with the start of a view in it."""
        if isinstance(value, ast.Call):
            called, parts = _called(value)
            if called == "reinterpret_tensor":
                start = ast.literal_eval(parts[3]) if len(parts) > 3 else 0
                return [Argument(memory, start) for memory in self._memory(parts[0])]
            if called == "device":
                return []
        if isinstance(value, (ast.List, ast.Tuple)):
            return [a for element in value.elts for a in self._arguments(element)]
        return [Argument(memory, 0) for memory in self._memory(value)]

    def _memory(self, value: ast.expr) -> tuple[int, ...]:
        found: list[int] = []
        for node in ast.walk(value):
            if isinstance(node, ast.Name) and node.id in self.memory:
                found += self.memory[node.id]
            elif isinstance(node, ast.Name) and node.id.startswith(("buf", "arg", "primals")):
                raise CodeError(f"{ast.unparse(value)}: no memory of that name: {node.id}")
        return tuple(found)

    def _event(
        self,
        kind: Kind,
        what: str,
        reads: tuple[Argument, ...] = (),
        after: tuple[int, ...] = (),
        writes: tuple[int, ...] = (),
        code: str = "",
    ) -> None:
        if self.partitions and not self.inside and kind in (*_TRANSFERS, "kernel"):
            self.wrapper.outside.append(what)
        self.wrapper.events.append(Event(kind, what, reads, after, writes, code))


def _triton_kernels(module: ast.Module) -> Iterator[tuple[str, _TritonKernel]]:
    """The kernels that the module defines, by name: `name = async_compile.triton('name', '''source''', ...)`."""
    for node in module.body:
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
            continue
        called, arguments = _called(node.value)
        if called == "async_compile.triton":
            assert isinstance(arguments[1], ast.Constant) and isinstance(node.targets[0], ast.Name)
            yield node.targets[0].id, _triton_kernel(ast.parse(str(arguments[1].value)))
        elif called.startswith("async_compile.") and called != "async_compile.wait":
            raise AssertionError(f"a kernel of an unknown kind: {called}")


def _triton_kernel(source: ast.Module) -> _TritonKernel:
    function, meta = next(
        (function, keyword.value)
        for function in source.body
        if isinstance(function, ast.FunctionDef)
        for decorator in function.decorator_list
        if isinstance(decorator, ast.Call)
        for keyword in decorator.keywords
        if keyword.arg == "triton_meta"
    )
    assert isinstance(meta, ast.Dict)
    entries = {
        ast.literal_eval(key): value for key, value in zip(meta.keys, meta.values, strict=True) if key is not None
    }
    (hints,) = ast.literal_eval(entries["configs"])
    aligned = frozenset(place for (place,), hint in hints.items() if ["tt.divisibility", 16] in hint)
    return _TritonKernel(tuple(a.arg for a in function.args.args), aligned)


def _called(call: ast.expr) -> tuple[str, list[ast.expr]]:
    assert isinstance(call, ast.Call), ast.unparse(call)
    return ast.unparse(call.func), call.args


def _devices(call: ast.Call) -> set[str]:
    found = set()
    for node in ast.walk(call):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("device", "torch.device"):
            parts = [ast.literal_eval(p) for p in [*node.args, *(k.value for k in node.keywords)]]
            found.add(":".join(str(part) for part in parts))
        elif isinstance(node, ast.keyword) and node.arg == "device" and isinstance(node.value, ast.Constant):
            found.add(str(node.value.value))
    return found


def _unknown(statement: ast.stmt) -> AssertionError:
    return AssertionError(f"unknown statement in generated code: {ast.unparse(statement)}")
