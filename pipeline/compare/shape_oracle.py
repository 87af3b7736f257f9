"""Compares TensorRT's shape inference with the declared output sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pipeline.build.shape_inference import ORACLE, output_sizes, why_not_asked
from pipeline.compare.memory import Memory, once
from pipeline.compare.plan import ComparisonPlan, Job
from pipeline.compare.run_names import TORCH
from pipeline.compare.verdict import other_shape
from pipeline.machine.target import Target
from pipeline.spec.dims import shape_at
from pipeline.spec.findings import Facts, Note, note
from pipeline.spec.verdicts import Verdict


def check_sizes(
    model: Path, target: Target, job: Job, plan: ComparisonPlan, memory: Memory | None = None
) -> list[Note]:
    """Compares TensorRT's output sizes with the declared sizes (torch's) at every point.

    A point with a difference gets a failed verdict in the plan, also if it is too large to run.

    Returns:
        Notes on the number of points that agree, or why TensorRT did not run.
    """
    why = why_not_asked(target)
    if why:
        return [note("shape-inference-not-run", reason=why)]
    found = once(
        memory, lambda: output_sizes(model, plan.shapes, target), model, ORACLE, target.name,
        plan.shapes,
    )  # fmt: skip
    open_axes = set()
    agreed = 0
    for n, (info, sizes) in enumerate(zip(plan.infos, found, strict=True)):
        wrong = []
        for name, shape in job.interface.output_shapes.items():
            want = shape_at(shape, info.sizes)
            if isinstance(sizes, str):
                facts: Facts = {"reason": sizes}  # TensorRT's message
                wrong.append(Verdict("sizes-refused", (TORCH, ORACLE), name, facts=facts))
                break
            got = sizes.get(name, ())
            open_axes |= {f"{name} axis {axis}" for axis, size in enumerate(got) if size < 0}
            same = len(got) == len(want) and all(
                a in (-1, b) for a, b in zip(got, want, strict=True)
            )
            if not same:
                wrong.append(other_shape((TORCH, ORACLE), name, tuple(got), want))
        answered = not isinstance(sizes, str) and any(
            not got or any(n >= 0 for n in got) for got in sizes.values()
        )
        agreed += answered and not wrong
        plan.infos[n] = replace(info, results=(*info.results, *wrong))
    notes = [note("shape-inference-agrees", count=agreed, of=len(found))]
    if open_axes:
        notes.append(note("sizes-left-to-the-run", names=tuple(sorted(open_axes))))
    return notes
