"""Converts models of other libraries, with one command each, for docs/results/strangers.md.

    python benchmarks/strangers/strangers.py [--only NAME ...] [--fresh] [--times plain quick]
        [--write] [--out DIR]

Each model of `strangers_set.py` has three steps. Each step runs in a child process with a time
limit.

1. The truth: runs the model to find the sizes that it accepts (`strangers_truth.py`).
2. The command ``pipeline convert FILE.py:FACTORY --input ... --dim ...``, with a wide range.
3. The check: compares ONNX Runtime on model.onnx with the model, at sizes that the artifact allows.
   It also compares the sizes that the artifact allows with the sizes of step 1.

With --times, more commands of each model are timed. ``plain`` is a plain export and build
(`strangers_plain.py`), ``quick`` is ``pipeline convert --quick``. Times are CPU seconds of whole
processes, and memory is the largest resident memory of one process.

As many models run at once as there are cores. Each process has one core, because threads that wait
for each other use CPU time.

The packages are not dependencies of the project. Install them without their dependencies, which
would replace torch:

    pip install --no-deps $(python benchmarks/strangers/strangers.py --requirements)

Results are stored in DIR (default: bench-results/strangers) as JSON. A model with a result does not
run again without --fresh. Prints the table as Markdown; --write puts it into
docs/results/strangers.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from statistics import median
from typing import Any, NamedTuple

from strangers_set import REQUIREMENTS, STRANGERS, Stranger, module_of

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DOCS = ROOT / "docs" / "results" / "strangers.md"
POINTS = 10  # sizes at which numbers are compared
# seconds of CPU time for each process
LIMITS = {"truth": 900, "convert": 600, "check": 600, "plain": 300}
PATIENCE = 5  # the factor for wall-clock time, because the machine may have other work
RIGHT, BEST = "right", "right as far as a dim can say"
HEAD = """# Do other people's models convert?

Made by `python benchmarks/strangers/strangers.py --write`. Every model belongs to another
library and has random weights. pipeline contains no code for any of them. Each was converted by one
command, with its batch and its other sizes free:

```sh
pipeline convert benchmarks/strangers/strangers_models.py:timm_vit_tiny {example}
```

## What the columns mean

- *asked*: the ranges that the command asked for.
- *it takes*: the sizes in that range at which the model itself runs. They were found by running
  the model, without pipeline.
- *the artifact allows*: the sizes that pipeline arrived at.
- *error*: the largest difference from the model, divided by the output's largest value. ONNX
  Runtime runs `model.onnx` at {points} sizes: smallest, largest, odd, uneven, batch 1 and 3.
- *CPU s*: the CPU seconds of the conversion's processes.
- *x plain*: these seconds, divided by those of `torch.onnx.export(dynamo=True)` and TensorRT-RTX's
  builder alone, over the asked ranges. No number: the plain one failed, or was not run.
- *quick x plain*: the same for `pipeline convert --quick`.
- *memory x plain*: the largest resident memory of the conversion's processes, divided by the plain
  one's.

## What the results mean

| result | meaning |
|---|---|
| right | the allowed sizes are those that the model takes, of all tried; the numbers agree |
| right as far as a dim can say | right, but a few more sizes fit no range with a multiple |
| narrowed | right, but for fewer sizes than the model takes |
| too little compared | too few allowed sizes could be compared |
| refused | no artifact; the text says why |
| crash | the conversion crashed, or ran out of time |
| lost rule | a size is allowed that the model refuses |
| wrong | other numbers or shapes than the model's, or a failure, at an allowed size |

