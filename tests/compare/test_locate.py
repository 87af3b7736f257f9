"""Faults that are planted, or that torch's exporter makes, and the location that is reported.

Each model is a stem, a middle and a head. The fault is in the marked line of the middle. Without
pipeline's fixes, torch's exporter makes faults: an export at one size is wrong at another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tiny
import torch
from onnx import helper, numpy_helper
from torch.nn import functional as F

from pipeline.artifact.manifest import RewriteInfo
from pipeline.compare.divergence.fingerprints import PLACES, Print, onnx_prints
from pipeline.compare.divergence.locate import locate as located
from pipeline.compare.run_names import EXPORTED, REWRITTEN, TORCH
from pipeline.export.export import export, reference
from pipeline.graph.session import run_onnx
from pipeline.machine.target import TARGETS
from pipeline.probe.eager import quiet
from pipeline.rewrite.rewrite import rewrite

Feed = dict[str, np.ndarray]
EXAMPLE = (18, 22)


class Stem(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x)))


class Head(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.out(x)) * 3


class Whole(torch.nn.Module):
    def __init__(self, middle: torch.nn.Module) -> None:
        super().__init__()
        self.stem, self.middle, self.head = Stem(), middle, Head()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.stem(x)))


class Adaptive(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.exp()
        return F.adaptive_avg_pool2d(x, (3, 3))  # fault


class Area(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.interpolate(x, size=(7, 9), mode="area")  # fault
        return torch.tanh(x)


class Antialias(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True)  # fault
        return x.exp()


class FloorDivision(torch.nn.Module):
    """ONNX truncates Python's ``//`` of a negative size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.pad(x.exp(), ((17 - x.shape[3]) // 2, 0, 0, 0))  # fault
        return x.tanh()


