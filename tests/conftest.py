"""Golden texts: `pytest --accept` writes what a test found as what it expects from then on. A cache directory for each run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

Golden = Callable[[str], None]

_FOLDER = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept", action="store_true", help="write the texts found as the golden ones")


@pytest.fixture(autouse=True, scope="session")
def _machine_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What was measured on this machine before must not change what a test sees."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compares a text with tests/golden/<name of the test>.txt."""
    name = request.node.name.removeprefix("test_").translate(str.maketrans({"[": "-", "]": "", " ": "_"}))
    file = _FOLDER / f"{name}.txt"

    def check(text: str) -> None:
        if request.config.getoption("--accept"):
            _FOLDER.mkdir(exist_ok=True)
            file.write_text(text)
        assert text == (
            file.read_text() if file.exists() else "(no golden text yet: look at it, then run with --accept)"
        )

    return check
