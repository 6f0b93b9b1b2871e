"""Golden texts: `pytest --accept` writes what a test found as what it expects from then on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Golden = Callable[[str], None]

_FOLDER = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept", action="store_true", help="write the texts found as the golden ones")


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
