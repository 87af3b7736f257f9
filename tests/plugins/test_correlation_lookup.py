"""The correlation lookup in all its forms, compared with torchvision's volume and each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lookup_in_child
import numpy as np
import onnx
import onnx.inliner
import onnxruntime
import pytest
import torch
from lookup_inputs import arguments, feed, maps, one_node

from pipeline.build.try_graph import attempt
from pipeline.errors import InputError
from pipeline.machine.child import Child
from pipeline.machine.libraries import import_torchvision
from pipeline.machine.target import TARGETS
from pipeline.models.raft import raft, raft_small
from pipeline.plugins.base import DOMAIN
from pipeline.plugins.correlation_lookup.function import LEVELS, NAME, function
from pipeline.plugins.correlation_lookup.torch_op import OnDemandCorrelation, correlation_lookup
from pipeline.plugins.correlation_lookup.translation import TRANSLATIONS
from pipeline.plugins.loading import library_folder

RTX = TARGETS["rtx-1.7"]


def run_onnx(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> np.ndarray:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (output,) = session.run(None, inputs)
    return np.asarray(output)


SIZES = [(1, 32, 16, 16, 4), (2, 64, 17, 31, 3), (2, 256, 23, 33, 4), (1, 30, 40, 19, 2)]


@pytest.mark.parametrize(("batch", "channels", "height", "width", "radius"), SIZES, ids=str)
def test_op_and_function_equal_the_volume(
    batch: int, channels: int, height: int, width: int, radius: int
) -> None:
    import_torchvision()
    from torchvision.models.optical_flow.raft import CorrBlock

    first, second, coordinates = maps(batch, channels, height, width)
    volume = CorrBlock(radius=radius)
    volume.build_pyramid(first, second)
    wanted = volume.index_pyramid(coordinates).numpy()
    # the volume is read at coordinates scaled to -1..1 and back: about 1e-6 px of rounding
    inputs = arguments(batch, channels, height, width)
    op = correlation_lookup(*inputs, radius).numpy()
    np.testing.assert_allclose(op, wanted, rtol=0, atol=2e-5)
    body = run_onnx(one_node(radius, channels), feed(inputs))
    np.testing.assert_allclose(body, op, rtol=0, atol=5e-6)


def test_op_is_what_torch_expects_of_one() -> None:
    inputs = arguments(2, 8, 16, 18)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(correlation_lookup, (*inputs, 3), test_utils=checks)


def test_coordinates_that_are_far_away_or_no_numbers() -> None:
    features, levels, coordinates = arguments(1, 16, 16, 16)
    coordinates[0, 0, 0, 0], coordinates[0, 1, 0, 1] = 1e30, -1e9
    coordinates[0, 0, 2, 3] = float("nan")
    inputs = (features, levels, coordinates)
    op = correlation_lookup(*inputs, 4)
    assert not op[0, :, 0, :2].any()
    assert op[0, :, 2, 3].isnan().all() and op.isnan().sum() == op.shape[1]
    np.testing.assert_allclose(run_onnx(one_node(4, 16), feed(inputs)), op, rtol=0, atol=5e-6)


def test_half_is_computed_in_float() -> None:
    features, levels, coordinates = arguments(1, 256, 17, 20)
    halves = (features.half(), [level.half() for level in levels], coordinates)
    floats = (halves[0].float(), [level.float() for level in halves[1]], coordinates)
    wanted = correlation_lookup(*floats, 4).half()
    op = correlation_lookup(*halves, 4)
    body = run_onnx(one_node(4, 256, half=True), feed(halves))
    assert op.dtype == torch.float16 and body.dtype == np.float16
    assert torch.equal(op, wanted)
    # one step of float16, if the float32 values round in different directions
    np.testing.assert_allclose(body.astype(np.float32), wanted.float(), rtol=2**-10, atol=1e-6)


FAULTS: dict[str, tuple[str, str, list[str]]] = {
    "x and y swapped": ("Gather", "x_0", ["centre", "one"]),
    "pooled coordinates not halved": ("Mul", "x_2", ["x_1", "one_f"]),
    "not divided by the root": ("Div", "scaled_1", ["product_1", "one_f"]),
    "something beyond the border": ("And", "inside_0", ["x_in_u_0", "x_in_u_0"]),
    "blended with the wrong fraction": ("Mul", "y_rise_3", ["y_slope_3", "x_blend_3"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_function_is_noticed(fault: str) -> None:
    kind, output, changed = FAULTS[fault]
    inputs = arguments(1, 16, 17, 19)
    model = one_node(3, 16)
    (loop,) = [n for n in model.functions[0].node if n.op_type == "Loop"]
    (node,) = [n for a in loop.attribute for n in a.g.node if list(n.output) == [output]]
    assert node.op_type == kind and list(node.input) != changed
    node.input[:] = changed
    wanted = correlation_lookup(*inputs, 3).numpy()
    assert np.abs(run_onnx(model, feed(inputs)) - wanted).max() > 0.1


@pytest.mark.parametrize(("opset", "half"), [(17, False), (18, True), (19, False)], ids=str)
def test_inlined_body_builds(opset: int, half: bool) -> None:
    pytest.importorskip("tensorrt_rtx")
    model = onnx.inliner.inline_local_functions(one_node(4, 256, half=half, opset=opset))
    assert all(node.domain == "" for node in model.graph.node)
    onnx.checker.check_model(model, full_check=True)
    feeds = []
    for size in [(1, 256, 16, 16), (2, 256, 47, 34), (1, 256, 20, 31)]:
        feeds.append(feed(arguments(*size)))
        if half:
            feeds[-1] = {
                k: v if k == "coordinates" else v.astype(np.float16) for k, v in feeds[-1].items()
            }
    with Child() as child:
        outcome = attempt(child, model, feeds, RTX)
    assert not outcome.failed, outcome


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's /proc")
def test_memory_stays_far_below_the_volume() -> None:
    height, width, channels = 90, 160, 64
    volume = (height * width) ** 2 * 4
    inputs = feed(arguments(1, channels, height, width))
    model = one_node(4, channels).SerializeToString()
    with Child() as child:
        taken = child.call(lookup_in_child.peak_of_run, model, inputs)
    assert taken < volume / 8


@pytest.mark.parametrize("factory", [raft, raft_small])
@pytest.mark.parametrize("size", [(1, 128, 136), (2, 200, 168)], ids=str)
def test_raft_on_demand_equals_raft(factory: Callable[..., Any], size: tuple[int, ...]) -> None:
    batch, height, width = size
    generator = torch.Generator().manual_seed(width)
    shape = (batch, 3, height, width)
    images = [torch.rand(shape, generator=generator) * 2 - 1 for _ in range(2)]
    with torch.inference_mode():
        wanted, got = (
            factory(updates=2, correlation=how).build(None)(*images)
            for how in ("volume", "on_demand")
        )
    assert wanted.abs().max() > 0.5
    # px; 4e-6 (large) and 1.6e-5 (small) were measured
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)


def test_raft_refuses_other_correlations() -> None:
    with pytest.raises(InputError, match="correlation='sparse' must be volume or on_demand"):
        raft(correlation="sparse")


def test_block_refuses_what_torchvision_refuses() -> None:
    block = OnDemandCorrelation(3)
    with pytest.raises(ValueError, match="at least 16"):
        block.build_pyramid(torch.zeros(1, 8, 15, 16), torch.zeros(1, 8, 15, 16))
    with pytest.raises(RuntimeError, match="after build_pyramid"):
        block.index_pyramid(torch.zeros(1, 2, 16, 16))


class Three(torch.nn.Module):
    """The op with three levels, which its ONNX form does not have."""

    def forward(self, features: torch.Tensor, coordinates: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = correlation_lookup(features, [features] * 3, coordinates, 2)
        return result


def to_onnx(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], **more: Any) -> Any:
    program = torch.export.export(module, inputs, **more)
    return torch.onnx.export(
        program, dynamo=True, opset_version=18, custom_translation_table=TRANSLATIONS, verbose=False
    )


def test_export_refuses_another_number_of_levels() -> None:
    inputs = (torch.zeros(1, 16, 16, 8), torch.zeros(1, 2, 16, 16))
    with pytest.raises(Exception, match="4 levels in ONNX, but the model has 3"):
        to_onnx(Three(), inputs)


@pytest.mark.slow
def test_raft_goes_to_onnx_with_the_op_in_it() -> None:
    module = raft_small(updates=2, correlation="on_demand").build(None)
    h, w = (torch.export.Dim(name, min=16, max=480) for name in ("h", "w"))
    images = tuple(torch.rand(1, 3, 136, 152) * 2 - 1 for _ in range(2))
    program = to_onnx(module, images, dynamic_shapes=({2: 8 * h, 3: 8 * w},) * 2)
    model = program.model_proto
    custom = [node for node in model.graph.node if node.domain]
    assert [(n.domain, n.op_type, len(n.input)) for n in custom] == [(DOMAIN, NAME, 6)] * 2
    assert any(entry.domain == DOMAIN for entry in model.opset_import)
    model.functions.append(function())
    onnx.checker.check_model(model, full_check=True)
    for height, width in [(128, 128), (184, 200)]:
        images = tuple(torch.rand(1, 3, height, width) * 2 - 1 for _ in range(2))
        names = [value.name for value in model.graph.input]
        got = run_onnx(model, dict(zip(names, (i.numpy() for i in images), strict=True)))
        with torch.inference_mode():
            np.testing.assert_allclose(got, module(*images), rtol=0, atol=1e-4)


def build_with_plugin(model: onnx.ModelProto, channels: int) -> dict[str, Any]:
    shapes: dict[str, list[list[int]]] = {"features": [], "coordinates": []}
    for height, width in [(16, 16), (55, 128), (270, 480)]:
        shapes["features"].append([1, height, width, channels])
        shapes["coordinates"].append([1, 2, height, width])
        for n in range(LEVELS):
            shapes.setdefault(f"level_{n}", []).append([1, height >> n, width >> n, channels])
    with library_folder(RTX) as env, Child(env) as child:
        return child.call(lookup_in_child.build_with_plugin, model.SerializeToString(), shapes)


@pytest.mark.parametrize(
    ("radius", "channels", "half"), [(4, 256, False), (3, 128, True)], ids=["float", "half"]
)
def test_plugin_builds(radius: int, channels: int, half: bool) -> None:
    pytest.importorskip("tensorrt_rtx")
    built = build_with_plugin(one_node(radius, channels, half=half, body=False), channels)
    assert built["plugins"] == 1
    assert built["output"] == (-1, LEVELS * (2 * radius + 1) ** 2, -1, -1)
    assert built["half"] is half
    # the engine has the plugin by name, and not the function's nodes
    assert built["plan"] is not None and NAME.encode() in built["plan"]


def test_plugin_refuses_a_node_without_radius() -> None:
    pytest.importorskip("tensorrt_rtx")
    model = one_node(4, 64, body=False)
    del model.graph.node[0].attribute[:]
    assert "Could not create the plugin" in " ".join(build_with_plugin(model, 64)["errors"])
