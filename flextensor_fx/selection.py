"""Which weights of a model the patterns select for offloading, in which units, and why the others stay."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ._nearest import nearest
from .errors import SelectionError
from .patterns import Pattern, Role, parse_all
from .tree import ModuleTree, ParameterEntry

_ROWS = 20


class PatternWarning(UserWarning):
    """A pattern has no effect on this model."""


@dataclass(frozen=True)
class Unit:
    """An offload unit: a module, the names of its selected weights in the tree's order, and their bytes.

    The path "" is the root; unless a ``class:`` pattern chose it, it holds the root's own parameters only.
    """

    path: str
    weights: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class Match:
    """How many module paths and parameter tensors of the model one pattern matched by itself, before any guard."""

    pattern: str
    role: Role
    modules: int
    parameters: int


@dataclass(frozen=True)
class Unmatched:
    """A pattern that matched nothing, with the nearest existing paths or classes, the likeliest first."""

    pattern: str
    role: Role
    nearest: tuple[str, ...]


@dataclass(frozen=True)
class Excluded:
    """A weight that an include pattern chose and an exclude pattern kept back."""

    weight: str
    pattern: str


@dataclass(frozen=True)
class Selection:
    """The outcome of `select`; prints as a short table.

    Attributes:
        units: the offload units, in the order of their first weight.
        matches: one entry per pattern, in the order given, includes first.
        unmatched: the patterns that matched nothing.
        excluded: the weights kept back by an exclude pattern, each with the first pattern that does so.
        ignored: the class patterns that a model without a module hierarchy cannot answer.
        aliases: (other name, weight) for each further name of a selected tensor.
    """

    units: tuple[Unit, ...]
    matches: tuple[Match, ...]
    unmatched: tuple[Unmatched, ...] = ()
    excluded: tuple[Excluded, ...] = ()
    ignored: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()

    @property
    def weights(self) -> tuple[str, ...]:
        """The names of all selected weights, unit by unit; each tensor once."""
        return tuple(name for unit in self.units for name in unit.weights)

    @property
    def nbytes(self) -> int:
        """The bytes of all selected weights."""
        return sum(unit.nbytes for unit in self.units)

    def unit_of(self, name: str) -> Unit | None:
        """Return the unit that owns a weight, by any of the weight's names; None when it is not selected."""
        return self._owners.get(name)

    @cached_property
    def _owners(self) -> dict[str, Unit]:
        owners = {name: unit for unit in self.units for name in unit.weights}
        owners.update((alias, owners[weight]) for alias, weight in self.aliases)
        return owners

    def __str__(self) -> str:
        title = f"selection: {len(self.units)} units, {len(self.weights)} weights, {self.nbytes} bytes"
        units = [(unit.path or "(root)", len(unit.weights), unit.nbytes) for unit in self.units]
        lines = [title, *_table(("unit", "weights", "bytes"), units)]
        lines += _table(("pattern", "role", "modules", "parameters"), [_row(match) for match in self.matches])
        lines += _table(("kept back", "by"), [(entry.weight, entry.pattern) for entry in self.excluded])
        lines += [_describe(entry) for entry in self.unmatched]
        lines += [f"ignored, the model has no classes: {text}" for text in self.ignored]
        return "\n".join(lines)


