"""The engines that `pipeline tune` tries: changes of the build that made the artifact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.artifact.manifest import Manifest
from pipeline.machine.target import Target
from pipeline.passes import DEFAULT_PASSES
from pipeline.runtime.sizes import best_profile
from pipeline.spec.effort import LEVELS
from pipeline.spec.precision import HALVES
from pipeline.spec.profiles import Point, Profile
from pipeline.spec.recipe import EVERYTHING, Recipe
from pipeline.spec.tensors import Precision

AS_IT_IS, NAIVE = "as it is", "naive"
_LEVEL = max(LEVELS)
_WITH_TACTIC_SOURCES = (9,)  # below this version, the pipeline turns cuBLAS and cuDNN off
_NO_SPEED = "fold_constants"  # other passes need it


@dataclass(frozen=True)
class Candidate:
    """One way to build the engine of an artifact.

    Args:
        name: Its name in the table.
        text: What differs from the artifact's own build, in a few words.
        precision: The engine's precision.
        profiles: The optimisation profiles.
        level: The builder's optimisation level; None for TensorRT's default.
        recipe: In half precision: which nodes are in half; None for the rules.
        skip: Names of passes that are left out.
        libraries, plain: See `pipeline.build.settings.BuildOptions`.
    """

    name: str
    text: str
    precision: Precision
    profiles: tuple[Profile, ...]
    level: int | None = None
    recipe: Recipe | None = None
    skip: tuple[str, ...] = ()
    libraries: bool = False
    plain: bool = False


@dataclass(frozen=True)
class Change:
    """One change of a candidate: the new values of some fields, by name."""

    name: str
    text: str
    fields: Mapping[str, Any]

    def of(self, start: Candidate) -> Candidate:
        """The candidate with this change. Passes to leave out are added to those of `start`."""
        skip = tuple(dict.fromkeys((*start.skip, *self.fields.get("skip", ()))))
        first = start.name == AS_IT_IS
        name = self.name if first else f"{start.name} + {self.name}"
        text = self.text if first else f"{start.text}; {self.text}"
        return replace(start, **{**self.fields, "name": name, "text": text, "skip": skip})


def as_it_is(manifest: Manifest, profiles: tuple[Profile, ...], recipe: Recipe | None) -> Candidate:
    """The build that made the artifact.

    Args:
        manifest: The artifact's manifest.
        profiles: Its profiles, each with a range for every dim.
        recipe: The artifact's recipe of half precision, if it has one.
    """
    precision: Precision = manifest.precision  # type: ignore[assignment]
    level = manifest.build.optimization_level if manifest.build is not None else None
    return Candidate(AS_IT_IS, "the artifact's own build", precision, profiles, level, recipe)


def naive(start: Candidate, target: Target) -> Candidate | None:
    """What TensorRT alone makes of the exported model: no pass, no choice of ours.

    None if there is no such engine: a strongly typed TensorRT has no flag for half precision.
    """
    if start.precision in HALVES and target.strongly_typed:
        return None
    return Candidate(
        NAIVE, "exported.onnx, TensorRT's defaults", start.precision, start.profiles,
        skip=tuple(p.name for p in DEFAULT_PASSES), plain=True,
    )  # fmt: skip


def changes(
    manifest: Manifest, target: Target, start: Candidate, points: Sequence[Point]
) -> tuple[Change, ...]:
    """The changes to try, in this order; those that take long to build come last.

    Args:
        manifest: The artifact's manifest.
        target: The TensorRT that builds.
        start: The build that made the artifact.
        points: The sizes to time.
    """
    found = [*_recipes(start), *_profiles(start, points), *_forms(manifest)]
    if target.flavour == "tensorrt" and target.version < _WITH_TACTIC_SOURCES:
        found.append(Change("libraries", "tactics of cuBLAS and cuDNN", {"libraries": True}))
    if start.level != _LEVEL:
        text = f"optimisation level {_LEVEL}"
        found.append(Change(f"level {_LEVEL}", text, {"level": _LEVEL}))
    return tuple(found)


def _recipes(start: Candidate) -> list[Change]:
    if start.precision not in HALVES:
        return []
    whole = Recipe(((EVERYTHING, start.precision),))
    found = []
    if start.recipe != whole:
        found.append(Change("all half", "every node in half precision", {"recipe": whole}))
    if start.recipe is not None:
        found.append(Change("rules", "half precision by the rules", {"recipe": None}))
    return found


def _profiles(start: Candidate, points: Sequence[Point]) -> list[Change]:
    """Profiles whose opt is a timed size; the ranges stay, so every size stays legal."""
    by_place: dict[int, list[Profile]] = {}
    for point in points:
        place = best_profile(start.profiles, point.sizes)
        old = start.profiles[place]
        ranges = {
            name: (low, point.sizes[name], high) for name, (low, _, high) in old.ranges.items()
        }
        mine = by_place.setdefault(place, [])
        if all(profile.ranges != ranges for profile in mine):
            mine.append(Profile(f"{old.name}-{len(mine)}" if mine else old.name, ranges))
    new = [
        profile
        for place, old in enumerate(start.profiles)
        for profile in by_place.get(place, [old])
    ]
    same = {tuple(p.ranges.items()) for p in new} == {
        tuple(p.ranges.items()) for p in start.profiles
    }
    if same:
        return []
    count = sum(map(len, by_place.values()))
    text = "opt at the timed sizes" if count > 1 else "opt at the timed size"
    name = "own profiles" if count > 1 else "own profile"
    return [Change(name, text, {"profiles": tuple(new)})]


def _forms(manifest: Manifest) -> list[Change]:
    """Each pass that only makes the engine faster, left out, if it rewrote something."""
    records = manifest.rewrite.passes if manifest.rewrite is not None else ()
    known = {p.name for p in DEFAULT_PASSES}
    if any(record.name not in known for record in records):
        return []  # the user's own passes are not in the artifact, so it can't be rewritten
    before = tuple(record.name for record in records if record.skipped)
    return [
        Change(
            f"no {record.name}",
            f"without the pass {record.name}",
            {"skip": (*before, record.name)},
        )
        for record in records
        if record.clean_up and record.rewritten and record.name != _NO_SPEED
    ]
