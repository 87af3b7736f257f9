"""Converts the same models with two checkouts, and says which facts of the manifests differ.

    python manifests.py convert CHECKOUT OUT [--only NAME ...] [--packages DIR]
    python manifests.py compare OUT_BEFORE OUT_AFTER [--only NAME ...] [--texts]
    python manifests.py list

`convert` runs each case of `CASES` in one process at a time, with the code of CHECKOUT. A case that
has its result in OUT is not run again: delete OUT/NAME to repeat it. Of an artifact it keeps
manifest.json; the ONNX files are replaced by their hashes, everything else is deleted.

`compare` prints one line for each case: `same`, or the paths of the facts that differ. It looks at
`facts` of each manifest, and ignores texts, times, memory peaks, the plan's bytes, and the
pipeline's own hashes. Numbers that stand inside texts are compared as information (--texts).

Both checkouts must run on the same machine, with the same packages and the same environment: this
script sets one thread for each library, one hash seed, and a fixed memory limit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "sources"
STRANGERS = HERE.parent / "strangers"
PYTHON = os.environ.get("PROOF_PYTHON", sys.executable)
PACKAGES = Path(tempfile.gettempdir()) / "strangers-packages"
ONNX_FILES = ("exported.onnx", "model.onnx", "half.onnx")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}
# the default depends on the memory that is free now, and decides which points are left out
LIMIT = ("--memory-limit", "6GiB")


@dataclass(frozen=True)
class Case:
    """One command of the pipeline.

    Args:
        name: of its folder.
        words: after ``pipeline``; ``{src}`` is the folder `SOURCES`.
        covers: why this case is here.
        seconds: limit of CPU time.
        artifact: whether the command writes one.
        then: words of a second command on the artifact, such as ``rewrite``.
    """

    name: str
    words: tuple[str, ...]
    covers: str
    seconds: int = 900
    artifact: bool = True
    then: tuple[str, ...] = ()


def _zoo(name: str, *words: str, seconds: int = 900, covers: str = "zoo") -> Case:
    return Case(name, ("convert", name, *words, *LIMIT), covers, seconds)


def _stranger(  # noqa: PLR0913 - one row of the table below
    name: str, covers: str, *words: str, file: str = "strangers_models", argument: str = "x",
    channels: int = 3, low: int = 64, high: int = 320, as_: str = "", command: str = "convert",
    then: tuple[str, ...] = (),
) -> Case:  # fmt: skip
    """A command as benchmarks/strangers.py gives it."""
    source = f"{STRANGERS / file}.py:{name}"
    dims = ["--dim", "b=1:4", "--dim", f"h={low}:{high}", "--dim", f"w={low}:{high}"]
    image = ["--input", f"{argument}:{{b}}x{channels}x{{h}}x{{w}}"]
    limit = () if command == "export" else LIMIT
    return Case(
        as_ or name, (command, source, *image, *dims, *words, *limit), covers,
        artifact=command != "check", then=then,
    )  # fmt: skip


_MORE = "strangers_more_models"
_SQUARE = (
    "convert", "{src}/small_torch.py:square", "--input", "x:{b}x3x{h}x{w}", "--dim", "b=1:4",
    "--dim", "h=8:64", "--dim", "w=8:64", *LIMIT,
)  # fmt: skip
_EQUAL = (
    "convert", "{src}/equal.onnx", "--dim", "batch=1:4", "--dim", "m=3:20", "--dim", "n=3:20",
    *LIMIT,
)  # fmt: skip
CASES = (
    # made for this: small
    Case("equal_onnx", _EQUAL, "ONNX file; two dims that must be equal"),
    Case("equal_onnx_exact", (*_EQUAL, "--exact-dims"), "ONNX file; refused: dims must be equal"),
    Case(
        "blocks_onnx",
        ("convert", "{src}/blocks.onnx", "--dim", "batch=1:4", "--dim", "n=8:100", *LIMIT),
        "ONNX file; multiples of 8",
    ),
    Case(
        "joined_onnx",
        (
            "convert",
            "{src}/joined.onnx",
            "--dim",
            "p=0:20",
            "--dim",
            "s=1:8",
            "--dim",
            "t=p+s",
            "--range",
            "bits=0..1000",
            *LIMIT,
        ),
        "ONNX file; a dim that is a sum of two; a pass rewrites; integer output",
    ),
    Case("square", _SQUARE, "torch; two dims that must be equal"),
    Case("square_exact", (*_SQUARE, "--exact-dims"), "torch; refused: dims must be equal"),
    Case("square_fails", (*_SQUARE, "--tolerance", "1e-9,1e-9"), "a comparison that fails"),
    Case("square_check", ("check", *_SQUARE[1:], "--json"), "check", artifact=False),
    Case(
        "tail",
        (
            "convert",
            "{src}/small_torch.py:tail",
            "--input",
            "x:{b}x{n}",
            "--dim",
            "b=1:4",
            "--dim",
            "n=5:100",
            *LIMIT,
        ),
        "torch; multiples of 4 with an offset of 1",
    ),
    Case("cell_pt2", ("convert", "{src}/cell.pt2", *LIMIT), ".pt2 program"),
    Case(
        "cell_pt2_trt86",
        ("convert", "{src}/cell.pt2", "--target", "tensorrt-8.6", *LIMIT),
        ".pt2 program; a target that is not installed here",
    ),
    # the zoo
    _zoo("linear"),
    _zoo("llama"),
    _zoo("unet_sr"),
    _zoo("vit"),
    _zoo("vit_any_size"),
    _zoo("raft_small"),
    # ten strangers
    _stranger("spandrel_compact", "any size; a rewrite", file=_MORE, low=24, high=160),
    _stranger("hf_detr", "any size; two outputs", file=_MORE, argument="pixel_values"),
    _stranger("timm_vit_tiny", "multiples of 16"),
    _stranger("timm_hrnet_w18_small", "rules: (h + 3) % 32 < 4"),
    _stranger("smp_pspnet", "multiples of 8"),
    _stranger("smp_pan", "multiples of 16, a smaller range"),
    _stranger("monai_basic_unet", "multiples of 16", channels=1),
    _stranger("timm_swin_tiny", "refused: another branch at other sizes"),
    _stranger("monai_flexible_unet", "refused: torch.export fails", argument="inputs"),
    _stranger("ultralytics_yolov8n", "refused: no tolerance can be measured", file=_MORE),
    # other targets and precisions
    _stranger(
        "spandrel_compact",
        "fp16",
        "--precision",
        "fp16",
        file=_MORE,
        low=24,
        high=160,
        as_="spandrel_compact_fp16",
    ),
    _stranger(
        "timm_vit_tiny",
        "rewritten for TensorRT 8.6; check",
        "--target",
        "tensorrt-8.6",
        "--json",
        as_="timm_vit_tiny_check86",
        command="check",
    ),
    _stranger(
        "spandrel_compact",
        "export, then rewrite for TensorRT 8.6",
        file=_MORE,
        low=24,
        high=160,
        as_="spandrel_compact_rewrite86",
        command="export",
        then=("rewrite", "{out}", "--target", "tensorrt-8.6"),
    ),
    _stranger(
        "hf_detr",
        "export, then rewrite for TensorRT 8.6",
        file=_MORE,
        argument="pixel_values",
        as_="hf_detr_rewrite86",
        command="export",
        then=("rewrite", "{out}", "--target", "tensorrt-8.6"),
    ),
    Case(
        "linear_fp16",
        ("convert", "linear", "--precision", "fp16", *LIMIT),
        "fp16 that stays within its tolerance: half.onnx",
    ),
    # the largest last
    _zoo("raft", seconds=2400),
)


# ---------------------------------------------------------------- convert


def convert(checkout: Path, out: Path, only: list[str], packages: Path) -> None:
    """Every case that has no result yet."""
    out.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        if only and case.name not in only:
            continue
        place = out / case.name
        if (place / "run.json").is_file():
            print(f"{case.name}: done before", flush=True)
            continue
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        result = run(case, checkout, place, packages)
        (place / "run.json").write_text(json.dumps(result, indent=1) + "\n")
        print(
            f"{case.name}: exit code {result['code']} {result['error']}, "
            f"{result['cpu_seconds']:.0f} s of CPU time",
            flush=True,
        )


def run(case: Case, checkout: Path, place: Path, packages: Path) -> dict[str, Any]:
    """One conversion; leaves stdout.txt, stderr.txt, manifest.json and texts in `place`."""
    artifact = place / "artifact"
    words = [word.replace("{src}", str(SOURCES)) for word in case.words]
    pipeline = [PYTHON, "-W", "ignore", "-m", "pipeline"]
    command = [*pipeline, *words, "--debug"]
    command += ["--out", str(artifact)] if case.artifact else []
    script = f'ulimit -t {case.seconds}; "$@"'
    if case.then:
        second = [*pipeline, *(w.replace("{out}", str(artifact)) for w in case.then), "--debug"]
        script += f" && {shlex.join(second)}"
    path = f"{checkout}:{SOURCES}:{STRANGERS}:{packages}"
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with (
        (place / "stdout.txt").open("w") as output,
        (place / "stderr.txt").open("w") as errors,
        subprocess.Popen(
            ["nice", "-n", "15", "bash", "-c", script, "bash", *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            cwd=checkout,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
            start_new_session=True,
        ) as child,
    ):
        try:
            code: int | None = child.wait(timeout=case.seconds * 4)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            code = None
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    kind, line = refusal((place / "stderr.txt").read_text())
    result: dict[str, Any] = {
        "name": case.name,
        "covers": case.covers,
        "command": command[command.index("-m") + 1 :],
        "checkout": str(checkout),
        "commit": git(checkout),
        "code": code,
        "error": kind,
        "error_line": line,
        "cpu_seconds": round(seconds, 1),
        "wall_seconds": round(time.monotonic() - start, 1),
        "onnx": {},
    }
    if (artifact / "manifest.json").is_file():
        shutil.copy(artifact / "manifest.json", place / "manifest.json")
        result["onnx"] = hashes(artifact)
    shutil.rmtree(artifact, ignore_errors=True)
    return result


def refusal(text: str) -> tuple[str, str]:
    """The class of the error that ended the command, and its line; "" where there is none."""
    named = re.findall(r"^(?:[a-z_][\w.]*\.)?([A-Z]\w+): ", text, re.MULTILINE)
    lines = re.findall(r"^error: .*", text, re.MULTILINE)
    return (named[-1] if lines and named else ""), (lines[-1] if lines else "")


def git(checkout: Path) -> str:
    words = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


_STRUCTURE = r"""
import hashlib, json, sys
import onnx
def bare(message):
    for field, value in message.ListFields():
        if field.type != field.TYPE_MESSAGE:
            continue
        for one in (value if field.is_repeated else (value,)):
            bare(one)
    for name in ("metadata_props", "doc_string"):
        if name in message.DESCRIPTOR.fields_by_name:
            message.ClearField(name)
