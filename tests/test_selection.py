"""Selection: what it says, what it refuses, and agreement with a slow matcher written from the rules alone."""

from __future__ import annotations

import itertools
import time
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flextensor_fx.errors import PatternError, SelectionError
from flextensor_fx.selection import PatternWarning, Selection, select
from flextensor_fx.tree import ModuleEntry, ModuleTree, ParameterEntry

LLAMA = ModuleTree(
    (
        ModuleEntry("", "toy.Llama"),
        ModuleEntry("model", "toy.Model"),
        ModuleEntry("model.layers", "torch.nn.modules.container.ModuleList"),
        *(ModuleEntry(f"model.layers.{i}", "toy.Layer") for i in range(3)),
        *(ModuleEntry(f"model.layers.{i}.norm", "toy.RMSNorm") for i in range(3)),
        ModuleEntry("lm_head", "torch.nn.modules.linear.Linear"),
    ),
    (
        ParameterEntry("model.embed", 64, ("lm_head.weight",)),
        *(
            ParameterEntry(f"model.layers.{i}.{name}", nbytes)
            for i in range(3)
            for name, nbytes in (("weight", 1024), ("norm.weight", 8))
        ),
    ),
)

TABLE = """\
selection: 4 units, 4 weights, 3136 bytes
unit            weights  bytes
lm_head               1     64
model.layers.0        1   1024
model.layers.1        1   1024
model.layers.2        1   1024
pattern         role     modules  parameters
model.layers.*  include        3           0
lm_head         include        1           0
layer.*         include        0           0
class:RMSNorm   exclude        3           0
kept back                   by
model.layers.0.norm.weight  class:RMSNorm
model.layers.1.norm.weight  class:RMSNorm
model.layers.2.norm.weight  class:RMSNorm
include pattern 'layer.*' matched no module and no parameter; nearest: 'model.layers.0', 'model.layers'"""


def test_prints_as_a_table() -> None:
    with pytest.warns(PatternWarning):
        selection = select(LLAMA, ["model.layers.*", "lm_head", "layer.*"], ["class:RMSNorm"])
    assert str(selection) == TABLE


def test_a_long_table_is_cut() -> None:
    tree = ModuleTree((), tuple(ParameterEntry(f"m{i}.weight", 4) for i in range(30)))
    assert "... and 10 more" in str(select(tree, ["*.weight"]))


def test_a_tied_weight_has_one_owner_and_answers_to_both_names() -> None:
    selection = select(LLAMA, ["lm_head"])
    assert selection.weights == ("lm_head.weight",)
    assert selection.unit_of("model.embed") is selection.unit_of("lm_head.weight") is selection.units[0]
    assert selection.unit_of("model.layers.0.weight") is None
    both = select(LLAMA, ["lm_head", "model.embed"])
    assert [unit.path for unit in both.units] == ["model"]
    assert both.nbytes == 64


@pytest.mark.parametrize("exclude", ["lm_head", "model.embed", "class:Linear", "lm_head.weight"])
def test_a_tied_weight_is_excluded_by_any_of_its_names(exclude: str) -> None:
    selection = select(LLAMA, ["model"], [exclude])
    assert "model.embed" not in selection.weights
    assert [(entry.weight, entry.pattern) for entry in selection.excluded] == [("model.embed", exclude)]


def test_the_root_holds_its_own_parameters_and_no_unit() -> None:
    tree = ModuleTree((ModuleEntry("", "M"), ModuleEntry("a", "A")), (ParameterEntry("w"), ParameterEntry("a.w")))
    assert [(u.path, u.weights) for u in select(tree, ["**"]).units] == [("", ("w",)), ("a", ("a.w",))]
    assert [(u.path, u.weights) for u in select(tree, ["class:M"]).units] == [("", ("w", "a.w"))]


@pytest.mark.parametrize(
    ("pattern", "nearest"),
    [
        ("layers.*", "'model.layers.0'"),
        ("model.layer.*", "'model.layers.0'"),
        ("Model.Layers", "'model.layers'"),
        ("class:torch.nn.Linear", "'class:torch.nn.modules.linear.Linear'"),
        ("class:rmsnorm", "'class:RMSNorm'"),
        ("RMSNorm", "'class:RMSNorm'"),
        ("head", "'lm_head'"),
        ("layers.0.norm.w", "'model.layers.0.norm.weight'"),
        ("zzzzzz", "none"),
    ],
)
@pytest.mark.parametrize("role", ["include", "exclude"])
def test_an_unmatched_pattern_warns_with_the_nearest_paths(pattern: str, nearest: str, role: str) -> None:
    include, exclude = (["lm_head", pattern], []) if role == "include" else (["lm_head"], [pattern])
    with pytest.warns(PatternWarning) as caught:
        selection = select(LLAMA, include, exclude)
    message = str(caught[0].message)
    assert message.startswith(f"{role} pattern '{pattern}' matched no module and no parameter; nearest: {nearest}")
    assert caught[0].filename == __file__
    assert [(entry.pattern, entry.role) for entry in selection.unmatched] == [(pattern, role)]


