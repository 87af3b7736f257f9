"""The regression check: what got worse from one artifact to another."""

from __future__ import annotations

from pipeline import compare
from pipeline.artifact import MODEL, Artifact
from pipeline.compare import Announce
from pipeline.declared import dims_of, inputs_of, profiles_of, tolerances_of
from pipeline.dims import solve_sizes
from pipeline.errors import InputError
from pipeline.judge import judge
from pipeline.manifest import Manifest
from pipeline.profiles import Point
from pipeline.stored import stored_points
from pipeline.target import bind_polygraphy, find_target
from pipeline.timing import Stopwatch


def regression(artifact: Artifact, old: Artifact, announce: Announce) -> list[str]:
    """What got worse from `old` to `artifact`, one line each; nothing means nothing.

    The new model runs on the old one's stored inputs, wherever it still takes their sizes, and
    its outputs are held against the old one's stored ones within the old tolerance. Inputs and
    outputs, the dims' ranges, the profiles and the tolerance are compared as well.
    """
    new, before = artifact.manifest, old.manifest
    lines = _declarations(new, before)
    if any(line.startswith("inputs:") for line in lines):
        return lines  # nothing to feed
    dims_now = {i.name: i.shape for i in inputs_of(new)}
    stored = stored_points(old.path, _last_run(old))
    usable, labels = [], []
    for point in stored:
        try:
            sizes = solve_sizes(dims_now, {k: v.shape for k, v in point.feed.items()})
        except InputError as error:
            lines.append(f"an input of the old artifact is refused: {error}")
        else:
            usable.append(point)
            labels.append(Point("stored", sizes))
    bind_polygraphy(find_target(new.target.name))
    model = artifact.model if MODEL in new.files else artifact.exported
    results = compare.run_onnx(model, [p.feed for p in usable])
    outputs = compare.collect("new model", results, labels, announce, Stopwatch())
    for label, point, output in zip(labels, usable, outputs, strict=True):
        for result in judge("old", "new", point.outputs, output, tolerances_of(before)):
            if not result.passed:
                lines.append(f"{result.output} at {label}: {result.why}")
    return lines


def _last_run(artifact: Artifact) -> str:
    """The stored run that speaks for an artifact: its rewritten model's, else the exported's."""
    return compare.REWRITTEN if MODEL in artifact.manifest.files else compare.EXPORTED


def _declarations(new: Manifest, old: Manifest) -> list[str]:
    lines = []
    for what, now, before in (
        ("inputs", new.inputs, old.inputs),
        ("outputs", new.outputs, old.outputs),
    ):
        mine = {t.name: (t.dtype, tuple(t.shape)) for t in now}
        for tensor in before:
            was = (tensor.dtype, tuple(tensor.shape))
            if mine.get(tensor.name) != was:
                lines.append(f"{what}: {tensor.name} was {was}, is {mine.get(tensor.name)}")
    now_dims = dims_of(new)
    for name, dim in dims_of(old).items():
        if name not in now_dims:
            lines.append(f"dim {name} is gone")
        elif (
            (mine_ := now_dims[name]).min > dim.min
            or mine_.max < dim.max
            or (dim.multiple_of % mine_.multiple_of)
            or (dim.offset - mine_.offset) % mine_.multiple_of
        ):
            lines.append(f"dim narrowed: {dim} is now {mine_}")
    now_profiles = profiles_of(new)
    for profile in profiles_of(old):
        for which, word in enumerate(("min", "opt", "max")):
            sizes = profile.sizes(which)
            at = ",".join(f"{k}={v}" for k, v in sizes.items())
            if sizes.keys() == now_dims.keys() and not any(p.allows(sizes) for p in now_profiles):
                lines.append(f"profile {profile.name}: no profile allows its {word} {at} any more")
    lines += _coverage(new, old)
    lines += [f"rule added: {rule}" for rule in new.rules if rule not in old.rules]
    now_tolerances = tolerances_of(new)
    for name, b in tolerances_of(old).items():
        a = now_tolerances.get(name, b)
        if a.rtol > b.rtol or a.atol > b.atol:
            lines.append(
                f"tolerance of {name} widened: rtol {b.rtol} to {a.rtol}, atol {b.atol} to {a.atol}"
            )
    return lines


def _coverage(new: Manifest, old: Manifest) -> list[str]:
    """What was built or compared otherwise, or less."""
    lines = []
    if old.precision != new.precision:
        lines.append(f"precision was {old.precision}, is {new.precision}")
    done = [p.sizes for p in new.comparison.points if p.compared] if new.comparison else []
    for point in old.comparison.points if old.comparison else ():
        if point.compared and point.sizes not in done:
            at = ",".join(f"{k}={v}" for k, v in point.sizes.items())
            lines.append(f"{at} was compared, is not any more")
    if old.engine_compared and not new.engine_compared:
        lines.append(f"the engine was compared, is not any more: {new.engine_compared_why}")
    return lines