for path in sys.argv[1:]:
    model = onnx.load(path)  # with its weights, wherever they lie
    for tensor in model.graph.initializer:
        del tensor.external_data[:]
        tensor.ClearField("data_location")
    bare(model)
    nodes = [[n.op_type, n.domain, len(n.input), len(n.output)] for n in model.graph.node]
    print(json.dumps({
        "structure": hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest(),
        "nodes": len(nodes),
    }))
"""


def hashes(artifact: Path) -> dict[str, dict[str, Any]]:
    """Of each ONNX file: sha256 of its bytes, of its bytes without traces, and without metadata.

    torch.onnx writes into each node's metadata the classes and source lines that it came from:
    paths and lines of the checkout, so `sha256` differs between two folders of the same commit.
    `structure` is the hash of the model with its weights but without metadata and doc strings.
    """
    found = [name for name in ONNX_FILES if (artifact / name).is_file()]
    if not found:
        return {}
    words = [PYTHON, "-W", "ignore", "-c", _STRUCTURE, *(str(artifact / name) for name in found)]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    rows = [json.loads(line) for line in printed.splitlines()]
    return {
        name: {"sha256": hashlib.sha256((artifact / name).read_bytes()).hexdigest(), **row}
        for name, row in zip(found, rows, strict=True)
    }


# ---------------------------------------------------------------- facts

TEXT_KEYS = (
    "why", "reason", "notes", "detail", "refinements", "dynamic", "evidence", "warnings",
    "engine_compared_why", "text", "validity", "timing_cache", "problems", "findings", "where",
    "do", "what",
)  # fmt: skip


def facts(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What a manifest states, without texts, times and hashes of the pipeline, in one form for
    all schemas. A key that is missing is an error, so that no fact is lost in silence."""
    return _facts(view(manifest))


