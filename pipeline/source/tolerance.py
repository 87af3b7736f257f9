"""The tolerances that a user states for a source which states none."""

from __future__ import annotations

from dataclasses import replace

from pipeline.errors import InputError
from pipeline.spec.config import Config
from pipeline.spec.model import ModelSpec, check_output_names


def with_stated(spec: ModelSpec, config: Config) -> ModelSpec:
    """The spec with the tolerance of the config.

    Raises:
        InputError: The spec states its own.
    """
    if config.tolerance is None:
        return spec
    if spec.tolerance is not None:
        raise InputError(f"model {spec.name} states its own tolerance; leave --tolerance out")
    return replace(spec, tolerance=config.tolerance)


def with_stated_outputs(spec: ModelSpec, config: Config) -> ModelSpec:
    """The spec with tolerances of single outputs. Outputs that are not known yet get them later.

    Raises:
        InputError: There is no such output, or the source states its tolerance.
    """
    given = config.output_tolerances
    if not spec.outputs and (spec.tolerance is None or config.tolerance is not None):
        return replace(spec, output_tolerances=given)
    check_output_names(given, [o.name for o in spec.outputs] or given)
    own = {o.name: o.tolerance for o in spec.outputs}
    for name in given:
        if own.get(name) or (spec.tolerance is not None and config.tolerance is None):
            raise InputError(
                f"model {spec.name} states the tolerance of output {name}; leave --tolerance "
                f"{name}=... out"
            )
    outputs = tuple(replace(o, tolerance=given.get(o.name, o.tolerance)) for o in spec.outputs)
    return replace(spec, outputs=outputs)
