"""A model's rules on its sizes: their text, their line, and applying them if allowed."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import onnxruntime
import pytest
import torch
from torch.nn import functional

from pipeline.errors import ConstraintError, ExportError, InputError
from pipeline.export.export import export
from pipeline.export.torch_messages import find_rules
from pipeline.probe import evaluate as guards
from pipeline.probe.evaluate import holds
from pipeline.probe.rules import fitted
from pipeline.spec.dims import Dim
from pipeline.spec.model import Input, ModelSpec, Output, Tolerance
from pipeline.spec.padding import Padding

H, W = Dim("h", 16, 64, 512), Dim("w", 16, 440, 512)
H8, W8 = Dim("h", 16, 64, 512, 8), Dim("w", 16, 440, 512, 8)
H8_5 = Dim("h", 21, 69, 509, 8, offset=5)
H2, W2 = Dim("h2", 16, 64, 512), Dim("w2", 16, 440, 512)


def eight(x):
    if x.shape[2] > 4:  # a guard that every size keeps: not the line to name
        x = x + 1
    return x.unflatten(2, (8, -1))  # eight's line


def sixteen(x):
    return x.unflatten(2, (16, -1)).flatten(2, 3)  # sixteen's line


def up_to_300(x):
    return x.mean((2, 3)) if x.shape[2] > 300 else x * 2  # the line of up_to_300


def below_100(x):
    return x * 2 if x.shape[2] < 100 else x  # the line of below_100


def fixed(x):
    return x + torch.ones(440)  # the line of fixed


def both(x):
    assert x.shape[3] % 4 == 0  # the line for w
    return x.unflatten(2, (8, -1))  # the line for h


def tied(x, y):
    return x + y  # the line of tied


def square(x):
    return x @ x  # the line of square


def baked(x):
    return x * x.shape[2].__index__()  # the line of baked


def rooted(x):
    return x[..., : int(math.sqrt(x.shape[3])) + 1]  # the line of rooted


def odd(x):
    assert x.shape[2] % 2 == 1  # the line of odd
    return x * 2


def five_of_eight(x):
    assert x.shape[2] % 16 == 5  # the line of five_of_eight
    return x * 2


def area(x):
    assert x.shape[2] * x.shape[3] < 10_000  # the line of area
    return x * 2


def forked(x):
    if x.sum() > 0:  # the line of forked
        return x
    return x * 2


def broken(x):
    raise ValueError(f"no good\n{x}")  # the line of broken


def wrap(function) -> torch.nn.Module:
    class One(torch.nn.Module):
        def forward(self, x):
            return function(x)

    class Two(torch.nn.Module):
        def forward(self, x, y):
            return function(x, y)

    return (One, Two)[function.__code__.co_argcount - 1]()


def make(function, *shapes, **options) -> ModelSpec:
    shapes = shapes or ((1, 3, H, W),)
    return ModelSpec(
        "m", lambda _: wrap(function),
        tuple(Input(n, s) for n, s in zip("xy", shapes, strict=False)), (Output("o"),),
        Tolerance(1e-4, 1e-4, "a test"), **options,
    )  # fmt: skip


BAKED = (baked, rooted)
HINT = "or set refine_dims=True"
CASES = [
    (eight, (), ["h must be a multiple of 8", "eight's line", "max=512, multiple_of=8)", HINT]),
    (sixteen, ((1, 3, H8, W8),), ["h must be a multiple of 16", "sixteen's", 'Dim("h", min=16,']),
    (up_to_300, (), ["h must be in 16..300", "line of up_to_300", "max=300)"]),
    (
        below_100,
        ((1, 3, H8, W8),),
        ["h must be in 16..96", "of below_100", "max=96, multiple_of=8"],
    ),
    (fixed, (), ["w must be 440", "line of fixed", "declare the number 440"]),
    (both, (), ["h must be a multiple of 8", "for h)", "w must be a multiple of 4", "for w)"]),
    (tied, ((1, 3, H, W), (1, 3, H2, W)), ["h2 must equal h", "line of tied", "one Dim for both"]),
    (square, (), ["w must equal h", "line of square"]),
    (baked, (), ["h is baked in", "line of baked", "a number in place of h"]),
    (rooted, (), ["w is baked in", "line of rooted", "or write n ** 0.5 in place of math.sqrt"]),
    (odd, (), ["h must be odd", "line of odd", "max=511, multiple_of=2, offset=1)", HINT]),
    (
        five_of_eight,
        ((1, 3, H8_5, W),),
        [
            "h must be 5 more than a multiple of 16",
            "line of five_of_eight",
            "multiple_of=16, offset=5",
        ],
    ),
    (area, (), ["h*w < 10000 must hold", "line of area", "ranges of h and w"]),
]


@pytest.mark.parametrize(
    ("function", "shapes", "words"), CASES, ids=lambda c: getattr(c, "__name__", "")
)
def test_a_violation_names_dim_rule_line_and_remedy(tmp_path, function, shapes, words) -> None:
    with pytest.raises(ConstraintError) as caught:
        export(make(function, *shapes), None, tmp_path / "m.onnx")
    text = str(caught.value)
    for word in (*words, "test_rules.py:", "model m:"):
        assert word in text
    assert "\n" not in text
    assert (HINT in text) == (function not in (tied, square, area, fixed, *BAKED))
    assert not (tmp_path / "m.onnx").exists()


@pytest.mark.parametrize(
    ("function", "shapes", "dims", "sizes"),
    [
        (eight, (), ["h in 16..512 in steps of 8", "w in 16..512"], [(16, 17), (72, 40)]),
        (sixteen, ((1, 3, H8, W8),), ["h in 16..512 in steps of 16", "w in 16..512 in steps of 8"],
         [(16, 16), (48, 24)]),
        (up_to_300, (), ["h in 16..300", "w in 16..512"], [(16, 16), (300, 17)]),
        (below_100, ((1, 3, H8, W8),), ["h in 16..96 in steps of 8", "w in 16..512 in steps of 8"],
         [(16, 16), (96, 24)]),
        (both, (), ["h in 16..512 in steps of 8", "w in 16..512 in steps of 4"],
         [(24, 20), (512, 16)]),
        (odd, (), ["h in 17..511 in steps of 2", "w in 16..512"], [(17, 16), (63, 17)]),
        (five_of_eight, ((1, 3, H8_5, W),), ["h in 21..501 in steps of 16", "w in 16..512"],
         [(21, 16), (53, 17)]),
    ],
)  # fmt: skip
def test_refined_dims_are_applied_reported_and_right(
    tmp_path, function, shapes, dims, sizes
) -> None:
    done = export(make(function, *shapes, refine_dims=True), None, tmp_path / "m.onnx")
    assert [str(dim) for dim in done.spec.dims.values()] == dims
    assert done.refinements
    assert all("test_rules.py:" in rule.line for rule in done.refinements)
    session = onnxruntime.InferenceSession(str(done.path))
    for h, w in sizes:
        x = np.random.default_rng(h).random((1, 3, h, w), np.float32)
        want = function(torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(session.run(None, {"x": x})[0], want, rtol=1e-5)


def test_what_no_dim_and_no_rule_can_say_is_refused_even_with_refine_dims(tmp_path) -> None:
    with pytest.raises(ConstraintError) as caught:
        export(make(baked, refine_dims=True), None, tmp_path / "m.onnx")
    assert HINT not in str(caught.value)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x if x.mean() > 0 else -x, "compute both branches and use torch.where"),
        (lambda x: x * {(64, 64): 2}.get(tuple(x.shape[2:]), 1), "size as a key of a dict"),
        (lambda x: functional.interpolate(x, scale_factor=0.7), "compute it in integers"),
        (lambda x: x[..., : round(x.shape[3] * 0.37)], "compute it in integers"),
    ],
)
def test_what_torch_refuses_comes_with_advice(tmp_path, function, words) -> None:
    with pytest.raises(ExportError, match=words):
        export(make(function), None, tmp_path / "m.onnx")


class Holder(torch.nn.Module):
    def forward(self, x):
        return self.function(x)


def test_a_function_that_no_name_leads_to_stays_as_it_is(tmp_path) -> None:
    holder = Holder()
    holder.function = lambda x: x / x.shape.numel()
    spec = dataclasses.replace(make(baked), build=lambda _: holder)
    words = r"or write x\.numel\(\) in place of x\.shape\.numel\(\) in that line"
    with pytest.raises(ConstraintError, match=words):
        export(spec, None, tmp_path / "m.onnx")


def test_a_models_own_error_gets_no_advice_of_ours(tmp_path) -> None:
    def own(_):
        raise RuntimeError("tracing is not supported for data-dependent models")

    with pytest.raises(ExportError) as caught:
        export(make(own), None, tmp_path / "m.onnx")
    assert caught.value.do == ""


def test_values_beyond_a_table_are_named(tmp_path) -> None:
    torch.manual_seed(0)
    table = torch.rand(300, 4)
    ids = Input("x", (Dim("b", 1, 2, 4), Dim("s", 1, 4, 8)), "int64", low=0, high=401)
    spec = make(lambda x: functional.embedding(x, table), refine_dims=True)
    with pytest.raises(ConstraintError, match=r"\(x 0\.\.400\), pass --range NAME=LOW"):
        export(dataclasses.replace(spec, inputs=(ids,)), None, tmp_path / "m.onnx")


def test_the_smaller_of_two_dims(tmp_path) -> None:
    def smaller(x):
        return x * 2 if min(x.shape[2], x.shape[3]) >= 24 else x

    spec = make(smaller, (1, 3, Dim("h", 4, 48, 96), Dim("w", 4, 48, 96)), refine_dims=True)
    done = export(spec, None, tmp_path / "m.onnx")
    assert [(d.min, d.max) for d in done.spec.dims.values()] == [(24, 96), (24, 96)]
    assert all("min(x.shape[2], x.shape[3])" in rule.line for rule in done.refinements)


def test_a_range_never_becomes_one_size_by_itself(tmp_path) -> None:
    with pytest.raises(ConstraintError, match=r"w must be 440.*the number 440 in place of"):
        export(make(fixed, refine_dims=True), None, tmp_path / "m.onnx")
    spec = make(fixed, (1, 3, H, 440), refine_dims=True)
    done = export(spec, None, tmp_path / "m.onnx")
    assert list(done.spec.dims) == ["h"]


def test_a_range_becomes_one_size_if_that_is_allowed(tmp_path) -> None:
    spec = dataclasses.replace(make(fixed, refine_dims=True), allow_narrow=True)
    done = export(spec, None, tmp_path / "m.onnx")
    w = done.spec.dims["w"]
    assert (w.min, w.opt, w.max) == (440, 440, 440)
    assert [rule.kind for rule in done.refinements] == ["fixed"]
    feed = done.spec.sample({"h": 100, "w": 440}, 0)
    got = onnxruntime.InferenceSession(str(done.path)).run(None, feed)[0]
    want = done.module(*map(torch.from_numpy, feed.values()))
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("function", [tied, square])
def test_dims_that_must_be_equal_become_one_with_refine_dims(tmp_path, function) -> None:
    shapes = ((1, 3, H, W), (1, 3, H2, W2)) if function is tied else ()
    done = export(make(function, *shapes, refine_dims=True), None, tmp_path / "m.onnx")
    assert list(done.spec.dims) == (["h", "w"] if function is tied else ["h"])
    assert any(rule.kind == "equal" for rule in done.refinements)
    sizes = dict.fromkeys(done.spec.dims, 32)
    feed = done.spec.sample(sizes, 0)
    got = onnxruntime.InferenceSession(str(done.path)).run(None, feed)[0]
    want = done.module(*map(torch.from_numpy, feed.values()))
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-4, atol=1e-5)


def test_what_dims_must_keep_together_becomes_a_rule_with_refine_dims(tmp_path) -> None:
    done = export(make(area, refine_dims=True), None, tmp_path / "m.onnx")
    assert done.spec.rules
    with pytest.raises(InputError, match="does not hold at h=512,w=512"):
        done.spec.sizes_of({"x": (1, 3, 512, 512)})
    done.spec.sizes_of({"x": (1, 3, 90, 90)})


def test_rules_inside_padding_are_told_in_the_users_dims(tmp_path) -> None:
    padding = Padding({"h": 8, "w": 8})
    for function, words in (
        (sixteen, ["h as padded must be a multiple of 16", 'declare Padding({"h": 16})']),
        (below_100, ["h as padded must be in 16..96", 'declare Dim("h", min=16, opt=64, max=96)']),
    ):
        with pytest.raises(ConstraintError) as caught:
            export(make(function, padding=padding), None, tmp_path / "m.onnx")
        for word in words:
            assert word in str(caught.value)
        spec = make(function, padding=padding, refine_dims=True)
        done = export(spec, None, tmp_path / "m.onnx")
        session = onnxruntime.InferenceSession(str(done.path))
        for h, w in ((17, 18), (95, 33), (96, 16)):
            x = np.random.default_rng(h).random((1, 3, h, w), np.float32)
            want = x if function is sixteen else 2 * x
            np.testing.assert_array_equal(session.run(None, {"x": x})[0], want)


def test_what_only_looks_like_a_rule_is_no_rule(tmp_path) -> None:
    """torch.export demands an odd h here, but the model accepts every h."""

    def half(x):
        return x[:, :, : x.shape[2] // 2]

    exported = torch.export.Dim("h", min=16, max=512)
    with pytest.raises(torch._dynamo.exc.UserError, match="Constraints violated"):
        torch.export.export(
            wrap(half), (torch.zeros(1, 3, 17, 18),), dynamic_shapes=({2: exported},), strict=False
        )
    done = export(make(half), None, tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(str(done.path))
    for h in (16, 17, 18, 63, 512):
        x = np.random.default_rng(h).random((1, 3, h, 20), np.float32)
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], x[:, :, : h // 2])


@pytest.mark.parametrize("function", [forked, broken])
def test_other_failures_name_the_models_line(tmp_path, function) -> None:
    with pytest.raises(ExportError) as caught:
        export(make(function), None, tmp_path / "m.onnx")
    assert not isinstance(caught.value, ConstraintError)
    text = str(caught.value)
    assert f"the line of {function.__name__}" in text
    assert "test_rules.py:" in text
    assert "\n" not in text
    assert caught.value.detail


def test_fixes_of_torch_are_read() -> None:
    dims = {"h": Dim("h", 135, 440, 2160), "w": W8}

    def words(*fixes: str) -> list[str]:
        return [rule.text() for rule in find_rules("Suggested fixes:\n" + "\n".join(fixes), dims)]

    assert words("  _h = Dim('_h', min=17, max=270)", "  h = 8*_h") == ["h must be a multiple of 8"]
    assert words("  _w = 2*__w") != []
    assert words("  h = 4*_h + 3") == ["h must be 3 more than a multiple of 4"]
    assert words("  h = 2*_h - 1") == ["h must be odd"]
    assert words("  h = 2*w") == ["h must be 2*w"]
    assert words("  h = w + 3") == ["h must be w + 3"]
    assert words("  _w = Dim('_w', max=10)") == ["w must be in 16..80"]
    h5 = {"h": Dim("h", 13, 69, 509, 8, offset=5)}

    def refined(*fixes: str) -> Dim | None:
        (rule,) = find_rules("Suggested fixes:\n" + "\n".join(fixes), h5)
        return rule.refined

    assert refined("  _h = 2*__h") == Dim("h", 21, 69, 501, 16, offset=5)
    assert refined("  _h = 2*__h + 1") == Dim("h", 13, 61, 509, 16, offset=13)
    assert refined("  _h = Dim('_h', min=3, max=9)") == Dim("h", 29, 69, 77, 8, offset=5)
    assert refined("  _h = 4") == Dim("h", 37, 37, 37, 1)
    assert words("  h = 440") == ["h must be 440: the model fixes it"]
    assert words("  z = 3") == []
    (rule,) = find_rules("Suggested fixes:\n  h = 3000", dims)
    assert rule.refined is not None or rule.obstacle == "empty"


def test_rules_are_fitted_to_the_good_sizes() -> None:
    dim = Dim("h", 16, 64, 100)
    rule = fitted(dim, range(16, 97, 8), "w")
    assert (rule.kind, rule.text()) == ("multiple", "h must be a multiple of 8")
    assert rule.refined == Dim("h", 16, 64, 96, 8)
    assert fitted(dim, range(20, 51), "w").text() == "h must be in 20..50"
    assert fitted(dim, [64], "w").text() == "h must be 64: the model fixes it"
    assert fitted(dim, range(48, 81, 16), "w").text() == "h must be a multiple of 16 in 48..80"
    assert fitted(dim, [16, 17, 19], "h < 20").text() == "h < 20 must hold"
    rule = fitted(dim, range(17, 101, 2), "w")
    assert rule.text() == "h must be odd"
    assert rule.refined == Dim("h", 17, 63, 99, 2, offset=1)
    assert rule.declaration() == (
        'Dim("h", min=17, opt=63, max=99, multiple_of=2, offset=1) '
        "(on the command line: --dim h=17:63:99/2+1)"
    )
    rule = fitted(dim, range(33, 98, 32), "w")
    assert rule.text() == "h must be 1 more than a multiple of 32"
    assert rule.refined == Dim("h", 33, 33, 97, 32, offset=1)
    eighths = Dim("h", 21, 69, 93, 8, offset=5)
    assert fitted(eighths, range(29, 70, 8), "w").text() == "h must be in 29..69"
    assert fitted(eighths, range(21, 94, 16), "w").refined == Dim("h", 21, 69, 85, 16, offset=5)
    assert fitted(dim, [], "h < 1").refined is None


def test_guards_are_evaluated_as_torch_means_them() -> None:
    for text, value in (
        ("Eq(s53, 16) | Eq(Mod(s53, 16), 0)", True),
        ("Ne((s53//16), 2)", False),
        ("192*s0*((s53//16)) <= 8*s0*s53", False),
        ("s53 < s0", False),
        ("Max(s53, 2*s0) >= 20", True),
        ("~Eq(s53, 3)", True),
        ("~(Eq(s53, 32) & (s0 < 9))", False),
        ("(IntTrueDiv(s53, 2)) <= 15.9", False),
        ("Eq(TruncToInt(FloatPow(ToFloat(s53), 0.5)), 5)", True),
        ("Ne(RoundToInt(0.4*ToFloat(s53)), 13)", False),
        ("CeilToInt(0.3*ToFloat(s53)) <= 9", False),
        ("Eq(FloorToInt(OpaqueUnaryFn_log2(ToFloat(s53))), 5)", True),
        ("PowByNatural(2, 3*s53) <= 1048576", False),
        ("Eq(LShift(s0, 1), 14) & (Abs(s0 - 20) > 10)", True),
        ("Eq(BitwiseFn_bitwise_and(s53, 1), 0)", True),
        ("Eq(Piecewise((s0, s53 < 9), (s53, True)), 32)", True),
        ("Eq(Where(s53 < 9, s0, 2), 2) & (FloatTrueDiv(1.0, 4.0) < 0.3)", True),
        ("unknown(s53)", None),
        ("s53 < s99", None),
        ("s53 // 0", None),
        ("__import__('os')", None),
    ):
        assert holds(text, {"s53": 32, "s0": 7}) is value, text


def late(x):
    return torch.cat([x[:, :, :25], x[:, :, 25:] * 0], 2) if x.shape[2] % 7 == 0 else x * 1.0


def nested(x):
    return x * 2 if x.shape[2] % 7 == 0 and x.shape[3] > 12 else x * 3


def halves(x):
    return x * 2 if 14.2 < x.shape[2] / 2 < 15.9 else x * 3


def padded(x):
    return x * 2 if 14 < x.shape[2] / 2 < 18 else x * 3


def root(x):
    return x * 2 if int(x.shape[2] ** 0.5) == 5 and x.shape[2] > 27 else x * 3


def third(x):
    return x * 2 if x.shape[2] / 64 == 3 else x * 3


def ratio(x):
    return x * 2 if 0.95 < x.shape[2] / x.shape[3] < 1.05 else x * 3


def diagonal(x):
    return x * 2 if x.shape[2] == x.shape[3] + 64 else x * 3


def band(x):
    return x * 2 if 40 < x.shape[2] - x.shape[3] < 90 else x * 3


def combined(x):
    return x * 2 if (x.shape[2] + 5 * x.shape[3]) % 211 == 7 else x * 3


SMALL = (1, 3, Dim("h", 5, 18, 40), Dim("w", 6, 22, 40))
LARGE = (1, 3, Dim("h", 16, 64, 512), Dim("w", 20, 96, 640))


@pytest.mark.parametrize(
    ("function", "shape", "options"),
    [
        (halves, SMALL, {}),
        (root, SMALL, {}),
        (third, (1, 3, Dim("h", 16, 64, 512, 8)), {}),
        (padded, SMALL, {"padding": Padding({"h": 4})}),
        (late, SMALL, {}),
        (nested, SMALL, {}),
        (ratio, LARGE, {}),
        (diagonal, LARGE, {}),
        (band, LARGE, {}),
        (combined, LARGE, {}),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_a_branch_on_sizes_is_never_taken_for_all(tmp_path, function, shape, options) -> None:
    with pytest.raises(ExportError) as caught:
        export(make(function, shape, **options), None, tmp_path / "m.onnx")
    assert "test_rules.py:" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_small_values_are_held_against_the_specs_own_tolerance(tmp_path) -> None:
    def small(x):
        y = x * 1e-5
        return y * 2 if x.shape[2] % 7 == 0 else y

    for tolerance in (Tolerance(1e-4, 1e-9, "a test"), Tolerance(1e-4, 1e-2, "a test")):
        spec = dataclasses.replace(make(small, SMALL), tolerance=tolerance)
        with pytest.raises(ConstraintError, match=r"h % 7 != 0 must hold"):
            export(spec, None, tmp_path / "m.onnx")


def test_a_guard_that_cannot_be_read_is_not_kept(tmp_path, monkeypatch) -> None:
    """As if torch printed an unknown function."""
    for name in ("IntTrueDiv", "Mod"):
        monkeypatch.delitem(guards._WORDS, name)
    for function, shape, words in (
        (halves, SMALL, "IntTrueDiv(h, 2)"),
        (ratio, LARGE, "IntTrueDiv(h, w)"),
    ):
        with pytest.raises(ExportError) as caught:
            export(make(function, shape), None, tmp_path / "m.onnx")
        assert words in str(caught.value)
        assert "test_rules.py:" in str(caught.value)


def test_the_side_of_a_branch_that_has_the_opt_is_taken(tmp_path) -> None:
    def branches(x):
        return x * 2 if x.shape[2] > 100 else x

    for opt, ends in ((64, (16, 100)), (150, (101, 200))):
        spec = dataclasses.replace(make(branches, (1, 3, Dim("h", 16, opt, 200))), refine_dims=True)
        h = export(spec, None, tmp_path / "m.onnx").spec.dims["h"]
        assert (h.min, h.max) == ends


def test_padded_dims_that_must_be_equal_are_refused(tmp_path) -> None:
    spec = make(square, padding=Padding({"h": 8, "w": 8}), refine_dims=True)
    with pytest.raises(ConstraintError, match="w_padded must equal h_padded") as caught:
        export(spec, None, tmp_path / "m.onnx")
    assert "declare one Dim for both h and w " in str(caught.value)


def test_padding_is_advised_where_a_multiple_is_needed(tmp_path) -> None:
    def eighths(x):
        return x.reshape(1, 3, x.shape[2] // 8, 8).sum(3)

    with pytest.raises(ConstraintError, match=r"padding=Padding\({'h': 8}\)"):
        export(make(eighths, (1, 3, Dim("h", 16, 64, 200))), None, tmp_path / "m.onnx")