def select(
    model: object, include: Iterable[str], exclude: Iterable[str] = (), *, allow_empty: bool = False
) -> Selection:
    """Select the weights to offload.

    1. Includes choose candidates: a module by its path or class, as a whole; or single parameters of a module.
    2. Of nested candidates only the outermost becomes a unit; what was chosen below joins it.
    3. An exclude drops every weight whose own name, or the path or class of any module above it, it matches.
    4. A tensor with several names belongs to the first of them that is selected; it is dropped if any is excluded.

    The root has no path for a name pattern to match. Parameters of the root itself form the unit "", which does not
    take in units below it. A class include that matches the root's class makes the whole model one unit.

    Args:
        model: an nn.Module, compiled or not, a Dynamo graph, an ExportedProgram, a mapping of names to tensors
            or a ModuleTree.
        include: patterns; see `flextensor_fx.patterns.parse`.
        exclude: patterns.
        allow_empty: return an empty selection where nothing is selected, not an error.

    Raises:
        PatternError: a pattern is malformed, or a plain string stands for a list.
        SelectionError: nothing is selected, `model` is of an unknown type, or all includes are class patterns and
            the model is a mapping, which has no classes.

    Warns:
        PatternWarning: a pattern matches nothing, or is a class pattern and the model is a mapping.
    """
    includes, excludes = parse_all(include, "include"), parse_all(exclude, "exclude")
    tree = ModuleTree.of(model)
    ignored: tuple[Pattern, ...] = ()
    if tree.is_dict:
        _require_a_name_pattern(includes)
        ignored = tuple(pattern for pattern in includes + excludes if pattern.kind == "class")
        includes = tuple(pattern for pattern in includes if pattern.kind == "name")
        excludes = tuple(pattern for pattern in excludes if pattern.kind == "name")
    hits = {pattern: _Hits.of(pattern, tree) for pattern in (*includes, *excludes)}
    units, excluded, aliases = _evaluate(tree, [hits[p] for p in includes], [(p.text, hits[p]) for p in excludes])
    unmatched = tuple(
        Unmatched(pattern.text, pattern.role, nearest(pattern, tree))
        for pattern, hit in hits.items()
        if not hit.modules and not hit.parameters
    )
    selection = Selection(
        units=units,
        matches=tuple(hits[p].match(p, tree) for p in (*includes, *excludes)),
        unmatched=unmatched,
        excluded=excluded,
        ignored=tuple(pattern.text for pattern in ignored),
        aliases=aliases,
    )
    if not units and not allow_empty:
        raise SelectionError(_nothing_selected(selection, tree, includes))
    for entry in unmatched:
        warnings.warn(f"{_describe(entry)}; correct or remove it", PatternWarning, stacklevel=2)
    for pattern in ignored:
        warnings.warn(
            f"{pattern.role} pattern {pattern.text!r} is ignored: a mapping of names to tensors has no module classes; "
            "use a name pattern such as 'layers.*'",
            PatternWarning,
            stacklevel=2,
        )
    return selection


@dataclass(frozen=True)
class _Hits:
    """The module paths and parameter names, aliases too, that one pattern matches."""

    modules: frozenset[str]
    parameters: frozenset[str]

    @classmethod
    def of(cls, pattern: Pattern, tree: ModuleTree) -> _Hits:
        if pattern.kind == "class":
            classes = {name for name in {m.class_name for m in tree.modules} if pattern.matches_class(name)}
            return cls(frozenset(m.path for m in tree.modules if m.class_name in classes), frozenset())
        modules = frozenset(m.path for m in tree.modules if m.path and pattern.matches_path(m.path))
        names = (name for parameter in tree.parameters for name in parameter.names)
        return cls(modules, frozenset(name for name in names if pattern.matches_path(name)))

    def match(self, pattern: Pattern, tree: ModuleTree) -> Match:
        tensors = sum(1 for parameter in tree.parameters if not self.parameters.isdisjoint(parameter.names))
        return Match(pattern.text, pattern.role, len(self.modules), tensors if self.parameters else 0)


