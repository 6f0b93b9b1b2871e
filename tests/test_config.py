"""Configuration: values, sources and their order, errors, and the trip through text."""

from __future__ import annotations

import dataclasses
import json
import pickle
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flextensor_fx.config import OffloadConfig
from flextensor_fx.device_memory import DeviceMemory
from flextensor_fx.errors import ConfigError, PatternError

FULL: dict[str, Any] = {
    "include_patterns": ["layers.*", "class:Linear"],
    "exclude_patterns": ["*.bias"],
    "budget": "25%",
    "device": "cpu",
    "lookahead": 2,
    "min_stream_bytes": 0,
    "objective": "steady",
    "profile": "llama.profile.json",
    "store": "host",
    "host_budget": 1000,
    "pin_memory": False,
    "store_dir": "/data",
    "inner_backend": "aot_eager",
    "inner_mode": "max-autotune",
    "inner_options": {"triton.cudagraphs": False, "nested": {"list": [1, [2]]}},
    "read_threads": 3,
    "direct_io": False,
    "dump_dir": "/dumps",
    "enabled": False,
}


def test_defaults() -> None:
    assert OffloadConfig().asdict() == {
        "include_patterns": [],
        "exclude_patterns": [],
        "budget": None,
        "device": None,
        "lookahead": None,
        "min_stream_bytes": None,
        "objective": "single",
        "profile": None,
        "store": None,
        "host_budget": None,
        "pin_memory": True,
        "store_dir": None,
        "inner_backend": "inductor",
        "inner_mode": None,
        "inner_options": None,
        "read_threads": 1,
        "direct_io": True,
        "dump_dir": None,
        "enabled": True,
    }


def test_every_field_is_documented_and_in_the_full_example() -> None:
    source = Path(sys.modules[OffloadConfig.__module__].__file__ or "").read_text()
    for entry in dataclasses.fields(OffloadConfig):
        declaration = source.index(f"\n    {entry.name}: ")
        assert '\n    """' in source[declaration : source.index('"""', declaration) + 3], entry.name
    assert {entry.name for entry in dataclasses.fields(OffloadConfig)} == set(FULL)


def test_a_full_configuration_survives_text_and_copies() -> None:
    config = OffloadConfig(**FULL)
    assert config.asdict() == FULL
    for other in (
        OffloadConfig(**json.loads(json.dumps(config.asdict()))),
        deepcopy(config),
        pickle.loads(pickle.dumps(config)),
        dataclasses.replace(config),
    ):
        assert other == config and hash(other) == hash(config) and other.digest() == config.digest()


def test_it_is_frozen_and_keyword_only() -> None:
    options = {"list": [1]}
    config = OffloadConfig(inner_options=options)
    options["list"].append(2)
    assert config.asdict()["inner_options"] == {"list": [1]}
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.budget = 3  # pyright: ignore[reportAttributeAccessIssue]  # the assignment under test
    with pytest.raises(TypeError):
        config.inner_options["list"] = 3  # pyright: ignore[reportIndexIssue, reportOptionalSubscript]  # the assignment under test
    with pytest.raises(TypeError):
        OffloadConfig(["layers.*"])  # pyright: ignore[reportCallIssue]  # the call under test


@pytest.mark.parametrize(
    ("budget", "stored", "of_1000"),
    [
        (None, None, None),
        (1, 1, 1),
        (10**12, 10**12, 10**12),
        ("2GiB", 2 << 30, 2 << 30),
        ("1.5 GB", 1_500_000_000, 1_500_000_000),
        ("300MB", 300_000_000, 300_000_000),
        ("300mb", 300_000_000, 300_000_000),
        ("7kib", 7168, 7168),
        ("12 B", 12, 12),
        ("1TiB", 1 << 40, 1 << 40),
        ("4096", 4096, 4096),
        ("25%", "25%", 250),
        ("auto", "auto", 3500),
        (" Auto", "auto", 3500),
        ("80% of device", "80% of device", 8000),
        ("12.5% OF the Device", "12.5% of device", 1250),
        (" 33.3 % ", "33.3%", 333),
        ("100%", "100%", 1000),
        (0.25, "25%", 250),
        ("0.25", "25%", 250),
        (1.0, "100%", 1000),
        (0.0009, "0.09%", 0),
    ],
)
def test_budget_forms(budget, stored, of_1000) -> None:
    config = OffloadConfig(budget=budget)
    assert config.budget == stored and type(config.budget) is type(stored)
    memory = DeviceMemory("cuda:0", 5000, 10000, 1000)  # 500 of it are the margin
    assert config.budget_bytes(1000, memory) == of_1000


BAD_SIZES = ["", "0", "0%", "150%", "-1GB", "2G", "2 gigs", "iB", "0.1B", "1e9", "1.5", "nan"]
BAD_SIZES += ["2GiB of device", "0% of device", "automatic"]


@pytest.mark.parametrize(
    "budget",
    [0, -1, 0.0, -0.5, 1.5, float("nan"), float("inf"), True, False, b"1GB", [1], *BAD_SIZES],
)
def test_a_bad_budget_is_refused(budget) -> None:
    with pytest.raises(ConfigError, match=r"^option 'budget': expected .*, found .*; "):
        OffloadConfig(budget=budget)


