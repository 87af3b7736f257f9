"""What differs between two keys: the reason of a miss, and what tells two entries apart."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.machine.gpu import sm_text
from pipeline.store.entry import STAGES, Entry, Parts

_HASH = re.compile(r"[0-9a-f]{64}")
_DIGITS = 8  # of a hash
_MOST = 60  # characters of a value
# parts whose content says enough without their name
_PLAIN = ("options", "packages", "libraries", "ranges", "spec")
ABSENT = "none"
_MOST_TOLD = 6  # differences in a text
_KEY = 12  # digits of a key in a text


@dataclass(frozen=True)
class Difference:
    """One part of a key that differs.

    Args:
        stage: The first stage that it changes.
        part: What it is: ``torch``, ``precision``, ``profile b``.
        before, after: Its value in the store, and in this conversion.
    """

    stage: str
    part: str
    before: str
    after: str

    @property
    def text(self) -> str:
        """The difference as text: ``torch 2.13.0 -> 2.14.0``."""
        return f"{self.part} {self.before} -> {self.after}"


def between(before: Entry, after: Entry) -> tuple[Difference, ...]:
    """What tells two entries apart; the first other key if the parts of one are not known."""
    if before.parts is not None and after.parts is not None:
        found = differences(before.parts, after.parts)
        if found:
            return found
    return other_key(before.manifest.keys, after.manifest.keys)


def other_key(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Difference, ...]:
    """The first stage whose key differs."""
    stage = next((stage for stage in STAGES if before[stage] != after[stage]), STAGES[-1])
    texts = (keys[stage][:_KEY] for keys in (before, after))
    return (Difference(stage, f"the key of {stage}", *texts),)


def as_text(found: Sequence[Difference]) -> str:
    """Differences as text, the first few of them: ``torch 2.13.0 -> 2.14.0 and 3 more``."""
    texts = [each.text for each in found[:_MOST_TOLD]]
    more = len(found) - len(texts)
    return f"{', '.join(texts)}{f' and {more} more' if more else ''}"


def differences(before: Parts, after: Parts) -> tuple[Difference, ...]:
    """Compares the parts of two keys. A part that occurs in several stages is listed once."""
    found: dict[tuple[str, str, str], Difference] = {}
    for stage in after:
        old, new = (dict(_leaves(parts.get(stage, {}), ())) for parts in (before, after))
        for path in [*new, *(path for path in old if path not in new)]:
            values = old.get(path, ABSENT), new.get(path, ABSENT)
            if values[0] != values[1]:
                part = " ".join(path)
                found.setdefault((part, *values), Difference(stage, part, *values))
    return tuple(found.values())


def _leaves(
    value: Any, path: tuple[str, ...], named: bool = False
) -> Iterator[tuple[tuple[str, ...], str]]:
    """The single values in the parts of a stage, with the names that lead to them."""
    if path and path[-1] == "gpus":
        yield path, ", ".join(map(sm_text, value or ())) or ABSENT
    elif isinstance(value, Mapping) and value:
        for key, item in value.items():
            if not (named and key == "name"):  # it is in the path
                yield from _leaves(item, path if key in _PLAIN else (*path, str(key)))
    elif _has_parts(value):
        names = _names(value)
        for name, item in zip(names, value, strict=True):
            own = (name,) if len(names) > 1 else ()
            yield from _leaves(item, (*path, *own), bool(own) and not name.isdecimal())
    else:
        yield path, value_text(value)


def _names(items: Sequence[Any]) -> list[str]:
    """A name for each item: its own, or its number if it has none or shares it."""
    own = [item.get("name") if isinstance(item, Mapping) else None for item in items]
    return [
        str(number) if name is None or own.count(name) > 1 else str(name)
        for number, name in enumerate(own)
    ]


def _has_parts(value: Any) -> bool:
    lists = isinstance(value, Sequence) and not isinstance(value, str)
    return lists and any(isinstance(item, Mapping | list) for item in value)


def value_text(value: Any) -> str:
    """A value of a key as short text; a hash by its first digits."""
    if value is None or value in ("", [], {}):
        return ABSENT
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(value_text, value))
    text = str(value)
    if _HASH.fullmatch(text):
        return text[:_DIGITS]
    return text if len(text) <= _MOST else f"{text[: _MOST - 3]}..."
