"""What a pattern that matched nothing may have meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from .patterns import Pattern, parse
from .tree import ModuleTree

_LIMIT = 3
_MOST_CANDIDATES = 2000


def nearest(pattern: Pattern, tree: ModuleTree) -> tuple[str, ...]:
    """Return up to three existing paths (or classes) nearest to an unmatched pattern, the likeliest first.

    1. Paths the pattern would match with a prefix (``model.layers.0`` for ``layers.*``), or classes with its last name.
    2. ``class:X`` where a path pattern is the name of a class.
    3. Paths with more around the last segment (``model.embed_tokens`` for ``embed``).
    4. The closest by `difflib.get_close_matches`, case aside.

    Of paths that differ in numbers alone, only the first is looked at, so the cost does not grow with the layers.
    """
    classes = {module.class_name for module in tree.modules if module.class_name}
    if pattern.kind == "class":
        last = pattern.body.rpartition(".")[2]
        found = [f"class:{name}" for name in sorted(classes) if name.rpartition(".")[2] == last]
        return tuple(found[:_LIMIT]) or tuple(
            f"class:{name}" for name in _close(pattern.body, _short_and_full(classes))
        )
    paths = _without_repeats(
        [*(m.path for m in tree.modules if m.path), *(n for p in tree.parameters for n in p.names)]
    )
    deeper = parse(f"name:**.{pattern.body}", pattern.role)
    found = [path for path in paths if deeper.matches_path(path)]
    found += [f"class:{pattern.body}" for name in classes if name.rpartition(".")[2] == pattern.body][:1]
    return tuple((found or _wider(pattern, paths))[:_LIMIT]) or _close(pattern.body, paths)


def _wider(pattern: Pattern, paths: list[str]) -> list[str]:
    head, dot, last = pattern.body.rpartition(".")
    if not last.strip("*"):
        return []
    globs = (f"name:{head}{dot}*{last}*", f"name:**.{head}{dot}*{last}*")
    wider = [parse(glob, pattern.role) for glob in globs]
    return [path for path in paths if any(glob.matches_path(path) for glob in wider)]


def _short_and_full(classes: Iterable[str]) -> list[str]:
    return sorted({name for full in classes for name in (full.rpartition(".")[2], full)})


def _without_repeats(paths: Iterable[str]) -> list[str]:
    first: dict[str, str] = {}
    for path in paths:
        first.setdefault(re.sub(r"\d+", "0", path), path)
    return list(first.values())[:_MOST_CANDIDATES]


def _close(word: str, candidates: list[str]) -> tuple[str, ...]:
    lowered = {candidate.lower(): candidate for candidate in reversed(candidates)}
    close = difflib.get_close_matches(word.lower(), list(lowered), n=_LIMIT, cutoff=0.5)
    return tuple(lowered[match] for match in close)
