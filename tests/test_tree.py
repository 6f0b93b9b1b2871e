"""The same names, ties and selection, whichever form of the model is at hand."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from flextensor_fx.errors import SelectionError
from flextensor_fx.selection import Selection, select
from flextensor_fx.tree import ModuleEntry, ModuleTree, ParameterEntry


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.zeros(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.attn(x)) * self.scale + self.shift


class Model(nn.Module):
    """A tied weight (embed and head), a parameter of the root, an odd path and a module under two paths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.odd = nn.ModuleDict({"a b": nn.Linear(4, 4)})
        self.pos = nn.Parameter(torch.ones(4))
        self.last = self.layers[1]
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.pos
        for layer in self.layers:
            x = layer(x)
        return self.head(self.last(self.odd["a b"](x)))


TOKENS = torch.arange(3)


def captured(model, *args: torch.Tensor) -> tuple[fx.GraphModule, ModuleTree]:
    """Return the Dynamo graph, and the tree read while the backend ran."""
    seen: list[tuple[fx.GraphModule, ModuleTree]] = []

    def backend(graph_module: fx.GraphModule, inputs: list[torch.Tensor]):
        seen.append((graph_module, ModuleTree.of(graph_module)))
        return graph_module.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(*args)
    return seen[0]


def as_dict(selection: Selection) -> dict[str, set[str]]:
    return {unit.path: set(unit.weights) for unit in selection.units}


REQUESTS = [
    (["layers.*"], []),
    (["**"], []),
    (["class:Linear"], []),
    (["class:Block", "pos", "odd.a b"], ["class:LayerNorm"]),
    (["layers.*", "head", "embed"], ["**.bias"]),
    (["head"], []),
    (["last"], ["last.norm"]),
    (["class:ModuleList"], []),
    (["class:Model"], ["layers.0"]),
    (["*"], ["head"]),
]


def on_meta() -> Model:
    with torch.device("meta"):
        return Model()


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.fixture(scope="module")
def forms(model: Model) -> dict[str, object]:
    return {
        "compiled": torch.compile(model, backend="eager"),
        "dynamo": captured(model, TOKENS)[1],
        "exported": torch.export.export(model, (TOKENS,)),
        "mapping": model.state_dict(),
        "kept": dict(model.named_parameters(remove_duplicate=False)),
        "meta": on_meta(),
    }


def answers(form: str, patterns: list[str]) -> bool:
    """A mapping has no classes, and an exported program none for a container, which has no node of its own."""
    classes = [text for text in patterns if text.startswith("class:")]
    return not (classes and form in ("mapping", "kept")) and not ("class:ModuleList" in classes and form == "exported")


FORMS = ["compiled", "dynamo", "exported", "mapping", "kept", "meta"]
ASKED = [(form, *request) for form in FORMS for request in REQUESTS if answers(form, request[0] + request[1])]


@pytest.mark.parametrize(("form", "include", "exclude"), ASKED)
def test_every_form_selects_the_same(model: Model, forms, form: str, include: list[str], exclude: list[str]) -> None:
    of_module = select(model, include, exclude)
    of_form = select(forms[form], include, exclude)
    assert as_dict(of_form) == as_dict(of_module)
    assert of_form.nbytes == of_module.nbytes
    assert {entry.weight for entry in of_form.excluded} == {entry.weight for entry in of_module.excluded}


def test_names_and_ties_of_a_module(model: Model) -> None:
    tree = ModuleTree.from_module(model)
    assert tree.parameter("head.weight") == ParameterEntry("embed.weight", 128, ("head.weight",))
    assert tree.parameter("last.scale") == ParameterEntry("layers.1.scale", 16, ("last.scale",))
    reference = list(dict(model.named_modules(remove_duplicate=False)))
    assert [module.path for module in tree.modules] == reference
    assert sorted(n for p in tree.parameters for n in p.names) == sorted(
        dict(model.named_parameters(remove_duplicate=False))
    )
    assert [p.name for p in tree.parameters] == [name for name, _ in model.named_parameters()]


def test_class_names_are_fully_qualified(model: Model) -> None:
    classes = {module.path: module.class_name for module in ModuleTree.from_module(model).modules}
    assert classes["layers.0"] == f"{Block.__module__}.Block"
    assert classes["layers.0.attn"] == "torch.nn.modules.linear.Linear"