@given(st.floats(min_value=0, max_value=1, exclude_min=True), st.integers(0, 10**15))
def test_a_share_is_exact_and_never_above_all(share: float, selected: int) -> None:
    config = OffloadConfig(budget=share)
    assert OffloadConfig(**json.loads(json.dumps(config.asdict()))) == config
    found = config.budget_bytes(selected)
    assert found is not None and 0 <= found <= selected
    assert abs(found - share * selected) <= 1 + selected * 1e-15


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("include_patterns", "layers.*", "found the plain string 'layers.*'"),
        ("include_patterns", None, "expected a list of strings, found NoneType"),
        ("exclude_patterns", ["clas:Foo"], "the nearest is 'class:'"),
        ("include_patterns", [""], "is blank"),
        ("device", 3, "found int 3"),
        ("device", "gpu!", "a device name that torch knows"),
        ("lookahead", -1, "None or a whole number of at least 0"),
        ("lookahead", True, "found bool True"),
        ("lookahead", 1.0, "found float 1.0"),
        ("min_stream_bytes", "1MB", "found str '1MB'"),
        ("objective", "fast", "one of 'single', 'steady'"),
        ("store_dir", 3, "None or a path"),
        ("store_dir", "", "None or a path"),
        ("inner_backend", "triton", "one of 'inductor', 'aot_eager', 'eager'"),
        ("inner_mode", 3, "None or a non-empty string"),
        ("inner_options", [1], "found list [1]"),
        ("inner_options", {"a": object()}, "option 'inner_options'['a']"),
        ("inner_options", {"a": float("nan")}, "option 'inner_options'['a']"),
        ("inner_options", {1: 2}, "expected a string"),
        ("read_threads", 0, "at least 1"),
        ("read_threads", None, "found NoneType"),
        ("direct_io", 1, "True or False"),
        ("dump_dir", b"x", "None or a path"),
        ("enabled", "yes", "True or False"),
    ],
)
def test_a_bad_value_says_who_expected_found_and_what_to_change(field: str, value, part: str) -> None:
    with pytest.raises(ConfigError) as error:
        OffloadConfig(**{field: value})
    message = str(error.value)
    assert message.startswith(f"option '{field}'") and part in message
    assert issubclass(error.type, PatternError) == (field in ("include_patterns", "exclude_patterns"))


def test_paths_and_devices_are_stored_as_text(tmp_path: Path) -> None:
    config = OffloadConfig(store_dir=tmp_path, dump_dir=tmp_path / "d", device=torch.device("cpu"))
    assert (config.store_dir, config.dump_dir, config.device) == (str(tmp_path), str(tmp_path / "d"), "cpu")


def test_options_win_over_the_file_and_the_file_over_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('include_patterns = ["from.file"]\nbudget = "1GB"\nlookahead = 4\n')
    env = {
        "FLEXTENSOR_FX_LOOKAHEAD": "7",
        "FLEXTENSOR_FX_READ_THREADS": "2",
        "FLEXTENSOR_FX_BUDGET": "50%",
        "HOME": "/",
    }
    config = OffloadConfig.resolve({"budget": 5}, file, env)
    assert config == OffloadConfig(include_patterns=["from.file"], budget=5, lookahead=4, read_threads=2)
    assert OffloadConfig.resolve({"budget": None}, file, env).budget is None
    named = OffloadConfig.resolve({"budget": 5}, env={**env, "FLEXTENSOR_FX_CONFIG": str(file)})
    assert named == config
    assert OffloadConfig.resolve(env={"FLEXTENSOR_FX_CONFIG": ""}) == OffloadConfig()


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXTENSOR_FX_READ_THREADS", "5")
    assert OffloadConfig.resolve().read_threads == 5


def test_a_whole_configuration_is_taken_as_it_is(tmp_path: Path) -> None:
    config = OffloadConfig(**FULL)
    assert OffloadConfig.resolve(config, env={"FLEXTENSOR_FX_READ_THREADS": "9"}) is config
    with pytest.raises(ConfigError, match="found both"):
        OffloadConfig.resolve(config, tmp_path / "c.toml")