## The models
"""


worker = threading.local()  # its `core` is the core of the processes that the thread starts


def arguments(stranger: Stranger) -> list[str]:
    """The arguments for a model on the command line."""
    inputs = (word for text in stranger.inputs for word in ("--input", text))
    ends = (word for name, *end in stranger.dims for word in ("--dim", f"{name}={end[0]}:{end[1]}"))
    return [*inputs, *ends]


def command(stranger: Stranger, artifact: Path) -> list[str]:
    source = f"{HERE / module_of(stranger)}.py:{stranger.name}"
    return [
        sys.executable, "-W", "ignore", "-m", "pipeline", "convert", source, *arguments(stranger),
        "--out", str(artifact),
    ]  # fmt: skip


class Ended(NamedTuple):
    """How a command ended.

    Attributes:
        code: The exit code; None if it ran out of time.
        text: The end of its output.
        seconds: CPU seconds of the process and its children.
        gigabytes: The largest resident memory of one of these processes, in GiB.
    """

    code: int | None
    text: str
    seconds: float
    gigabytes: float


def run(words: list[str], limit: int) -> Ended:
    """Runs a command for `limit` CPU seconds at most."""
    with subprocess.Popen(
        ["bash", "-c", f'ulimit -t {limit}; exec "$@"', "bash", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{HERE}"},
    ) as child:
        assert child.stdout is not None
        os.sched_setaffinity(child.pid, {worker.core})
        timer = threading.Timer(limit * PATIENCE, os.killpg, (child.pid, signal.SIGKILL))
        timer.start()
        text = child.stdout.read()
        _, status, used = os.wait4(child.pid, 0)
        late = not timer.is_alive()
        timer.cancel()
        child.returncode = os.waitstatus_to_exitcode(status)
    spent = used.ru_utime + used.ru_stime
    code: int | None = child.returncode
    if late or (code in (-signal.SIGXCPU, -signal.SIGKILL) and spent > 0.9 * limit):
        code = None
    return Ended(code, text[-20_000:], spent, used.ru_maxrss / 2**20)


def step(name: str, stranger: Stranger, out: Path, fresh: bool) -> dict[str, Any]:
    """Runs one step of this file, and returns the result from its JSON file."""
    place = out / name / f"{stranger.name}.json"
    if fresh or not place.is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        own = [sys.executable, "-W", "ignore", __file__, "--step", name, stranger.name]
        code, text, seconds, _ = run([*own, "--out", str(out)], LIMITS[name])
        if not place.is_file():
            why = (
                f"not finished after {seconds:.0f} s of CPU time"
                if code is None
                else last_line(text)
            )
            return {"failed": why}
    result: dict[str, Any] = json.loads(place.read_text())
    return result


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def convert(stranger: Stranger, out: Path) -> dict[str, Any]:
    """Runs the convert command, and returns its result."""
    artifact = out / "artifacts" / stranger.name
    code, text, seconds, memory = run([*command(stranger, artifact), "--force"], LIMITS["convert"])
    error = ""
    if code is None:
        error = f"not finished after {seconds:.0f} s of CPU time"
    elif code != 0:
        errors = [line for line in text.splitlines() if line.startswith("error:")]
        error = errors[-1] if errors else f"crash (exit code {code}): {last_line(text)}"
    measured = {"seconds": round(seconds, 1), "gigabytes": round(memory, 2)}
    return {"error": error, "code": code, **measured, "text": text}


def times(stranger: Stranger, out: Path, kinds: Sequence[str]) -> dict[str, float | None]:
    """CPU seconds of a plain export and build and of ``--quick``; None for one that failed.

    ``plain memory`` is the plain one's memory in GiB, as in `Ended`.
    """
    own = [sys.executable, "-W", "ignore", __file__, "--step", "plain", stranger.name]
    quick = [*command(stranger, out / "artifacts" / f"{stranger.name}-quick"), "--quick", "--force"]
    found: dict[str, float | None] = {}
    for name, words in (("plain", [*own, "--out", str(out)]), ("quick", quick)):
        if name not in kinds:
            continue
        code, _, seconds, memory = run(words, LIMITS["plain"])
        found[name] = round(seconds, 1) if code == 0 else None
        if name == "plain":
            found["plain memory"] = round(memory, 2) if code == 0 else None
    return found


def verdict(result: dict[str, Any]) -> str:
    """One word for a model."""
    if "failed" in result["truth"]:
        return "not tried"
    if error := result["convert"]["error"]:
        return "crash" if error.startswith(("crash", "not finished")) else "refused"
    found = result["check"]
    if "failed" in found:
        return "wrong"
    faults = {
        "wrong": found["wrong"],
        "lost rule": found["lost"],
        "narrowed": found["missing"] and not found["best"],
        "too little compared": len(found["compared"]) < 4,
        BEST: found["missing"],
    }
    return next((word for word, fault in faults.items() if fault), RIGHT)


def why(result: dict[str, Any]) -> str:
    """The reason for a verdict other than `RIGHT`."""
    if result["verdict"] == RIGHT:
        return ""
    if failed := result["truth"].get("failed") or result["check"].get("failed"):
        return str(failed)
    if result["convert"]["error"]:
        text = str(result["convert"]["error"])
        return re.sub(r"\S*/site-packages/", "", text).removeprefix("error: ")
    found = result["check"]
    if found["lost"]:
        return f"allowed, but refused by the model: {found['lost'][0]}; {found['wrong']}"
    if found["missing"]:
        return f"not allowed: {found['missing'][0]} ({found['kept'][0]} of {found['kept'][1]} are)"
    return str(found["wrong"])


def one(stranger: Stranger, out: Path, fresh: bool, timed: Sequence[str]) -> dict[str, Any]:
    """All steps of one model. The result is stored in a JSON file."""
    place = out / f"{stranger.name}.json"
    if place.is_file() and not fresh:
        kept: dict[str, Any] = json.loads(place.read_text())
        return kept
    result: dict[str, Any] = {"truth": step("truth", stranger, out, fresh=False), "check": {}}
    if "failed" not in result["truth"]:
        result["convert"] = convert(stranger, out)
        if timed:
            result["times"] = times(stranger, out, timed)
        if not result["convert"]["error"]:
            result["check"] = step("check", stranger, out, fresh=True)
    result["verdict"] = verdict(result)
    place.write_text(json.dumps(result, indent=1))
    return result


def table(results: dict[str, dict[str, Any]]) -> str:
    """The results as Markdown."""
    by_name = {s.name: s for s in STRANGERS}
    counts = Counter(r["verdict"] for r in results.values())
    lines = [
        f"{counts[RIGHT]} of {len(results)} right"
        + "".join(f", {n} {word}" for word, n in counts.items() if word != RIGHT)
        + ".",
        "",
        "| model | asked | it takes | the artifact allows | result | error | CPU s | x plain | "
        "quick x plain | memory x plain |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    ratios: dict[str, list[float]] = {"Whole": [], "Quick": [], "Memory": []}
    for name, result in results.items():
        s, found = by_name[name], result["check"]
        cells = [
            f"{name} ({s.kind})",
            ", ".join(f"{name} {low}..{high}" for name, low, high in s.dims),
            result["truth"].get("rule", ""),
            found.get("allows", ""),
            ": ".join(filter(None, (result["verdict"], why(result)))),
            f"{found['worst']:.0e}" if "worst" in found else "",
            f"{result['convert']['seconds']:.0f}" if "convert" in result else "",
            *(_ratio(result, which, ratios[which]) for which in ratios),
        ]
        lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    lines += [
        f"\n{what}: {median(every):.1f} times that of a plain export and build (median of "
        f"{len(every)}; {min(every):.1f} to {max(every):.1f})."
        for what, every in zip(
            ("CPU time of a conversion", "CPU time with `--quick`", "Peak memory of a conversion"),
            ratios.values(),
            strict=True,
        )
        if every
    ]
    packages = sorted({by_name[name].package for name in results})
    found_versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in packages)
    return "\n".join([*lines, "", f"Packages: {found_versions}."])


def _ratio(result: dict[str, Any], which: str, found: list[float]) -> str:
    """A right conversion's time or memory as a multiple of the plain one's; added to `found`."""
    timed, own = result.get("times", {}), result.get("convert", {})
    part, whole = {
        "Whole": (own.get("seconds"), timed.get("plain")),
        "Quick": (timed.get("quick"), timed.get("plain")),
        "Memory": (own.get("gigabytes"), timed.get("plain memory")),
    }[which]
    if result["verdict"] not in (RIGHT, BEST) or not part or not whole:
        return ""
    found.append(part / whole)
    return f"{found[-1]:.1f}"


def main() -> None:
    """Runs the benchmark, or one step of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--times", nargs="+", choices=("plain", "quick"), default=[])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("bench-results/strangers"))
    parser.add_argument("--requirements", action="store_true")
    parser.add_argument("--step", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.requirements:
        print(*REQUIREMENTS)
        return
    out: Path = options.out.resolve()
    by_name = {s.name: s for s in STRANGERS}
    if options.step:
        from strangers_check import built, check
        from strangers_truth import find_truth

        name, stranger = options.step[0], by_name[options.step[1]]
        if name == "plain":
            from strangers_plain import export_and_build

            print(export_and_build(stranger, built(stranger)))
            return
        if name == "truth":
            found = find_truth(stranger, built(stranger))
        else:
            truth = json.loads((out / "truth" / f"{stranger.name}.json").read_text())
            found = check(stranger, truth, out / "artifacts" / stranger.name, POINTS)
        (out / name / f"{stranger.name}.json").write_text(json.dumps(found))
        return
    chosen = [s for s in STRANGERS if not options.only or s.name in options.only]
    cores: Queue[int] = Queue()
    for core in os.sched_getaffinity(0):
        cores.put(core)

    def on_its_core() -> None:
        worker.core = cores.get()

    def done(stranger: Stranger) -> dict[str, Any]:
        result = one(stranger, out, options.fresh, options.times)
        print(stranger.name, result["verdict"], why(result), file=sys.stderr, flush=True)
        return result

    with ThreadPoolExecutor(cores.qsize(), initializer=on_its_core) as pool:
        results = {s.name: r for s, r in zip(chosen, pool.map(done, chosen), strict=True)}
    text = table(results)
    print(text)
    if options.write:
        example = " ".join(f"'{a}'" if "{" in a else a for a in arguments(by_name["timm_vit_tiny"]))
        DOCS.write_text(f"{HEAD.format(example=example, points=POINTS)}\n{text}\n")


if __name__ == "__main__":
    main()
