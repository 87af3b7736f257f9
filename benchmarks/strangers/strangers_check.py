"""Compares a stranger's artifact with the model: its sizes and its numbers."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import onnxruntime
from strangers_set import Stranger, module_of
from strangers_truth import best_dim, chosen, image, probes
from strangers_truth import run as run_module

from pipeline.source.factory import mended

SCALE = 1e-3  # a part of an output's largest value; a larger difference is wrong


def built(stranger: Stranger) -> Any:
    """The model."""
    return mended(getattr(importlib.import_module(module_of(stranger)), stranger.name))


def legal_by(interface: dict[str, Any], point: tuple[int, int, int]) -> bool:
    """True if the artifact allows these sizes. Reads its manifest, without the pipeline."""
    sizes = dict(zip("bhw", point, strict=True))
    (shape,) = (i["shape"] for i in interface["inputs"])
    for name, declared in zip("bchw", shape, strict=True):
        if isinstance(declared, int) and name in sizes and declared != sizes[name]:
            return False
    for dim in interface["dims"]:
        if not _in_dim(dim, sizes[dim["name"]]):
            return False
    return all(eval(rule, {"__builtins__": {}}, sizes) for rule in interface["rules"])


def check(stranger: Stranger, truth: dict[str, Any], artifact: Path, most: int) -> dict[str, Any]:
    """Compares the artifact's sizes and numbers with the model's."""
    interface = json.loads((artifact / "manifest.json").read_text())["interface"]
    points = {(b, h, w): ok for b, h, w, ok in truth["points"]}
    allowed = {p for p in points if legal_by(interface, p)}
    takes = {p for p, ok in points.items() if ok}
    result: dict[str, Any] = {
        "allows": allows(interface),
        "lost": sorted(allowed - takes)[:5],
        "missing": sorted(takes - allowed)[:5],
        "kept": [len(takes & allowed), len(takes)],
        "best": all(_is_best(interface, axis, truth, probes(stranger)) for axis in (2, 3)),
    }
    module = built(stranger)
    session = onnxruntime.InferenceSession(
        str(artifact / "model.onnx"), providers=["CPUExecutionProvider"]
    )
    (name,) = (i.name for i in session.get_inputs())
    worst, wrong, done = 0.0, "", []
    for point in chosen(list(points), lambda p: p in allowed and p in takes, most):
        x = image(stranger, point, seed=1)
        want = [t.numpy() for t in run_module(module, x)]
        try:
            got = session.run(None, {name: x.numpy()})
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
            off = float(abs(w.astype(float) - g).max() / max(abs(w).max(), 1e-30))
            worst = max(worst, off)
            if not off <= SCALE:
                wrong = wrong or f"at {point}: output {number} is off by {off:.2g} of its scale"
    return {**result, "worst": worst, "wrong": wrong, "compared": done}


def _is_best(interface: dict[str, Any], axis: int, truth: dict[str, Any], tried: list[int]) -> bool:
    """True if no dim could allow more of the sizes that the model takes on an axis."""
    good = truth["height" if axis == 2 else "width"]
    size = interface["inputs"][0]["shape"][axis]
    dim = next((d for d in interface["dims"] if d["name"] == size), None)
    mine = [n for n in good if n == size or (dim is not None and _in_dim(dim, n))]
    return len(mine) >= len(best_dim(good, tried))


def _in_dim(dim: dict[str, Any], size: int) -> bool:
    fits = (size - dim["offset"]) % dim["multiple_of"] == 0
    return bool(dim["min"] <= size <= dim["max"] and fits)


def allows(interface: dict[str, Any]) -> str:
    """The sizes that an artifact allows, as text."""
    parts = []
    shape = interface["inputs"][0]["shape"]
    fixed = {n: s for n, s in zip("bchw", shape, strict=True) if isinstance(s, int) and n != "c"}
    for name, size in fixed.items():
        parts.append(f"{name}={size}")
    for dim in interface["dims"]:
        text = f"{dim['name']} {dim['min']}..{dim['max']}"
        if dim["multiple_of"] > 1:
            text += f" by {dim['multiple_of']}" + (
                f" plus {dim['offset']}" if dim["offset"] else ""
            )
        parts.append(text)
    return ", ".join([*parts, *interface["rules"]])
