"""The commands ``store ls``, ``store gc``, ``store push`` and ``store pull``."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.commands.options import size
from pipeline.commands.output import show
from pipeline.commands.table import table
from pipeline.errors import ArtifactError, InputError
from pipeline.machine.progress import Announce

_KEY = 12  # digits of a key in a table
_STORE = "A folder, s3://BUCKET/PATH, gs://BUCKET/PATH or memory://NAME"


def option(sub: Any) -> None:
    """Adds ``--store`` to ``convert``."""
    sub.add_argument(
        "--store", metavar="STORE",
        help="Share artifacts with other machines: pull what is there, and push the result. "
        "Files that a factory reads without an import are not compared. "
        f"{_STORE}",
    )  # fmt: skip


def add_commands(commands: Any, add: Callable[..., Any]) -> None:
    """Adds ``store`` and the commands below it."""
    text = "List, push, pull or clean up the artifacts in a shared store."
    group = commands.add_parser("store", help=text, description=text)
    group.set_defaults(parser=group)
    below = group.add_subparsers(required=True, metavar="COMMAND", parser_class=type(group))
    add = partial(add, group=below)
    put = add("push", push, "Copy an artifact into a store.")
    shown = add("ls", ls, "List the artifacts in a store, the last used one first.")
    get = add("pull", pull, "Copy an artifact from a store into a folder, and check its files.")
    less = add(
        "gc", gc,
        "Remove files that no artifact in a store needs, and with --max-size the least recently "
        "used artifacts.",
    )  # fmt: skip
    put.add_argument("artifact", type=Path, metavar="ARTIFACT", help="Folder of the artifact")
    for sub in (shown, less, put, get):
        sub.add_argument("store", metavar="STORE", help=_STORE)
    get.add_argument(
        "entry", metavar="NAME|KEY",
        help="Name of a model, for its last used artifact; or the beginning of a key from store ls",
    )  # fmt: skip
    get.add_argument("out", type=Path, metavar="OUT", help="Folder to write. It must not exist yet")
    less.add_argument(
        "--max-size", type=size, metavar="SIZE",
        help="Remove artifacts until the others fit into this size, e.g. 50GiB (default: no limit)",
    )  # fmt: skip
    less.add_argument(
        "--grace", type=_seconds, default=3600.0, metavar="SECONDS",
        help="Keep files that were pushed in this time: a conversion may push them now "
        "(default: 3600)",
    )  # fmt: skip


def ls(arguments: argparse.Namespace, announce: Announce) -> int:
    """Runs ``store ls``. Damaged entries, and those of other versions, are listed as such.

    Each entry is compared with the last used one of the same model.
    """
    from pipeline.store.differences import as_text, between
    from pipeline.store.entry import Entry
    from pipeline.store.store import Store

    del announce
    store = Store.open(arguments.store)
    store.place.check_exists()
    rows: list[dict[str, Any]] = []
    newest: dict[str, Entry] = {}
    left = 0
    for listed in store.entries():
        try:
            entry = store.read(listed)
        except ArtifactError:
            left += 1
            continue
        manifest = entry.manifest
        first = newest.setdefault(manifest.name, entry)
        rows.append(
            {
                "key": listed.key,
                "name": manifest.name,
                "source": manifest.model.source,
                "target": manifest.target.name,
                "precision": manifest.precision,
                "bytes": sum(info.bytes for info in manifest.files.values()),
                "created": manifest.created,
                "used": datetime.fromtimestamp(listed.used, timezone.utc).isoformat(
                    timespec="seconds"
                ),
                "differs_from": "" if first is entry else first.key,
                "differs_in": "" if first is entry else as_text(between(first, entry)),
            }
        )
    if arguments.json:
        show(json.dumps({"entries": rows, "unreadable": left}, indent=2))
        return 0
    if rows:
        head = ("key", "model", "target", "precision", "size", "created", "last used")
        texts = [
            (r["key"][:_KEY], r["name"], r["target"], r["precision"], size_of(r["bytes"]),
             r["created"], r["used"]) for r in rows
        ]  # fmt: skip
        show(table([head, *texts]))
        for row in rows:
            if row["differs_from"]:
                key, other = row["key"][:_KEY], row["differs_from"][:_KEY]
                show(f"{key} differs from {other} in {row['differs_in']}")
    else:
        show(f"{arguments.store} has no artifacts")
    if left:
        show(f"{_count(left, 'entry')} not listed: damaged, or of another version of pipeline")
    return 0


def gc(arguments: argparse.Namespace, announce: Announce) -> int:
    """Runs ``store gc``."""
    from pipeline.store.collect import collect
    from pipeline.store.entry import key_of
    from pipeline.store.store import Store

    store = Store.open(arguments.store)
    store.place.check_exists()
    done = collect(store, arguments.max_size, arguments.grace, announce)
    if arguments.json:
        show(json.dumps(asdict(done), indent=2))
        return 0
    for name in done.entries:
        show(f"removed {name.split('/')[1]} {key_of(name)[:_KEY]}")
    show(
        f"removed {_count(len(done.entries), 'entry')} and {_count(done.blobs, 'blob')} "
        f"({size_of(done.freed_bytes)})"
    )
    show(f"kept {_count(done.kept_entries, 'entry')} ({size_of(done.kept_bytes)})")
    if done.young_blobs:
        show(
            f"kept {_count(done.young_blobs, 'blob')} ({size_of(done.young_bytes)}) that no entry "
            f"needs: pushed in the last {arguments.grace:g} s"
        )
    return 0


def push(arguments: argparse.Namespace, announce: Announce) -> int:
    """Runs ``store push``."""
    from pipeline.artifact.artifact import Artifact
    from pipeline.artifact.engines import engine_places
    from pipeline.store.store import Store

    store = Store.open(arguments.store)
    artifact = Artifact.open(arguments.artifact)
    announce("store: push")
    entry = store.push(artifact)
    if arguments.json:
        show(json.dumps({"key": entry.key, "blobs": entry.blobs}, indent=2))
    else:
        total = size_of(sum(entry.blobs.values()))
        show(f"pushed {entry.manifest.name} as entry {entry.key[:_KEY]} ({total})")
        others = len(engine_places(artifact.path))
        if others:
            show(f"left out: {others} of its other engines, which no store takes")
    return 0


def pull(arguments: argparse.Namespace, announce: Announce) -> int:
    """Runs ``store pull``."""
    from pipeline.store.store import Store

    if os.path.lexists(arguments.out):
        raise InputError(f"{arguments.out}: exists already. Pass another folder")
    store = Store.open(arguments.store)
    entry = store.read(store.named(arguments.entry))
    name, count = entry.manifest.name, 1
    if arguments.entry == name:
        count = len(store.of_model(name, entry.manifest.keys))
    try:
        store.pull(entry, arguments.out, announce=announce)
    except ArtifactError as error:
        raise ArtifactError(f"store {arguments.store}: {error}. Convert again, and push") from error
    if arguments.json:
        show(json.dumps({"key": entry.key, "path": str(arguments.out)}, indent=2))
    else:
        show(f"pulled {name}, entry {entry.key[:_KEY]} -> {arguments.out}")
        if count > 1:
            show(
                f"It is the last used of {count} entries of {name}. "
                f"pipeline store ls {arguments.store} shows how they differ"
            )
    return 0


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def size_of(number: int) -> str:
    """A number of bytes as text: ``12.3 MiB``."""
    value, units = float(number), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        del units[0]
    return f"{number} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def _count(number: int, word: str) -> str:
    many = {"entry": "entries"}.get(word, f"{word}s")
    return f"{number} {word if number == 1 else many}"
