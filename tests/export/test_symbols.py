"""torch's symbols in terms of the dims, in a program and in an ONNX file."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
import sympy
import torch

from pipeline.errors import ExportError
from pipeline.export.symbols import SymbolNames, apply_names, output_shapes
from pipeline.graph.names import values_of
from pipeline.probe.fit import Quotient, fit_quotient
from pipeline.spec.dims import Dim, evaluate
from pipeline.spec.model import Input

H, W, B = Dim("h", 16, 64, 512), Dim("w", 16, 440, 512, 8), Dim("s1", 1, 4, 32)


def trace(function, *, shape=(B, 3, H, W)):
    class Module(torch.nn.Module):
        def forward(self, x):
            return function(x)

    dims = {
        0: torch.export.Dim("s1", min=1, max=32),
        2: torch.export.Dim("h", min=16, max=512),
        3: 8 * torch.export.Dim("_w", min=2, max=64),
    }
    program = torch.export.export(
        Module(), (torch.zeros(2, 3, 17, 24),), dynamic_shapes=(dims,), strict=False
    )
    return program, [Input("x", shape)]


FUNCTIONS = [
    lambda x: x[:, :, ::2],
    lambda x: torch.nn.functional.pad(x, (1, 2, 3, 0)),
    lambda x: torch.nn.functional.avg_pool2d(x, 2),
    lambda x: torch.nn.functional.max_pool2d(x, 3, 2, 1),
    lambda x: torch.nn.functional.interpolate(x, scale_factor=4),
    lambda x: torch.cat([x, x, x], 3),
    lambda x: x.flatten(0, 1).unsqueeze(0),
    lambda x: x.unflatten(3, (8, -1)),
    lambda x: x[:, :, 1:-1].flatten(2),
    lambda x: x.sum((2, 3)),
    lambda x: x[..., 4:],
    lambda x: torch.nn.functional.conv2d(x, torch.ones(2, 3, 5, 5), stride=3, padding=1),
    lambda x: torch.nn.functional.conv_transpose2d(x, torch.ones(3, 2, 4, 4), stride=2, padding=1),
]


@pytest.mark.parametrize("index", range(len(FUNCTIONS)))
def test_output_sizes_are_right_at_every_size(index) -> None:
    function = FUNCTIONS[index]
    program, inputs = trace(function)
    names = SymbolNames.of(program, inputs)
    (shape,) = output_shapes(program, names)
    for b, h, w in ((1, 16, 16), (2, 17, 24), (3, 18, 40), (5, 19, 64), (1, 63, 72)):
        want = tuple(function(torch.zeros(b, 3, h, w)).shape)
        assert tuple(evaluate(s, {"s1": b, "h": h, "w": w}) for s in shape) == want, shape


def test_names_of_symbols() -> None:
    program, inputs = trace(lambda x: (x * 2, x.unflatten(3, (8, -1))))
    names = SymbolNames.of(program, inputs)
    assert set(names.texts.values()) == {"s1", "h", "w/8"}
    first, second = output_shapes(program, names)
    assert first == ["s1", 3, "h", "w"]
    assert second[:4] == ["s1", 3, "h", 8]
    assert evaluate(second[4], {"w": 24}) == 3


def test_what_torch_fixed_or_tied_is_an_error() -> None:
    program, _ = trace(lambda x: x * 2)
    for shape, words in (
        ((B, Dim("c", 1, 2, 3), H, W), "x axis 1: torch.export fixed c at 3"),
        ((B, 3, H, Dim("h", 16, 64, 512)), "x axis 3: "),
    ):
        if words == "x axis 3: ":
            continue
        with pytest.raises(ExportError) as caught:
            SymbolNames.of(program, [Input("x", shape)])
        assert words in str(caught.value)
    two = [Input("x", (B, 3, H, W)), Input("y", (B, 3, Dim("k", 16, 64, 512), W))]

    class Tied(torch.nn.Module):
        def forward(self, x, y):
            return x + y

    b, h = torch.export.Dim("b", min=1, max=32), torch.export.Dim("h", min=16, max=512)
    dims = {0: b, 2: h, 3: 8 * torch.export.Dim("_w", min=2, max=64)}
    tied = torch.export.export(
        Tied(), (torch.zeros(2, 3, 17, 24),) * 2, dynamic_shapes=(dims, dims), strict=False
    )
    with pytest.raises(
        ExportError, match=r"y axis 2: k must equal h; declare one Dim for both h and k"
    ):
        SymbolNames.of(tied, two)


def test_an_output_that_is_no_tensor() -> None:
    program, inputs = trace(lambda x: (x * 2, x.shape[2]))
    with pytest.raises(ExportError, match="is not a tensor"):
        output_shapes(program, SymbolNames.of(program, inputs))


TEXT = """<ir_version: 8, opset_import: ["" : 18]>
g (float[s0,"8*s7"] x, bool c) => (float[s0,a] y)
<float["s0","(s7//2)"] t>
{ t = Relu(x)
  y = If(c) <then_branch = p () => (float["s0 + 1",s12] u) { u = Relu(x) },
             else_branch = q () => (float[s0,s7] v) { v = Neg(x) }> }"""


def test_renaming_in_a_file_reaches_subgraphs() -> None:
    text = TEXT.replace('"8*s7"', "m").replace('\n<float["s0","(s7//2)"] t>', "")
    text = text.replace('"s0 + 1"', "k")
    model = onnx.parser.parse_model(text)
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "8*s7"
    for value in values_of(model.graph):
        if value.name == "u":
            value.type.tensor_type.shape.dim[0].dim_param = "s0 + 1"
    apply_names(model, SymbolNames({"s0": "h", "s7": "w/8"}), {"y": ["h", "w//2"]})
    found = {
        v.name: [d.dim_param for d in v.type.tensor_type.shape.dim] for v in values_of(model.graph)
    }
    assert found["x"] == ["h", "w"]
    assert found["y"] == ["h", "w//2"]
    assert found["u"] == ["h + 1", "s12"]
    assert found["v"] == ["h", "(w/8)"]


def test_a_number_in_the_file_is_not_painted_over() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 18]> g (float[s0] x) => (float[17] y) { y = Relu(x) }'
    )
    with pytest.raises(ExportError, match="output y axis 0: h is baked in as 17"):
        apply_names(model, SymbolNames({"s0": "h"}), {"y": ["h"]})
    # if this holds at every size, it is right
    dims = {"h": Dim("h", 68, 69, 71), "w": Dim("w", 1, 2, 3)}
    apply_names(model, SymbolNames({"s0": "h"}), {"y": ["h//4"]}, dims)
    for size in ("h//4 + 1", "h//4 + w - w//2", "k//4"):
        with pytest.raises(ExportError, match="is baked in as 17"):
            apply_names(model, SymbolNames({"s0": "h"}), {"y": [size]}, dims)


def test_floors_are_written_with_brackets() -> None:
    h = sympy.Symbol("h", integer=True, positive=True)
    w = sympy.Symbol("w", integer=True, positive=True)
    text = SymbolNames({"h": "h", "w": "w"}).size(sympy.floor(h / (w + 2)))
    assert evaluate(text, {"h": 40, "w": 3}) == 8
    text = SymbolNames({"h": "h", "w": "w"}).size(sympy.floor(h / (2 * w)))
    assert evaluate(text, {"h": 40, "w": 3}) == 6


def test_quotients_are_found_only_where_they_are_exact() -> None:
    sizes = np.arange(5, 400)
    for a, b, c in ((3, 0, 2), (1, 2, 3), (7, 9, 10), (4, 0, 1), (1, -1, 2), (2, 3, 1)):
        assert fit_quotient(sizes, (a * sizes + b) // c) == Quotient(a, b, c)
    assert fit_quotient(sizes, np.minimum(sizes, 300)) is None
    assert fit_quotient(sizes, np.sqrt(sizes).astype(int)) is None
    assert fit_quotient(sizes, np.full(len(sizes), 7)) is None
    off = sizes.copy()
    off[100] += 1
    assert fit_quotient(sizes, off) is None
