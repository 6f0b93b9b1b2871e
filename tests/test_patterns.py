"""Patterns: the syntax, each row of the specified tables, and the worked cases."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from flextensor_fx.errors import PatternError
from flextensor_fx.patterns import parse, parse_all
from flextensor_fx.selection import PatternWarning, select
from flextensor_fx.tree import ModuleEntry, ModuleTree, ParameterEntry

CASES = json.loads((Path(__file__).parent / "data" / "patterns.json").read_text())


def tree_of_case(hierarchy: str) -> ModuleTree:
    described = CASES["hierarchies"][hierarchy]
    modules = (ModuleEntry(path, class_name) for path, class_name in described["modules"].items())
    return ModuleTree(tuple(modules), tuple(ParameterEntry(name, 4) for name in described["parameters"]))


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda case: case["id"])
def test_worked_case(case: dict) -> None:
    tree = tree_of_case(case["hierarchy"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PatternWarning)
        selection = select(tree, case["include"], case["exclude"], allow_empty=True)
    assert {unit.path: list(unit.weights) for unit in selection.units} == case["units"]


@pytest.mark.parametrize("role", ["include", "exclude"])
@pytest.mark.parametrize("text", [*CASES["invalid_patterns"], "a..b", ".a", "a.", "name:a..b", "a.***.b", ":x"])
def test_malformed_pattern_is_refused(text: str, role) -> None:
    with pytest.raises(PatternError, match=f"^{role} pattern"):
        parse(text, role)


@pytest.mark.parametrize("text", [None, 3, b"layers", ["layers"]])
def test_a_pattern_that_is_no_string_is_refused(text) -> None:
    with pytest.raises(PatternError, match="expected a string"):
        parse(text, "include")


@pytest.mark.parametrize(("text", "prefix"), [("clas:Foo", "class:"), ("Class:Foo", "class:"), ("nam:layers", "name:")])
def test_an_unknown_prefix_names_the_nearest_and_the_literal_form(text: str, prefix: str) -> None:
    with pytest.raises(PatternError) as error:
        parse(text, "include")
    assert f"the nearest is '{prefix}'" in str(error.value)
    assert f"write 'name:{text}'" in str(error.value)


@pytest.mark.parametrize("texts", ["layers.*", None, 3])
def test_a_list_is_required(texts) -> None:
    with pytest.raises(PatternError, match="expected a list of strings"):
        parse_all(texts, "include")


def test_surrounding_blanks_do_not_count() -> None:
    assert parse(" layers.* ", "include") == parse("layers.*", "include")
    assert parse("class: Linear", "include").matches_class("torch.nn.modules.linear.Linear")


# Each table of the specification, row by row: pattern, what it matches, what it does not.
SYNTAX = [
    ("layers", ["layers"], ["layer", "layers.0", "Layers"]),
    ("layer_*", ["layer_0", "layer_abc", "layer_"], ["layer", "layer_0.attn"]),
    ("layer?", ["layer0"], ["layer01", "layer", "layer."]),
]
INCLUDE = [
    ("layers.*", ["layers.0", "layers.1"], ["layers.0.attn", "layers"]),
    ("*", ["layers", "norm", "head"], ["layers.0", ""]),
    ("layers.*.self_attn", ["layers.0.self_attn"], ["layers.0.self_attn.q_proj"]),
    ("*.weight", ["lm_head.weight", "norm.weight"], ["layers.0.attn.q_proj.weight", "weight"]),
    ("layers.*.weight", ["layers.0.weight"], ["layers.0.attn.weight"]),
    ("**", ["layers", "layers.0", "layers.0.attn.weight"], [""]),
    ("**.scale", ["layers.scale", "layers.0.attn.scale"], ["scale"]),
    ("layers.**.weight", ["layers.0.weight", "layers.0.attn.weight"], ["layers.weight"]),
    ("layer_**", ["layer_0"], ["layer_0.attn"]),
]
EXCLUDE = [
    ("foo.*", ["foo.bar", "foo.bar.baz", "foo.bar.baz.weight"], ["foo"]),
    ("*.weight", ["lm_head.weight", "layers.0.self_attn.q_proj.weight"], ["weight", "layers.weight.data"]),
    ("*", ["layers", "layers.0.self_attn"], [""]),
    ("layer_*", ["layer_0", "layer_abc"], ["layer_0.attn"]),
    ("**.weight", ["lm_head.weight", "layers.0.self_attn.q_proj.weight"], ["weight"]),
]
PATHS = [("include", *row) for row in SYNTAX + INCLUDE] + [("exclude", *row) for row in SYNTAX + EXCLUDE]


@pytest.mark.parametrize(("role", "text", "matching", "other"), PATHS)
def test_path_table(role, text: str, matching: list[str], other: list[str]) -> None:
    for form in (text, f"name:{text}"):
        pattern = parse(form, role)
        assert [path for path in matching + other if pattern.matches_path(path)] == matching


CLASSES = {
    "nemotron_h.layers.SharedExpertMLP",
    "other.SharedExpertMLP",
    "nemotron_h.layers.RoutedExpert",
    "torch.nn.modules.linear.Linear",
    "mine.Linear",
}
CLASS_TABLE = [
    ("class:SharedExpertMLP", {"nemotron_h.layers.SharedExpertMLP", "other.SharedExpertMLP"}),
    ("class:*Expert*", {c for c in CLASSES if "Expert" in c}),
    ("class:torch.nn.*.Linear", {"torch.nn.modules.linear.Linear"}),
    ("class:*.SharedExpertMLP", {"nemotron_h.layers.SharedExpertMLP", "other.SharedExpertMLP"}),
    ("class:Linea?", {"torch.nn.modules.linear.Linear", "mine.Linear"}),
    ("class:torch.nn.Linear", set()),
    ("class:linear", set()),
    ("class:[A-Z]inear", set()),
]


@pytest.mark.parametrize("role", ["include", "exclude"])
@pytest.mark.parametrize(("text", "expected"), CLASS_TABLE)
def test_class_table(role, text: str, expected: set[str]) -> None:
    pattern = parse(text, role)
    assert {name for name in CLASSES if pattern.matches_class(name)} == expected
    assert not pattern.matches_class("") and not pattern.matches_path("Linear")


def test_brackets_are_literal() -> None:
    pattern = parse("layers.[0-1]", "include")
    assert pattern.matches_path("layers.[0-1]") and not pattern.matches_path("layers.0")
