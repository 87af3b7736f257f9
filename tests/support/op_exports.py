"""Exports a function of tensors with dynamic axes, and runs it in ONNX Runtime beside torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch

from pipeline.export.ops import exporter
from pipeline.export.torch_2_13 import mended
from pipeline.spec.dims import Dim, Size
from pipeline.spec.model import Input, ModelSpec, Output, Tolerance


class Of(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args)


def spec_of(function: Callable[..., Any], shape: tuple[Size, ...]) -> ModelSpec:
    """A spec of a function of one tensor `x`, whose result is `y`."""
    return ModelSpec(
        "m", lambda _: Of(function), (Input("x", shape),), (Output("y"),),
        Tolerance(1e-5, 1e-5, "a test"),
    )  # fmt: skip


def export_op(
    function: Callable[..., Any] | torch.nn.Module,
    example: Sequence[torch.Tensor],
    path: Path,
    dynamic: Sequence[Sequence[int]] | None = None,
    most: int = 200,
) -> onnx.ModelProto:
    """Writes the function as ONNX, and returns the checked file.

    Args:
        function: a function of tensors, or a module.
        example: its arguments, of sizes that differ and are above 1.
        path: the file to write.
        dynamic: for each argument the dynamic axes; all of them by default.
        most: the largest size.
    """
    module = function if isinstance(function, torch.nn.Module) else Of(function)
    axes = dynamic or [range(x.dim()) for x in example]
    size = torch.export.Dim.DYNAMIC(min=1, max=most)
    shapes: Any = tuple(dict.fromkeys(a, size) for a in axes)
    if not isinstance(function, torch.nn.Module):
        shapes = (shapes,)
    with torch.no_grad(), mended(module, {}):
        program = torch.export.export(
            module.eval(), tuple(example), dynamic_shapes=shapes, strict=False
        )
    count = len(program.graph_signature.user_outputs)
    exporter.to_onnx(
        program,
        path,
        opset=18,
        input_names=[f"x{n}" for n in range(len(example))],
        output_names=[f"y{n}" for n in range(count)],
        shapes=[
            [
                Dim(f"x{n}_{k}", 1, length, most) if k in axes[n] else length
                for k, length in enumerate(x.shape)
            ]
            for n, x in enumerate(example)
        ],
    )
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    return model


def compare_op(
    function: Callable[..., Any],
    path: Path,
    args: Sequence[torch.Tensor],
    near: float = 0.0,
) -> None:
    """Asserts that the file gives torch's outputs: shapes, dtypes, NaNs and values.

    Args:
        function: the function in torch.
        path: the file.
        args: the arguments.
        near: the largest difference relative to the size of a value; 0 for equal values.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # the graphs are small
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(path), options)
    names = [i.name for i in session.get_inputs()]
    found = session.run(None, dict(zip(names, (a.numpy() for a in args), strict=True)))
    with torch.no_grad():
        want = function(*args)
    want = [want] if isinstance(want, torch.Tensor) else list(want)
    for got, expected in zip(found, want, strict=True):
        assert got.shape == tuple(expected.shape)
        assert str(got.dtype) == str(expected.dtype).removeprefix("torch.")
        np.testing.assert_allclose(got, expected.numpy(), rtol=near, atol=near, equal_nan=True)
