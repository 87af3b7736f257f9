"""Compares a stranger's artifact with the model: its sizes and its numbers."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import onnxruntime
from strangers_set import Stranger, module_of
from strangers_truth import (
    Point,
    Sizes,
    best_dim,
    chosen,
    computed,
    feed,
    leaves,
    probes,
    shape_of,
)
from strangers_truth import run as run_module

from pipeline.source.factory import mended

SCALE = 1e-3  # a part of an output's largest value; a larger difference is wrong


def built(stranger: Stranger) -> Any:
    """The model."""
    return mended(getattr(importlib.import_module(module_of(stranger)), stranger.name))


def legal_by(stranger: Stranger, interface: dict[str, Any], sizes: Sizes) -> bool:
    """True if the artifact allows these sizes. Reads its manifest, without the pipeline."""
    asked = [shape for text in stranger.inputs for shape in [shape_of(text.split(":")[1], sizes)]]
    declared = [i["shape"] for i in interface["inputs"]]
    if len(asked) != len(declared):  # a cache has one input for each part, all of one shape
        asked = asked[:-1] + [asked[-1]] * (len(declared) - len(asked) + 1)
    for mine, theirs in zip(asked, declared, strict=True):
        if mine != [n if isinstance(n, int) else computed(n, sizes) for n in theirs]:
            return False
    if not all(_in_dim(dim, sizes[dim["name"]]) for dim in interface["dims"]):
        return False
    return all(eval(rule, {"__builtins__": {}}, sizes) for rule in interface["rules"])


def check(stranger: Stranger, truth: dict[str, Any], artifact: Path, most: int) -> dict[str, Any]:
    """Compares the artifact's sizes and numbers with the model's."""
    interface = json.loads((artifact / "manifest.json").read_text())["interface"]
    points = {tuple(sizes): ok for *sizes, ok in truth["points"]}
    names = [name for name, *_ in stranger.dims]

    def by_name(point: Point) -> Sizes:
        return dict(zip(names, point, strict=True))

    allowed = {p for p in points if legal_by(stranger, interface, by_name(p))}
    takes = {p for p, ok in points.items() if ok}
    result: dict[str, Any] = {
        "allows": allows(stranger, interface),
        "lost": sorted(allowed - takes)[:5],
        "missing": sorted(takes - allowed)[:5],
        "kept": [len(takes & allowed), len(takes)],
        "best": all(
            _is_best(interface, dim, truth["axes"][dim[0]])
            for dim in stranger.dims
            if dim[0] != "b"
        ),
    }
    module = built(stranger)
    session = onnxruntime.InferenceSession(
        str(artifact / "model.onnx"), providers=["CPUExecutionProvider"]
    )
    inputs = [i.name for i in session.get_inputs()]
    worst, wrong, done = 0.0, "", []
    for point in chosen(stranger, list(points), lambda p: p in allowed and p in takes, most):
        arguments = feed(stranger, by_name(point), seed=1)
        want = [t.numpy() for t in run_module(module, arguments)]
        try:
            values = (t.numpy() for t in leaves(arguments))
            got = session.run(None, dict(zip(inputs, values, strict=True)))
        except Exception as error:
            wrong = (
                wrong
                or f"at {point}: ONNX Runtime fails: {str(error).strip().splitlines()[-1][:200]}"
            )
            continue
        done.append(point)
        if [w.shape for w in want] != [g.shape for g in got]:
            shapes = f"{[g.shape for g in got]} instead of {[w.shape for w in want]}"
            wrong = wrong or f"at {point}: shapes {shapes}"
            continue
        for number, (w, g) in enumerate(zip(want, got, strict=True)):
            if not w.size:
                continue
            off = float(abs(w.astype(float) - g).max() / max(abs(w).max(), 1e-30))
            worst = max(worst, off)
            if not off <= SCALE:
                wrong = wrong or f"at {point}: output {number} is off by {off:.2g} of its scale"
    return {**result, "worst": worst, "wrong": wrong, "compared": done}


def _is_best(interface: dict[str, Any], asked: tuple[str, int, int], good: list[int]) -> bool:
    """True if no dim could allow more of the sizes that the model takes on an axis."""
    name, low, high = asked
    dim = next((d for d in interface["dims"] if d["name"] == name), None)
    mine = [n for n in good if dim is not None and _in_dim(dim, n)]
    return max(len(mine), 1) >= len(best_dim(good, probes(low, high)))


def _in_dim(dim: dict[str, Any], size: int) -> bool:
    fits = (size - dim["offset"]) % dim["multiple_of"] == 0
    return bool(dim["min"] <= size <= dim["max"] and fits)


def allows(stranger: Stranger, interface: dict[str, Any]) -> str:
    """The sizes that an artifact allows, as text."""
    free = {dim["name"] for dim in interface["dims"]}
    parts = [f"{name} fixed or equal to another" for name, *_ in stranger.dims if name not in free]
    for dim in interface["dims"]:
        text = f"{dim['name']} {dim['min']}..{dim['max']}"
        if dim["multiple_of"] > 1:
            text += f" by {dim['multiple_of']}" + (
                f" plus {dim['offset']}" if dim["offset"] else ""
            )
        parts.append(text)
    return ", ".join([*parts, *interface["rules"]])
