"""The script that repeats a comparison with Polygraphy's own commands."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.machine.target import Flavour
from pipeline.spec.file_names import EXPORTED, MODEL, PLAN
from pipeline.spec.tensors import Tolerance


@dataclass(frozen=True)
class StoredRun:
    """Stored inputs and the outputs of one run for them, iteration by iteration.

    Args:
        inputs: Polygraphy's JSON file of the inputs, relative to the artifact. Shapes may differ
            between iterations.
        outputs: Polygraphy's JSON file of a RunResults with as many iterations. With fewer
            iterations, Polygraphy only warns, and does not compare the other inputs.
        profile: The index of the engine's profile that allows the inputs; None leaves the engine
            out.
    """

    inputs: str
    outputs: str
    profile: int | None = 0


def reproduce_script(
    runs: Sequence[StoredRun],
    tolerances: Mapping[str, Tolerance],
    *,
    flavour: Flavour,
    models: Sequence[str] = (EXPORTED, MODEL),
    plan: str | None = PLAN,
    engine_tolerances: Mapping[str, Tolerance] | None = None,
) -> str:
    """The text of ``reproduce.sh``: repeats the comparison with Polygraphy's own commands.

    ONNX Runtime runs the models without graph optimisations, because these could hide a rewrite.
    With ``--engine`` TensorRT also runs the plan, which needs a GPU. The script works from any
    folder, runs everything, and exits with 1 if anything failed. The stored outputs are
    Polygraphy's second run, so ``rtol`` is relative to them.

    Args:
        runs: The stored runs to compare with.
        tolerances: The tolerance of each output by its name.
        flavour: The flavour of TensorRT that runs the plan.
        models: The ONNX files of the artifact.
        plan: The engine's plan; None if there is none.
        engine_tolerances: The engine's tolerances by output name; None means `tolerances`.
    """
    lines = [
        "#!/bin/sh",
        "# Repeats the comparison of this artifact. Needs polygraphy and onnxruntime.",
        "# --engine also compares the engine. It needs TensorRT and a supported GPU.",
        "# half.onnx is not run: on a CPU, ONNX Runtime does not round as a GPU does",
        "# (docs/guide/half-precision.md).",
        'CDPATH= cd -- "$(dirname -- "$0")" || exit 2',
        "failed=0",
    ]
    if any(tolerance.parts for tolerance in tolerances.values()):
        lines.insert(-2, "# Parts of an output have a smaller atol, which Polygraphy cannot check.")
    for run in runs:
        for model in models:
            options = ["--onnxrt", "--graph-optimization-level", "ORT_DISABLE_ALL"]
            lines += ["", _command(model, options, run, tolerances) + " || failed=1"]
    engine_runs = [(run, run.profile) for run in runs if run.profile is not None]
    if plan is not None and engine_runs:
        lines += ["", 'if [ "${1:-}" = --engine ]; then']
        rtx = "1" if flavour == "tensorrt_rtx" else "0"
        lines += [f"export POLYGRAPHY_USE_TENSORRT_RTX={rtx}"]
        for run, profile in engine_runs:
            options = ["--trt", "--model-type", "engine", "--optimization-profile", str(profile)]
            lines += [
                _command(plan, options, run, engine_tolerances or tolerances) + " || failed=1"
            ]
        lines += ["fi"]
    return "\n".join([*lines, "", 'exit "$failed"', ""])


def _command(
    model: str, options: Sequence[str], run: StoredRun, tolerances: Mapping[str, Tolerance]
) -> str:
    # "./" keeps a name that begins with "-" from being read as an option
    words = ["polygraphy", "run", f"./{model}", *options, "--validate"]
    words += ["--load-inputs", f"./{run.inputs}", "--load-outputs", f"./{run.outputs}"]
    for option in ("rtol", "atol"):
        values = {name: repr(float(getattr(t, option))) for name, t in tolerances.items()}
        same = len(set(values.values())) == 1
        words += [f"--{option}"]
        words += [*set(values.values())] if same else [f"{n}:{v}" for n, v in values.items()]
    return shlex.join(words)
