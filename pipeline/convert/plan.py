"""Plans a conversion, and raises the errors that are known before it begins."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.artifact.artifact import Artifact
from pipeline.artifact.manifest import Manifest, ModelInfo, TargetInfo, now
from pipeline.convert.keys import keys_of, stage_parts, weights_info
from pipeline.convert.options import StageOptions, stage_options
from pipeline.convert.reuse import first_changed, previous
from pipeline.convert.shared import Shared, Wanted, open_store, pull_best
from pipeline.machine.libraries import versions
from pipeline.machine.progress import Announce, silent
from pipeline.machine.target import find_target, require
from pipeline.plugins.loading import find_plugins
from pipeline.probe.apply import merge_profiles
from pipeline.source.find import find_source
from pipeline.spec.config import Config
from pipeline.spec.dims import check_rules
from pipeline.spec.effort import check_effort
from pipeline.spec.interface import Interface
from pipeline.spec.model import ModelSpec
from pipeline.spec.precision import check_precision
from pipeline.spec.profiles import Profile, check_names, parse_sizes
from pipeline.store.entry import STAGES


@dataclass(frozen=True)
class ConversionPlan:
    """One conversion, before it begins.

    Args:
        spec: The model, with the profiles to build.
        place: The folder of the artifact.
        manifest: The manifest before the first stage that runs.
        options: The options of each stage.
        keys: Stage name to the hash of everything that changes the stage's result.
        todo: The stages to run, in order.
        old: The artifact to go on from: the existing one if it is undamaged, or the store's.
        shared: The store of the conversion; None without one.
    """

    spec: ModelSpec
    place: Path
    manifest: Manifest
    options: StageOptions
    keys: Mapping[str, str]
    todo: tuple[str, ...]
    old: Artifact | None
    shared: Shared | None = None


def plan_conversion(
    config: Config, stack: ExitStack, announce: Announce = silent
) -> ConversionPlan:
    """Finds the model and the target, and compares them with the existing artifact.

    With a store, an artifact from it is used in place of the existing one if it saves a stage.

    Args:
        config: What to convert.
        stack: Holds the workspace of such an artifact; see `pull_best`.
        announce: Called with each step that begins.

    Raises:
        InputError: The config is not valid, a plugin does not exist, the weights can't be read, or
            the store's bucket does not exist.
        StoreError: The store can't be read.
        TargetMissing: The target's TensorRT is not installed.
    """
    spec = find_source(config)
    target = find_target(config.target)
    require(target)
    check_precision(config.engine_precision, target)
    check_effort(config.effort, target)
    find_plugins(config.plugins, target)
    profiles = chosen_profiles(config, spec)
    for text in config.shapes:
        check_rules(spec.rules, parse_sizes(text, spec.dims), f"shape {text!r}")
    place = config.place(spec)
    options = stage_options(config, target)
    # dims that must be equal become one dim in the profiles too
    spec = replace(spec, profiles=profiles)
    manifest = initial_manifest(config, spec)
    old = None if config.force else previous(place)
    every = [options]
    if config.quick:  # what a whole conversion did is more than a quick one does
        whole = stage_options(replace(config, quick=False), target)
        every += [replace(options, export=whole.export), whole]
    weights = manifest.model.weights
    parts = [stage_parts(config, spec, one, weights) for one in every]
    store, found = open_store(config, spec), None
    if store is not None and config.force:
        store.place.check_bucket()  # the look-up does it, and there is none
    elif store is not None:
        found = pull_best(store, Wanted(place, manifest, parts), old, stack, announce)
        old = found.old
    by_options = [keys_of(each) for each in parts]
    keys = max(by_options, key=lambda keys: first_changed(old, keys))
    first = first_changed(old, keys)
    shared = None
    if store is not None:
        use, work = (found.use, found.work) if found is not None else (None, None)
        shared = Shared(store, parts[by_options.index(keys)], use, work)
    if old is not None and first > 0:  # the earlier stages do not depend on tolerances
        interface = old.manifest.interface.with_tolerances(spec.interface)
        manifest = replace(old.manifest, interface=interface)
    return ConversionPlan(spec, place, manifest, options, keys, STAGES[first:], old, shared)


def initial_manifest(config: Config, spec: ModelSpec) -> Manifest:
    """Returns the manifest before any stage: what will be converted."""
    target = find_target(config.target)
    source = config.model if isinstance(config.model, str) else f"spec:{spec.name}"
    return Manifest(
        name=spec.name,
        created=now(),
        model=ModelInfo(
            source,
            dict(spec.options),
            weights_info(config, spec),
            versions(spec.libraries),
            config.inputs,
            config.dims,
            config.ranges,
            spec.dtype,
        ),
        interface=spec.interface,
        target=TargetInfo(target.name, target.flavour, None),
        precision=config.engine_precision,
        versions={"python": platform.python_version()},
    )


def chosen_profiles(config: Config, spec: ModelSpec) -> tuple[Profile, ...]:
    """Returns the given profiles, or the spec's, or one profile over the whole ranges.

    Raises:
        InputError: A profile's name or range is not valid.
    """
    chosen = config.parsed_profiles() or spec.profiles or (Profile("default"),)
    check_names(chosen)
    for profile in chosen:
        profile.resolve(spec.dims).check_shapes(spec.interface.input_shapes)
    return tuple(chosen)


def with_profiles(manifest: Manifest, profiles: Sequence[Profile]) -> Interface:
    """An artifact's interface with other profiles, which may name dims that were merged."""
    return replace(manifest.interface, profiles=merge_profiles(profiles, manifest.merged))