@pytest.mark.parametrize("suffix", [".toml", ".json", ".yaml", ".yml"])
def test_each_kind_of_file(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"c{suffix}"
    if suffix == ".toml":
        lines = [f"{name} = {json.dumps(value)}" for name, value in FULL.items() if name != "inner_options"]
        file.write_text(
            "\n".join([*lines, '[inner_options]\n"triton.cudagraphs" = false\nnested = { list = [1, [2]] }'])
        )
    elif suffix == ".json":
        file.write_text(json.dumps(FULL))
    else:
        file.write_text(pytest.importorskip("yaml").safe_dump(FULL))
    assert OffloadConfig.resolve(file=file, env={}) == OffloadConfig(**FULL)


def test_an_empty_yaml_file_sets_nothing(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "c.yaml").write_text("# nothing\n")
    assert OffloadConfig.resolve(file=tmp_path / "c.yaml", env={}) == OffloadConfig()


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("c.ini", "", "expected the suffix .toml, .yaml, .yml or .json, found '.ini'"),
        ("c.toml", "a = ", "expected valid TOML"),
        ("c.json", "{", "expected valid JSON"),
        ("c.json", "[1]", "expected a table of options, found list"),
        ("c.json", '{"budgte": 1}', "budgte in file "),
        ("c.json", '{"read_threads": "2"}', "option 'read_threads' in file "),
        ("c.json", '{"include_patterns": "layers.*"}', "option 'include_patterns' in file "),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, name: str, text: str, part: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as error:
        OffloadConfig.resolve(file=tmp_path / name, env={})
    assert part in str(error.value) and name in str(error.value)


def test_a_missing_file_and_a_missing_parser_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="expected a readable text file"):
        OffloadConfig.resolve(file=tmp_path / "none.toml", env={})
    (tmp_path / "c.yaml").write_text("budget: [\n")
    with pytest.raises(ConfigError, match=r"expected valid YAML|expected PyYAML"):
        OffloadConfig.resolve(file=tmp_path / "c.yaml", env={})
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match="install pyyaml"):
        OffloadConfig.resolve(file=tmp_path / "c.yaml", env={})


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("include_patterns", "layers.*, class:Linear", ("layers.*", "class:Linear")),
        ("include_patterns", '["a,b", "c"]', ("a,b", "c")),
        ("exclude_patterns", "", ()),
        ("budget", "1.5 GB", 1_500_000_000),
        ("budget", "none", None),
        ("lookahead", "3", 3),
        ("min_stream_bytes", "", None),
        ("objective", "steady", "steady"),
        ("store_dir", "/data", "/data"),
        ("inner_backend", "eager", "eager"),
        ("inner_options", '{"max_autotune": true}', {"max_autotune": True}),
        ("read_threads", "2", 2),
        ("direct_io", "no", False),
        ("direct_io", "0", False),
        ("direct_io", "False", False),
        ("enabled", "YES", True),
        ("enabled", "1", True),
        ("enabled", "true", True),
    ],
)
def test_environment_values(name: str, text: str, value) -> None:
    assert getattr(OffloadConfig.resolve(env={f"FLEXTENSOR_FX_{name.upper()}": text}), name) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ENABLED", "maybe"),
        ("READ_THREADS", "two"),
        ("READ_THREADS", "0"),
        ("LOOKAHEAD", "1.5"),
        ("INNER_OPTIONS", "{"),
        ("INNER_OPTIONS", "[1]"),
        ("INCLUDE_PATTERNS", "[1"),
        ("INCLUDE_PATTERNS", "a,,b"),
        ("BUDGET", "2G"),
    ],
)
def test_a_bad_environment_value_names_the_variable(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^environment variable 'FLEXTENSOR_FX_{name}'"):
        OffloadConfig.resolve(env={f"FLEXTENSOR_FX_{name}": text})


@pytest.mark.parametrize(
    ("overrides", "env", "nearest"),
    [
        ({"include_pattern": []}, {}, "include_pattern in the options is no option: the nearest is 'include_patterns'"),
        ({}, {"FLEXTENSOR_FX_BUDGTE": "1"}, "the nearest is 'FLEXTENSOR_FX_BUDGET'"),
        ({}, {"FLEXTENSOR_FX_budget": "1"}, "FLEXTENSOR_FX_budget in the environment is no option"),
        ({1: 2}, {}, "1 in the options is no option"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(overrides, env: dict[str, str], nearest: str) -> None:
    with pytest.raises(ConfigError) as error:
        OffloadConfig.resolve(overrides, env=env)
    assert nearest in str(error.value)


def test_options_of_the_wrong_type_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^options: expected a mapping or an OffloadConfig"):
        OffloadConfig.resolve(["layers.*"], env={})  # pyright: ignore[reportArgumentType]  # the call under test


CHANGED: dict[str, Any] = {**FULL, "include_patterns": ["x"], "exclude_patterns": ["y"], "budget": 9, "device": None}
CHANGED |= {
    "lookahead": 3,
    "min_stream_bytes": 7,
    "objective": "single",
    "profile": "auto",
    "store": None,
    "host_budget": 2000,
    "pin_memory": True,
    "store_dir": "/other",
    "inner_backend": "eager",
    "inner_mode": "m",
}
CHANGED |= {"inner_options": {}, "read_threads": 1, "direct_io": True, "dump_dir": None, "enabled": True}


@pytest.mark.parametrize("field", list(FULL))
def test_the_digest_changes_with_what_shapes_the_graph_alone(field: str) -> None:
    config, changed = OffloadConfig(**FULL), OffloadConfig(**{**FULL, field: CHANGED[field]})
    assert changed != config
    indifferent = field in ("host_budget", "pin_memory", "store_dir", "read_threads", "direct_io", "dump_dir")
    assert (changed.digest() == config.digest()) == indifferent


def test_the_digest_is_the_same_in_every_process() -> None:
    assert OffloadConfig(include_patterns=["layers.*"], budget="2GiB").digest() == "85a9e72e2d16aa5a"
