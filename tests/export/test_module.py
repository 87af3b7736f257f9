"""Modules with nested inputs and outputs, converted and compared with torch in ONNX Runtime."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from pipeline.errors import ExportError, InputError
from pipeline.export.export import export
from pipeline.export.module import built, flat_outputs
from pipeline.spec.dims import Dim
from pipeline.spec.model import Input, ModelSpec, Output, Tolerance

B, S, P = Dim("b", 1, 3, 9), Dim("seq", 1, 4, 20), Dim("past", 0, 6, 30)
TOLERANCE = Tolerance(1e-5, 1e-6, "elementwise")
X, X2, X3 = Input("x", (B, S)), Input("y", (B, S)), Input("z", (B, S))


@dataclasses.dataclass
class Batch:
    image: Any
    mask: Any = None


def spec_of(forward: Callable[..., Any], inputs: Any, **more: Any) -> ModelSpec:
    kind = type("Net", (torch.nn.Module,), {"forward": forward})
    return ModelSpec("m", lambda _: kind(), inputs, **{"tolerance": TOLERANCE, **more})


def check(
    spec: ModelSpec, folder: Path, call: Callable[[dict[str, torch.Tensor]], Any], *sizes: Any
) -> ModelSpec:
    """Exports a spec. ONNX Runtime must give the same as `call` for the same inputs."""
    done = export(spec, None, folder / "m.onnx")
    session = onnxruntime.InferenceSession(done.path, providers=["CPUExecutionProvider"])
    for each in sizes:
        feed = spec.sample(each, 1)
        assert done.spec.sizes_of({n: x.shape for n, x in feed.items()}) == each
        with torch.no_grad():
            want = flat_outputs(call({n: torch.from_numpy(x.copy()) for n, x in feed.items()}))
        got = session.run(None, feed)
        assert [o.name for o in session.get_outputs()] == [o.name for o in done.spec.outputs]
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            assert a.shape == tuple(b.shape)
            np.testing.assert_allclose(a, b.numpy(), rtol=1e-5, atol=1e-6)
    return done.spec


@pytest.mark.parametrize("names", [("x", "y"), ("y", "x")])
def test_hooks_of_the_model_see_its_arguments(tmp_path: Path, names: tuple[str, str]) -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x - y

    def net() -> torch.nn.Module:
        module = Net()
        module.register_forward_pre_hook(lambda _, args: (args[0] * 2, *args[1:]))
        module.register_forward_hook(lambda _, args, result: result + args[0] + len(args))
        return module

    spec = ModelSpec(
        "m", lambda _: net(), {name: Input(name, (B, S)) for name in names}, tolerance=TOLERANCE
    )
    sizes = ({"b": 1, "seq": 1}, {"b": 3, "seq": 4})
    check(spec, tmp_path, lambda feed: net()(feed["x"], feed["y"]), *sizes)


def test_tuples_dicts_dataclasses_and_keywords(tmp_path: Path) -> None:
    def forward(_: Any, x: Any, past: Any, *, batch: Any, more: Any = None) -> Any:
        key, value = past[0]
        joined = torch.cat([key, x], 1)
        return {
            "y": joined * batch.image[:, :1] + more["scale"],
            "past": ((joined, torch.cat([value, x + 1], 1)),),
            "nothing": None,
        }

    cache = Input("", (B, P))
    spec = spec_of(
        forward,
        {
            "x": X,
            "past": [(cache, cache)],
            "batch": Batch(Input("", (B, 3))),
            "more": {"scale": Input("", ())},
        },
    )
    assert [i.name for i in spec.inputs] == [
        "x", "past_0_0", "past_0_1", "batch_image", "more_scale",
    ]  # fmt: skip
    module = spec.build(None)

    def call(t: dict[str, torch.Tensor]) -> Any:
        past = [(t["past_0_0"], t["past_0_1"])]
        batch, more = Batch(t["batch_image"]), {"scale": t["more_scale"]}
        return module(t["x"], past, batch=batch, more=more)

    sizes = [{"b": b, "seq": s, "past": p} for b, s, p in ((1, 1, 0), (2, 5, 7), (9, 20, 30))]
    done = check(spec, tmp_path, call, *sizes)
    assert [o.name for o in done.outputs] == ["y", "past_0_0_out", "past_0_1_out"]


def test_positional_tuples_keep_their_order(tmp_path: Path) -> None:
    def forward(_: Any, pair: Any, x: Any) -> Any:
        a, b = pair
        return [a - x, (b * x, a)]

    y = Input("", (B, S))
    spec = spec_of(forward, ((y, Input("second", (B, S))), X))
    assert [i.name for i in spec.inputs] == ["input_0_0", "second", "x"]
    module = spec.build(None)
    done = check(
        spec,
        tmp_path,
        lambda t: module((t["input_0_0"], t["second"]), t["x"]),
        {"b": 1, "seq": 1},
        {"b": 5, "seq": 7},
    )
    assert [o.name for o in done.outputs] == ["output_0", "output_1_0", "output_1_1"]


@dataclasses.dataclass
class Result:
    logits: Any
    hidden: Any = None
    more: Any = None


def model_output(**parts: Any) -> Any:
    return pytest.importorskip("transformers.modeling_outputs").CausalLMOutputWithPast(**parts)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda a, b: {"a": a, "b": b}, ["a", "b"]),
        (lambda a, b: collections.OrderedDict(z=b, a=a), ["z", "a"]),
        (lambda a, b: Result(a, more=[b]), ["logits", "more_0"]),
        (lambda a, b: (a, {"x": b}), ["output_0", "output_1_x"]),
        (lambda a, _: a, ["output"]),
        (lambda a, b: {"x": a, "y": b}, ["x_out", "y"]),
        (
            lambda a, b: model_output(logits=a, past_key_values=((a, b),)),
            ["logits", "past_key_values_0_0", "past_key_values_0_1"],
        ),
    ],
    ids=["dict", "ordered", "dataclass", "tuple", "tensor", "input's name", "transformers"],
)
def test_outputs_are_found_and_named(
    tmp_path: Path, make: Callable[[Any, Any], Any], names: list[str]
) -> None:
    def forward(_: Any, x: Any) -> Any:
        return make(x * 2, x.sum(1) + 1)

    spec = spec_of(forward, (X,))
    module = spec.build(None)
    sizes = [{"b": 1, "seq": 1}, {"b": 3, "seq": 20}]
    done = check(spec, tmp_path, lambda t: module(t["x"]), *sizes)
    assert [o.name for o in done.outputs] == names


def test_expressions_of_dims_in_inputs(tmp_path: Path) -> None:
    """A mask as long as past and new together, a map at an eighth, and one at twice the height."""
    h = Dim("h", 16, 32, 80, 8)

    def forward(_: Any, x: Any, past: Any, mask: Any, image: Any, small: Any, large: Any) -> Any:
        scores = torch.cat([past, x], 1) * mask
        up = torch.nn.functional.interpolate(small[None], scale_factor=8.0)[0]
        down = torch.nn.functional.avg_pool2d(large[None], 2)[0]
        return scores, image + up + down

    spec = spec_of(
        forward,
        (
            X,
            Input("old", (B, P)),
            Input("mask", (B, P + S)),
            Input("image", (3, h, 8)),
            Input("small", (3, h // 8, 1)),
            Input("large", (3, 2 * h, 16)),
        ),
    )
    module = spec.build(None)
    sizes = [
        {"b": b, "seq": s, "past": p, "h": n}
        for b, s, p, n in ((1, 1, 0, 16), (2, 7, 5, 40), (9, 20, 30, 80))
    ]
    done = check(spec, tmp_path, lambda t: module(*t.values()), *sizes)
    good = {n: x.shape for n, x in spec.sample(sizes[1], 0).items()}
    assert good["mask"] == (2, 12) and good["small"] == (3, 5, 1) and good["large"] == (3, 80, 16)
    for name, shape, words in (
        ("mask", (2, 13), "mask axis 1: size 13, expected past + seq = 12 with past=5,seq=7"),
        ("small", (3, 6, 1), "small axis 1: size 6, expected h // 8 = 5 with h=40"),
        ("large", (3, 79, 16), "large axis 1: size 79, expected 2 * h = 80"),
        ("image", (3, 44, 8), "h=44 is not a multiple of 8"),
    ):
        with pytest.raises(InputError) as caught:
            done.sizes_of({**good, name: shape})
        assert words in str(caught.value)


def test_odd_sizes_only(tmp_path: Path) -> None:
    n = Dim("n", 3, 9, 65, 2, offset=1)

    def forward(_: Any, x: Any) -> Any:
        even, odd = x[:, ::2], x[:, 1::2]
        return torch.cat([even[:, 1:] - odd, even[:, :-1] + odd], 1)

    spec = spec_of(forward, (Input("x", (B, n)),))
    module = spec.build(None)
    with pytest.raises(RuntimeError):
        module(torch.rand(2, 8))
    sizes = [{"b": b, "n": k} for b, k in ((1, 3), (2, 9), (3, 37), (9, 65))]
    done = check(spec, tmp_path, lambda t: module(t["x"]), *sizes)
    with pytest.raises(InputError, match="n=8 is not 1 more than a multiple of 2; nearest: 7, 9"):
        done.sizes_of({"x": (2, 8)})


class LearntMask(torch.nn.Module):
    """Attention with a learnt mask, as in windowed transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mask = torch.nn.Parameter(torch.randn(1, 2, 5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        each = x.view(-1, 5, 2, 4).transpose(1, 2)
        out = torch.nn.functional.scaled_dot_product_attention(each, each, each, self.mask)
        return out.transpose(1, 2).view(-1, 5, 8)


def test_weights_ask_for_no_gradients(tmp_path: Path) -> None:
    """With gradients, torch 2.13 fails at the last view, because attention has other strides."""
    module = LearntMask()
    with torch.no_grad(), pytest.raises(RuntimeError, match="view size is not compatible"):
        module(torch.zeros(3, 5, 8))
        pytest.fail(f"torch {torch.__version__} needs no `requires_grad_(False)` in `made`")
    spec = ModelSpec("m", lambda _: module, (Input("x", (B, 5, 8)),), tolerance=TOLERANCE)
    check(spec, tmp_path, lambda t: module(t["x"]), {"b": 1}, {"b": 4})
    assert not module.mask.requires_grad


def test_modules_that_can_not_be_called() -> None:
    def forward(_: Any, x: Any, y: Any) -> Any:
        return x + y

    for spec, kind, words in (
        (
            spec_of(forward, (X,)),
            InputError,
            "can't be called with the inputs as declared: missing",
        ),
        (spec_of(forward, (X,)), InputError, "'y'. Add --input y:SHAPE (in Python: to inputs)"),
        (spec_of(forward, {"y": X}), InputError, "'x'. Add --input x:SHAPE (in Python: to inputs)"),
        (
            spec_of(forward, {"x": X, "y": X2, "z": X3}),
            InputError,
            "its forward has no argument 'z'; its arguments: x, y",
        ),
        (
            spec_of(forward, {"a": X, "b": X2}),
            InputError,
            "its forward has no argument 'a'; its arguments: x, y",
        ),
        (spec_of(lambda _, x: (x, "text"), (X,)), InputError, "output[1] is of type str"),
        (spec_of(lambda *_: None, (X,)), InputError, "the model returns no tensor"),
        (spec_of(lambda _, x: {"a": {"b": x}, "a_b": x}, (X,)), InputError, "called a_b"),
        (spec_of(lambda _, x: x @ x, (X,)), ExportError, "runs at none of the example sizes"),
    ):
        with pytest.raises(kind) as caught:
            built(spec, None)
        assert words in str(caught.value), str(caught.value)
        assert str(caught.value).startswith("model m")
    for build, words in (
        (lambda _: 3, "its build returned int, not a torch.nn.Module"),
        (lambda _: 1 // 0, "its build raised ZeroDivisionError"),
    ):
        with pytest.raises(InputError, match=words):
            built(ModelSpec("m", build, (X,), tolerance=TOLERANCE), None)  # type: ignore[arg-type, return-value]


def test_what_is_given_by_place_is_told(tmp_path: Path) -> None:
    def forward(_: Any, *tensors: Any) -> Any:
        return tensors[0] * 2 + tensors[1]

    spec = spec_of(forward, {"a": X, "b": X2})
    done = export(spec, None, tmp_path / "m.onnx")
    assert [i.name for i in done.spec.inputs] == ["x", "y"]
    assert list(done.notes) == [
        "a, b: passed by position, because the model's forward is forward(*tensors: 'Any') -> "
        "'Any', which names none of them"
    ]
    plain = spec_of(lambda _, x: x * 2, {"x": X})
    assert list(export(plain, None, tmp_path / "n.onnx").notes) == []


def test_declared_outputs_have_to_be_as_many(tmp_path: Path) -> None:
    spec = spec_of(lambda _, x: (x, x + 1), (X,), outputs=(Output("y"),))
    with pytest.raises(ExportError, match="returns 2 tensors; the spec names 1 outputs"):
        export(spec, None, tmp_path / "m.onnx")


def test_a_lazy_layer_without_values_is_named() -> None:
    module = torch.nn.Sequential(torch.nn.LazyLinear(3))
    with pytest.raises(InputError, match=r"0\.weight has no values.*call the module once"):
        built(ModelSpec("m", lambda _: module, (X,)), None)


def test_outputs_have_the_names_that_are_given(tmp_path: Path) -> None:
    def forward(_: Any, x: Any) -> Any:
        return {"a": x + 1, "more": (x * 2, None)}

    spec = spec_of(forward, (X,), output_names=("plus", "twice"))
    done = check(spec, tmp_path, lambda f: (f["x"] + 1, f["x"] * 2), {"b": 2, "seq": 5})
    assert [o.name for o in done.outputs] == ["plus", "twice"]
    with pytest.raises(InputError, match=r"2 outputs \(a, more_0\), but --output-name names 1"):
        built(spec_of(forward, (X,), output_names=("one",)), None)
    with pytest.raises(InputError, match="two inputs or outputs are called 'x'"):
        built(spec_of(forward, (X,), output_names=("x", "y")), None)


def test_two_outputs_of_one_name_can_be_named() -> None:
    def forward(_: Any, x: Any) -> Any:
        return {"a_b": x, "a": {"b": x}}

    with pytest.raises(InputError, match=r"two outputs would be called a_b\. .*--output-name"):
        built(spec_of(forward, (X,)), None)
    spec, _ = built(spec_of(forward, (X,), output_names=("y", "z")), None)
    assert [o.name for o in spec.outputs] == ["y", "z"]
