"""Files that are no profiles, or damaged ones: one error that says why, and never a value that cannot be used."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flextensor_fx.errors import BudgetError, ProfileError
from flextensor_fx.profile import Profile
from profiles import model_profile
from reports import JSON_VALUES, paths, put, without

SAVED = model_profile(2, graphs=2).to_json()
PLACES = paths(json.loads(SAVED))[1:]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected JSON, found: Expecting value"),
        ("[1, NaN]", "the number NaN"),
        ("[" * 100_000, "nested too deeply"),
        (b"\xff\xfe\x00", "expected JSON"),
        ("[]", "expected a profile, an object"),
        ('{"format": "flextensor_fx report", "version": 1}', "give a file that Profile.save wrote"),
        ('{"format": "flextensor_fx profile", "version": 2}', "expected version 1 of the format, found 2"),
        ('{"format": "flextensor_fx profile", "version": true}', "found True"),
        ('{"format": "flextensor_fx profile", "version": 1}', r"profile: expected an object \(Profile\), found None"),
        ('{"format": "flextensor_fx profile", "version": 1, "profile": {"model": "M"}}', "found no 'machine'"),
    ],
)
def test_foreign_files_give_a_clear_error(text: str | bytes, message: str):
    with pytest.raises(ProfileError, match=message):
        Profile.from_json(text, "profile file 'p.json'")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("machine", "cores"), "x", r"profile\.machine\.cores: expected a whole number, found 'x'"),
        (("machine", "cores"), 0, r"profile\.machine: Machine: expected cores >= 1"),
        (("weights", 0, "nbytes"), True, "expected a whole number, found True"),
        (("weights", 0, "shape"), [1.5], r"weights\[0\]\.shape\[0\]: expected a whole number"),
        (("weights", 1, "name"), "layers.0.up.weight", "expected each weight once"),
        (("weights", 1, "stays"), 3, "expected a text, found 3"),
        (("graphs", 0, "steps", 0, "ms"), None, r"steps\[0\]\.ms: expected a number, found None"),
        (("graphs", 0, "steps", 0, "ms"), -1, r"steps\[0\]: StepProfile: expected ms >= 0"),
        (("graphs", 0, "steps", 0, "provenance"), "guessed", "expected one of 'measured', 'estimated', found 'guessed'"),
        (("graphs", 0, "uses", "head.weight"), [7], r"graphs\[0\]: GraphProfile 'forward 0': .* among 0 to 6, found"),
        (("graphs", 0, "uses", "lost"), [0], "uses weight 'lost', which is not among the 7 weights"),
        (("graphs", 0, "uses"), [], "uses: expected an object, found"),
        (("graphs", 0, "samples"), 1 << 70, "found a number beyond 64 bits"),
        (("link", "bytes_per_ms"), 0, r"link: LinkProfile: expected latency_ms >= 0 and bytes_per_ms >= 1"),
        (("link", "points", 0, "nbytes"), 1 << 40, "expected points of increasing size"),
        (("link", "more"), 1, "found also 'more'"),
    ],
)  # fmt: skip
def test_a_damaged_value_is_named(path: tuple[str | int, ...], value: Any, message: str):
    data = json.loads(SAVED)
    put(data["profile"], path, value)
    with pytest.raises(ProfileError, match=rf"p\.json: .*{message}.*; profile again"):
        Profile.from_json(json.dumps(data), "p.json")


def works_or_refuses(text: str | bytes) -> None:
    """A profile that is read prints, plans and is saved; one that cannot be read is refused by the one error that says why."""
    try:
        made = Profile.from_json(text, "p.json")
    except ProfileError as error:
        if str(error).startswith("p.json: "):
            return
        raise
    assert str(made) and str(made.link) and made.fingerprint
    assert Profile.from_json(made.to_json()) == made
    for objective in ("single", "steady"):
        for budget in (None, made.nbytes // 2):
            with suppress(BudgetError):
                assert made.plan(budget, objective=objective).predicted_ms >= 0


NUMBERS = st.sampled_from([0, 1, -1, 3, 1e-9, 0.5, 1e15, 1e18, 1 << 62, 1 << 63, 4096])


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(PLACES), JSON_VALUES | NUMBERS)
def test_any_value_anywhere(place: tuple[str | int, ...], value: Any):
    data = json.loads(SAVED)
    put(data, place, value)
    works_or_refuses(json.dumps(data))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([p for p in PLACES if p[-1] not in ("version", "format")]), NUMBERS), max_size=5)
)
def test_several_numbers_at_once(changes: list[tuple[tuple[str | int, ...], Any]]):
    data = json.loads(SAVED)
    for place, value in sorted(changes, key=lambda change: -len(change[0])):
        put(data, place, value)
    works_or_refuses(json.dumps(data))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(PLACES))
def test_anything_left_out(place: tuple[str | int, ...]):
    works_or_refuses(json.dumps(without(json.loads(SAVED), place)))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(SAVED)), st.binary(max_size=8))
def test_any_bytes_at_any_end(at: int, extra: bytes):
    works_or_refuses(SAVED.encode()[:at] + extra)


@settings(max_examples=60, deadline=None)
@given(JSON_VALUES)
def test_any_json(value: Any):
    works_or_refuses(json.dumps(value))
