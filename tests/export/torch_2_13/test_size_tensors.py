# ruff: noqa: ARG005
"""Numbers that a model computes from its sizes in tensors are known, or left to torch."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch.nn import functional

from pipeline.errors import ExportError
from pipeline.export.export import export
from pipeline.export.torch_2_13 import mended
from pipeline.spec.dims import Dim
from pipeline.spec.model import Input, ModelSpec, Output

H, W = Dim("h", 7, 12, 40), Dim("w", 5, 13, 40)
FREE = torch.export.Dim.DYNAMIC


class Net(torch.nn.Module):
    """A module with numbers in buffers, one of them inside another module, and in a constant."""

    def __init__(self, function: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.conv = torch.nn.Identity()
        self.conv.register_buffer("stride", torch.tensor(3))
        self.register_buffer("kernel", torch.tensor([5, 4]), persistent=False)
        self.register_buffer("small", torch.tensor(200, dtype=torch.uint8))
        self.register_buffer("flag", torch.tensor(True))
        self.pads = torch.tensor([2, 1])

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def length(m: Any, x: torch.Tensor) -> Any:
    """The padding of EnCodec's convolutions."""
    n = (x.shape[-1] - m.kernel[0] + m.pads[0]) / m.conv.stride + 1
    n = torch.ceil(n).to(torch.int64) - 1
    return n * m.conv.stride + m.kernel[0] - m.pads[0] - x.shape[-1]


