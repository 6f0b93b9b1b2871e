"""Numbers of this machine that are measured once and kept in small files, so that plans are the same in every process."""

from __future__ import annotations

import contextlib
import os
import platform
import tempfile
from pathlib import Path
from typing import TypeVar

from ._json_files import JsonFormat
from .errors import OffloadError

T = TypeVar("T")


def kept_file(name: str, cache_dir: str | os.PathLike[str] | None = None) -> Path | None:
    """Where the numbers called `name` of this machine are kept; None where there is no home to keep them in.

    Args:
        cache_dir: the directory; None takes `flextensor_fx` in $XDG_CACHE_HOME or ~/.cache.
    """
    if cache_dir is None:
        home = os.environ.get("XDG_CACHE_HOME", "")
        try:
            # A relative one is to be ignored: https://specifications.freedesktop.org/basedir-spec/latest/
            cache_dir = (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "flextensor_fx"
        except RuntimeError:  # there is no home
            return None
    machine = "".join(c if c.isalnum() or c in "-." else "_" for c in platform.node())[:80]
    kind, _, rest = name.partition("-")
    return Path(cache_dir) / ("-".join(part for part in (kind, machine, rest) if part) + ".json")


def read_kept(file: Path | None, form: JsonFormat[T]) -> T | None:
    """What `keep` wrote; None if it is not there or damaged."""
    if file is None:
        return None
    try:
        return form.load(file)
    except OffloadError:
        return None


def keep(file: Path | None, form: JsonFormat[T], value: T) -> None:
    """Writes a value whole or not at all; where nothing can be written, nothing is kept."""
    if file is None:
        return
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)
        try:
            with open(fd, "w", encoding="utf-8") as target:
                target.write(form.to_text(value))
            os.replace(name, file)  # another process reads the old one or the new one, never a part
        except OSError:
            os.unlink(name)
            raise
