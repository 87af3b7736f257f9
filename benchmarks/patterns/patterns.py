"""Tries each pattern naively and with pipeline, for the table in docs/results/patterns.md.

    python benchmarks/patterns/patterns.py [--only NAME ...] [--write] [--out DIR]

The naive way is the code of a user: torch.onnx.export with named dims at opset 18. ONNX Runtime is
then compared with torch at sizes other than the example's. TensorRT-RTX then parses, builds and
infers shapes. The other way is `pipeline.run`.

Each way runs in a forked process with a time limit, because a library may crash. torch also
exports the second LSTM of a process with fixed time.

Prints a Markdown table and writes DIR/patterns.json (default: bench-results). --write also puts the
table into docs/results/patterns.md, between its two marks.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from pattern_modules import PATTERNS, Pattern

from pipeline.artifact.manifest import Manifest
from pipeline.build.try_graph import attempt, differs
from pipeline.convert.driver import run
from pipeline.errors import CompareError, PipelineError
from pipeline.machine.child import Child
from pipeline.machine.target import DEFAULT_TARGET, find_target
from pipeline.probe.eager import quiet
from pipeline.spec.config import Config
from pipeline.spec.dims import Dim
from pipeline.spec.model import ModelSpec, Output, Tolerance
from pipeline.spec.profiles import Profile, points

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results" / "patterns.md"
BEGIN, END = "<!-- patterns: begin -->", "<!-- patterns: end -->"
HEAD = """# Which patterns break, without pipeline and with it?

Made by `python benchmarks/patterns/patterns.py --write` on TensorRT-RTX, without a GPU. Each
row is a small torch module with dynamic sizes (`benchmarks/patterns/pattern_modules.py`).

- *naive*: `torch.onnx.export` with named dims at opset 18. Then ONNX Runtime is compared with torch
  at seven sets of sizes. Then TensorRT-RTX parses and builds, and its shape inference is compared
  with the true sizes. `right` means that nothing wrong was found. The engine itself was not run.
- *with the pipeline*: `pipeline.run` on the same module and sizes. `refused` is an error that says
  why, before you get anything wrong.
- *passes*: the rewrite passes that changed the graph. Where none did and the naive path is wrong,
  the export was fixed (`pipeline/export/ops`).
"""
LIMIT = 240.0  # seconds for one pattern in one way
Feed = dict[str, np.ndarray]


def spec_of(pattern: Pattern) -> ModelSpec:
    """The pattern as a model to convert."""
    return ModelSpec(
        name="pattern",
        build=lambda _: pattern.module(),
        inputs=pattern.inputs,
        outputs=tuple(Output(f"y{n}") for n in range(pattern.outputs)),
        tolerance=Tolerance(1e-4, 1e-4, "float32 rounding in small modules; faults are above 1e-2"),
    )


def naive(pattern: Pattern) -> str:
    """The result without the pipeline: ``right``, or the first failure."""
    module, spec = pattern.module(), spec_of(pattern)
    sizes = {name: dim.opt for name, dim in spec.dims.items()}
    roots: dict[str, Any] = {}
    try:
        with torch.no_grad(), quiet():
            program = torch.onnx.export(
                module,
                tuple(map(torch.from_numpy, spec.sample(sizes, 0).values())),
                dynamic_shapes=tuple(_torch_dims(i.shape, roots) for i in spec.inputs),
                opset_version=18,
                dynamo=True,
                verbose=False,
            )
            assert program is not None
            model = program.model_proto
    except Exception as error:
        return f"export fails: {_cause(error)}"
    names = [value.name for value in model.graph.input]
    fixed = _fixed(model, spec, names)
    if fixed:
        return f"a dim is fixed: {fixed}"
    feeds, wrong = [], ""
    for point in points(spec.dims, [Profile("p").resolve(spec.dims)]):
        values = list(spec.sample(point.sizes, 1).values())
        with torch.no_grad():
            result = module(*map(torch.from_numpy, values))
        want = [t.numpy() for t in (result if isinstance(result, tuple) else (result,))]
        feeds.append(dict(zip(names, values, strict=True)))
        wrong = wrong or _against(model, feeds[-1], want)
    if wrong.startswith("ONNX Runtime fails"):
        return wrong
    with Child() as child:
        outcome = attempt(child, model, feeds, find_target(DEFAULT_TARGET))
    trt = f"{outcome.verdict} fails: {outcome.detail}" if outcome.failed else ""
    if outcome.verdict == "sizes":
        trt = f"TensorRT's sizes are wrong: {outcome.detail}"
    return "; ".join(filter(None, (wrong, trt))) or "right"


def converted(pattern: Pattern) -> tuple[str, list[str]]:
    """The result with the pipeline, and the passes that rewrote nodes."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            report = run(Config(spec_of(pattern), out=Path(folder) / "a"))
        except CompareError as error:
            return f"caught by the comparison: {error}", []
        except PipelineError as error:
            return f"refused: {error}", []
        return ("right" if report.ok else "wrong"), _passes(report.manifest)


def _passes(manifest: Manifest) -> list[str]:
    info = manifest.rewrite
    return [p.name for p in info.passes if p.rewritten] if info is not None else []


