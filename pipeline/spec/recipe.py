"""A recipe: which nodes of a model compute in half precision, as a short text.

Example::

    * = fp16
    # module model.encoder.norm at model.py:31
    model.encoder.norm = fp32

Each line has a pattern and a precision. The last line that matches a node decides. A pattern
matches a node by its module, by its place in the model's file (``model.py:31``), by either with the
op (``model.encoder.norm/Pow``), or by its name. ``*`` stands for any text.

A module's name matches the nodes of its own ``forward`` only, and ``model.encoder.*`` those of its
submodules. A search needs the difference: it keeps a module in float32 and its submodules in half.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from pipeline.errors import InputError
from pipeline.spec.file_names import RECIPE
from pipeline.spec.precision import HALVES
from pipeline.spec.tensors import Precision

WIDE: Precision = "fp32"
EVERYTHING = "*"
_ADVICE = "Write PATTERN = PRECISION, for example: model.encoder.norm = fp32"


@dataclass(frozen=True)
class Recipe:
    """The patterns with their precisions, in order.

    Args:
        lines: ``(pattern, precision)`` with ``fp32``, and ``fp16`` or ``bf16``.
    """

    lines: tuple[tuple[str, Precision], ...]

    @property
    def precision(self) -> Precision:
        """The half precision of the recipe: ``fp16`` or ``bf16``."""
        return next(precision for _, precision in self.lines if precision in HALVES)

    @property
    def islands(self) -> tuple[str, ...]:
        """The patterns of the nodes that stay in float32."""
        return tuple(pattern for pattern, precision in self.lines if precision == WIDE)

    def decide(self, names: Collection[str]) -> tuple[str, Precision] | None:
        """The line that decides on a node with these names; None if no line matches."""
        for pattern, precision in reversed(self.lines):
            if matches(pattern, names):
                return pattern, precision
        return None

    def text(self, notes: Mapping[str, str] | None = None) -> str:
        """The recipe as text.

        Args:
            notes: A comment for some patterns; the comment of ``*`` is the first one.
        """
        out = []
        for pattern, precision in self.lines:
            note = (notes or {}).get(pattern, "")
            out += [f"# {line}" for line in note.splitlines()]
            out.append(f"{pattern} = {precision}")
        return "\n".join(out) + "\n"


def counted(count: int, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@dataclass(frozen=True)
class Island:
    """The nodes that one line of a recipe keeps in float32.

    Args:
        pattern: The pattern of the line.
        nodes: How many nodes.
        source: The module and line of the first one; empty if the model does not say.
    """

    pattern: str
    nodes: int
    source: str = ""

    @property
    def text(self) -> str:
        """The nodes and their place as text."""
        count = counted(self.nodes, "node")
        return f"{count}, {self.source}" if self.source else count


@dataclass(frozen=True)
class HalfInfo:
    """How a recipe was applied to a model.

    Args:
        half: The number of nodes that compute in half precision.
        islands: The nodes that could, and stay in float32.
        runs: How many recipes the search tried; 0 if the recipe was given.
        seconds: The time of the search.
        share: The largest error at any compared size, as a share of the tolerance. None if the
            recipe was given.
        stopped: Whether the search reached its limit of runs. Then fewer islands may do.
    """

    half: int
    islands: tuple[Island, ...] = ()
    runs: int = 0
    seconds: float = 0.0
    share: float | None = None
    stopped: bool = False

    @property
    def text(self) -> str:
        """The numbers of nodes, and the search, in one line."""
        wide = sum(island.nodes for island in self.islands)
        where = f"{wide} in {counted(len(self.islands), 'island')} of float32"
        where = where if wide else "no island of float32"
        text = f"{counted(self.half, 'node')} in half precision, {where}"
        if self.runs:
            text += f"; {counted(self.runs, 'recipe')} tried in {self.seconds:.1f} s"
        if self.share is not None:
            text += f"; the error is {self.share:.0%} of the tolerance"
        if self.stopped:
            text += ". The search ended at its limit: fewer islands may do"
        return text


def pattern_of(name: str) -> str:
    """A pattern for a name. Text that a line cannot have becomes ``*``."""
    text = EVERYTHING.join(name.splitlines())
    plain = text.strip().lstrip("#")
    return text if plain == text else f"{EVERYTHING}{plain}{EVERYTHING}"


def matches(pattern: str, names: Collection[str]) -> bool:
    """True if the pattern matches one of a node's names as a whole."""
    if EVERYTHING not in pattern:
        return pattern in names
    parts = (re.escape(part) for part in pattern.split(EVERYTHING))
    whole = re.compile(".*".join(parts), re.DOTALL)
    return any(whole.fullmatch(name) for name in names)


def all_but(precision: Precision, islands: Collection[str]) -> Recipe:
    """The recipe for half precision everywhere but in these islands."""
    return Recipe(((EVERYTHING, precision), *((name, WIDE) for name in islands)))


def parse_recipe(text: str, where: str) -> Recipe:
    """Reads the text of a recipe; errors begin with `where`.

    Raises:
        InputError: A line has no pattern or no known precision. Or the recipe names no half
            precision, or two of them.
    """
    lines: list[tuple[str, Precision]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        pattern, found, precision = (part.strip() for part in line.rpartition("="))
        if not found or not pattern:
            raise InputError(f"{where}, line {number}: {line.strip()!r} has no pattern. {_ADVICE}")
        if precision != WIDE and precision not in HALVES:
            known = ", ".join(name for name in get_args(Precision) if name in (WIDE, *HALVES))
            raise InputError(
                f"{where}, line {number}: unknown precision {precision!r}; known: {known}"
            )
        lines.append((pattern, cast(Precision, precision)))
    halves = dict.fromkeys(precision for _, precision in lines if precision in HALVES)
    if len(halves) != 1:
        what = f"mixes {' and '.join(halves)}" if halves else "names no half precision"
        raise InputError(f"{where}: {what}. Begin it with {EVERYTHING} = fp16, or with = bf16")
    return Recipe(tuple(lines))


def read_recipe(path: Path) -> Recipe:
    """Reads a recipe's file.

    Raises:
        InputError: The file cannot be read, or is not a recipe.
    """
    try:
        return parse_recipe(path.read_text(encoding="utf-8"), f"recipe {path}")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise InputError(f"recipe {path}: can't be read: {reason}") from error


def stored_recipe(folder: Path) -> Recipe | None:
    """The recipe in an artifact's folder; None if there is none."""
    path = folder / RECIPE
    return read_recipe(path) if path.is_file() else None