NUMBERS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "a buffer": lambda m, x: m.conv.stride,
    "a padding": length,
    "sums": lambda m, x: m.kernel[1] + x.shape[0] - m.conv.stride + 2 * m.pads[1],
    "swapped": lambda m, x: 100 - m.kernel[0] - x.shape[0],
    "a negative one": lambda m, x: 50 + -m.kernel[0] - x.shape[0] + x.shape[1],
    "floor division": lambda m, x: x.shape[1] // m.conv.stride,
    "floor division by a size": lambda m, x: (100 * m.kernel[0]) // x.shape[1],
    "a remainder": lambda m, x: (m.kernel[0] - x.shape[1] % m.kernel[0]) % m.kernel[0],
    "of a negative number": lambda m, x: -torch.tensor(x.shape[1]) % m.conv.stride,
    "div, rounded down": lambda m, x: torch.div(
        x.shape[0] - 20 * m.conv.stride, m.kernel[1], rounding_mode="floor"
    )
    + 60,
    "a size divided by a power of 2": lambda m, x: (x.shape[1] / m.kernel[1]).ceil().int(),
    "an exact quotient": lambda m, x: (x.shape[1] / m.kernel[1] * 2).floor().int(),
    "divided twice": lambda m, x: (torch.tensor(x.shape[1]) / 2 / m.kernel[1] + 0.5).ceil().long(),
    "cut": lambda m, x: (torch.tensor(x.shape[1]) / m.conv.stride).int(),
    "trunc": lambda m, x: (torch.tensor(x.shape[1]) / m.conv.stride).trunc().int(),
    "the larger": lambda m, x: torch.maximum(
        m.kernel[0], torch.tensor(x.shape[1] - x.shape[0] + 20)
    ),
    "the largest": lambda m, x: torch.tensor([x.shape[0], x.shape[1], 20]).max(),
    "the smaller": lambda m, x: min(m.kernel[0] * 4, torch.tensor(x.shape[1])),
    "clamp": lambda m, x: torch.tensor(x.shape[1]).clamp(m.kernel[0] * 2, 30),
    "a product": lambda m, x: torch.tensor(x.shape).prod() // 7,
    "a sum": lambda m, x: (torch.as_tensor([x.shape[0], 4, 5]) * 2).sum(),
    "a part": lambda m, x: torch.tensor([x.shape[0], x.shape[1], 7, 8])[1:3][0],
    "unbind": lambda m, x: torch.tensor([x.shape[0], x.shape[1]]).unbind()[1],
    "a stack": lambda m, x: torch.stack([m.kernel[0], torch.tensor(x.shape[0])])[-1],
    "other shapes": lambda m, x: (
        torch.tensor([x.shape[0]]).view(1, 1).squeeze().clone().double().long()
    ),
    "an item": lambda m, x: (torch.tensor(x.shape[1]) / 4).ceil().item(),
    "tolist": lambda m, x: sum((torch.tensor(x.shape) // 2 + m.kernel[0]).tolist()),
    "chosen by a flag": lambda m, x: x.shape[0] + m.kernel[0] if m.flag else x.shape[1],
    "chosen by a buffer": lambda m, x: x.shape[0] if m.kernel[0] / 2 > m.kernel[1] - 2 else 3,
    "a write into a copy": lambda m, x: m.kernel.clone().add_(1) * 0 + m.kernel + x.shape[0],
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_the_number_is_the_models_at_every_size(name: str) -> None:
    function = NUMBERS[name]

    def used(m: Net, x: torch.Tensor) -> torch.Tensor:
        number = function(m, x)
        last = number[-1] if isinstance(number, torch.Tensor) and number.dim() else number
        return x.new_zeros(2, int(last) if isinstance(last, (float, torch.SymFloat)) else last)

    module = Net(used)
    sizes = {("x", 0): H, ("x", 1): W}
    with torch.no_grad(), mended(module, sizes):
        program = torch.export.export(
            module, (torch.ones(H.opt, W.opt),),
            dynamic_shapes=({0: FREE(min=H.min, max=H.max), 1: FREE(min=W.min, max=W.max)},),
            strict=False,
        )  # fmt: skip
    graph = program.module(check_guards=False)
    for h, w in itertools.product(range(H.min, H.max + 1, 3), range(W.min, W.max + 1)):
        x = torch.ones(h, w)
        assert graph(x).shape == module(x).shape, (h, w)


def clamp(tensor: torch.Tensor, least: int) -> Any:
    if torch.overrides.has_torch_function((tensor,)):
        return torch.overrides.handle_torch_function(clamp, (tensor,), tensor, least)
    return tensor * 2 + least


LEFT: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "data": lambda m, x: (x > 0).sum(),
    "a buffer that is written to": lambda m, x: m.kernel.add_(1)[0],
    "through a view": lambda m, x: (m.kernel.view(2)[0].add_(1), m.kernel)[1][0],
    "a tensor that is written to": lambda m, x: torch.tensor(x.shape[1]).add_(m.kernel[0]),
    "a type that may overflow": lambda m, x: m.small + x.shape[1],
    "a float with many digits": lambda m, x: (torch.tensor(x.shape[1]) * 0.7).int(),
    "a third of a third": lambda m, x: (
        torch.tensor(x.shape[1]) / m.conv.stride / m.conv.stride
    ).int(),
    "two thirds": lambda m, x: (torch.tensor(x.shape[1]) / m.conv.stride * 2).int(),
    "beyond float32": lambda m, x: (
        torch.tensor(x.shape[1]) * 1048576 / m.conv.stride
    ).int() // 100000,
    "half precision": lambda m, x: (
        torch.tensor(x.shape[1]).half() * 2000 / m.conv.stride
    ).int() // 1000,
    "read as another type": lambda m, x: (
        torch.tensor(x.shape[1]).int().view(torch.float32) * 1e40
    ).int(),
    "a remainder of a rounded number": lambda m, x: (
        (torch.tensor(x.shape[1]) * 1000001 + 1) % 7.0
    ).int(),
    "a quotient of a rounded number": lambda m, x: (
        (torch.tensor(x.shape[1]) * 1000001 - 1) // 1000001.0 % 5
    ).int(),
    "a comparison of a rounded number": lambda m, x: (
        torch.tensor(x.shape[1]) * 16777217 > 16777217.0 * 16
    ).item(),
    "an int32 that overflows": lambda m, x: (
        torch.tensor(x.shape[1], dtype=torch.int32) * 100000000 // 100000000
    ),
    "a comparison that a uint8 wraps": lambda m, x: (m.small < x.shape[1]).item(),
    "a size divided by a tensor": lambda m, x: (x.shape[1] / m.conv.stride).ceil().int(),
    "an and of a constant": lambda m, x: (m.pads.__iand__(1), m.pads)[1][0] + x.shape[1],
    "many writes at once": lambda m, x: (torch._foreach_add_([m.pads], 3), m.pads)[1][0],
    "a write by its option": lambda m, x: (
        functional.hardtanh(m.pads, 0, 1, inplace=True), m.pads
    )[1][0],
    "a write by its keyword": lambda m, x: (torch.add(m.kernel, 1, out=m.pads), m.pads)[1][0],
    "an own function of the name of torch's": lambda m, x: clamp(torch.tensor(x.shape[1]), 3),
    "a constant that is written to": lambda m, x: (m.pads[:1].fill_(x.shape[1]), m.pads)[1][0],
}  # fmt: skip


def clamped(m: Net, x: torch.Tensor, number: Any) -> torch.Tensor:
    del m
    return x.new_zeros(1 + (number.clamp(max=9).item() if hasattr(number, "clamp") else number))


def exported_with(function: Callable[[Any, torch.Tensor], Any], path: Path) -> Any:
    spec = ModelSpec(
        "net",
        lambda _: Net(lambda m, x: clamped(m, x, function(m, x))),
        (Input("x", (H, W)),),
        (Output("y"),),
    )
    return export(spec, None, path)


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_known_is_left_to_torch(tmp_path, name: str) -> None:
    with pytest.raises(ExportError, match=r"depend|data|it remembers earlier calls"):
        exported_with(LEFT[name], tmp_path / "m.onnx")


@pytest.mark.parametrize("name", ["a buffer", "a padding", "a product"])
def test_what_is_known_is_not_left(tmp_path, name: str) -> None:
    exported_with(NUMBERS[name], tmp_path / "m.onnx")


def assigned(m: Net, x: torch.Tensor) -> torch.Tensor:
    m.conv.stride = torch.abs(torch.tensor(x.shape[1]) - 24).clamp(max=1)
    return torch.roll(x, int(m.conv.stride), -1)


def by_keyword(_: Net, x: torch.Tensor) -> torch.Tensor:
    y = torch.clamp(input=x, min=-0.5, max=0.5)
    y = torch.unsqueeze(input=torch.flatten(input=y, start_dim=0), dim=0).view(size=(-1,))
    return torch.unbind(input=y.unsqueeze(0), dim=0)[0].clone(memory_format=torch.preserve_format)


def mapped(_: Net, x: torch.Tensor) -> torch.Tensor:
    return x + torch.vmap(lambda i: i + 1)(torch.arange(8)).sum()


def inferred(m: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        y = torch.arange(4).sum() + m.conv.stride
    return x * y


def as_float(m: Net, x: torch.Tensor) -> torch.Tensor:
    return x * float(m.conv.stride)


@pytest.mark.parametrize("function", [by_keyword, mapped, inferred, as_float])
def test_other_calls_stay_as_they_are(tmp_path, function: Any) -> None:
    spec = ModelSpec("net", lambda _: Net(function), (Input("x", (H, W)),), (Output("y"),))
    export(spec, None, tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    for h, w in ((7, 5), (12, 13), (40, 39)):
        x = torch.randn(h, w)
        got = session.run(None, {"x": x.numpy()})[0]
        np.testing.assert_allclose(got, spec.build(None)(x).numpy(), rtol=1e-6)


def test_a_buffer_that_is_assigned_has_its_new_value(tmp_path) -> None:
    spec = ModelSpec("net", lambda _: Net(assigned), (Input("x", (H, W)),), (Output("y"),))
    try:
        export(spec, None, tmp_path / "m.onnx")
    except ExportError:
        return
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    for w in range(W.min, W.max + 1):
        x = torch.randn(8, w)
        assert np.array_equal(session.run(None, {"x": x.numpy()})[0], spec.build(None)(x).numpy())


def rolled(m: Net, x: torch.Tensor) -> torch.Tensor:
    return torch.roll(x, int(m.conv.stride), -1)


def again(m: Net, x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] == 1:
        return rolled(m, x)
    m.conv.stride = torch.abs(torch.tensor(x.shape[1]) - 24)
    return torch.roll(x + 0 * m(x[:1]), int(m.conv.stride), -1)


def with_hook() -> Net:
    net = Net(rolled)
    net.register_forward_pre_hook(
        lambda m, args: setattr(m.conv, "stride", torch.abs(torch.tensor(args[0].shape[1]) - 24))
    )
    return net


@pytest.mark.parametrize("build", [lambda: Net(again), with_hook])
def test_a_buffer_that_is_assigned_early_has_its_new_value(tmp_path, build: Any) -> None:
    spec = ModelSpec("net", lambda _: build(), (Input("x", (H, W)),), (Output("y"),))
    with contextlib.suppress(ExportError):
        export(spec, None, tmp_path / "m.onnx")
        session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
        for w in range(W.min, W.max + 1):
            x = torch.randn(8, w)
            got = session.run(None, {"x": x.numpy()})[0]
            assert np.array_equal(got, build()(x).numpy())


def test_a_border_in_a_tensor_narrows_as_a_border_in_python_does(tmp_path) -> None:
    def function(m: Net, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[1] > 2 * m.kernel[0] else x + 1

    def plain(_: Net, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[1] > 2 * 5 else x + 1

    found = []
    for one in (function, plain):
        spec = ModelSpec("net", lambda _, f=one: Net(f), (Input("x", (H, W)),), (Output("y"),))
        with pytest.raises(Exception, match="w") as caught:
            export(spec, None, tmp_path / "m.onnx")
        found.append([(r.kind, r.dim, r.refined) for r in caught.value.rules])
        assert f"in {one.__name__}: " in str(caught.value)
    assert found[0] == found[1] and found[0][0][:2] == ("range", "w")


def reflected(m: Net, x: torch.Tensor) -> torch.Tensor:
    more = 0
    if x.shape[1] <= 2 * m.kernel[0]:
        more = 2 * m.kernel[0] - x.shape[1] + 1
        x = functional.pad(x, (0, more))
    y = functional.pad(x[None], (2 * m.kernel[0], 0), mode="reflect")[0]
    return y[..., : y.shape[-1] - more]


def test_a_branch_in_a_tensor_becomes_arithmetic(tmp_path) -> None:
    spec = ModelSpec("net", lambda _: Net(reflected), (Input("x", (H, W)),), (Output("y"),))
    assert not export(spec, None, tmp_path / "m.onnx").refinements
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    for w in range(W.min, W.max + 1):
        x = torch.randn(8, w)
        assert np.array_equal(session.run(None, {"x": x.numpy()})[0], spec.build(None)(x).numpy())
