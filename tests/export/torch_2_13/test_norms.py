"""batch_norm's fake result is that of torch's own arithmetic: shape, strides, type and guards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from pipeline.export.torch_2_13.norms import from_input

OP = torch.ops.aten._native_batch_norm_legit_no_training.default
IMAGE = torch.randn(2, 4, 6, 10)
INPUTS = {
    "an image": IMAGE,
    "channels last": IMAGE.to(memory_format=torch.channels_last),
    "rows": torch.randn(6, 4),
    "a sequence": torch.randn(3, 4, 7),
    "a transposed sequence": torch.randn(3, 7, 4).transpose(1, 2),
    "a volume": torch.randn(2, 4, 3, 5, 6),
    "a part of an image": torch.randn(2, 8, 6, 10)[:, ::2],
    "every second column": torch.randn(2, 4, 6, 20)[..., ::2],
    "half precision": IMAGE.half(),
    "double precision": IMAGE.double(),
}


def known_of(x: torch.Tensor, channels: DimDynamic = DimDynamic.STATIC) -> tuple[Any, list[str]]:
    """What torch knows of the results: shape, strides, type; and its guards."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    dynamic = [channels if axis == 1 else DimDynamic.DYNAMIC for axis in range(x.dim())]
    fake = mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic))
    numbers = [mode.from_tensor(torch.rand(4), static_shapes=True) for _ in range(4)]
    with mode:
        results = OP(fake, *numbers, 0.1, 1e-5)
    known = [(tuple(map(str, r.shape)), tuple(map(str, r.stride())), r.dtype) for r in results]
    return known, sorted(str(guard.expr) for guard in env.guards)


@pytest.mark.parametrize("what", INPUTS)
def test_the_result_is_that_of_torch(what: str) -> None:
    own, asked = known_of(INPUTS[what])
    with from_input():
        found, guards = known_of(INPUTS[what])
    assert found == own
    assert set(guards) <= set(asked)


def test_a_dynamic_number_of_channels_is_left_to_torch() -> None:
    """torch then has to learn that it equals the number of weights."""
    own, asked = known_of(IMAGE, DimDynamic.DYNAMIC)
    with from_input():
        assert known_of(IMAGE, DimDynamic.DYNAMIC) == (own, asked)
    assert asked


def test_wrong_weights_are_left_to_torch() -> None:
    x = torch.randn(2, 5, 6, 10)
    for _ in range(2):
        with pytest.raises(RuntimeError), from_input():
            known_of(x)
