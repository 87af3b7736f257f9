"""The fake results are those of torch's own arithmetic: shapes, strides, types and guards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from pipeline.export.torch_2_13.known_shapes import ELEMENTWISE, INTERPOLATION, at_once

Op = Callable[..., Any]
aten = torch.ops.aten
IMAGE = torch.randn(2, 4, 6, 10)
INPUTS = {
    "an image": IMAGE,
    "channels last": IMAGE.to(memory_format=torch.channels_last),
    "rows": torch.randn(6, 4),
    "a sequence": torch.randn(3, 4, 7),
    "a transposed sequence": torch.randn(3, 7, 4).transpose(1, 2),
    "a permuted image": torch.randn(2, 6, 10, 4).permute(0, 3, 1, 2),
    "a volume": torch.randn(2, 4, 3, 5, 6),
    "a part of an image": torch.randn(2, 8, 6, 10)[:, ::2],
    "every second column": torch.randn(2, 4, 6, 20)[..., ::2],
    "the same column": torch.randn(2, 4, 6, 1).expand(-1, -1, -1, 10),
    "half precision": IMAGE.half(),
    "double precision": IMAGE.double(),
    "integers": torch.arange(480).reshape(2, 4, 6, 10),
    "complex numbers": IMAGE.to(torch.complex64),
}
ARGS: dict[str, tuple[Any, ...]] = {"clamp": (-1.0, 2), "clamp_min": (0,), "clamp_max": (0.5,)}
FOUR = torch.rand(4)


def like_its_input(op: Any) -> Op:
    args = ARGS.get(op.name().removeprefix("aten::"), ())
    return lambda x, mode: op(x, *args)  # noqa: ARG005


def numbers(mode: FakeTensorMode, count: int) -> list[torch.Tensor]:
    return [mode.from_tensor(FOUR, static_shapes=True) for _ in range(count)]


def batch_norm(x: torch.Tensor, mode: FakeTensorMode) -> Any:
    op = aten._native_batch_norm_legit_no_training.default
    return op(x, *numbers(mode, 4), 0.1, 1e-5)


def group_norm(x: torch.Tensor, mode: FakeTensorMode) -> Any:
    inner = x[0, 0].numel()
    return aten.native_group_norm.default(
        x, *numbers(mode, 2), x.shape[0], x.shape[1], inner, 2, 1e-5
    )


def layer_norm(x: torch.Tensor, mode: FakeTensorMode) -> Any:
    """Over the channels, as the last axis."""
    return aten.native_layer_norm.default(x.movedim(1, -1), [4], *numbers(mode, 2), 1e-5)


def plain_layer_norm(x: torch.Tensor, mode: FakeTensorMode) -> Any:  # noqa: ARG001
    return aten.native_layer_norm.default(x.movedim(1, -1), [4], None, None, 1e-5)


def resized(op: Any, *args: Any) -> Op:
    """To 4 more in each axis, or by factors where torch's arithmetic knows no other size."""
    return lambda x, mode: op(x, [size + 4 for size in x.shape[2:]], *args)  # noqa: ARG005


def sampled(op: Any, *numbers: Any, planar: bool = False) -> Op:
    """At one place more in each axis; `planar`: first all x of the grid in memory, then all y."""

    def call(x: torch.Tensor, mode: FakeTensorMode) -> Any:  # noqa: ARG001
        n, _, *inner = x.shape
        more = [size + 1 for size in inner]
        if planar:
            grid = x.new_empty(n, len(inner), *more).movedim(1, -1)
        else:
            grid = x.new_empty(n, *more, len(inner))
        return op(x, grid, *numbers)

    return call


OPS: dict[str, Op] = {
    "batch_norm": batch_norm,
    "group_norm": group_norm,
    "layer_norm": layer_norm,
    "layer_norm without weights": plain_layer_norm,
    "clone": lambda x, mode: x.clone(),  # noqa: ARG005
    "a contiguous copy": lambda x, mode: x.clone(  # noqa: ARG005
        memory_format=torch.contiguous_format
    ),
    **{op.name(): like_its_input(op) for op in ELEMENTWISE},
    **{op.name(): resized(op, False, None) for op in INTERPOLATION},
    **{
        f"{op.name()} {number}": sampled(op, *numbers, planar=number > 1)
        for op in (aten.grid_sampler.default, aten.grid_sampler_2d.default)
        for number, numbers in enumerate([(0, 0, True), (2, 2, False), (0, 1, False), (1, 0, True)])
    },
}
IMAGES = ("aten::upsample", "aten::grid_sampler")
SPATIAL = {aten.upsample_trilinear3d.vec.name(): 5}