def test_a_graph_alone_knows_what_it_traced(model: Model) -> None:
    graph_module, inside = captured(model, TOKENS)
    tree = ModuleTree.from_graph(graph_module)
    classes = {module.path: module.class_name for module in tree.modules}
    assert classes["layers.0"] == f"{Block.__module__}.Block" and classes["layers"] == ""
    assert {parameter.name for parameter in tree.parameters} == {p.name for p in inside.parameters}
    assert as_dict(select(tree, ["layers.*"])) == as_dict(select(model, ["layers.*"]))
    # The graph holds the tied weight under the name it was first used by.
    assert tree.parameter("embed.weight").aliases == () and inside.parameter("head.weight").name == "embed.weight"


def test_a_graph_knows_only_the_parameters_it_uses() -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts["used"](x)

    _, tree = captured(Half(), torch.ones(4))
    assert [parameter.name for parameter in tree.parameters] == ["parts.used.weight", "parts.used.bias"]
    assert "parts.unused" in {module.path for module in tree.modules}


def test_a_function_over_modules_names_each_by_its_variable() -> None:
    first, second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))

    def call(x: torch.Tensor) -> torch.Tensor:
        return second(first(x))

    graph_module, inside = captured(call, torch.ones(4))
    names = {"first.weight", "first.bias", "second.0.weight", "second.0.bias"}
    for tree in (inside, ModuleTree.from_graph(graph_module)):
        assert {parameter.name for parameter in tree.parameters} == names
        assert as_dict(select(tree, ["class:Linear"]))["second.0"] == {"second.0.weight", "second.0.bias"}


def test_modules_outside_the_registered_hierarchy_keep_their_attribute_names() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4, bias=False)
            self.hidden = [nn.Linear(4, 4, bias=False)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.hidden[0](self.inner(x))

    graph_module, inside = captured(Holder(), torch.ones(4))
    for tree in (inside, ModuleTree.from_graph(graph_module)):
        assert {parameter.name for parameter in tree.parameters} == {"inner.weight", "hidden.0.weight"}


def test_a_compile_wrapper_never_shows() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    wrapped = nn.Sequential(*plain)
    wrapped.register_module("0", torch.compile(plain[0], backend="eager"))  # pyright: ignore[reportArgumentType]  # a Module
    assert "0._orig_mod.weight" in dict(wrapped.named_parameters())
    expected = ModuleTree.from_module(plain)
    graph_module, inside = captured(wrapped, torch.ones(4))
    assert ModuleTree.of(wrapped) == ModuleTree.of(torch.compile(wrapped, backend="eager")) == inside == expected
    assert ModuleTree.from_graph(graph_module) == expected
    assert ModuleTree.of(wrapped.state_dict()).parameters == expected.parameters
    assert {p.name for p in ModuleTree.of(torch.export.export(wrapped, (torch.ones(4),))).parameters} == {
        "0.weight",
        "0.bias",
    }


def test_a_tie_survives_saving_an_exported_program(model: Model, tmp_path) -> None:
    torch.export.save(torch.export.export(model, (TOKENS,)), tmp_path / "model.pt2")
    tree = ModuleTree.of(torch.export.load(tmp_path / "model.pt2"))
    assert tree.parameter("head.weight").name == "embed.weight"


def test_a_module_that_contains_itself_is_walked_once() -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    module.add_module("again", module)
    assert [entry.path for entry in ModuleTree.from_module(module).modules] == ["", "0"]


def test_a_lazy_parameter_has_no_bytes_yet() -> None:
    assert ModuleTree.from_module(nn.LazyLinear(4)).parameter("weight").nbytes == 0


def test_a_plain_graph_module_is_a_module() -> None:
    traced = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4)))
    assert [parameter.name for parameter in ModuleTree.of(traced).parameters] == ["0.weight", "0.bias"]


def test_a_mapping_has_prefixes_for_modules() -> None:
    tree = ModuleTree.of({"a.b.weight": torch.zeros(2), "c": torch.zeros(1), "a._extra_state": None})
    assert tree == ModuleTree(
        (ModuleEntry(""), ModuleEntry("a"), ModuleEntry("a.b")),
        (ParameterEntry("a.b.weight", 8), ParameterEntry("c", 4)),
        is_dict=True,
    )


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"a": {"b": torch.ones(1)}}, "expected a tensor, found dict"),
        ({1: torch.ones(1)}, "expected a name, found int"),
        ([torch.ones(1)], "found list"),
        (None, "found NoneType"),
    ],
)
def test_what_is_no_model_is_refused(found, message: str) -> None:
    with pytest.raises(SelectionError, match=message):
        ModuleTree.of(found)
