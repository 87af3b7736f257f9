"""What a conversion is going to do, with all that can be refused before it begins."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.artifact.artifact import Artifact
from pipeline.artifact.manifest import Manifest, ModelInfo, TargetInfo, now
from pipeline.convert.keys import STAGES, stage_keys, weights_info
from pipeline.convert.options import StageOptions, stage_options
from pipeline.convert.reuse import first_changed, previous
from pipeline.errors import InputError
from pipeline.machine.libraries import versions
from pipeline.machine.target import find_target, require
from pipeline.probe.apply import merge_ranges
from pipeline.source.find import find_source
from pipeline.spec.config import Config
from pipeline.spec.dims import check_rules
from pipeline.spec.effort import check_effort
from pipeline.spec.file_names import RESERVED
from pipeline.spec.interface import Interface
from pipeline.spec.model import ModelSpec
from pipeline.spec.precision import check_precision
from pipeline.spec.profiles import Profile, parse_sizes

_PROFILE_NAME = re.compile(r"\w[\w-]*")


@dataclass(frozen=True)
class Plan:
    """One conversion, before it begins.

    Args:
        spec: the model, with the profiles to build.
        place: where the artifact goes.
        manifest: what the artifact says before the first stage that runs.
        options: what is asked of each stage.
        keys: stage name to the hash of all that its result depends on.
        todo: the stages to run, in order.
        old: the artifact that is there, if any of it can be used again.
    """

    spec: ModelSpec
    place: Path
    manifest: Manifest
    options: StageOptions
    keys: Mapping[str, str]
    todo: tuple[str, ...]
    old: Artifact | None


def plan_conversion(config: Config) -> Plan:
    """Finds the model and the target, and compares with the artifact that is there.

    Raises:
        InputError: anything in the config that can't be.
        TargetMissing: the target's TensorRT is not installed here.
    """
    spec = find_source(config)
    target = find_target(config.target)
    require(target)
    check_precision(config.precision)
    check_effort(config.effort, target)
    profiles = chosen_profiles(config, spec)
    for text in config.shapes:
        check_rules(spec.rules, parse_sizes(text, spec.dims), f"shape {text!r}")
    place = config.place(spec)
    options = stage_options(config, target)
    # dims that must be equal become one in the profiles, too
    spec = replace(spec, profiles=profiles)
    keys = stage_keys(config, spec, options)
    old = None if config.force else previous(place)
    first = first_changed(old, keys)
    manifest = initial_manifest(config, spec)
    if old is not None and first > 0:  # the stages before do not depend on the tolerances
        interface = old.manifest.interface.with_tolerances(spec.interface)
        manifest = replace(old.manifest, interface=interface)
    return Plan(spec, place, manifest, options, keys, STAGES[first:], old)


def initial_manifest(config: Config, spec: ModelSpec) -> Manifest:
    """A manifest that says what is to be converted, before any stage."""
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
        ),
        interface=spec.interface,
        target=TargetInfo(target.name, target.flavour, None),
        precision=config.precision,
        versions={"python": platform.python_version()},
    )


def chosen_profiles(config: Config, spec: ModelSpec) -> tuple[Profile, ...]:
    """The profiles asked for, or the spec's, or one over the whole range; each checked."""
    chosen = config.parsed_profiles() or spec.profiles or (Profile("default"),)
    names = [profile.name for profile in chosen]
    if len(set(names)) != len(names):
        raise InputError(f"two profiles have the same name: {', '.join(names)}")
    for profile in chosen:
        if not _PROFILE_NAME.fullmatch(profile.name) or profile.name in RESERVED:
            raise InputError(
                f"profile name {profile.name!r}: use letters, digits, _ and -, and none of "
                f"{', '.join(RESERVED)}; a folder is called after it"
            )
        profile.resolve(spec.dims).check_shapes(spec.interface.input_shapes)
    return tuple(chosen)


def with_profiles(manifest: Manifest, profiles: Sequence[Profile]) -> Interface:
    """An artifact's interface with other profiles, which may name dims that were merged."""
    for goes, stays in manifest.merged.items():
        profiles = [merge_ranges(profile, stays, goes) for profile in profiles]
    return replace(manifest.interface, profiles=tuple(profiles))
