"""Programs in files: a round trip in a process without the model's code, and files that are damaged, altered or hostile."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.export import Dim

import flextensor_fx
from compiling import fresh_compiler
from flextensor_fx import ConfigError, OffloadError, ProgramError, StoreError
from flextensor_fx.runtime.container import lay_out, read_entries, read_names
from programs import FORMS, Form, assert_same, streaming

assert fresh_compiler  # a fixture of every test here

_LOADER = """
import sys, torch, flextensor_fx
path, call = sys.argv[1:]
program = flextensor_fx.load_program(path)
assert "programs" not in sys.modules and not any("transformers" in name for name in sys.modules)
args, kwargs = torch.load(call)
before = program(*args, **kwargs)
torch.save((before, program(*args, **kwargs), str(flextensor_fx.report(program).graphs[0].schedule)), path + ".out")
"""


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The file of a program."""
    path = tmp_path / "stack.pt2"
    program = streaming(FORMS["stack"].exported()[1], budget="60%")
    program.save(path)
    program.close()
    return path


@pytest.mark.parametrize("name", FORMS)
def test_a_program_comes_back_in_another_process_without_its_models_code(name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    _, exported = form.exported()
    program = streaming(exported)
    path, call = tmp_path / "program.pt2", tmp_path / "call"
    program.save(path)
    torch.save((form.args, form.kwargs), call)
    expected = [form.call(program) for _ in range(2)]
    subprocess.run([sys.executable, "-c", _LOADER, path, call], check=True, timeout=300)
    *found, schedule = torch.load(f"{path}.out")
    for one, want in zip(found, expected, strict=True):
        assert_same(one, want)
    assert schedule == str(flextensor_fx.report(program).graphs[0].schedule)


def test_what_is_saved_is_what_the_weights_are_now(tmp_path: Path) -> None:
    form = FORMS["stack"]
    program = streaming(form.exported()[1])
    form.call(program)
    for name, tensor in program.state_dict().items():
        if name == "head.weight":
            tensor.copy_(torch.ones_like(tensor))
    program.save(tmp_path / "p")
    again = flextensor_fx.load_program(tmp_path / "p")
    assert torch.equal(again.state_dict()["head.weight"], torch.ones(5, 32))
    assert again.state_dict()["calls"].item() == 1.0
    assert_same(form.call(again), form.call(program))


def test_a_loaded_program_saves_compiles_and_is_reported_like_its_source(saved: Path, tmp_path: Path) -> None:
    form = FORMS["stack"]
    program = flextensor_fx.load_program(saved)
    program.save(tmp_path / "again.pt2")
    again = flextensor_fx.load_program(tmp_path / "again.pt2")
    assert again.fingerprint == program.fingerprint
    assert_same(form.call(again), form.call(program))
    assert str(flextensor_fx.report(program))
    torch.testing.assert_close(form.call(again.compile(inner_backend="aot_eager"))["y"], form.call(program)["y"])


def test_the_weights_are_read_in_place(saved: Path) -> None:
    program = flextensor_fx.load_program(saved)
    engine: Any = program.session.engine
    assert [file.path for file in engine.store.files] == [str(saved)]
    with safe_open(saved, "pt") as file:  # any reader of safetensors can have them too
        assert torch.equal(file.get_tensor("head.weight"), program.state_dict()["head.weight"])
    fd = engine.store.files[0].fd
    names = read_names(str(saved), fd)
    assert all(entry.offset % 4096 == 0 for entry in read_entries(str(saved), fd, {n: n for n in names}).values())


def test_ties_stay_ties(tmp_path: Path) -> None:
    program = streaming(FORMS["tied"].exported()[1])
    program.save(tmp_path / "p")
    with safe_open(tmp_path / "p", "pt") as file:
        assert ("embed.weight" in file.keys()) != ("head.weight" in file.keys())  # noqa: SIM118  # it is no mapping
    again = flextensor_fx.load_program(tmp_path / "p")
    slots = dict(again._holder.named_parameters(remove_duplicate=False))
    assert slots["embed.weight"] is slots["head.weight"]


class _Dtypes(nn.Module):
    """Frozen tensors of every kind of element."""

    def __init__(self) -> None:
        super().__init__()

        def put(value: Tensor) -> nn.Parameter:
            return nn.Parameter(value, requires_grad=False)

        self.bytes, self.words = put(torch.arange(256).to(torch.uint8)), put(torch.arange(64, dtype=torch.int32))
        self.small, self.brain = put(torch.ones(40, 8).half()), put(torch.ones(40, 8).bfloat16())
        self.eight, self.pairs = (
            put(torch.ones(64).to(torch.float8_e4m3fn)),
            put(torch.randn(32, dtype=torch.complex64)),
        )
        self.truth, self.wide = put(torch.ones(100, dtype=torch.bool)), put(torch.randn(9, dtype=torch.float64))
        self.scalar, self.empty = put(torch.tensor(3.0)), put(torch.empty(0, 4))
        self.swapped = put(torch.randn(6, 8).t())
        self.register_buffer("expanded", torch.ones(1).expand(5))

    def forward(self, x: Tensor) -> list[Tensor]:
        parts = (
            self.bytes,
            self.words,
            self.small,
            self.brain,
            self.eight,
            self.pairs,
            self.truth,
            self.wide,
            self.scalar,
        )
        return [*(part.clone() for part in parts), self.swapped @ x, self.empty + 1, self.expanded * 2]


def test_every_dtype_and_layout_survives(tmp_path: Path) -> None:
    form = Form(_Dtypes, (torch.randn(6, 2),), {}, {})
    program = streaming(form.exported()[1])
    expected = form.call(program)
    program.save(tmp_path / "p")
    assert_same(form.call(flextensor_fx.load_program(tmp_path / "p")), expected)


def test_options_of_the_machine_can_be_given(saved: Path, tmp_path: Path) -> None:
    program = flextensor_fx.load_program(saved, {"read_threads": 2, "store_dir": tmp_path})
    assert program.config.read_threads == 2
    for option in ({"budget": "20%"}, {"include_patterns": ["**"]}, {"nothing": 1}):
        with pytest.raises(ConfigError, match="expected options among"):
            flextensor_fx.load_program(saved, option)


def test_a_new_file_takes_the_old_ones_place_only_when_it_is_whole(saved: Path, monkeypatch: Any) -> None:
    before = saved.read_bytes()
    program = flextensor_fx.load_program(saved)

    def fail(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", fail)
        with pytest.raises(StoreError, match="No space left"):
            program.save(saved)
    assert saved.read_bytes() == before and [f.name for f in saved.parent.iterdir()] == [saved.name]
    program.save(saved)  # over the file that it reads from
    form = FORMS["stack"]
    assert_same(form.call(flextensor_fx.load_program(saved)), form.call(program))


class _Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("rows", torch.eye(2).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.rows, self.layer(x))


def test_a_tensor_without_a_form_in_a_file_is_named(tmp_path: Path) -> None:
    program = streaming(Form(_Sparse, (torch.randn(2, 8),), {}, {}).exported()[1])
    with pytest.raises(ProgramError, match="'rows': cannot be in a file: its layout is sparse_coo"):
        program.save(tmp_path / "p")


class _ReturnsText(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        return self.layer(x), "text"  # which torch writes and does not read


def test_a_program_that_would_not_come_back_is_not_saved(tmp_path: Path) -> None:
    program = streaming(Form(_ReturnsText, (torch.randn(2, 8),), {}, {}).exported()[1])
    with pytest.raises(ProgramError, match=r"the graph would not come back: .* output node"):
        program.save(tmp_path / "p")
    assert not [*tmp_path.iterdir()]


class _Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.layer(x).repeat(2, 1) + y


def test_sizes_that_are_made_of_others_survive(tmp_path: Path) -> None:
    rows = Dim("rows", min=2, max=64)
    shapes = {"dynamic_shapes": {"x": {0: rows}, "y": {0: 2 * rows}}}
    form = Form(_Halves, (torch.randn(3, 8), torch.randn(6, 8)), {}, shapes)
    program = streaming(form.exported()[1])
    program.save(tmp_path / "p")
    again = flextensor_fx.load_program(tmp_path / "p")
    for count in (2, 7):
        x, y = torch.randn(count, 8), torch.randn(2 * count, 8)
        assert torch.equal(again(x, y), program(x, y))
    for wrong in (torch.randn(7, 8), torch.randn(130, 8)):
        with pytest.raises(OffloadError, match="expected"):
            again(torch.randn(len(wrong) // 2, 8), wrong)


class _Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).new_zeros(int(x.shape[0] ** 0.5))


def test_guards_with_roots_survive(tmp_path: Path) -> None:
    form = Form(_Root, (torch.randn(5, 8),), {}, {"dynamic_shapes": {"x": {0: Dim.DYNAMIC}}})
    program = streaming(form.exported()[1])
    program.save(tmp_path / "p")
    again = flextensor_fx.load_program(tmp_path / "p")
    assert torch.equal(again(torch.randn(6, 8)), program(torch.randn(6, 8)))
    with pytest.raises(OffloadError, match="expected sizes for which"):
        again(torch.randn(16, 8))


@pytest.mark.parametrize("where", ["nowhere/p.pt2", "."])
def test_a_place_that_cannot_be_written_is_refused(where: str, tmp_path: Path) -> None:
    program = streaming(FORMS["repeated"].exported()[1])
    with pytest.raises(ProgramError, match="expected a file name in a directory that exists"):
        program.save(tmp_path / where)


# --- damaged files -----------------------------------------------------------------------------------------------------


def _same_or_refused(path: Path, expected: Any) -> bool:
    """Whether a file is refused; one that is not must give the right numbers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = flextensor_fx.load_program(path)
        except (ProgramError, StoreError):
            return True
    assert_same(FORMS["stack"].call(program), expected)
    program.close()
    return False


@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_byte_is_an_error_or_makes_no_difference(seed: int, saved: Path) -> None:
    expected = FORMS["stack"].call(flextensor_fx.load_program(saved))
    data, rng = saved.read_bytes(), random.Random(seed)
    length = 8 + int.from_bytes(data[:8], "little")
    places = [rng.randrange(len(data)) for _ in range(12)] + [rng.randrange(length) for _ in range(8)]
    refused = 0
    for place in places:
        saved.write_bytes(data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :])
        refused += _same_or_refused(saved, expected)
    assert refused > 0


def test_every_truncation_is_an_error(saved: Path) -> None:
    data = saved.read_bytes()
    for length in (0, 7, 8, 100, 4096, len(data) // 2, len(data) - 4096):
        saved.write_bytes(data[:length])
        with pytest.raises(ProgramError, match="program file"):
            flextensor_fx.load_program(saved)


def test_a_changed_weight_is_named(saved: Path) -> None:
    with safe_open(saved, "pt") as file:
        value = file.get_tensor("head.weight")
    data = saved.read_bytes()
    at = data.index(value.numpy().tobytes())
    saved.write_bytes(data[: at + 5] + b"\xff" + data[at + 6 :])
    with pytest.raises(ProgramError, match=r"tensor 'head.weight' is damaged"):
        flextensor_fx.load_program(saved)
    assert flextensor_fx.load_program(saved, verify=False)


def test_a_file_that_changes_after_it_was_loaded_gives_an_error(saved: Path) -> None:
    program = flextensor_fx.load_program(saved)
    with open(saved, "r+b") as file:
        file.seek(-4096, 2)
        file.write(b"\0")
    with pytest.raises(StoreError, match="found it written to since"):
        FORMS["stack"].call(program)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x02}", b"{}" * 40, bytes(5000)])
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(content)
    with pytest.raises(ProgramError):
        flextensor_fx.load_program(tmp_path / "p")


def test_files_of_others_are_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.ones(4)}, tmp_path / "weights.safetensors")
    with pytest.raises(ProgramError, match=r"found other tensors; weights .* flextensor_fx\.load"):
        flextensor_fx.load_program(tmp_path / "weights.safetensors")
    torch.export.save(FORMS["repeated"].exported()[1], tmp_path / "exported.pt2")
    with pytest.raises(ProgramError, match=r"found a zip archive; .* torch\.export\.load"):
        flextensor_fx.load_program(tmp_path / "exported.pt2")
    with pytest.raises(ProgramError, match=r"found a directory; .* flextensor_fx\.load_package"):
        flextensor_fx.load_program(tmp_path)
    with pytest.raises(ProgramError, match="cannot be read: No such file"):
        flextensor_fx.load_program(tmp_path / "absent")


# --- files that were made to do harm: consistent, with digests of their own ------------------------------------------------


def _forged(
    path: Path, record: Callable[[Any], None] | None = None, graph: Callable[[Any], None] | None = None
) -> None:
    """Rewrites a file with another record or graph and with digests that fit."""
    import hashlib

    from flextensor_fx.runtime.layout import WeightSpec, spec_of

    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys() if not name.startswith("__pad__")}  # noqa: SIM118
    texts = {name: tensors.pop(name).numpy().tobytes() for name in ("__program__.graph", "__program__.record")}
    described, drawn = json.loads(texts["__program__.record"]), json.loads(texts["__program__.graph"])
    if graph is not None:
        graph(drawn)
    data = json.dumps(drawn).encode()
    described["program"]["digests"]["__program__.graph"] = hashlib.sha256(data).hexdigest()
    if record is not None:
        record(described["program"])
    text = json.dumps(described).encode()
    specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
    specs += [
        WeightSpec(n, (len(d),), (1,), torch.uint8)
        for n, d in (("__program__.graph", data), ("__program__.record", text))
    ]
    container = lay_out(specs, {"flextensor_fx.program": hashlib.sha256(text).hexdigest()})
    out = bytearray(container.nbytes)
    out[: len(container.header)] = container.header
    values = {n: t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for n, t in tensors.items()}
    for name, value in {**values, "__program__.graph": data, "__program__.record": text}.items():
        at = container.entries[name].offset
        out[at : at + len(value)] = value
    path.write_bytes(out)


def test_the_forger_makes_files_that_load(saved: Path) -> None:
    expected = FORMS["stack"].call(flextensor_fx.load_program(saved))
    _forged(saved)
    assert_same(FORMS["stack"].call(flextensor_fx.load_program(saved)), expected)


def _nodes(graph: Any) -> Any:
    return graph["graph_module"]["graph"]["nodes"]


def _set_target(text: str) -> Callable[[Any], None]:
    def change(graph: Any) -> None:
        _nodes(graph)[0]["target"] = text

    return change


def _set_name(text: str) -> Callable[[Any], None]:
    def change(graph: Any) -> None:
        body = json.dumps(graph).replace('"x"', json.dumps(text))
        graph.clear()
        graph.update(json.loads(body))

    return change


def _set_size(text: str) -> Callable[[Any], None]:
    def change(graph: Any) -> None:
        meta = graph["graph_module"]["graph"]["tensor_values"]["x"]
        meta["sizes"][0] = {"as_expr": {"expr_str": text, "hint": {"as_int": 3}}}

    return change


def _set_guard(text: str) -> Callable[[Any], None]:
    def change(graph: Any) -> None:
        graph["guards_code"] = [text]

    return change


def _set_structure(kind: str, context: str) -> Callable[[Any], None]:
    def change(graph: Any) -> None:
        signature = graph["graph_module"]["module_call_graph"][0]["signature"]
        spec = json.loads(signature["out_spec"])
        spec[1]["type"], spec[1]["context"] = kind, context
        signature["out_spec"] = json.dumps(spec)

    return change


def _set_argument(value: Any) -> Callable[[Any], None]:
    def change(graph: Any) -> None:
        _nodes(graph)[0]["inputs"][0]["arg"] = value

    return change


_HARM = "__import__('pathlib').Path('{mark}').touch()"
HOSTILE = {
    "a function of the system": _set_target("torch.os.system"),
    "a loader of libraries": _set_target("torch.ops.load_library"),
    "an op that makes files": _set_target("torch.ops.aten.from_file.default"),
    "an op of the interpreter that makes files": _set_target("torch.ops.aten.save.default"),
    "a text that ends a text": _set_argument({"as_string": '"); system("touch {mark}"); ("'}),
    "texts of several lines": _set_argument({"as_strings": ["x\n"]}),
    "code as an option of a kernel": _set_argument({"as_string_to_argument": {"SIZE": {"as_string": "1; f()"}}}),
    "an op of another library": _set_target("torch.ops.profiler._record_function_enter.default"),
    "an attribute of an op": _set_target("torch.ops.aten.add.__class__.__init__"),
    "a kernel by number": _set_target("torch.ops.higher_order.triton_kernel_wrapper_mutation"),
    "an operator that calls": _set_target("_operator.methodcaller"),
    "an extension": _set_target("#x:y"),
    "code as a size": _set_size(_HARM),
    "code in a symbol": _set_size(f'Symbol("{_HARM}")'),
    "a tower of powers": _set_size("Pow(Integer(9), Pow(Integer(9), Integer(9)))"),
    "a lambda as a size": _set_size("(lambda: 1)()"),
    "an attribute as a size": _set_size("Symbol.__class__"),
    "code as a guard": _set_guard(_HARM),
    "code behind a guard": _set_guard(f"L['x'].size()[0] == 3 and {_HARM}"),
    "a guard that is a tower of powers": _set_guard("L['x'].size()[0] ** 9 ** 9 == 3"),
    "a guard with many powers": _set_guard("((((L['x'].size()[0] ** 8) ** 8) ** 8) ** 8) ** 8 == 3"),
    "a function of torch as a guard": _set_guard("torch.load(L['x'])"),
    "a message that ends early": _set_guard("L['x'].size()[0] == 3 and L['\"), print(1), (\"'] == 3"),
    "a method of a tensor": _set_guard("L['x'].numpy()"),
    "a name that is code": _set_name(f"x=({_HARM})"),
    "a name with a default": _set_name("x, y=print(1)"),
    "a container with a factory": _set_structure(
        "collections.defaultdict",
        json.dumps({"default_factory_module": "os", "default_factory_name": "getcwd", "dict_context": []}),
    ),
    "an enum as a key": _set_structure("builtins.dict", '[{"__enum__": true, "fqn": "os:environ", "name": "x"}]'),
    "an object of a script": _set_argument({"as_custom_obj": {"name": "o", "class_fqn": "__torch__.X"}}),
    "an operator as a value": _set_argument({"as_operator": "torch.os.system"}),
    "a graph that is none": lambda graph: graph.update(graph_module=[1]),
    "nodes that are none": lambda graph: graph["graph_module"]["graph"].update(nodes=[1, None, {}]),
    "no signature": lambda graph: graph["graph_module"].update(module_call_graph=[]),
    "another schema": lambda graph: graph.update(schema_version={"major": 99, "minor": 0}),
    "a verifier that is none": lambda graph: graph.update(verifiers=["os"]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_graph_is_refused_and_runs_nothing(name: str, saved: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    def change(graph: Any) -> None:
        HOSTILE[name](graph)
        body = json.dumps(graph).replace("{mark}", str(mark))
        graph.clear()
        graph.update(json.loads(body))

    _forged(saved, graph=change)
    with pytest.raises(ProgramError, match="program file"):
        flextensor_fx.load_program(saved)
    assert not mark.exists()


def _in_plan(name: str, value: Any) -> Callable[[Any], None]:
    return lambda record: record["plan"].update({name: value})


def _in_tensor(name: str, value: Any) -> Callable[[Any], None]:
    return lambda record: record["tensors"][0].update({name: value})


ALTERED = {
    "another version": lambda record: record.update(torch=7),
    "a pool that is too small": _in_plan("pool", 16),
    "a pool below nothing": _in_plan("pool", -1),
    "residents that are streamed": lambda record: record["plan"]["resident"].append(record["plan"]["streamed"][0]),
    "weights of another model": _in_plan("streamed", ["a.weight"]),
    "a plan beyond its budget": lambda record: record["plan"].update(budget=record["plan"]["peak_bytes"] - 1),
    "another schedule": lambda record: record["graph"]["schedule"]["transfers"][2].update(issue_at=0),
    "another shape": _in_tensor("shape", [7, 7]),
    "a shape without end": _in_tensor("shape", [1 << 62, 1 << 62]),
    "a stride that leaves gaps": _in_tensor("stride", [1 << 20]),
    "a dtype that is none": _in_tensor("dtype", "os"),
    "a tensor of another name": _in_tensor("name", "other"),
    "a tensor of another kind": _in_tensor("kind", "buffer"),
    "an entry that is not there": _in_tensor("entry", "absent"),
    "an entry of another": lambda record: record["tensors"][0].update(entry=record["tensors"][1]["entry"]),
    "a tensor too few": lambda record: record["tensors"].pop(),
    "steps that are not there": lambda record: record["costs"].update(step_ms=[]),
    "a configuration that is none": lambda record: record.update(config="[]"),
    "a directory of its own": lambda record: record.update(config=json.dumps({"store_dir": "/"})),
    "an option that is none": lambda record: record.update(config=json.dumps({"nothing": 1})),
    "another selection": lambda record: record.update(config=json.dumps({"include_patterns": ["head"]})),
    "no digests": lambda record: record.update(digests={}),
}


@pytest.mark.parametrize("name", ALTERED)
def test_an_altered_record_is_refused(name: str, saved: Path) -> None:
    _forged(saved, record=ALTERED[name])
    with pytest.raises(ProgramError, match="program file"):
        flextensor_fx.load_program(saved)


def test_operators_of_other_libraries_must_be_named(tmp_path: Path) -> None:
    with torch.library._scoped_library("flextensor_fx_test_ops", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(8, 8)

            def forward(self, x: Tensor) -> Tensor:
                twice = torch.ops.flextensor_fx_test_ops.twice  # in a body alone
                return self.layer(torch.cond(x.sum() > 0, lambda a: twice(a) + 1, lambda a: a - 1, (x,)))

        form = Form(Model, (torch.randn(2, 8),), {}, {})
        program = streaming(form.exported()[1])
        program.save(tmp_path / "p")
        assert program.namespaces == ("flextensor_fx_test_ops",)
        with pytest.raises(ProgramError, match=r"found flextensor_fx_test_ops::twice; if you trust the file"):
            flextensor_fx.load_program(tmp_path / "p")
        again = flextensor_fx.load_program(tmp_path / "p", namespaces=["flextensor_fx_test_ops"])
        assert_same(form.call(again), form.call(program))


def test_errors_are_of_one_kind() -> None:
    assert issubclass(ProgramError, OffloadError)