def view(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """The manifest in the form of schema 4."""
    schema = manifest["schema"]
    if schema not in _VIEWS:
        raise SystemExit(f"no view of schema {schema} yet: add one to _VIEWS in {__file__}")
    return _VIEWS[schema](manifest)


def _schema_4(m: Mapping[str, Any]) -> Mapping[str, Any]:
    """The sizes at which a dim ran stood in a text of schema 4."""
    export = m["export"]
    if export is None:
        return m
    dynamic = {
        name: {
            "where": text,
            "ran_at": [*map(int, re.findall(r"\d+", text.partition("ran at ")[2]))],
        }
        for name, text in export["dynamic"].items()
    }
    return {**m, "export": {**export, "dynamic": dynamic}}


# what makes a check of schema 5 a good one; schema 4 had `passed` only
_GOOD_CHECKS = (
    "bit-identical", "within-tolerance", "all-written", "rows-independent", "rows-as-in-model",
)  # fmt: skip


def _schema_5(m: Mapping[str, Any]) -> Mapping[str, Any]:
    """Schema 5 in the form of schema 4: the interface at the top, kinds as `passed`."""
    flat = {**{k: v for k, v in m.items() if k != "interface"}, **m["interface"]}
    if comparison := m["comparison"]:
        points = [
            {
                **point,
                "compared": point["left_out"] is None,
                "results": [
                    {**r, "passed": r["kind"] in ("agrees", "near-zero")} for r in point["results"]
                ],
            }
            for point in comparison["points"]
        ]
        checks = [{**k, "passed": k["kind"] in _GOOD_CHECKS} for k in comparison["checks"]]
        flat["comparison"] = {**comparison, "points": points, "checks": checks}
    return flat


# schema 6 adds fields only
_VIEWS: dict[int, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = {
    4: _schema_4,
    5: _schema_5,
    6: _schema_5,
}


def _facts(m: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": m["name"],
        "model": _pick(m["model"], "source options weights libraries inputs dims ranges"),
        "dims": {
            d["name"]: _pick(d, "min opt max multiple_of offset defaulted") for d in m["dims"]
        },
        "inputs": [_pick(i, "name dtype shape low high") for i in m["inputs"]],
        "outputs": [
            {**_pick(o, "name dtype shape"), "tolerance": _tolerance(o["tolerance"])}
            for o in m["outputs"]
        ],
        "reference": m["reference"],
        "rules": m["rules"],
        "padding": m["padding"] and _pick(m["padding"], "multiples mode align"),
        "tolerance": _tolerance(m["tolerance"]),
        "engine_tolerance": {k: _tolerance(t) for k, t in m["engine_tolerance"].items()},
        "target": _pick(m["target"], "name flavour version compute_capabilities"),
        "precision": m["precision"],
        "profiles": {p["name"]: p["ranges"] for p in m["profiles"]},
        "export": m["export"] and _export(m["export"]),
        "rewrite": m["rewrite"] and _rewrite(m["rewrite"]),
        "build": m["build"] and _build(m["build"]),
        "comparison": m["comparison"] and _comparison(m["comparison"]),
        "engine_compared": m["engine_compared"],
        "engine_gpu": m["engine_gpu"],
        "stages": [s["name"] for s in m["stages"]],
        "versions": m["versions"],
        "keys": sorted(m["keys"]),
        "files": sorted(m["files"]),
        # raw results of the runs, as Polygraphy wrote them
        "results": {
            k: v["sha256"] for k, v in m["files"].items() if k.startswith("comparison/")
        },
    }  # fmt: skip


def _tolerance(t: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return t and _pick(t, "rtol atol differing")


def _export(e: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_pick(e, "opset exporter"),
        "refinements": len(e["refinements"]),
        "dynamic": {name: how["ran_at"] for name, how in sorted(e["dynamic"].items())},
        "notes": len(e["notes"]),
    }


def _rewrite(r: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "passes": [
            {
                **_pick(p, "name needed skipped"),
                "rewritten": [_pick(n, "node op") for n in p["rewritten"]],
                "refused": [_pick(n, "node op") for n in p["refused"]],
            }
            for p in r["passes"]
        ],
        "warnings": len(r["warnings"]),
        **_pick(r, "nodes_before nodes_after"),
    }


def _build(b: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_pick(b, "layers plugins optimization_level gpu plugin_hashes"),
        "warnings": len(b["warnings"]),
    }


def _comparison(c: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_pick(c, "memory_limit_bytes passed"),
        "points": [
            {
                **_pick(p, "label sizes compared estimate_bytes"),
                "results": [
                    _pick(r, "pair output max_abs max_rel passed") for r in p["results"]
                ],
            }
            for p in c["points"]
        ],
        "notes": len(c["notes"]),
        "checks": [_pick(k, "name run sizes passed") for k in c["checks"]],
    }  # fmt: skip


def _pick(content: Mapping[str, Any], names: str) -> dict[str, Any]:
    return {name: content[name] for name in names.split()}


# counts of texts: a rewritten message may be two, or none: printed as information
_COUNTS = re.compile(r"(?:export\.(?:refinements|notes)|\.warnings|comparison\.notes)\Z")
# lists of files differ by what an artifact is made of, not by what was converted
_LAYOUT = re.compile(r"files(?:\[|\Z)|keys(?:\[|\Z)|stages(?:\[|\Z)")


def check_facts(text: str) -> Any:
    """`check --json` without its sentences: how many findings of which section block, by dim."""
    try:
        report = json.loads(text)
    except ValueError:
        return "no JSON"
    found = [
        json.dumps({k: f.get(k) for k in ("section", "blocks", "dim")}, sort_keys=True)
        for f in report.get("findings", ())
    ]
    return {
        **{k: report.get(k) for k in ("ok", "name", "target")},
        "findings": dict(sorted(Counter(found).items())),
    }


# ---------------------------------------------------------------- compare


def differences(a: Any, b: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Paths at which two JSON values differ, and how. Floats have to be equal to the last bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(k for k in b if k not in a)]:
            here = f"{path}.{key}" if path else str(key)
            if key not in a or key not in b:
                yield (
                    here,
                    f"only {'before' if key in a else 'after'}: {_short(a.get(key, b.get(key)))}",
                )
            else:
                yield from differences(a[key], b[key], here)
    elif isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b):
            yield path, f"{len(a)} before, {len(b)} after"
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            yield from differences(x, y, f"{path}[{i}]")
    elif type(a) is not type(b) or a != b:
        yield path, f"{_short(a)} -> {_short(b)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])", re.IGNORECASE)


def text_numbers(manifest: Mapping[str, Any]) -> dict[str, Counter[str]]:
    """The numbers that stand in texts, by the section of schema 4."""
    manifest = view(manifest)
    found: dict[str, Counter[str]] = {}

    def visit(value: Any, section: str, text: bool) -> None:
        if isinstance(value, str) and text:
            found.setdefault(section, Counter()).update(_NUMBER.findall(value))
        elif isinstance(value, Mapping):
            whole = text and isinstance(value.get("text"), str)  # an object that has its own text
            for key, inner in value.items():
                if not whole or key == "text":
                    visit(inner, section or key, text or key in TEXT_KEYS)
        elif isinstance(value, list):
            for inner in value:
                visit(inner, section, text)

    for key, value in manifest.items():
        visit(value, key, key in TEXT_KEYS)
    return found


def compare(before: Path, after: Path, only: list[str], texts: bool) -> int:
    """Prints the comparison; 1 if a fact of any case differs."""
    wrong = done = missing = 0
    for case in CASES:
        if only and case.name not in only:
            continue
        runs = [load(folder / case.name) for folder in (before, after)]
        if None in runs:
            missing += 1
            print(f"{case.name}: not run {'before' if runs[0] is None else 'after'}")
            continue
        done += 1
        facts_, notes = one(runs[0] or {}, runs[1] or {})
        wrong += bool(facts_)
        code, *seconds = (runs[0]["code"], *(run["cpu_seconds"] for run in runs))  # type: ignore[index]
        print(
            f"{case.name}: {'DIFFERS' if facts_ else 'same'} (exit code {code}, "
            f"{seconds[0]:.0f} and {seconds[1]:.0f} s of CPU time)"
        )
        for path, how in facts_:
            print(f"    {path}: {how}")
        for note in notes if texts else ():
            print(f"    info: {note}")
    print(f"\n{done - wrong} of {done} the same, {wrong} differ, {missing} not run on both sides")
    return 1 if wrong or missing else 0


def load(place: Path) -> dict[str, Any] | None:
    if not (place / "run.json").is_file():
        return None
    result: dict[str, Any] = json.loads((place / "run.json").read_text())
    result["stdout"] = (place / "stdout.txt").read_text()
    manifest = place / "manifest.json"
    result["manifest"] = json.loads(manifest.read_text()) if manifest.is_file() else None
    return result


def one(a: dict[str, Any], b: dict[str, Any]) -> tuple[list[tuple[str, str]], list[str]]:
    """Facts that differ, and what is printed as information."""
    found: list[tuple[str, str]] = []
    notes: list[str] = []
    for key in ("command", "code", "error"):
        x, y = a[key], b[key]
        if key == "command":  # the artifact's folder
            x, y = x[: x.index("--debug")], y[: y.index("--debug")]
        found += differences(x, y, key)
    if a["error_line"] != b["error_line"]:
        notes.append(f"error before: {a['error_line']}")
        notes.append(f"error after:  {b['error_line']}")
        x, y = (Counter(_NUMBER.findall(side["error_line"])) for side in (a, b))
        if x != y:
            notes.append(f"numbers in the error: lost {[*(x - y)]}, new {[*(y - x)]}")
    for name in sorted({*a["onnx"], *b["onnx"]}):
        x, y = a["onnx"].get(name, {}), b["onnx"].get(name, {})
        found += differences(x.get("structure"), y.get("structure"), f"{name} without metadata")
        if x.get("sha256") != y.get("sha256"):
            notes.append(f"{name}: other bytes (the source lines in its metadata)")
    if a["command"][1] == "check" and "--json" in a["command"]:
        found += differences(check_facts(a["stdout"]), check_facts(b["stdout"]), "report")
    if (a["manifest"] is None) != (b["manifest"] is None):
        found.append(("manifest", "only one side has an artifact"))
    elif a["manifest"]:
        more = manifests(a["manifest"], b["manifest"])
        found, notes = found + more[0], notes + more[1]
    return found, notes


def manifests(
    a: Mapping[str, Any], b: Mapping[str, Any]
) -> tuple[list[tuple[str, str]], list[str]]:
    """The same of two manifests alone."""
    found: list[tuple[str, str]] = []
    notes: list[str] = []
    for path, how in differences(facts(a), facts(b)):
        if _COUNTS.search(path) or _LAYOUT.match(path):
            notes.append(f"{path}: {how}")
        else:
            found.append((path, how))
    x, y = text_numbers(a), text_numbers(b)
    for section in sorted({*x, *y}):
        lost = x.get(section, Counter()) - y.get(section, Counter())
        new = y.get(section, Counter()) - x.get(section, Counter())
        both = {"lost": lost, "new": new}
        if words := [f"{k} {' '.join(v.elements())}" for k, v in both.items() if v]:
            notes.append(f"numbers in texts of {section}: {'; '.join(words)}")
    return found, notes


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    sub = commands.add_parser("convert")
    sub.add_argument("checkout", type=Path)
    sub.add_argument("out", type=Path)
    sub.add_argument("--packages", type=Path, default=PACKAGES)
    sub.add_argument("--only", nargs="*", default=[])
    sub = commands.add_parser("compare")
    sub.add_argument("before", type=Path)
    sub.add_argument("after", type=Path)
    sub.add_argument("--only", nargs="*", default=[])
    sub.add_argument("--texts", action="store_true")
    commands.add_parser("list")
    options = parser.parse_args()
    if options.command == "list":
        for case in CASES:
            print(f"{case.name:24} {case.covers}\n    pipeline {' '.join(case.words)}")
        return 0
    if options.command == "convert":
        convert(options.checkout.resolve(), options.out.resolve(), options.only, options.packages)
        return 0
    return compare(options.before, options.after, options.only, options.texts)


if __name__ == "__main__":
    sys.exit(main())
