"""Glob patterns over module paths, parameter names and module classes: parse one, match one string."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from .errors import PatternError

Role = Literal["include", "exclude"]
Kind = Literal["name", "class"]

_ONE_SEGMENT = r"[^.]+"
_ONE_OR_MORE_SEGMENTS = r"[^.]+(?:\.[^.]+)*"


@dataclass(frozen=True)
class Pattern:
    """One parsed entry of include_patterns or exclude_patterns.

    Attributes:
        text: the entry as the user wrote it, without surrounding blanks.
        role: which list it stands in; it decides how many segments a standalone ``*`` takes.
        kind: what it selects on, a path (``name``) or a module's class (``class``).
        body: the glob itself, without the prefix.
        matcher: the glob as a compiled expression, for a full match.
    """

    text: str
    role: Role
    kind: Kind
    body: str
    matcher: re.Pattern[str]

    def matches_path(self, path: str) -> bool:
        """Tell whether a ``name`` pattern matches a dotted path or parameter name; the root, "", never matches."""
        return self.kind == "name" and self.matcher.fullmatch(path) is not None

    def matches_class(self, class_name: str) -> bool:
        """Tell whether a ``class`` pattern matches a fully-qualified class name or its last part; "" never matches."""
        if self.kind != "class" or not class_name:
            return False
        short_name = class_name.rpartition(".")[2]
        return self.matcher.fullmatch(short_name) is not None or self.matcher.fullmatch(class_name) is not None


def parse(text: str, role: Role) -> Pattern:
    """Parse one pattern.

    1. ``<glob>`` and ``name:<glob>`` match dotted paths segment by segment; ``class:<glob>`` matches class names.
    2. A segment that is ``*`` takes exactly one path segment in an include and one or more in an exclude.
    3. A segment that is ``**`` takes one or more path segments in both.
    4. ``*`` and ``?`` beside other characters, and ``?`` alone, stay inside their segment.
    5. In a class glob ``*`` and ``?`` match any characters, dots too. Everything else is literal; case counts.

    Raises:
        PatternError: `text` is not a string, is blank, has an unknown prefix, an empty segment or more than two
            stars as one segment.
    """
    if not isinstance(text, str):
        raise PatternError(
            f"{role} pattern {text!r}: expected a string such as 'layers.*', found {type(text).__name__}; "
            "write each pattern as a string"
        )
    stripped = text.strip()
    if not stripped:
        raise PatternError(
            f"{role} pattern {text!r} is blank: expected a glob such as 'layers.*'; write one or remove it"
        )
    kind, body = _split_prefix(stripped, role)
    segments = body.split(".")
    if "" in segments:
        raise PatternError(
            f"{role} pattern {text!r} has an empty segment: expected names or wildcards between the dots; "
            "remove the extra dot"
        )
    if kind == "class":
        return Pattern(stripped, role, kind, body, re.compile(_glob(body, any_character="."), re.DOTALL))
    for segment in segments:
        if len(segment) > 2 and not segment.strip("*"):
            raise PatternError(
                f"{role} pattern {text!r}: {segment!r} is no wildcard; write '*' for one segment, '**' for one or more"
            )
    expression = r"\.".join(_segment(segment, role) for segment in segments)
    return Pattern(stripped, role, kind, body, re.compile(expression))


def parse_all(texts: Iterable[str], role: Role) -> tuple[Pattern, ...]:
    """Parse a list of patterns, in order.

    Raises:
        PatternError: `texts` is a plain string or not a list of strings, or a pattern is malformed.
    """
    if isinstance(texts, str):
        # It would be iterated by characters, and its "*" would select the whole model.
        raise PatternError(
            f"{role} patterns: expected a list of strings, found the plain string {texts!r}; write [{texts!r}]"
        )
    if not isinstance(texts, Iterable):
        raise PatternError(
            f"{role} patterns: expected a list of strings, found {type(texts).__name__}; write one such as ['layers.*']"
        )
    return tuple(parse(text, role) for text in texts)


def _split_prefix(text: str, role: Role) -> tuple[Kind, str]:
    prefix, colon, body = text.partition(":")
    if not colon:
        return "name", text
    if prefix != "name" and prefix != "class":
        nearest = difflib.get_close_matches(prefix.lower(), ("name", "class"), n=1, cutoff=0.0)[0]
        raise PatternError(
            f"{role} pattern {text!r}: expected the prefix 'name:' or 'class:', found {prefix + ':'!r}; "
            f"the nearest is '{nearest}:'. For a literal path with a colon write {'name:' + text!r}"
        )
    if not body.strip():
        raise PatternError(
            f"{role} pattern {text!r}: expected a glob after '{prefix}:', found nothing; write one or remove it"
        )
    return prefix, body.strip()


def _segment(segment: str, role: Role) -> str:
    if segment == "**" or (segment == "*" and role == "exclude"):
        return _ONE_OR_MORE_SEGMENTS
    return _ONE_SEGMENT if segment == "*" else _glob(segment, any_character="[^.]")


def _glob(glob: str, *, any_character: str) -> str:
    collapsed = re.sub(r"\*+", "*", glob)
    wildcards = {"*": any_character + "*", "?": any_character}
    return "".join(wildcards.get(character) or re.escape(character) for character in collapsed)
