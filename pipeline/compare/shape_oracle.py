"""TensorRT's shape inference compared with the declared sizes of the outputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pipeline.build.shape_inference import ORACLE, output_sizes, why_not_asked
from pipeline.compare.plan import Job, Plan
from pipeline.compare.run_names import TORCH
from pipeline.compare.verdict import failed
from pipeline.machine.target import Target
from pipeline.spec.dims import shape_at


def check_sizes(model: Path, target: Target, job: Job, plan: Plan) -> list[str]:
    """Holds TensorRT's sizes against the declared ones, which are torch's, at every point.

    What disagrees is added to the plan's points as failed, those that are too large to run
    included. Returns notes for the manifest: at how many points it agreed, or why it was not
    asked.
    """
    why = why_not_asked(target)
    if why:
        return [f"output sizes not asked of TensorRT's shape inference: {why}"]
    found = output_sizes(model, plan.shapes, target)
    open_axes = set()
    agreed = 0
    for n, (info, sizes) in enumerate(zip(plan.infos, found, strict=True)):
        wrong = []
        for name, shape in job.interface.output_shapes.items():
            want = shape_at(shape, info.sizes)
            if isinstance(sizes, str):
                wrong.append(failed((TORCH, ORACLE), name, f"TensorRT refuses the sizes: {sizes}"))
                break
            got = sizes.get(name, ())
            open_axes |= {f"{name} axis {axis}" for axis, size in enumerate(got) if size < 0}
            same = len(got) == len(want) and all(
                a in (-1, b) for a, b in zip(got, want, strict=True)
            )
            if not same:
                wrong.append(failed((TORCH, ORACLE), name, f"shape {got}, not {want}"))
        told = not isinstance(sizes, str) and any(
            not got or any(n >= 0 for n in got) for got in sizes.values()
        )
        agreed += told and not wrong
        plan.infos[n] = replace(info, results=(*info.results, *wrong))
    notes = [f"output sizes by TensorRT's own shape inference: right at {agreed} of {len(found)}"]
    if open_axes:
        notes.append(f"sizes that TensorRT leaves to the run: {', '.join(sorted(open_axes))}")
    return notes