def test_a_pattern_that_matches_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        select(LLAMA, ["model.layers.*"], ["*.norm", "lm_head"])


EMPTY = """\
include=['layers.*', 'model.layers.0.norm'], exclude=['*.norm'] selects no weight to offload
  include pattern 'model.layers.0.norm' matched modules: 1, parameters: 0
  exclude pattern '*.norm' matched modules: 3, parameters: 0
  include pattern 'layers.*' matched no module and no parameter; nearest: 'model.layers.0'
  weights chosen and then excluded: 1; loosen the exclude patterns
  the model has 7 parameters, under: model, lm_head"""


def test_an_empty_selection_is_an_error_that_restates_the_request() -> None:
    request = (["layers.*", "model.layers.0.norm"], ["*.norm"])
    with pytest.raises(SelectionError) as error:
        select(LLAMA, *request)
    assert str(error.value) == EMPTY
    with pytest.warns(PatternWarning):
        assert select(LLAMA, *request, allow_empty=True).units == ()


def test_no_include_pattern_says_what_to_write() -> None:
    with pytest.raises(SelectionError, match=r"such as include_patterns=\['layers.\*'\]"):
        select(LLAMA, [])


@pytest.mark.parametrize("arguments", [("layers.*",), (["layers.*"], "*.norm")])
def test_a_plain_string_for_a_list_is_refused(arguments) -> None:
    with pytest.raises(PatternError, match="expected a list of strings, found the plain string"):
        select(LLAMA, *arguments)


STATE = {"layers.0.weight": torch.zeros(2), "layers.0.norm.weight": torch.zeros(2), "head.weight": torch.zeros(2)}


def test_a_mapping_with_class_includes_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="has no module classes"):
        select(STATE, ["class:Linear"], ["head"], allow_empty=True)


def test_a_mapping_ignores_class_patterns_with_a_warning() -> None:
    with pytest.warns(PatternWarning) as caught:
        selection = select(STATE, ["layers.*", "class:Linear"], ["class:Norm"])
    assert [str(w.message).partition(" is ignored")[0] for w in caught] == [
        "include pattern 'class:Linear'",
        "exclude pattern 'class:Norm'",
    ]
    assert selection.ignored == ("class:Linear", "class:Norm")
    assert [(unit.path, unit.nbytes) for unit in selection.units] == [("layers.0", 16)]


def test_ten_thousand_modules_take_under_a_second() -> None:
    parts = (nn.ModuleList(nn.Linear(1, 1, device="meta") for _ in range(9)) for _ in range(1000))
    tree = ModuleTree.from_module(nn.ModuleList(parts))
    start = time.process_time()
    with pytest.warns(PatternWarning):
        selection = select(tree, ["*.3", "class:Linear", "**.weight", "layers.*"], ["*.bias", "55"])
    assert time.process_time() - start < 1.0
    assert len(selection.units) == 8991


def glob(pattern: str, text: str) -> bool:
    """Match by trying every split; written apart from the expressions that the package compiles."""
    if not pattern:
        return not text
    if pattern[0] == "*":
        return any(glob(pattern[1:], text[cut:]) for cut in range(len(text) + 1))
    return bool(text) and pattern[0] in ("?", text[0]) and glob(pattern[1:], text[1:])


def path_matches(segments: list[str], path: list[str], exclude: bool) -> bool:
    if not segments or not path:
        return not segments and not path
    if segments[0] == "**" or (exclude and segments[0] == "*"):
        return any(path_matches(segments[1:], path[taken:], exclude) for taken in range(1, len(path) + 1))
    return glob(segments[0], path[0]) and path_matches(segments[1:], path[1:], exclude)


