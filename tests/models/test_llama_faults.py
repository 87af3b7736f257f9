"""Faults planted in Llama's graph. The comparison and the generation must notice them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from llama_model import (
    CHUNK,
    PREFILL,
    PROMPTS,
    made,
    onnx_tokens,
    reference,
    session_of,
    transformers_tokens,
)
from onnx import TensorProto, helper, numpy_helper

from pipeline.artifact.artifact import Artifact
from pipeline.compare.run_names import TORCH
from pipeline.compare.verdict import judge
from pipeline.graph.session import run_onnx

pytestmark = pytest.mark.slow

AUTO = torch.export.Dim.AUTO


@pytest.fixture(scope="module")
def artifact(zoo_artifact: Callable[[str], Artifact]) -> Artifact:
    """The artifact of `pipeline convert llama`."""
    return zoo_artifact("llama")


def nodes(model: onnx.ModelProto, op: str) -> list[onnx.NodeProto]:
    found = [node for node in model.graph.node if node.op_type == op]
    assert found, op
    return found


def maker(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if name in node.output)


def constant(model: onnx.ModelProto, name: str, value: np.ndarray) -> str:
    model.graph.initializer.append(numpy_helper.from_array(value, name))
    return name


def mask_leaves_out_the_diagonal(model: onnx.ModelProto) -> None:
    (node,) = nodes(model, "LessOrEqual")
    node.op_type = "Less"


def mask_shows_one_token_ahead(model: onnx.ModelProto) -> None:
    (node,) = nodes(model, "LessOrEqual")
    one = constant(model, "one", np.array(1, np.int64))
    at = list(model.graph.node).index(node)
    model.graph.node.insert(at, helper.make_node("Sub", [node.input[0], one], ["ahead"]))
    model.graph.node[at + 1].input[0] = "ahead"


def mask_forgets_the_cache(model: onnx.ModelProto) -> None:
    """sdpa's is_causal does this if the numbers of queries and keys differ."""
    ranges = {node.output[0] for node in nodes(model, "Range")}
    (node,) = [node for node in nodes(model, "Add") if set(node.input) & ranges]
    past = next(name for name in node.input if name not in ranges)
    node.input[list(node.input).index(past)] = constant(model, "zero", np.array(0, np.int64))


def padding_is_shown(model: onnx.ModelProto) -> None:
    node = next(node for node in nodes(model, "Cast") if node.input[0] == "attention_mask")
    node.input[0] = "all"
    shape = helper.make_node("Shape", ["attention_mask"], ["all_shape"])
    one = helper.make_tensor("value", TensorProto.INT64, [1], [1])
    fill = helper.make_node("ConstantOfShape", ["all_shape"], ["all"], value=one)
    model.graph.node.insert(0, fill)
    model.graph.node.insert(0, shape)


def tokens_without_keys_see_the_mean(model: onnx.ModelProto) -> None:
    """torch's exporter does this."""
    greater = {node.output[0] for node in nodes(model, "Greater")}
    chosen = [node for node in nodes(model, "Where") if node.input[0] in greater]
    assert len(chosen) == 2
    for node in chosen:
        node.op_type = "Identity"
        node.input[:] = [node.input[1]]


def positions_are_off_by_one(model: onnx.ModelProto) -> None:
    users = [n for n in model.graph.node if "position_ids" in n.input and n.op_type != "Shape"]
    for node in users:
        node.input[list(node.input).index("position_ids")] = "moved"
    one = constant(model, "one", np.array(1, np.int64))
    model.graph.node.insert(0, helper.make_node("Add", ["position_ids", one], ["moved"]))


def cache_stands_behind(model: onnx.ModelProto) -> None:
    for name in ("present_0_key", "present_0_value"):
        node = maker(model, name)
        assert node.op_type == "Concat" and node.input[0].startswith("past_0")
        node.input[:] = [node.input[1], node.input[0]]


def caches_are_swapped(model: onnx.ModelProto, one: str, other: str) -> None:
    first, second = (maker(model, name.replace("past", "present")) for name in (one, other))
    first.input[0], second.input[0] = other, one


def heads_are_tiled(model: onnx.ModelProto) -> None:
    """Keys of heads 0, 1, 0, 1 in place of 0, 0, 1, 1."""
    users = [n for n in nodes(model, "Unsqueeze") if n.input[0] in ("present_0_key",)]
    (node,) = users
    node.input[1] = constant(model, "tiled", np.array([1], np.int64))


