"""Conversions with a shared store: what is pulled before the first stage, and pushed at the end.

A result that leaves no stage to run becomes the artifact at once. Any other goes into the workspace
of the conversion. So the folder keeps its old artifact until the conversion has passed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.artifact.artifact import Artifact
from pipeline.artifact.manifest import Manifest
from pipeline.convert.keys import is_new_every_time, keys_of
from pipeline.convert.reuse import code_changed, first_changed, previous, refuse_other
from pipeline.convert.workspace import Workspace, new_artifact
from pipeline.errors import ArtifactError, InputError, StoreError
from pipeline.machine.progress import Announce
from pipeline.spec.config import Config
from pipeline.spec.model import ModelSpec
from pipeline.store.differences import Difference, as_text, differences, other_key
from pipeline.store.entry import STAGES, Entry, Parts, shared
from pipeline.store.store import Listed, Store

if TYPE_CHECKING:
    from pipeline.convert.report import Report

_KEY = 12  # digits of a key in a text
_TRIED = 8  # entries that are read for the reason of a miss


@dataclass(frozen=True)
class StoreUse:
    """How a conversion used its store.

    Args:
        url: The store.
        pulled: The stages whose results came from the store, in order.
        entry: The key of the entry that they came from; empty if nothing was pulled.
        nearest: If not all stages were pulled: the key of the nearest entry of the same model;
            empty if there is none, or if everything was in the artifact's folder.
        differs: What differs between the nearest entry and this conversion. It is the first other
            key if that entry was pushed by itself, so that the parts of its keys are not known.
        damaged: Entries and blobs that were not used, a sentence each.
        pushed: The key of the entry that the conversion wrote; empty if one was there already.
        problem: Why nothing was pushed; empty if it was pushed or was there already.
    """

    url: str
    pulled: tuple[str, ...] = ()
    entry: str = ""
    nearest: str = ""
    differs: tuple[Difference, ...] = ()
    damaged: tuple[str, ...] = ()
    pushed: str = ""
    problem: str = ""
    searched: bool = field(default=False)

    def lines(self) -> list[str]:
        """What happened, a sentence each."""
        found = [f"not used: {text}" for text in self.damaged]
        if self.pulled:
            what = "everything" if len(self.pulled) == len(STAGES) else ", ".join(self.pulled)
            found.append(f"hit: {what} from entry {self.entry[:_KEY]}")
        if self.searched and len(self.pulled) < len(STAGES):
            found.append(self._miss())
        if self.pushed:
            found.append(f"pushed as entry {self.pushed[:_KEY]}")
        if self.problem:
            found.append(f"not pushed: {self.problem}")
        return found

    def _miss(self) -> str:
        if not self.nearest:
            return "miss: the store has no entry of this model"
        head = f"miss: the nearest entry {self.nearest[:_KEY]} differs in"
        return f"{head} {as_text(self.differs)}"


@dataclass(frozen=True)
class Wanted:
    """A conversion that looks for its results.

    Args:
        place: The artifact's folder.
        manifest: The manifest before the first stage.
        parts: What the keys of the stages are made of. Any of several will do: a whole comparison
            is as good as a quick one.
    """

    place: Path
    manifest: Manifest
    parts: Sequence[Parts]


@dataclass(frozen=True)
class Shared:
    """The store of a conversion.

    Args:
        store: The store.
        parts: What the keys of the conversion's stages are made of.
        use: What was pulled; None if the store was not searched.
        work: The workspace with the results of the first stages, if only these were pulled.
    """

    store: Store
    parts: Parts
    use: StoreUse | None
    work: Workspace | None = None


@dataclass(frozen=True)
class Found:
    """What `pull_best` found.

    Args:
        old: The artifact to go on from; None if there is none.
        use: What was done.
        work: The workspace with the files of `old`, if it is not in the conversion's folder.
    """

    old: Artifact | None
    use: StoreUse
    work: Workspace | None = None


def open_store(config: Config, spec: ModelSpec) -> Store | None:
    """Opens the store of a conversion; None if it has none.

    Raises:
        InputError: The store's address is not valid, or no other run can have the same keys.
    """
    if config.store is None:
        return None
    if is_new_every_time(config, spec):
        raise InputError(
            f"store {config.store}: {spec.name} is an object without a key, so no other run can "
            "find its results. Pass ModelSpec(key=...), or the model as file.py:NAME"
        )
    return Store.open(str(config.store))


def pull_best(
    store: Store, wanted: Wanted, old: Artifact | None, stack: ExitStack, announce: Announce
) -> Found:
    """Pulls the artifact whose first stages are those of the conversion, if it saves a stage.

    Only a result that leaves no stage to run is written into the conversion's folder here.

    Args:
        store: The store.
        wanted: What to look for.
        old: The artifact in the conversion's folder, if there is one.
        stack: Holds the workspace of a result that leaves stages to run. The workspace becomes the
            artifact when the stack is left without an error, and is removed after one.
        announce: Called with each step that begins.

    Raises:
        InputError: The folder has an artifact of another source, or another process writes to it.
        StoreError: The store cannot be read.
    """
    use = StoreUse(store.place.url)
    every = [keys_of(parts) for parts in wanted.parts]
    have = max(first_changed(old, keys) for keys in every)
    if have == len(STAGES):
        return Found(old, use)
    refuse_other(wanted.place, wanted.manifest)
    announce("store: look up")
    use = replace(use, searched=True)
    found = Found(old, use)
    listed = store.of_model(wanted.manifest.name, every[0])
    # the sort is stable: of equals, the last used one stays first
    listed.sort(key=lambda each: -_shared(each, every))
    for each in tuple(listed):
        count = _shared(each, every)
        if count <= have:
            break
        try:
            entry = store.read(each)
            if code_changed(entry.manifest):
                continue
            if count == len(STAGES):
                store.pull(entry, wanted.place, wanted.manifest.model.source, announce)
                found = Found(previous(wanted.place), use)
            else:
                found = _begun(store, entry, wanted, stack, announce)
        except ArtifactError as error:
            use = replace(use, damaged=(*use.damaged, f"entry {each.key[:_KEY]}: {error}"))
            listed.remove(each)
            continue
        use = replace(use, pulled=STAGES[:count], entry=each.key)
        break
    if len(use.pulled) < len(STAGES):
        use = _explained(store, listed, wanted.parts[0], every, use)
    for line in use.lines():
        announce(f"store: {line}")
    return replace(found, use=use)


def _begun(
    store: Store, entry: Entry, wanted: Wanted, stack: ExitStack, announce: Announce
) -> Found:
    """Copies an entry into a new workspace, which the stack holds from then on."""
    with ExitStack() as own:
        work = own.enter_context(new_artifact(wanted.place, wanted.manifest, announce))
        source = wanted.manifest.model.source
        old = Artifact(work.folder, store.copy_out(entry, work.folder, source, announce))
        stack.enter_context(own.pop_all())
    return Found(old, StoreUse(store.place.url), work)


def _shared(listed: Listed, every: Sequence[Mapping[str, str]]) -> int:
    return max(shared(listed.name, keys) for keys in every)


def _explained(
    store: Store,
    listed: Sequence[Listed],
    parts: Parts,
    every: Sequence[Mapping[str, str]],
    use: StoreUse,
) -> StoreUse:
    """Adds the nearest entry: of those that share most stages, the one that differs least.

    Args:
        listed: The entries, those that share most stages first.
        every: The keys by which they were sorted.
    """
    best: StoreUse | None = None
    most = 0
    for each in listed[:_TRIED]:
        if best is not None and _shared(each, every) < most:
            break
        try:
            entry = store.read(each)
        except ArtifactError:
            continue
        found = differences(entry.parts, parts) if entry.parts is not None else ()
        found = (*found, *code_changed(entry.manifest))
        if best is None or (found and len(found) < len(best.differs)):
            found = found or other_key(entry.manifest.keys, keys_of(parts))
            most = _shared(each, every)
            best = replace(use, nearest=each.key, differs=found)
    return best or use


def push_result(report: Report, shared: Shared | None, announce: Announce) -> Report:
    """Pushes the artifact of a conversion that passed, unless the store has it or knows more.

    The artifact is complete, so a store that cannot be written is no error here: the report has the
    problem.

    Args:
        report: The report of the conversion.
        shared: Its store; None without one.
        announce: Called with each step that begins.
    """
    if shared is None:
        return report
    store, use = shared.store, shared.use or StoreUse(shared.store.place.url)
    try:
        if not report.unchanged or not store.has(report.manifest):
            announce("store: push")
            artifact = Artifact.open(report.path)
            if artifact.manifest != report.manifest:
                raise StoreError("another run replaced the artifact in the meantime")
            entry = store.push(artifact, shared.parts)
            written = entry.manifest == artifact.manifest
            use = replace(use, pushed=entry.key if written else "")
    except (StoreError, ArtifactError) as error:
        use = replace(use, problem=error.message)
    return replace(report, store=use)