def reference(tree: ModuleTree, include: list[str], exclude: list[str]) -> dict[str, set[str]]:
    """The rules one weight at a time, with no table in between."""
    classes = {module.path: module.class_name for module in tree.modules}

    def hit(text: str, path: str, is_exclude: bool) -> bool:
        if text.startswith("class:"):
            name = classes.get(path, "")
            return bool(name) and any(glob(text[6:], form) for form in (name, name.split(".")[-1]))
        return bool(path) and path_matches(text.removeprefix("name:").split("."), path.split("."), is_exclude)

    def names_hit(texts: list[str], name: str, is_exclude: bool) -> bool:
        return any(not text.startswith("class:") and hit(text, name, is_exclude) for text in texts)

    def above(name: str) -> list[str]:
        parts = name.split(".")[:-1]
        return [".".join(parts[:length]) for length in range(len(parts) + 1)]

    def any_hit(texts: list[str], path: str, is_exclude: bool) -> bool:
        return any(hit(text, path, is_exclude) for text in texts)

    every_name = [name for parameter in tree.parameters for name in parameter.names]
    candidates = {path for path in classes if any_hit(include, path, False)}
    whole = set(candidates)
    candidates |= {above(name)[-1] for name in every_name if names_hit(include, name, False)}
    units: dict[str, set[str]] = {}
    for parameter in tree.parameters:
        chosen = [
            name
            for name in parameter.names
            if names_hit(include, name, False) or any(path in whole for path in above(name))
        ]
        dropped = any(
            names_hit(exclude, name, True) or any(any_hit(exclude, path, True) for path in above(name))
            for name in parameter.names
        )
        if chosen and not dropped:
            outer = [path for path in above(chosen[0]) if path in candidates]
            if outer[0] == "" and "" not in whole and len(above(chosen[0])) > 1:
                outer = outer[1:]
            units.setdefault(outer[0], set()).add(chosen[0])
    return units


SEGMENT = st.sampled_from(["a", "b", "ab", "0", "1", "10"])
GLOB = st.sampled_from(["a", "b", "0", "1", "*", "**", "?", "a*", "*b", "1?", "*0*"])
CLASS = st.sampled_from(["", "x.A", "x.AB", "y.z.A", "y.B"])
CLASS_GLOB = st.sampled_from(["A", "x.*", "*.A", "?", "A*", "y.*.A", "*"])
PATTERN = st.one_of(
    st.lists(GLOB, min_size=1, max_size=4).map(".".join),
    st.lists(GLOB, min_size=1, max_size=3).map(lambda parts: "name:" + ".".join(parts)),
    CLASS_GLOB.map("class:".__add__),
)


@st.composite
def trees(draw: st.DrawFn) -> ModuleTree:
    paths = draw(st.lists(st.lists(SEGMENT, min_size=1, max_size=4).map(tuple), max_size=8, unique=True))
    modules = {"": draw(CLASS)}
    for path in paths:
        for length in range(1, len(path) + 1):
            modules.setdefault(".".join(path[:length]), draw(CLASS))
    owners = st.sampled_from(list(modules))
    owned = draw(st.lists(st.tuples(owners, st.sampled_from(["w", "a", "0"])), min_size=1, max_size=10, unique=True))
    names = [f"{owner}.{leaf}" if owner else leaf for owner, leaf in owned]
    names = [name for name in names if name not in modules]
    parameters = []
    while names:
        taken = draw(st.integers(1, min(2, len(names))))
        parameters.append(ParameterEntry(names[0], draw(st.integers(0, 9)), tuple(names[1:taken])))
        names = names[taken:]
    return ModuleTree(tuple(itertools.starmap(ModuleEntry, modules.items())), tuple(parameters))


@settings(max_examples=400, deadline=None)
@given(trees(), st.lists(PATTERN, min_size=1, max_size=3), st.lists(PATTERN, max_size=2))
def test_agrees_with_the_slow_matcher(tree: ModuleTree, include: list[str], exclude: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PatternWarning)
        selection = select(tree, include, exclude, allow_empty=True)
    assert {unit.path: set(unit.weights) for unit in selection.units} == reference(tree, include, exclude)
    check_accounts(tree, selection)


def check_accounts(tree: ModuleTree, selection: Selection) -> None:
    """Each tensor has at most one owner, bytes add up, and what is kept back is not selected."""
    assert len(set(selection.weights)) == len(selection.weights)
    owners = [{name for name in p.names if name in selection.weights} for p in tree.parameters]
    assert all(len(found) <= 1 for found in owners)
    held = {parameter for parameter, found in zip(tree.parameters, owners, strict=True) if found}
    assert selection.nbytes == sum(parameter.nbytes for parameter in held)
    assert not {entry.weight for entry in selection.excluded} & set(selection.weights)
    assert all(selection.unit_of(name) is not None for parameter in held for name in parameter.names)
