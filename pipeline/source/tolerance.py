"""The tolerances that a user states for a source which states none."""

from __future__ import annotations

from dataclasses import replace

from pipeline.errors import InputError
from pipeline.spec.config import Config
from pipeline.spec.model import ModelSpec, check_output_names


def with_stated(spec: ModelSpec, config: Config) -> ModelSpec:
    """The spec with the tolerances of the config. Outputs not known yet get theirs later.

    Raises:
        InputError: The spec states its own, or there is no such output.
    """
    own, given = spec.tolerance, config.output_tolerances
    if config.tolerance is not None:
        if own is not None:
            raise InputError(f"model {spec.name} states its own tolerance; leave --tolerance out")
        spec = replace(spec, tolerance=config.tolerance)
    if not given:
        return spec
    if not spec.outputs and own is None:
        return replace(spec, output_tolerances=given)
    check_output_names(given, [o.name for o in spec.outputs] or given)
    of_outputs = {o.name: o.tolerance for o in spec.outputs}
    for name in given:
        if own is not None or of_outputs.get(name):
            raise InputError(
                f"model {spec.name} states the tolerance of output {name}; leave --tolerance "
                f"{name}=... out"
            )
    outputs = tuple(replace(o, tolerance=given.get(o.name, o.tolerance)) for o in spec.outputs)
    return replace(spec, outputs=outputs)