def one_epsilon_is_another(model: onnx.ModelProto) -> None:
    norm = next(n for n in nodes(model, "ReduceMean"))
    node = next(n for n in nodes(model, "Add") if norm.output[0] in n.input)
    node.input[1] = constant(model, "epsilon", np.array(2e-6, np.float32))


FAULTS: dict[str, Callable[[onnx.ModelProto], None]] = {
    "a token does not see itself": mask_leaves_out_the_diagonal,
    "a token sees the next one": mask_shows_one_token_ahead,
    "the causal mask forgets the cache": mask_forgets_the_cache,
    "padding is shown": padding_is_shown,
    "tokens without keys see the mean": tokens_without_keys_see_the_mean,
    "positions are off by one": positions_are_off_by_one,
    "the cache stands behind the new keys": cache_stands_behind,
    "keys and values are swapped": lambda m: caches_are_swapped(m, "past_0_key", "past_0_value"),
    "the layers' keys are swapped": lambda m: caches_are_swapped(m, "past_0_key", "past_1_key"),
    "heads are tiled": heads_are_tiled,
    "one epsilon of 2e-6 instead of 1e-6": one_epsilon_is_another,
}


def plant(artifact: Artifact, fault: str, path: Path) -> Path:
    model = onnx.load(artifact.model)
    FAULTS[fault](model)
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(artifact: Artifact, fault: str, tmp_path: Path) -> None:
    spec, _ = made()
    assert spec.tolerance is not None
    feeds = [spec.sample(size, seed=0) for size in (CHUNK, PREFILL)]
    wrong = run_onnx(plant(artifact, fault, tmp_path / "wrong.onnx"), feeds)
    results = [
        result
        for feed, got in zip(feeds, wrong, strict=True)
        for result in judge(TORCH, "wrong", reference(feed), got, spec.tolerance)
    ]
    assert not all(result.passed for result in results)
    # the tolerance's `why` states that the smallest fault is well outside of it
    assert max(r.max_abs for r in results if r.max_abs is not None) > 4 * spec.tolerance.atol


@pytest.mark.parametrize(
    "fault",
    [
        "a token does not see itself",
        "the causal mask forgets the cache",
        "padding is shown",
        "the cache stands behind the new keys",
        "the layers' keys are swapped",
        "heads are tiled",
    ],
)
def test_generation_notices_a_planted_fault(artifact: Artifact, fault: str, tmp_path: Path) -> None:
    case = next(iter(PROMPTS))
    wrong = onnx_tokens(session_of(plant(artifact, fault, tmp_path / "wrong.onnx")), case)
    assert (wrong != transformers_tokens(case)).any()


def test_the_naive_path_is_wrong_where_a_token_has_no_keys(tmp_path: Path) -> None:
    """torch.onnx.export alone is right with a mask of ones. Else errors are as large as logits."""
    spec, module = made()
    shapes: list[dict[int, Any]] = []
    dims = {name: torch.export.Dim(name, min=d.min, max=d.max) for name, d in spec.dims.items()}
    for i in spec.inputs:
        free = {a: size for a, size in enumerate(i.shape) if not isinstance(size, int)}
        shapes.append({a: dims.get(str(getattr(s, "name", s)), AUTO) for a, s in free.items()})
    example = tuple(map(torch.from_numpy, spec.sample(CHUNK, seed=0).values()))
    names = [i.name for i in spec.inputs], [o.name for o in spec.outputs]
    torch.onnx.export(
        module, example, tmp_path / "naive.onnx", dynamo=True, opset_version=18, verbose=False,
        input_names=names[0], output_names=names[1], dynamic_shapes=(tuple(shapes),),
    )  # fmt: skip
    random = spec.sample(PREFILL, seed=0)
    ones = {**random, "attention_mask": np.ones_like(random["attention_mask"])}
    feeds = [ones, random]
    good, bad = (
        max(float(np.abs(want[name] - got[name]).max()) for name in want)
        for want, got in zip(
            map(reference, feeds), run_onnx(tmp_path / "naive.onnx", feeds), strict=True
        )
    )
    assert good < 1e-4
    assert bad > 1