def _torch_dims(shape: Sequence[Any], roots: dict[str, Any]) -> dict[int, Any]:
    result = {}
    for axis, size in enumerate(shape):
        if isinstance(size, Dim):
            step = size.multiple_of
            name = f"_{size.name}" if step > 1 else size.name
            if name not in roots:
                low, high = size.min // step, size.max // step
                roots[name] = torch.export.Dim(name, min=low, max=high)
            result[axis] = step * roots[name] if step > 1 else roots[name]
    return result


def _fixed(model: onnx.ModelProto, spec: ModelSpec, names: Sequence[str]) -> str:
    """Dims that torch.onnx.export silently replaced by numbers."""
    if len(names) != len(spec.inputs):
        return f"the inputs are {', '.join(names)}"
    found = set()
    for value, declared in zip(model.graph.input, spec.inputs, strict=True):
        for dim, size in zip(value.type.tensor_type.shape.dim, declared.shape, strict=True):
            if isinstance(size, Dim) and not dim.dim_param:
                found.add(f"{size.name}={dim.dim_value}")
    return ", ".join(sorted(found))


def _against(model: onnx.ModelProto, feed: Feed, want: Sequence[np.ndarray]) -> str:
    """The difference between ONNX Runtime with its default options and torch."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    at = " at " + ", ".join(str(list(array.shape)) for array in feed.values())
    try:
        got = onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, feed)
    except Exception as error:
        return f"ONNX Runtime fails{at}: {_cause(error)}"
    for a, b in zip(got, want, strict=True):
        if a.shape != b.shape:
            return f"wrong sizes: {a.shape}, not {b.shape}{at}"
        why = differs(a, b)
        if why:
            return f"wrong numbers: {why}{at}"
    return ""


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def warm_up() -> None:
    """Makes the exporter import its modules once, for all forked processes."""
    with torch.no_grad(), quiet():
        torch.onnx.export(torch.nn.ReLU(), (torch.zeros(1),), dynamo=True, verbose=False)


def limited(function: Callable[[Pattern], Any], pattern: Pattern) -> tuple[Any, float]:
    """Calls a function in a forked process. Returns its result or its failure, and the seconds."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        try:
            sender.send(function(pattern))
        except Exception as error:
            sender.send(f"{type(error).__name__}: {_cause(error)}")

    start = time.perf_counter()
    process = context.Process(target=work)
    process.start()
    sender.close()
    result: Any = f"nothing after {LIMIT:g} s"
    if receiver.poll(LIMIT):
        try:
            result = receiver.recv()
        except EOFError:
            process.join()
            result = f"the process died: exit code {process.exitcode}"
    process.kill()
    process.join()
    return result, time.perf_counter() - start


def measure(pattern: Pattern) -> dict[str, Any]:
    """One row."""
    before, seconds = limited(naive, pattern)
    result, more = limited(converted, pattern)
    after, passes = result if isinstance(result, tuple) else (result, [])
    return {
        "pattern": pattern.name,
        "naive": before,
        "pipeline": after,
        "passes": passes,
        "seconds": round(seconds + more, 1),
    }


def _cell(text: str, most: int = 130) -> str:
    text = " ".join(text.replace("|", "\\|").split())
    return text if len(text) <= most else text[: most - 3] + "..."


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as Markdown, with a line of totals."""
    lines = ["| pattern | naive | with the pipeline | passes |", "|---|---|---|---|"]
    for row in rows:
        cells = (row["pattern"], row["naive"], row["pipeline"], ", ".join(row["passes"]))
        lines.append("| " + " | ".join(map(_cell, cells)) + " |")

    def right(key: str) -> int:
        return sum(row[key] == "right" for row in rows)

    refused = sum(row["pipeline"].startswith("refused") for row in rows)
    lines += [
        "",
        f"{len(rows)} patterns: {right('naive')} right by the naive path; with the pipeline "
        f"{right('pipeline')} right and {refused} refused.",
    ]
    return "\n".join(lines)


def write(text: str, path: Path = DOCS) -> None:
    """Puts the table between the marks of the document. Makes the document if it does not exist."""
    if not path.exists():
        path.write_text(f"{HEAD}\n{BEGIN}\n{END}\n")
    old = path.read_text()
    if old.count(BEGIN) != 1 or old.count(END) != 1:
        raise SystemExit(f"{path}: needs the lines {BEGIN} and {END} once each")
    before, _, rest = old.partition(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--write", action="store_true", help="into docs/results/patterns.md")
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    arguments = parser.parse_args()
    names = [pattern.name for pattern in PATTERNS]
    unknown = [name for name in arguments.only if name not in names]
    if unknown:
        parser.error(f"no pattern {unknown[0]!r}; known: {', '.join(names)}")
    if arguments.write and arguments.only:
        parser.error("--write needs the whole table. Leave --only out")
    torch.set_num_threads(1)  # before the fork
    logging.disable(logging.ERROR)
    warm_up()
    rows = []
    for pattern in PATTERNS:
        if not arguments.only or pattern.name in arguments.only:
            rows.append(measure(pattern))
            last = rows[-1]
            print(
                f"{last['pattern']}: {last['naive'][:60]} -> {last['pipeline'][:60]}",
                file=sys.stderr,
            )
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "patterns.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))
    if arguments.write:
        write(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
