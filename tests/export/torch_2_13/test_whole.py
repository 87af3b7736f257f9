"""int() of sizes and of their quotients stays symbolic, and equals Python's int at every size."""

from __future__ import annotations

import builtins
import importlib.util
import math
import sys
import threading
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
import sympy
import torch
from torch.nn import functional
from torch.utils._sympy.functions import FloatTrueDiv, FloorDiv, IntTrueDiv, ToFloat

from pipeline.errors import ConstraintError, ExportError
from pipeline.export import torch_call
from pipeline.export.export import export
from pipeline.export.torch_2_13 import whole as whole_module
from pipeline.export.torch_2_13.quotients import whole_part
from pipeline.export.torch_2_13.whole import _Int, whole_numbers
from pipeline.export.torch_call import Task
from pipeline.machine.resources import Stopwatch
from pipeline.probe.fit import plain_size
from pipeline.spec.dims import Dim
from pipeline.spec.model import Input, ModelSpec, Output, Tolerance

B, H, W = Dim("b", 1, 2, 5), Dim("h", 5, 24, 61), Dim("w", 6, 32, 67)
B_, H_, W_ = (sympy.Symbol(name, integer=True, positive=True) for name in ("s0", "s1", "s2"))
NAMESPACE = sys.modules[__name__].__dict__  # its functions only call int, as required


