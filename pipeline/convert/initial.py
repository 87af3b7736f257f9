"""What a conversion is about to do: a manifest that nothing has come of yet, and its profiles."""

from __future__ import annotations

import platform
import re

from pipeline.artifact.manifest import Manifest, ModelInfo, TargetInfo, now
from pipeline.convert.keys import weights_info
from pipeline.errors import InputError
from pipeline.machine.libraries import versions
from pipeline.machine.target import find_target
from pipeline.spec.config import Config
from pipeline.spec.file_names import RESERVED
from pipeline.spec.model import ModelSpec
from pipeline.spec.profiles import Profile

_PROFILE_NAME = re.compile(r"\w[\w-]*")


def draft(config: Config, spec: ModelSpec) -> Manifest:
    """A manifest that says what is to be converted, and nothing of what came of it."""
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