def known_of(
    op: Op, x: torch.Tensor, channels: DimDynamic = DimDynamic.STATIC
) -> tuple[Any, list[str]]:
    """What torch knows of the results: shape, strides, type; and its guards. Or its error."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    dynamic = [channels if axis == 1 else DimDynamic.DYNAMIC for axis in range(x.dim())]
    fake = mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic))
    with mode:
        try:
            made = op(fake, mode)
        except Exception as error:
            return type(error), []
    results = made if isinstance(made, tuple) else (made,)
    known = [(tuple(map(str, r.shape)), tuple(map(str, r.stride())), r.dtype) for r in results]
    return known, sorted(str(guard.expr) for guard in env.guards)


@pytest.mark.parametrize("what", INPUTS)
@pytest.mark.parametrize("name", OPS)
def test_the_result_is_that_of_torch(name: str, what: str) -> None:
    x = INPUTS[what]
    if name.startswith(IMAGES) and x.dim() != SPATIAL.get(name, 4):
        pytest.skip("the op is for another number of axes")
    own, asked = known_of(OPS[name], x)
    with at_once():
        found, guards = known_of(OPS[name], x)
    assert found == own
    assert set(guards) <= set(asked)


@pytest.mark.parametrize("name", ["batch_norm", "group_norm", "layer_norm"])
def test_a_dynamic_number_of_channels_is_left_to_torch(name: str) -> None:
    """torch then has to learn that it equals the number of weights."""
    own, asked = known_of(OPS[name], IMAGE, DimDynamic.DYNAMIC)
    with at_once():
        assert known_of(OPS[name], IMAGE, DimDynamic.DYNAMIC) == (own, asked)
    assert asked


@pytest.mark.parametrize("name", ["batch_norm", "group_norm", "layer_norm"])
def test_wrong_weights_are_left_to_torch(name: str) -> None:
    own, _ = known_of(OPS[name], torch.randn(2, 6, 6, 10))
    with at_once():
        assert known_of(OPS[name], torch.randn(2, 6, 6, 10))[0] == own
    assert isinstance(own, type) and issubclass(own, Exception)


def grid_of(shape: tuple[int, ...], mode: FakeTensorMode) -> torch.Tensor:
    """A grid with a dynamic batch of its own."""
    dynamic = [DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * (len(shape) - 1)]
    context = StatelessSymbolicContext(dynamic_sizes=dynamic)
    return mode.from_tensor(torch.rand(shape), symbolic_context=context)


@pytest.mark.parametrize("shape", [(2, 5, 7, 2), (3, 5, 7, 2), (1, 5, 7, 2), (2, 5, 7, 3)])
def test_a_grid_fits_its_image_as_torch_asks(shape: tuple[int, ...]) -> None:
    def op(x: torch.Tensor, mode: FakeTensorMode) -> Any:
        return aten.grid_sampler_2d.default(x, grid_of(shape, mode), 0, 0, False)

    own, asked = known_of(op, IMAGE)
    with at_once():
        found, guards = known_of(op, IMAGE)
    assert found == own
    fits = shape == (2, 5, 7, 2)
    # both ask for the batch; torch's arithmetic writes it with the grid's other sizes
    assert len(guards) == len(asked) == fits


@pytest.mark.parametrize("numbers", [(3, 0, False), (0, -1, False)])
def test_unknown_modes_are_refused_as_by_torch(numbers: tuple[Any, ...]) -> None:
    own, _ = known_of(sampled(aten.grid_sampler_2d.default, *numbers), IMAGE)
    with at_once():
        assert known_of(sampled(aten.grid_sampler_2d.default, *numbers), IMAGE)[0] == own
    assert isinstance(own, type) and issubclass(own, Exception)


class Sampled(torch.nn.Module):
    """A volume, at places of its own values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grid = x[:, :1].movedim(1, -1).expand(-1, -1, -1, -1, 3)
        return torch.nn.functional.grid_sample(x, grid, align_corners=False)


def test_a_volume_is_left_to_torch_also_where_its_op_stays_whole() -> None:
    """As in torch.onnx.export, where torch then runs no arithmetic of its own for the op."""
    x, size = torch.rand(2, 3, 4, 5, 6), torch.export.Dim("h", min=2, max=9)
    program = torch.export.export(Sampled(), (x,), dynamic_shapes=({3: size},))
    with at_once():
        program = program.run_decompositions({})
    assert torch.ops.aten.grid_sampler.default in {node.target for node in program.graph.nodes}
    other = torch.rand(2, 3, 4, 7, 6)
    torch.testing.assert_close(program.module()(other), Sampled()(other))
