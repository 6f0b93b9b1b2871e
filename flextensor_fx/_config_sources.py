"""Reading configuration values from a file and from environment variables."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import ConfigError

ENV_PREFIX = "FLEXTENSOR_FX_"

_TRUE = ("1", "true", "yes")
_FALSE = ("0", "false", "no")


def read_file(file: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Read a table of values from a .toml, .yaml, .yml or .json file.

    Raises:
        ConfigError: the suffix is none of these, the file cannot be read or parsed, it holds no table, or it is YAML
            and PyYAML is not installed.
    """
    path = Path(file)
    who = f"configuration file {str(path)!r}"
    suffix = path.suffix.lower()
    if suffix not in (".toml", ".yaml", ".yml", ".json"):
        raise ConfigError(f"{who}: expected the suffix .toml, .yaml, .yml or .json, found {suffix!r}; rename the file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{who}: expected a readable text file, found: {error}; correct the path or the file"
        ) from error
    try:
        values = _parse(text, suffix, who)
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{who}: expected valid {suffix[1:].upper()}, found: {error}; correct the file") from error
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{who}: expected a table of options, found {type(values).__name__}; write one 'name: value' each"
        )
    return values


def from_text(text: str, default: object, field: str, who: str) -> Any:
    """Turn an environment variable's text into a value of the field's kind, which its default shows.

    Raises:
        ConfigError: the text is not of that kind.
    """
    stripped = text.strip()
    if default is None and stripped.lower() in ("", "none"):
        return None
    if field == "inner_options":
        return _json(stripped, who, "a JSON object")
    if isinstance(default, tuple):
        if stripped.startswith("["):
            return _json(stripped, who, "a comma-separated list or a JSON list")
        return [item.strip() for item in stripped.split(",")] if stripped else []
    if isinstance(default, bool):
        if stripped.lower() in _TRUE + _FALSE:
            return stripped.lower() in _TRUE
        raise ConfigError(f"{who}: expected one of {', '.join(_FALSE + _TRUE)}, found {text!r}; write one of these")
    if isinstance(default, int) or field in ("lookahead", "min_stream_bytes"):
        try:
            return int(stripped)
        except ValueError:
            raise ConfigError(f"{who}: expected a whole number, found {text!r}; write digits alone") from None
    return stripped


def _parse(text: str, suffix: str, who: str) -> Any:
    if suffix == ".toml":
        return tomllib.loads(text)
    if suffix == ".json":
        return json.loads(text)
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(
            f"{who}: expected PyYAML to read it, found it missing; install pyyaml or write TOML or JSON"
        ) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _json(text: str, who: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{who}: expected {expected}, found {text!r} ({error}); correct the JSON") from None
