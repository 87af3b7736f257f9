"""Compares engines with torch, ONNX Runtime and the naive engine, on one GPU and the same inputs.

    python benchmarks/engines/engines.py run ARTIFACT... --torch-python python3
        [--shape h=440,w=1024 ...] [--part floors,rates,torch,engine,naive,ort]
        [--variant compile-tf32 ...] [--json FILE]
    python benchmarks/engines/engines.py table [--json FILE ...]
    python benchmarks/engines/plot.py FILE... --out docs/results

By default all parts run; --part selects some. Each result is merged into the file at once. So you
can run the parts one after the other, and again. Two runs at once, each on its GPU, need a file
each. `table` and `plot.py` join several files.

- ``floors``: operations and bytes (benchmarks/engines/floors.py; needs no GPU)
- ``rates``: the GPU's rates
- ``torch``: benchmarks/engines/torch_baselines.py, run by --torch-python, for a model of the zoo:
  eager-fp32, and by default the variants of the artifact's precision
- ``engine``: `pipeline bench`, with CUDA graphs and without
- ``naive``: the same for the engine of a plain torch.onnx.export, by each exporter, with
  TensorRT's defaults (benchmarks/engines/naive_engine.py); --naive DIR has files exported before,
  ``MODEL-dynamo.onnx``, ``MODEL-torchscript.onnx`` and ``MODEL-torchscript-17.onnx``
- ``ort``: ONNX Runtime's CUDA provider on model.onnx, if it is installed

Each part runs alone in a child process. Nothing else should use the GPU. A part that fails, or
exceeds --time-limit, is noted in the file, and the other parts continue. Each result has its
distance to torch in float32, if the part ``torch`` ran eager-fp32 before.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import floors
from children import lines, other_python
from engine_results import Results, join
from engine_tables import tables
from naive_engine import EXPORTERS
from references import as_written, option_texts
from torch_baselines import VARIANTS

from pipeline.artifact.artifact import Artifact, finish
from pipeline.commands.bench.measure import Method
from pipeline.errors import PipelineError
from pipeline.machine.gpu import find_gpu
from pipeline.models import MODELS
from pipeline.spec.dims import sizes_text
from pipeline.spec.file_names import PLAN
from pipeline.spec.profiles import sizes_to_time

HERE = Path(__file__).resolve().parent
DEFAULT = Path("bench-results/engines.json")


class Part:
    """The arguments of a part.

    Args:
        place: The artifact's folder.
        shapes: The sizes to measure at, as text.
        arguments: The arguments of the command line.
        results: The file for the records.
    """

    def __init__(self, place: Path, arguments: argparse.Namespace, results: Results) -> None:
        self.place, self.arguments, self.results = place, arguments, results
        self.artifact = Artifact.open(place)
        self.manifest = manifest = self.artifact.manifest
        declared = manifest.interface
        points = sizes_to_time(declared.dims, declared.profiles, declared.rules, arguments.shape)
        self.points = [dict(p.sizes) for p in points]
        self.shapes = [sizes_text(sizes) for sizes in self.points if sizes]
        info = manifest.model
        self.name = info.source if info.source in MODELS else manifest.name
        self.options = option_texts(as_written(self.name, info.options))
        self.base = {
            "model": self.name,
            "options": self.options,
            "precision": manifest.precision,
        }
        self.own = {
            "artifact": place.resolve().name,
            "own_options": option_texts(info.options),
        }
        self.measured = 0

    def add(self, record: Mapping[str, Any], **more: Any) -> None:
        """Stores a record of the artifact, or of torch, which all artifacts of a model share."""
        record = {**self.base, **record, **more}
        if not record["runner"].startswith("torch"):
            record.update(self.own)
        self.measured += "median_ms" in record
        record["gpu"] = "cpu" if record.get("device") == "cpu" else self.arguments.gpu
        self.results.add(record)
        sizes = sizes_text(record["sizes"]) if record["sizes"] else "all sizes"
        value = record.get("why") or f"{record['median_ms']:.3f} ms"
        print(f"{self.name} {record['precision']} {sizes}: {record['runner']}: {value}", flush=True)

    def failed(self, runner: str, why: str) -> None:
        self.add({"runner": runner, "sizes": None, "why": why})

    @property
    def known(self) -> bool:
        """Whether torch can make the model."""
        return self.manifest.model.source in MODELS or bool(self.arguments.module)

    @property
    def unknown(self) -> str:
        return f"{self.manifest.model.source} is not a model of the zoo; pass --module FILE.py:NAME"

    @property
    def model(self) -> list[str]:
        """The words that name the model to the scripts that run in torch."""
        words = [self.name, *(word for option in self.options for word in ("--option", option))]
        if self.arguments.module:
            words += ["--module", self.arguments.module, "--artifact", str(self.place)]
        if self.arguments.weights:
            words += ["--weights", str(self.arguments.weights)]
        return words

    @property
    def how(self) -> list[str]:
        """The options that all measuring parts share."""
        words = ["--repeat", str(self.arguments.repeat), "--seconds", str(self.arguments.seconds)]
        words += [word for shape in self.shapes for word in ("--shape", shape)]
        return [*words, "--reference", str(self.arguments.reference)]


def count_floors(part: Part) -> None:
    for record in floors.count_artifact(part.place, part.shapes, part.arguments.trips):
        part.results.add({**part.base, **part.own, **record, "model": part.name}, "floors")


def run_torch(part: Part) -> None:
    if not part.known:
        part.failed("torch", part.unknown)
        return
    command = [*part.arguments.torch_python, str(HERE / "torch_baselines.py"), *part.model]
    names = part.arguments.variant or variants(part.manifest.precision)
    command += [word for name in names for word in ("--variant", name)]
    command += ["--device", part.arguments.device, *part.how]
    command += ["--time-limit", str(part.arguments.time_limit)]
    why = lines(command, part.add, env=other_python(part.arguments.torch_path))
    if why:
        part.failed("torch", why)


def variants(precision: str) -> list[str]:
    """torch's variants at this precision, after eager-fp32, which all others are compared with."""
    same = [name for name, variant in VARIANTS.items() if variant.precision == precision]
    return list(dict.fromkeys(["eager-fp32", *same]))


