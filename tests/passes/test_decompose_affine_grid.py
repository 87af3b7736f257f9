"""decompose_affine_grid: compared with torch, and at the size where the runtimes differ."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from pass_harness import PASSES, apply, assert_same, own, run

P = PASSES["decompose_affine_grid"]


@pytest.mark.parametrize("aligned", [0, 1])
@pytest.mark.parametrize("kind", ["image", "volume"])
def test_it_is_torchs(kind: str, aligned: int) -> None:
    torch = pytest.importorskip("torch")
    name = f"{kind}, align_corners={aligned}"
    (case,) = (c for c in own(P.name, "positive") if c.name == name)
    after, _ = apply(P, case.model())
    for shapes in case.shapes:
        feeds = case.feeds(shapes)
        expected = torch.nn.functional.affine_grid(
            torch.from_numpy(feeds["theta"]), shapes["x"], align_corners=bool(aligned)
        )
        assert_same([expected.numpy()], run(after, feeds))


@pytest.mark.filterwarnings("ignore:Since version 1.3.0")
def test_one_pixel_lies_in_the_middle_as_in_torch() -> None:
    torch = pytest.importorskip("torch")
    (case,) = (c for c in own(P.name, "positive") if c.name == "image, align_corners=1")
    after, _ = apply(P, case.model())
    feeds = case.feeds({"theta": (1, 2, 3), "x": (1, 2, 1, 3)})
    expected = torch.nn.functional.affine_grid(
        torch.from_numpy(feeds["theta"]), (1, 2, 1, 3), align_corners=True
    )
    assert_same([expected.numpy()], run(after, feeds))


def test_a_wrong_constant_is_noticed() -> None:
    case = own(P.name, "positive")[0]
    after, _ = apply(P, case.model())
    floats = [t for t in after.graph.initializer if t.data_type == onnx.TensorProto.FLOAT]
    two = next(t for t in floats if onnx.numpy_helper.to_array(t) == 2)
    two.CopyFrom(onnx.numpy_helper.from_array(np.array(2.001, np.float32), two.name))
    feeds = case.feeds(case.shapes[0])
    with pytest.raises(AssertionError):
        assert_same(run(case.model(), feeds), run(after, feeds))
