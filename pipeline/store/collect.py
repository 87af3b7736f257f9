"""Removes from a store what is not needed, the least recently used entries first.

A conversion may push while this runs. This is why it removes no blob that an entry needs:

1. `Store.push` writes each blob, or sets the time of a blob that is there already, before it writes
   the entry. `collect` removes no blob whose time is younger than the grace period, and asks for
   the time again right before it removes one. So a blob stays if its push began less than the grace
   period ago, also if no entry names it yet.
2. `collect` lists the blobs first, removes entries, and only then reads which blobs the entries
   need. So every entry that was written until then keeps its blobs, however old they are.
3. `Store.push` looks for its blobs again after it wrote the entry, and writes those that are gone.
   This repairs a push that took longer than the grace period, and the moment between the second
   question in 1. and the removal.

One case is left. A whole push would have to fit between the second question and the removal of a
blob: milliseconds. Then the entry has lost a blob. The next conversion that finds it converts
again, and its push writes the blob again. A wrong or damaged file is never the result.

A reader may lose its entry or a blob while it pulls: it converts as if there were none. Times are
those of the store. The clock of this machine may differ from it by much less than the grace period.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.machine.progress import Announce, silent
from pipeline.store.entry import BLOBS, ENTRIES, blobs_in, is_blob
from pipeline.store.place import TMP, USED, Place, Stored
from pipeline.store.store import Store

GRACE = 3600.0  # seconds
_EXACT = 1.0  # seconds by which two questions for one time may differ


@dataclass(frozen=True)
class Collected:
    """What `collect` did.

    Args:
        entries: The names of the removed entries, the least recently used one first.
        kept_entries: The number of entries that stay.
        kept_bytes: The size of the blobs that they need, in bytes.
        blobs: The number of removed blobs.
        freed_bytes: Their size in bytes.
        young_blobs: The number of blobs that no entry needs, and that stay for the grace period.
        young_bytes: Their size in bytes.
    """

    entries: tuple[str, ...]
    kept_entries: int
    kept_bytes: int
    blobs: int
    freed_bytes: int
    young_blobs: int
    young_bytes: int


def collect(
    store: Store,
    max_bytes: int | None = None,
    grace: float = GRACE,
    announce: Announce = silent,
) -> Collected:
    """Removes blobs that no entry needs, after the entries that are too many.

    Args:
        store: The store.
        max_bytes: The largest size in bytes of all blobs that entries need. Entries are removed
            until they fit, the least recently used one first. None keeps all entries.
        grace: The grace period in seconds: a blob that was pushed later is not removed.
        announce: Called with each step that begins.

    Raises:
        StoreError: The store cannot be read or written.
    """
    place = store.place
    announce("store: list")
    blobs = {name: file for name, file in place.find(BLOBS).items() if is_blob(name)}
    removed = _remove_entries(place, max_bytes, grace)
    announce("store: remove")
    entries = _needs(place)
    needed = _sizes(entries)
    oldest = time.time() - grace
    gone: list[Stored] = []
    young: list[Stored] = []
    for name, file in blobs.items():
        if name.rpartition("/")[2] in needed:
            continue
        if file.time > oldest or place.time_of(name) > oldest:
            young.append(file)
        elif place.remove(name):
            gone.append(file)
    _remove_rest(place, oldest)
    return Collected(
        tuple(removed),
        len(entries),
        sum(needed.values()),
        len(gone),
        sum(file.bytes for file in gone),
        len(young),
        sum(file.bytes for file in young),
    )


def _needs(place: Place) -> dict[str, Mapping[str, int]]:
    """The blobs of each entry. A damaged entry needs none."""
    found: dict[str, Mapping[str, int]] = {}
    for name in place.find(ENTRIES):
        try:
            found[name] = blobs_in(place.read(name)) or {}
        except FileNotFoundError:
            continue
    return found


def _sizes(entries: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    return {sha256: size for blobs in entries.values() for sha256, size in blobs.items()}


def _remove_entries(place: Place, max_bytes: int | None, grace: float) -> list[str]:
    """Removes damaged entries, and then the least recently used ones, until the others fit."""
    removed: list[str] = []
    times = {name: file.time for name, file in place.find(ENTRIES).items()}
    entries = _needs(place)
    sizes = _sizes(entries)
    users = Counter(sha256 for blobs in entries.values() for sha256 in blobs)
    total = sum(sizes.values())
    for name in sorted(entries.keys() & times.keys(), key=lambda name: times[name]):
        damaged = not entries[name] and times[name] < time.time() - grace
        if not damaged and (max_bytes is None or total <= max_bytes):
            continue
        if place.time_of(name) > times[name] + _EXACT:  # used since it was listed
            continue
        if place.remove(name):
            removed.append(name)
            users.subtract(entries[name].keys())
            total -= sum(sizes[sha256] for sha256 in entries[name] if not users[sha256])
    return removed


def _remove_rest(place: Place, oldest: float) -> None:
    """Removes unfinished files of killed processes, and the times of removed files."""
    for name, file in place.find(TMP).items():
        if file.time < oldest:
            place.remove(name)
    left = place.find(USED)
    there = {*place.find(BLOBS), *place.find(ENTRIES)} if left else set()
    for name, file in left.items():
        if file.time < oldest and name.removeprefix(f"{USED}/") not in there:
            place.remove(name)
