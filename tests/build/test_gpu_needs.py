"""Which GPUs a plan of TensorRT-RTX is for, by the types in its model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from pipeline.build.build import build
from pipeline.build.gpu_needs import gpus_for
from pipeline.build.settings import BuildOptions
from pipeline.errors import BuildError, InputError
from pipeline.machine.target import TARGETS, installed_version
from pipeline.rewrite.half import in_half
from pipeline.spec.dims import Dim
from pipeline.spec.interface import Interface
from pipeline.spec.profiles import Profile
from pipeline.spec.tensors import Input, Output

RTX = TARGETS["rtx-1.7"]
NEEDS_RTX = pytest.mark.skipif(installed_version(RTX) is None, reason="needs TensorRT-RTX")
ADA = ((8, 9), (12, 0), (12, 1))


def model(path: Path, kind: int | None, *, inside: bool = False) -> Path:
    """y = x w, where x and w pass through QuantizeLinear and DequantizeLinear if `kind` is given.

    Args:
        inside: whether a cast to `kind` is in a branch of an If instead.
    """
    weight = numpy_helper.from_array(np.ones((8, 8), np.float32), "w")
    nodes, weights, names = [], [weight], ["x", "w"]
    if kind is not None and not inside:
        weights.append(numpy_helper.from_array(np.array(0.1, np.float32), "scale"))
        weights.append(helper.make_tensor("zero", kind, (), [0]))
        for n, name in enumerate(names):
            quantized = [name, "scale", "zero"]
            nodes.append(helper.make_node("QuantizeLinear", quantized, [f"{name}q"]))
            back = [f"{name}q", "scale", "zero"]
            nodes.append(helper.make_node("DequantizeLinear", back, [f"{name}d"]))
            names[n] = f"{name}d"
    nodes.append(helper.make_node("MatMul", names, ["m"]))
    if inside:
        branch = helper.make_graph(
            [
                helper.make_node("Cast", ["m"], ["c"], to=kind),
                helper.make_node("Cast", ["c"], ["o"], to=TensorProto.FLOAT),
            ],
            "branch", [], [helper.make_tensor_value_info("o", TensorProto.FLOAT, None)],
        )  # fmt: skip
        weights.append(numpy_helper.from_array(np.array(True), "yes"))
        nodes.append(helper.make_node("If", ["yes"], ["y"], then_branch=branch, else_branch=branch))
    else:
        nodes.append(helper.make_node("Identity", ["m"], ["y"]))
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["b", 8]) for n in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    opset = [helper.make_opsetid("", 19)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), path)
    return path


@pytest.mark.parametrize(
    ("kind", "able"),
    [
        (None, ()),
        (TensorProto.INT8, ()),
        (TensorProto.FLOAT8E4M3FN, ADA),
        (TensorProto.FLOAT8E5M2, ADA),
    ],
)
def test_a_portable_plan(tmp_path: Path, kind: int | None, able: tuple[object, ...]) -> None:
    assert gpus_for(model(tmp_path / "m.onnx", kind), BuildOptions(RTX)) == able


def test_a_type_in_a_branch(tmp_path: Path) -> None:
    file = model(tmp_path / "m.onnx", TensorProto.FLOAT8E4M3FN, inside=True)
    assert gpus_for(file, BuildOptions(RTX)) == ADA
    file = model(tmp_path / "m.onnx", TensorProto.BFLOAT16, inside=True)
    assert gpus_for(file, BuildOptions(RTX)) == ()  # every GPU of a portable plan has it
    with pytest.raises(InputError, match=r"gpu 7\.5: the model computes in bfloat16, .* from 8\.0"):
        gpus_for(file, BuildOptions(RTX, gpus=((7, 5),)))


def test_gpus_that_the_user_asks_for(tmp_path: Path) -> None:
    file = model(tmp_path / "m.onnx", TensorProto.FLOAT8E4M3FN)
    assert gpus_for(file, BuildOptions(RTX, gpus=((12, 0),))) == ((12, 0),)
    with pytest.raises(
        InputError, match=r"gpu 8\.6: the model computes in float8e4m3fn, .* from 8\.9 on\. Leave"
    ):
        gpus_for(file, BuildOptions(RTX, gpus=((8, 6), (12, 0))))


def test_other_targets_build_for_the_gpu_at_hand(tmp_path: Path) -> None:
    file = model(tmp_path / "m.onnx", TensorProto.FLOAT8E4M3FN)
    assert gpus_for(file, BuildOptions(TARGETS["tensorrt-10"])) == ()


@NEEDS_RTX
@pytest.mark.parametrize(
    ("kind", "asked", "able"),
    [
        (None, (), ()),
        (None, ((8, 6), (12, 0)), ((8, 6), (12, 0))),
        (TensorProto.FLOAT8E4M3FN, (), ADA),
    ],
)
def test_the_plan_is_built(
    tmp_path: Path, kind: int | None, asked: tuple[tuple[int, int], ...], able: tuple[object, ...]
) -> None:
    b = Dim("b", 1, 2, 4)
    shape = (b, 8)
    declared = Interface(
        (Input("x", shape),), (Output("y", shape),), profiles=(Profile("p", {"b": (1, 2, 4)}),)
    )
    plan = tmp_path / "engine.plan"
    made = build(model(tmp_path / "m.onnx", kind), plan, declared, BuildOptions(RTX, gpus=asked))
    assert made.gpus == able
    assert plan.stat().st_size == made.plan_bytes > 0


@NEEDS_RTX
def test_a_float32_product_on_turing_leads_to_fp16(tmp_path: Path) -> None:
    file, plan = model(tmp_path / "m.onnx", None), tmp_path / "engine.plan"
    shape = (Dim("b", 1, 2, 4), 8)
    declared = Interface(
        (Input("x", shape),), (Output("y", shape),), profiles=(Profile("p", {"b": (1, 2, 4)}),)
    )
    turing = BuildOptions(RTX, gpus=((7, 5),))
    with pytest.raises(BuildError, match=r"float32 products: build with --precision fp16, or"):
        build(file, plan, declared, turing)
    # the advice is right
    half = onnx.load(file)
    assert in_half(half, "fp16")
    onnx.save(half, file)
    assert build(file, plan, declared, turing).gpus == ((7, 5),)


@NEEDS_RTX
def test_an_impossible_type_fails_before_the_build(tmp_path: Path) -> None:
    declared = Interface((Input("x", (2, 8)),), (Output("y", (2, 8)),))
    file = model(tmp_path / "m.onnx", TensorProto.FLOAT8E4M3FN)
    with pytest.raises(InputError, match=r"gpu 8\.6: the model computes in float8e4m3fn"):
        build(file, tmp_path / "engine.plan", declared, BuildOptions(RTX, gpus=((8, 6),)))
    assert not (tmp_path / "engine.plan").exists()