def windows(x, size):
    b, h, w, c = x.shape
    x = x.view(b, h // size, size, w // size, size, c)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, size, size, c)


def window_reverse(parts, size, h, w):
    """As in Swin Transformer."""
    b = int(parts.shape[0] / (h * w / size / size))
    x = parts.view(b, h // size, w // size, size, size, -1)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, -1)


class Swin(torch.nn.Module):
    """A layer in windows. Optionally, the image is padded to whole windows."""

    def __init__(self, size, pads):
        super().__init__()
        self.size, self.pads = size, pads
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x):
        h, w = x.shape[2:]
        if self.pads:
            x = functional.pad(x, (0, -w % self.size, 0, -h % self.size))
        x = x.permute(0, 2, 3, 1)
        parts = windows(x, self.size)
        parts = self.linear(parts - parts.mean((1, 2), keepdim=True))
        x = window_reverse(parts, self.size, x.shape[1], x.shape[2])
        return x[:, :h, :w].permute(0, 3, 1, 2)


class Of(torch.nn.Module):
    """A module whose number of columns is a function of the sizes."""

    def __init__(self, count):
        super().__init__()
        self.count = count

    def forward(self, x):
        b, _, h, w = x.shape
        sizes = SimpleNamespace(b=b, h=h, w=w)
        return x.mean((2, 3))[..., None] * torch.ones(self.count(sizes))


def spec_of(module, *dims) -> ModelSpec:
    b, h, w = dims or (B, H, W)
    return ModelSpec(
        "m", lambda _: module, (Input("x", (b, 3, h, w)),), (Output("y"),),
        Tolerance(1e-4, 1e-5, "a test"), refine_dims=not dims,
    )  # fmt: skip


def compare(done, module, sizes) -> None:
    session = onnxruntime.InferenceSession(str(done.path))
    for b, h, w in sizes:
        x = torch.randn(b, 3, h, w)
        with torch.no_grad():
            want = module(x).numpy()
        got = session.run(None, {"x": x.numpy()})[0]
        assert got.shape == want.shape, (b, h, w)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def without(monkeypatch) -> None:
    """torch.export without pipeline's changes."""
    monkeypatch.setattr(whole_module, "namespaces", lambda _: [])


@pytest.mark.parametrize("size", [4, 7])
def test_swin(tmp_path, monkeypatch, size) -> None:
    eights = [Dim(n, 2 * size, 4 * size, 9 * size, size) for n in "hw"]
    spec = spec_of(Swin(size, pads=False), B, *eights)
    done = export(spec, None, tmp_path / "m.onnx")
    assert done.output_shapes["y"] == ["b", 3, "h", "w"]
    steps = [(b, size * i, size * (11 - i)) for b in (1, 2, 3, 5) for i in (2, 3, 4, 8, 9)]
    compare(done, done.module, steps)

    if size == 4:
        without(monkeypatch)
        baked = r"b as dynamic but your code specialized it to be a constant \(3\)"
        with pytest.raises(ConstraintError, match=baked):
            task = Task(spec, done.module, 0, Stopwatch())
            torch_call.torch_export(task, {"b": 3, "h": 12, "w": 20})


def test_swin_that_pads(tmp_path) -> None:
    module = Swin(4, pads=True)
    done = export(spec_of(module), None, tmp_path / "m.onnx")
    assert done.output_shapes["y"] == ["b", 3, "h", "w"]
    compare(done, module, [(b, h, 72 - h) for b in (1, 4) for h in (5, 6, 8, 11, 12, 61)])


COUNTS = {
    "a size": lambda s: int(s.h) + s.b - s.b,
    "half": lambda s: int(s.h / 2),
    "two dims": lambda s: int(s.h * s.w / 7),
    "by way of floats": lambda s: int(s.b * s.h / (s.w / 4)),
    "map": lambda s: sum(map(int, (s.h / 3, s.w))),
    "asked for": lambda s: int(s.h / 2) if isinstance(int(7.5), int) else 1,
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts(tmp_path, monkeypatch, name) -> None:
    module = Of(COUNTS[name])
    done = export(spec_of(module), None, tmp_path / "m.onnx")
    every = [(b, h, w) for b, w in ((1, 6), (2, 7), (3, 67), (5, 49)) for h in range(5, 62, 4)]
    compare(done, module, every)
    assert "int" not in NAMESPACE

    without(monkeypatch)
    with pytest.raises(ExportError):
        export(spec_of(module, B, H, W), None, tmp_path / "n.onnx")


FLOATS = {
    "a factor": lambda s: int(s.h * 0.7),
    "a folded factor": lambda s: int(s.h * 0.1 * 10),
    "rounded below": lambda s: int(s.w / (s.w / 49)),
    "a negative number": lambda s: 40 + int(-s.w / 2),
    "a sum": lambda s: int(s.h / 2 + s.w / 2),
    "a root": lambda s: int((s.h * s.w) ** 0.5),
    "a root by math": lambda s: int(math.sqrt(s.h * s.w)),
}


@pytest.mark.parametrize("name", FLOATS)
def test_other_floats_are_refused_as_before(tmp_path, monkeypatch, name) -> None:
    spec = spec_of(Of(FLOATS[name]), B, H, W)
    with pytest.raises(ExportError) as mended:
        export(spec, None, tmp_path / "m.onnx")
    without(monkeypatch)
    with pytest.raises(ExportError) as naive:
        export(spec, None, tmp_path / "n.onnx")
    assert str(mended.value) == str(naive.value)


def columns(expr, dims):
    return whole_part(expr, tuple(zip(("s0", "s1", "s2"), dims, strict=False)))


def test_a_rounding_that_does_harm_is_seen() -> None:
    """49 * (1 / 49) is 0.99... in floats, and so is w / (w / 49) for some w."""
    assert any(int(n / (n / 49)) != 49 for n in range(1, 1 << 10))
    quotient = FloatTrueDiv(ToFloat(B_), IntTrueDiv(B_, sympy.Integer(49)))
    assert columns(quotient, [Dim("b", 1, 2, 1 << 10)]) is None
    assert columns(quotient, [Dim("b", 49, 98, 49 << 10, 49)]) == 49
    assert all(int(n / (n / 49)) == 49 for n in range(50, 53))
    assert columns(quotient, [Dim("b", 50, 50, 52)]) == 49  # at every size


def test_whole_parts_are_pythons_up_to_2_to_the_20() -> None:
    sizes = [*range(1, 300), *(2**k + d for k in range(9, 21) for d in (-1, 0, 1))]
    dims = [Dim(n, 1, 2, 1 << 20) for n in ("b", "h")]
    half = columns(IntTrueDiv(B_ * H_, sympy.Integer(7)), dims)
    assert half == FloorDiv(B_ * H_, 7)
    for b in sizes:
        for h in sizes[::5]:
            assert int(b * h / 7) == b * h // 7
    area = H_ * W_
    by_windows = FloatTrueDiv(ToFloat(B_ * area), FloatTrueDiv(IntTrueDiv(64 * area, 8), 8.0))
    dims = [Dim("b", 1, 2, 8), Dim("h", 1, 2, 1 << 20), Dim("w", 1, 2, 1 << 14)]
    assert columns(by_windows, dims) == B_
    for b in range(1, 9):
        for h in sizes:
            for w in (1, 3, 49, 1 << 14):
                assert int(b * h * w / (64 * h * w / 8 / 8)) == b


def test_what_is_too_large_for_floats_is_left() -> None:
    dims = [Dim(n, 1, 2, 1 << 20) for n in ("b", "h", "w")]
    assert columns(IntTrueDiv(B_ * H_ * W_, sympy.Integer(7)), dims) is None
    n = 7 * (1 << 53) - 1
    assert int(n / 7) != n // 7


@pytest.mark.parametrize(
    "expr",
    [
        1.0 * ToFloat(B_), 0.7 * ToFloat(B_), FloatTrueDiv(ToFloat(B_), sympy.Float(0.7)),
        IntTrueDiv(-B_, sympy.Integer(2)), IntTrueDiv(B_, sympy.Integer(-2)),
        IntTrueDiv(sympy.Integer(8), B_ - 1), IntTrueDiv(B_, sympy.Integer(2)) + 0.5,
        sympy.sqrt(B_),
    ],
)  # fmt: skip
def test_other_forms_are_left(expr) -> None:
    assert columns(expr, [Dim("b", 1, 2, 64)]) is None


SOURCES = {
    "only called": ("n = int(x.shape[0] / 2)", True),
    "isinstance": ("n = int(3) if isinstance(x, (int, float)) else int(2)", True),
    "an annotation": ("n: int = int(x.shape[0])", True),
    "an inner function": ("def g(n: int) -> int: return int(n)", True),
    "a dtype": ("n = int(3); y = torch.zeros(3, dtype=int)", False),
    "its type": ("n = int(3); y = type(n) is int", False),
    "an inner default": ("def g(n, kind=int): return int(n)", False),
    "an inner subclass": ("class N(int): a = int(3)", False),
    "a method of it": ("n = int(3) + int.from_bytes(b'a', 'big')", False),
    "a global": ("global int; n = int(3)", False),
    "a lambda": ("f = lambda kind: int(3) if kind is int else 0", False),
}


@pytest.mark.parametrize("name", SOURCES)
def test_which_modules_are_taken(tmp_path, name) -> None:
    line, taken = SOURCES[name]
    text = (
        f"KIND = int\nSIZES = dict[str, int]\nimport torch\nclass M(torch.nn.Module):\n"
        f"    count: int = int(3)\n    def forward(self, x, n: int = int(2)):\n        {line}\n"
    )
    module = loaded(tmp_path, text)
    model = module.M()
    with whole_numbers(model, {}):
        assert (vars(module).get("int") is _Int) == taken
        if taken:
            model(torch.zeros(4))
    assert "int" not in vars(module)
    assert module.KIND is builtins.int


def loaded(folder, text):
    file = folder / f"m{abs(hash(text))}.py"
    file.write_text(text)
    made = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    return module


def test_an_int_of_the_modules_own_and_code_without_a_source_are_left(tmp_path) -> None:
    text = "import torch\nclass M(torch.nn.Module):\n    def forward(self, x): return int(3)\n"
    own = loaded(tmp_path, f"from builtins import int\n{text}")
    names = {"__name__": "somewhere"}
    exec(text, names)
    for model, space in ((own.M(), vars(own)), (names["M"](), names)):
        before = space.get("int")
        with whole_numbers(model, {}):
            assert space.get("int") is before


def test_the_name_is_put_back() -> None:
    model = Swin(4, pads=True)
    with pytest.raises(ZeroDivisionError), whole_numbers(model, {}):
        assert NAMESPACE["int"] is _Int
        with whole_numbers(model, {}):
            pass
        assert NAMESPACE["int"] is _Int
        raise ZeroDivisionError
    assert "int" not in NAMESPACE


def test_the_type_is_pythons_int_for_all_else() -> None:
    for args in ((), ("12",), ("ff", 16), (3.9,), (-3.9,), (True,), (np.int64(4),)):
        assert _Int(*args) == int(*args)
        assert type(_Int(*args)) is builtins.int
    assert isinstance(3, _Int)
    assert not isinstance(3.0, _Int)
    assert issubclass(bool, _Int)
    with pytest.raises(ValueError, match="invalid literal"):
        _Int("x")


def test_another_thread_is_not_under_it() -> None:
    """Another thread sees the name, but there int() of a size is Python's: the size is baked in."""
    module = Of(lambda s: int(s.h))
    dims = ({0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC},)
    got = SimpleNamespace(error=None)

    def work() -> None:
        try:
            torch.export.export(
                module, (torch.zeros(2, 3, 6, 7),), dynamic_shapes=dims, strict=False
            )
        except Exception as error:
            got.error = error

    with whole_numbers(module, {}):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert "specialized" in str(got.error)


PADDED = "(h + (8 - h % 8) % 8)"
PLAIN = {
    f"(64*b*({PADDED}//8)*(w//8))//({PADDED}*(w - w % 8))": "b",
    f"2*((b*{PADDED})//{PADDED})": "2*b",
    "(2*h*b + 2*b)//(4*b)": "(h + 1)//2",
    "(b*h*8 + 7)//(8*b)": "h",
    "(b*h + b - 1)//b": "h",
    "(b*h + 3)//b": "(b*h + 3)//b",
    "(h*w)//24": "(h*w)//24",
    "(b*w + b//64*64)//b": "(b*w + b//64*64)//b",  # w, except at b = 64
    "(h//2)": "(h//2)",
    "(b*h)//b + 0*(past//(past + 1))": "h",
    PADDED: PADDED,
    "min(50, (h//2)*(w//2))": 50,
    "min(500, (h//2)*(w//2))": "min(500, (h//2)*(w//2))",
}  # fmt: skip


@pytest.mark.parametrize("size", PLAIN)
def test_output_sizes_as_one_dim(size) -> None:
    dims = {d.name: d for d in (Dim("b", 1, 2, 64), Dim("h", 24, 32, 128), Dim("w", 24, 32, 128))}
    dims["past"] = Dim("past", 0, 4, 64)
    got = plain_size(size, dims, ())
    assert got == PLAIN[size]
    sizes = {"b": np.arange(1, 65), "h": np.arange(40, 104), "w": np.arange(127, 63, -1), "past": 3}
    sizes["min"] = np.minimum
    assert (eval(str(got), {}, sizes) == eval(size, {}, sizes)).all()
    assert plain_size(7, dims, ()) == 7