def run_engine(part: Part) -> None:
    _engine(
        part, part.place, "engine", part.manifest.build.seconds if part.manifest.build else None
    )


def run_naive(part: Part) -> None:
    """The engine of a plain torch.onnx.export, by each exporter. See naive_engine.py."""
    if not part.known:
        part.failed("naive", part.unknown)
        return
    for exporter in part.arguments.exporter or EXPORTERS:
        with tempfile.TemporaryDirectory() as folder:
            why = _naive(part, exporter, Path(folder))
        if why:
            part.failed(f"naive {exporter}", why.replace(f"{folder}/", ""))


def _naive(part: Part, exporter: str, folder: Path) -> str:
    """Exports, builds and measures. Returns the reason of a failure."""
    arguments, model, copy = part.arguments, folder / "naive.onnx", folder / "naive"
    script = str(HERE / "naive_engine.py")
    export = [*arguments.torch_python, script, "export", *part.model, "--exporter", exporter]
    env = other_python(arguments.torch_path)
    stored = arguments.naive and arguments.naive / f"{part.name}-{exporter}.onnx"
    if stored and stored.is_file():
        model = stored
    else:
        why = lines(
            [*export, "--out", str(model)], lambda _: None, limit=arguments.time_limit, env=env
        )
        if why:
            return why
    said: dict[str, Any] = {}
    check = [*arguments.torch_python, script, "check", *part.model, str(model)]
    unknown = lines(check, said.update, limit=arguments.time_limit, env=env)
    narrow = {"unchecked": unknown} if unknown else {"narrow": said["narrow"]}
    shutil.copytree(part.place, copy)
    seconds: list[float] = []
    why = lines(
        [sys.executable, script, "build", str(model), str(part.place), "--out", str(copy / PLAN)],
        lambda record: seconds.append(record["seconds"]),
        limit=arguments.time_limit,
    )
    if why:
        return why
    finish(copy, part.manifest)  # with the hash of the naive plan
    _engine(part, copy, f"naive {exporter}", seconds[0], **narrow)
    return ""


def _engine(part: Part, place: Path, runner: str, seconds: float | None, **more: str) -> None:
    command = [sys.executable, str(HERE / "run_engine.py"), "engine", str(place), *part.how]

    def add(record: Mapping[str, Any]) -> None:
        name = f"{runner} graph" if record["graph"] else runner
        part.add(record, runner=name, build_s=seconds, **more)

    why = lines(command, add, limit=part.arguments.time_limit)
    if why:
        part.failed(runner, why)


def run_ort(part: Part) -> None:
    command = [sys.executable, str(HERE / "run_engine.py"), "ort", str(part.place), *part.how]
    why = lines(
        command,
        lambda record: part.add(record, runner="onnxruntime CUDA"),
        limit=part.arguments.time_limit,
    )
    if why:
        part.failed("onnxruntime CUDA", why)


PARTS: dict[str, Callable[[Part], None]] = {
    "floors": count_floors,
    "torch": run_torch,
    "engine": run_engine,
    "naive": run_naive,
    "ort": run_ort,
}


def machine() -> dict[str, Any]:
    """The GPU, its driver, the processor and the Python version."""
    gpu = find_gpu()
    driver = None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=driver_version,memory.total", "--format=csv,noheader"]
        driver = subprocess.run(
            query, capture_output=True, text=True, timeout=60, check=True
        ).stdout.splitlines()[0]
    return {
        "gpu": None if isinstance(gpu, str) else gpu.name,
        "driver": driver,
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
    }