class BakedNumber(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height = 18 if torch.compiler.is_exporting() else x.shape[2]
        x = x.exp() * height  # fault
        return x / 20


class BakedShape(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = EXAMPLE if torch.compiler.is_exporting() else x.shape[2:]
        x = F.interpolate(x[..., ::2, ::2], size=size)  # fault
        return x.exp()


class AfterAttention(torch.nn.Module):
    """The exporter writes attention with values that the eager run does not have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.flatten(2)[:, None]
        q = F.scaled_dot_product_attention(q, q.tanh(), q.exp())
        x = q[:, 0].unflatten(2, (x.shape[2], x.shape[3]))
        return F.adaptive_avg_pool2d(x, (3, 3))  # fault


def exported(middle: torch.nn.Module, path: Path) -> torch.nn.Module:
    """The model around a middle, exported by torch alone, without pipeline's translations."""
    torch.manual_seed(0)
    net = Whole(middle).eval()
    free = torch.export.Dim.DYNAMIC
    with quiet():
        program = torch.export.export(
            net, (torch.randn(1, 3, *EXAMPLE),), dynamic_shapes=({2: free, 3: free},), strict=False
        )
        done = torch.onnx.export(
            program, dynamo=True, opset_version=18, input_names=["x"], output_names=["y"]
        )
        assert done is not None
        done.save(path)
    return net


def feed_at(height: int, width: int) -> Feed:
    return {"x": np.random.default_rng(0).uniform(-1, 1, (1, 3, height, width)).astype(np.float32)}


def locate(*args: Any, **options: Any) -> str:
    return located(*args, **options).text


def marked(kind: type) -> str:
    """``file:line`` of the line in a class that is marked as its fault."""
    import inspect

    lines, first = inspect.getsourcelines(kind)
    (place,) = (n for n, line in enumerate(lines) if line.rstrip().endswith("# fault"))
    return f"{inspect.getsourcefile(kind)}:{first + place}"


@dataclass(frozen=True)
class Case:
    middle: type[torch.nn.Module]
    wrong_at: tuple[int, int]
    parts: tuple[str, ...]
    right_at: tuple[int, int] = EXAMPLE

    def __str__(self) -> str:
        return self.middle.__name__


CASES = (
    Case(Adaptive, (24, 44), ("ReduceMean node node_mean", "has other numbers than torch")),
    Case(Area, (24, 44), ("has other numbers than torch",)),
    Case(Antialias, (21, 25), ("Resize node ", "has other numbers than torch")),
    Case(
        FloorDivision, (24, 44),
        ("Pad node ", "has shape [1, 8, 24, 31], torch has [1, 8, 24, 30]"), right_at=(21, 25),
    ),
    Case(BakedNumber, (21, 25), ("Mul node ", "its constants: ", " = [18.0]")),
    Case(
        BakedShape, (21, 25),
        ("Resize node ", "has shape [1, 8, 18, 22], torch has [1, 8, 21, 25]",
         "a size is baked in: ", " = [1, 8, 18, 22]"),
    ),
    Case(AfterAttention, (24, 44), ("has other numbers than torch",)),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fault_of_the_plain_exporter(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "exported.onnx"
    net = exported(case.middle(), path)
    assert not agree(net, path, feed_at(*case.wrong_at))
    told = locate((TORCH, EXPORTED), feed_at(*case.wrong_at), path, module=net)
    assert told.startswith("first difference: ")
    assert f", from module middle at {marked(case.middle)}: " in told
    for part in case.parts:
        assert part in told
    assert "\n" not in told
    # no fault is reported at a size without a fault
    assert agree(net, path, feed_at(*case.right_at))
    assert locate((TORCH, EXPORTED), feed_at(*case.right_at), path, module=net) == ""


def agree(net: torch.nn.Module, path: Path, feed: Feed) -> bool:
    with torch.inference_mode():
        want = net(*map(torch.from_numpy, feed.values())).numpy()
    (got,) = next(run_onnx(path, [feed])).values()
    return want.shape == got.shape and bool(np.allclose(want, got, rtol=1e-4, atol=1e-4))


class Plain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.conv(x))
        return x.reshape(1, 8, x.shape[2] * x.shape[3]).unflatten(2, x.shape[2:])  # fault


def change(path: Path, what: Callable[[onnx.ModelProto], None], to: Path | None = None) -> Path:
    model = onnx.load(path)
    what(model)
    onnx.save(model, to or path)
    return to or path


def weight(name: str, by: float) -> Callable[[onnx.ModelProto], None]:
    def what(model: onnx.ModelProto) -> None:
        (tensor,) = (t for t in model.graph.initializer if t.name == name)
        values = numpy_helper.to_array(tensor).copy()
        values.reshape(-1)[5] += np.float32(by)
        tensor.CopyFrom(numpy_helper.from_array(values, name))

    return what


def test_wrong_weight_in_the_exported_file(tmp_path: Path) -> None:
    path = tmp_path / "exported.onnx"
    net = exported(Plain(), path)
    for by in (0.3, 1e-3):
        wrong = change(path, weight("middle.conv.weight", by), tmp_path / "wrong.onnx")
        told = locate((TORCH, EXPORTED), feed_at(21, 25), wrong, module=net)
        assert told.startswith(
            "first difference: Conv node node_conv2d_1, from module middle.conv at "
        )
        assert f"its middle.conv.weight differs by up to {by:.3g}"[:45] in told


def test_node_that_fails_at_these_sizes(tmp_path: Path) -> None:
    path = tmp_path / "exported.onnx"
    net = exported(Plain(), path)

    def bake(model: onnx.ModelProto) -> None:
        node = next(n for n in model.graph.node if n.op_type == "Reshape")
        shape = numpy_helper.from_array(np.array([1, 8, 18 * 22]), "baked")
        model.graph.initializer.append(shape)
        node.input[1] = "baked"

    change(path, bake)
    told = locate((TORCH, EXPORTED), feed_at(21, 25), path, module=net)
    assert told.startswith("Reshape node ")
    assert f", from module middle at {marked(Plain)} fails: " in told
    assert "baked = [1, 8, 396]" in told
    # an earlier fault is reported first
    change(path, weight("middle.conv.weight", 0.3))
    told = locate((TORCH, EXPORTED), feed_at(21, 25), path, module=net)
    assert told.startswith("first difference: Conv node node_conv2d_1, from module middle.conv at ")
    assert "; a later node fails: Reshape node " in told


def test_wrong_constant_in_the_rewritten_file(tmp_path: Path) -> None:
    path = tmp_path / "exported.onnx"
    exported(Plain(), path)
    wrong = change(path, weight("middle.conv.bias", 0.2), tmp_path / "model.onnx")
    told = locate((EXPORTED, REWRITTEN), feed_at(21, 25), path, wrong)
    assert told.startswith("first difference: Conv node node_conv2d_1, from module middle.conv at ")
    assert "has other numbers than exported" in told
    assert "its middle.conv.bias differs by up to 0.2 from exported's" in told
    assert locate((EXPORTED, REWRITTEN), feed_at(21, 25), path, path) == ""
    outside = tmp_path / "outside.onnx"
    onnx.save_model(
        onnx.load(wrong), outside, save_as_external_data=True, location="weights",
        size_threshold=16,
    )  # fmt: skip
    assert locate((EXPORTED, REWRITTEN), feed_at(21, 25), path, outside) == told


def test_pass_that_went_wrong_is_named(tmp_path: Path) -> None:
    class Normed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.InstanceNorm2d(8, affine=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.silu(self.norm(x))

    path, other = tmp_path / "exported.onnx", tmp_path / "model.onnx"
    exported(Normed(), path)
    done = rewrite(path, other, TARGETS["tensorrt-8.6"])

    def break_it(model: onnx.ModelProto) -> None:
        node = next(n for n in model.graph.node if n.op_type == "Sub" and "/" in n.name)
        node.op_type = "Add"

    change(other, break_it)
    record = RewriteInfo(done.passes, (), done.nodes_before, done.nodes_after)
    told = locate((EXPORTED, REWRITTEN), feed_at(21, 25), path, other, rewrite=record)
    assert told.startswith("first difference: ")
    assert "from module middle.norm at " in told
    assert "rewritten by decompose_instance_norm" in told


def test_padded_model(tmp_path: Path) -> None:
    path = tmp_path / "exported.onnx"
    done = export(tiny.conv(), None, path)
    module = reference(done.spec, done.module, done.output_shapes)
    feed = done.spec.sample({"h": 21, "w": 9}, 0)
    assert locate((TORCH, EXPORTED), feed, path, module=module) == ""
    change(path, weight("conv.weight", 0.1))
    told = locate((TORCH, EXPORTED), feed, path, module=module)
    assert told.startswith("first difference: Conv node ")
    assert "from module conv at " in told
    assert "its conv.weight differs by up to 0.1 from the module's" in told

    def skew(model: onnx.ModelProto) -> None:
        node = next(n for n in model.graph.node if n.op_type == "Pad")
        next(a for a in node.attribute if a.name == "mode").s = b"reflect"

    export(tiny.conv(), None, path)
    change(path, skew)
    told = locate((TORCH, EXPORTED), feed, path, module=module)
    assert "Pad node padding/x/padded: " in told


def test_what_can_not_be_told_is_not_told(tmp_path: Path) -> None:
    path = tmp_path / "exported.onnx"
    net = exported(Plain(), path)
    feed = feed_at(21, 25)
    assert locate((TORCH, EXPORTED), feed, path) == ""
    assert locate((REWRITTEN, "engine"), feed, path, path, module=net) == ""

    class Broken(torch.nn.Module):
        def forward(self, _: torch.Tensor) -> torch.Tensor:
            raise ValueError("the model's own")

    assert locate((TORCH, EXPORTED), feed, path, module=Broken()) == ""
    change(path, weight("middle.conv.weight", 0.3))
    pair = (TORCH, EXPORTED)
    assert locate(pair, feed, path, module=net)
    assert locate(pair, feed, path, module=net, seconds=0) == ""  # torch is stopped


def test_run_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 18]>
    g (float[n,n] x) => (float[n,n] y)
    { a = MatMul(x, x) b = MatMul(a, x) c = MatMul(b, x) d = MatMul(c, x) y = MatMul(d, x) }"""
    path = tmp_path / "exported.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    large = {"x": np.full((2500, 2500), 1e-3, np.float32)}
    assert onnx_prints(onnx.load(path), tmp_path, large, 60).values
    stopped = onnx_prints(onnx.load(path), tmp_path, large, 0.05)
    assert not stopped.values
    assert stopped.failed is None


@pytest.mark.filterwarnings("error")
def test_prints_of_what_is_not_finite() -> None:
    """Fingerprints of NaN and infinity: no terminal warning, and equal only to themselves."""

    def printed(*values: float) -> Print:
        flat = np.array([*values, 0.0], np.float32)
        largest = max(map(abs, values))  # equivalent to the norm here
        facts = np.array([flat.min(), flat.max(), largest], np.float32)
        return Print((len(values),), np.concatenate([flat[PLACES % flat.size], facts]))

    infinite, below, nan, plain = (
        printed(1, 2, odd) for odd in (np.inf, -np.inf, np.nan, 3.0)
    )  # fmt: skip
    kinds = (infinite, below, nan, plain)
    for one in kinds:
        for other in kinds:
            assert one.apart(other) == (0 if one is other else np.inf)
            assert one.bound(other) <= one.apart(other)
    far, near = printed(3e38, 1), printed(-3e38, 1)
    assert far.bound(near) <= far.apart(near) == pytest.approx(2)
    assert nan.apart(printed(1, 4, np.nan)) > 0


def test_values_of_every_kind_have_a_print(tmp_path: Path) -> None:
    """Empty tensors, integers, booleans, sequences, bodies and infinity do not stop the search."""
    text = """<ir_version: 10, opset_import: ["" : 18]>
    g (float[n,4] x, float[0,4] none, bool c) => (float[m,4] y)
    <float[1] minus = {-1.0}, float[1] big = {-1000.0}, int64 zero = {0}> {
        both = Concat<axis=0>(x, none)
        least = Less(both, minus)
        parts = SequenceConstruct(both, both)
        one = SequenceAt(parts, zero)
        e = Pow(big, one)
        branch = If(c) <
            then_branch = t () => (float[n,4] p) { p = Mul(one, minus) },
            else_branch = f () => (float[n,4] q) { q = Add(one, minus) }>
        w = Where(least, e, branch)
        y = Mul(w, minus)
    }"""
    model = onnx.parser.parse_model(text)
    path, other = tmp_path / "exported.onnx", tmp_path / "model.onnx"
    onnx.save(model, path)
    rng = np.random.default_rng(0)
    feed: Mapping[str, np.ndarray] = {
        "x": rng.uniform(-1, 1, (3, 4)).astype(np.float32),
        "none": np.zeros((0, 4), np.float32),
        "c": np.array(False),
    }
    assert locate((EXPORTED, REWRITTEN), feed, path, path) == ""

    def skew(changed: onnx.ModelProto) -> None:
        body = next(n for n in changed.graph.node if n.op_type == "If").attribute[1].g
        body.node[0].CopyFrom(helper.make_node("Sub", ["one", "minus"], ["q"]))

    change(path, skew, other)
    told = locate((EXPORTED, REWRITTEN), feed, path, other)
    assert told.startswith("first difference: If node ")
    assert "branch has other numbers than exported" in told


class Chosen(torch.nn.Module):
    """The positions of zeros that tie, and what is there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = x.relu().topk(6).indices
        return x.gather(1, places)


def test_indices_of_equal_values_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    example = torch.full((1, 12), -1.0)
    torch.onnx.export(Chosen(), (example,), path, dynamo=True, input_names=["x"], verbose=False)
    feed = {"x": -np.arange(1, 13, dtype=np.float32)[None]}
    found = located((TORCH, EXPORTED), feed, path, module=Chosen())
    told = found.text
    assert found.ties
    assert "its indices come from TopK node" in told, told
    assert "torch may choose others of values that are equal within rounding" in told
    assert "its floating-point inputs agree within" in told