def _evaluate(
    tree: ModuleTree, includes: list[_Hits], excludes: list[tuple[str, _Hits]]
) -> tuple[tuple[Unit, ...], tuple[Excluded, ...], tuple[tuple[str, str], ...]]:
    whole = frozenset[str]().union(*(hit.modules for hit in includes))
    single = frozenset[str]().union(*(hit.parameters for hit in includes))
    candidates = whole | {_owner(name) for name in single}
    chains: dict[str, tuple[str, ...]] = {}
    unit_paths: dict[str, list[ParameterEntry]] = {}
    names: dict[str, list[str]] = {}
    excluded: list[Excluded] = []
    aliases: list[tuple[str, str]] = []
    for parameter in tree.parameters:
        name = next((n for n in parameter.names if n in single or any(p in whole for p in _chain(n, chains))), None)
        if name is None:
            continue
        blocker = _blocker(parameter, excludes, chains)
        if blocker is not None:
            excluded.append(Excluded(name, blocker))
            continue
        path = _unit_path(_chain(name, chains), candidates, whole)
        unit_paths.setdefault(path, []).append(parameter)
        names.setdefault(path, []).append(name)
        aliases.extend((other, name) for other in parameter.names if other != name)
    units = tuple(Unit(path, tuple(names[path]), sum(p.nbytes for p in held)) for path, held in unit_paths.items())
    return units, tuple(excluded), tuple(aliases)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _chain(name: str, chains: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the paths of the modules above a parameter, the root first. `chains` remembers them by owner."""
    owner = _owner(name)
    if owner not in chains:
        parts = owner.split(".") if owner else []
        chains[owner] = ("", *(".".join(parts[: depth + 1]) for depth in range(len(parts))))
    return chains[owner]


def _unit_path(chain: tuple[str, ...], candidates: frozenset[str] | set[str], whole: frozenset[str]) -> str:
    # Without the test on "" one chosen parameter of the root would pull every other unit into the root's.
    return next(path for path in chain if path in candidates and (path or "" in whole or len(chain) == 1))


def _blocker(
    parameter: ParameterEntry, excludes: list[tuple[str, _Hits]], chains: dict[str, tuple[str, ...]]
) -> str | None:
    for text, hit in excludes:
        for name in parameter.names:
            if name in hit.parameters or any(path in hit.modules for path in _chain(name, chains)):
                return text
    return None


def _require_a_name_pattern(includes: tuple[Pattern, ...]) -> None:
    if includes and all(pattern.kind == "class" for pattern in includes):
        raise SelectionError(
            f"include {[pattern.text for pattern in includes]}: expected a name pattern, found class patterns alone, "
            "and a mapping of names to tensors has no module classes; use name patterns such as ['layers.*.weight']"
        )


def _row(match: Match) -> tuple[str, str, int, int]:
    return match.pattern, match.role, match.modules, match.parameters


def _describe(entry: Unmatched) -> str:
    close = ", ".join(repr(path) for path in entry.nearest)
    return f"{entry.role} pattern {entry.pattern!r} matched no module and no parameter; nearest: {close or 'none'}"


def _nothing_selected(selection: Selection, tree: ModuleTree, includes: tuple[Pattern, ...]) -> str:
    asked = {role: [m.pattern for m in selection.matches if m.role == role] for role in ("include", "exclude")}
    lines = [f"include={asked['include']}, exclude={asked['exclude']} selects no weight to offload"]
    if not includes:
        lines.append("  expected at least one include pattern, such as include_patterns=['layers.*'] or ['**']")
    lines += [
        f"  {match.role} pattern {match.pattern!r} matched modules: {match.modules}, parameters: {match.parameters}"
        for match in selection.matches
        if match.modules or match.parameters
    ]
    lines += [f"  {_describe(entry)}" for entry in selection.unmatched]
    if selection.ignored:
        lines.append(f"  a mapping has no module classes, so these were ignored: {list(selection.ignored)}")
    if selection.excluded:
        lines.append(f"  weights chosen and then excluded: {len(selection.excluded)}; loosen the exclude patterns")
    top = list(dict.fromkeys(name.partition(".")[0] for parameter in tree.parameters for name in parameter.names))
    shown = ", ".join(top[:_ROWS]) + (", ..." if len(top) > _ROWS else "")
    lines.append(f"  the model has {len(tree.parameters)} parameters, under: {shown or 'nothing'}")
    return "\n".join(lines)


def _table(header: tuple[str, ...], rows: list[tuple[str | int, ...]]) -> list[str]:
    """Lay out rows in columns, numbers to the right; rows past the first twenty are counted."""
    if not rows:
        return []
    cells = [header, *(tuple(str(value) for value in row) for row in rows[:_ROWS])]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    numbers = [isinstance(value, int) for value in rows[0]]
    lines = []
    for row in cells:
        padded = zip(row, widths, numbers, strict=True)
        lines.append("  ".join(c.rjust(w) if number else c.ljust(w) for c, w, number in padded).rstrip())
    return lines + ([f"... and {len(rows) - _ROWS} more"] if len(rows) > _ROWS else [])