def run(arguments: argparse.Namespace) -> int:
    """Runs the stage `run`. Returns 1 if all measurements of an artifact failed, otherwise 0."""
    results = Results(arguments.json)
    where = machine()
    arguments.gpu = where["gpu"]
    command = shlex.join(["python", "benchmarks/engines/engines.py", *sys.argv[1:]])
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    results.begin({"date": date, "command": command, "machine": where})
    names = arguments.part.split(",") if arguments.part else ["rates", *PARTS]
    code = 0
    if "rates" in names and not arguments.gpu:
        print("rates: there is no GPU here", file=sys.stderr)
        code = int(names == ["rates"])
    elif "rates" in names:
        measure = [*arguments.torch_python, str(HERE / "floors.py"), "measure"]
        why = lines(measure, results.add_rates, env=other_python(arguments.torch_path))
        if why:
            print(f"rates: {why}", file=sys.stderr)
            code = int(names == ["rates"])
    for place in arguments.artifacts:
        try:
            part = Part(place, arguments, results)
        except PipelineError as error:
            print(f"error: {error}", file=sys.stderr)
            code = error.exit_code
            continue
        asked = [name for name in PARTS if name in names]
        for name in asked:
            try:
                PARTS[name](part)
            except PipelineError as error:
                part.failed(name, str(error))
        if set(asked) - {"floors"} and not part.measured:
            tried = ", ".join(name for name in asked if name != "floors")
            print(f"error: {place}: nothing could be measured ({tried})", file=sys.stderr)
            code = code or 1
    print(tables(results.content))
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="measure, and print the tables")
    running.add_argument(
        "artifacts", nargs="+", type=Path, metavar="ARTIFACT",
        help="folders with an engine for the GPU here",
    )  # fmt: skip
    running.add_argument(
        "--torch-python", type=shlex.split, default=["python3"], metavar="COMMAND",
        help="a Python that has torch with CUDA, for parts torch and rates (default: python3)",
    )  # fmt: skip
    running.add_argument(
        "--torch-path", action="append", default=[], metavar="DIR",
        help="one more folder that this Python imports from",
    )  # fmt: skip
    running.add_argument(
        "--shape", action="append", default=[], metavar="DIM=SIZE,...",
        help="measure at these sizes; other dims have their opt "
        "(default: min, opt and max of every profile)",
    )  # fmt: skip
    running.add_argument("--part", help=f"some of rates,{','.join(PARTS)} (default: all)")
    running.add_argument(
        "--variant", action="append", default=[], choices=VARIANTS,
        help="a variant of torch (default: eager-fp32 and those of the artifact's precision)",
    )  # fmt: skip
    running.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda",
        help="the device of torch; use cpu to try the script (default: cuda)",
    )  # fmt: skip
    running.add_argument(
        "--naive", type=Path, metavar="DIR",
        help="a folder with plain exports; others are made by --torch-python",
    )  # fmt: skip
    running.add_argument(
        "--exporter", action="append", default=[], choices=EXPORTERS,
        help="naive: the exporter (default: each in turn)",
    )  # fmt: skip
    running.add_argument(
        "--module", metavar="FILE.py:NAME",
        help="for torch and naive: the function that makes the artifact's model, if it is not of "
        "the zoo",
    )  # fmt: skip
    running.add_argument("--weights", type=Path, help="for torch: the weights of the artifact")
    running.add_argument(
        "--repeat", type=int, default=Method.repeat,
        help=f"the least number of timed calls (default: {Method.repeat})",
    )  # fmt: skip
    running.add_argument(
        "--seconds", type=float, default=Method.seconds,
        help=f"the least seconds of timed calls (default: {Method.seconds:g})",
    )  # fmt: skip
    running.add_argument(
        "--time-limit", type=float, default=300.0, metavar="SECONDS",
        help="the limit of a part, and of each variant of torch (default: 300)",
    )  # fmt: skip
    running.add_argument(
        "--trips", type=int, help="floors: the count of loops whose count is an input of the model"
    )
    running.add_argument(
        "--reference", type=Path, default=Path("bench-results/reference"), metavar="DIR",
        help="the folder of torch's outputs, for the errors (default: %(default)s)",
    )  # fmt: skip
    table = commands.add_parser("table", help="print the tables of the measurements")
    running.add_argument(
        "--json", type=Path, default=DEFAULT, metavar="FILE",
        help="the file of the measurements (default: %(default)s)",
    )  # fmt: skip
    table.add_argument(
        "--json", type=Path, action="append", metavar="FILE",
        help="a file of measurements; several files are joined, and of two equal records the later "
        f"one counts (default: {DEFAULT})",
    )  # fmt: skip
    arguments = parser.parse_args()
    if arguments.command == "run":
        unknown = set((arguments.part or "").split(",")) - {"", "rates", *PARTS}
        if unknown:
            parser.error(
                f"--part {', '.join(sorted(unknown))}: unknown; known: rates, {', '.join(PARTS)}"
            )
    try:
        if arguments.command == "run":
            return run(arguments)
        content, said = join(arguments.json or [DEFAULT])
        for line in said:
            print(line, file=sys.stderr)
        print(tables(content))
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
