"""Dims, their expressions, and reading sizes from shapes."""

from __future__ import annotations

import pytest

from pipeline.errors import InputError
from pipeline.spec.dims import (
    Dim,
    DimExpr,
    SizeRule,
    evaluate,
    kept_rules,
    shape_at,
    size_text,
    solve_sizes,
)

H = Dim("h", 135, 440, 2160)
B = Dim("b", 16, 64, 512, multiple_of=8)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("h", 10, 10, 5), "dim h: min=10 is greater than max=5"),
        (("h", 10, 30, 20), "dim h: opt=30 is outside min=10..max=20"),
        (("h", 10, 9, 20), "dim h: opt=9 is outside"),
        (("h", -1, 9, 20), "dim h: min=-1 can't be negative"),
        (("h", 8, 8, 20, 8), "dim h: max=20 is not a multiple of 8; nearest: 16, 24"),
        (("h", 3, 8, 24, 8), "dim h: min=3 is not a multiple of 8; nearest: 8"),
        (("h", 8, 12, 24, 8), "dim h: opt=12 is not a multiple of 8; nearest: 8, 16"),
        (("h", 1, 2, 3, 0), "dim h: multiple_of=0 must be at least 1"),
        (("h", 1.5, 2, 3), "dim h: min=1.5 is not a whole number"),
        (("h", True, 2, 3), "dim h: min=True is not a whole number"),
        (("_h", 1, 2, 3), "dim name '_h'"),
        (("h w", 1, 2, 3), "dim name 'h w'"),
        (("h\n", 1, 2, 3), "dim name"),
        (("", 1, 2, 3), "dim name ''"),
        (("min", 1, 2, 3), "dim name 'min'"),
        (("if", 1, 2, 3), "dim name 'if'"),
    ],
)
def test_contradicting_sizes_are_refused(arguments, words) -> None:
    with pytest.raises(InputError) as caught:
        Dim(*arguments)
    assert words in str(caught.value)
    assert "nearest: 0" not in str(caught.value)


@pytest.mark.parametrize(
    ("dim", "size", "words"),
    [
        (H, 130, "x: h=130 is outside 135..2160"),
        (H, 2161, "x: h=2161 is outside 135..2160"),
        (B, 65, "x: b=65 is not a multiple of 8; nearest: 64, 72"),
        (B, 513, "x: b=513 is outside 16..512"),
    ],
)
def test_illegal_size_names_the_dim_and_the_legal_ones(dim, size, words) -> None:
    with pytest.raises(InputError) as caught:
        dim.check(size, "x")
    assert str(caught.value) == words
    dim.check(dim.min)
    dim.check(dim.max)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("h", 9), ("4*h", 36), ("h//2", 4), ("(h + 1)//2", 5), ("8*((h + 7)//8)", 16),
        ("h - 10", -1), ("-h % 8", 7), ("-h//2", -5), ("max(h, w, 1)", 20), ("min(h, w)", 9),
        ("h/3", 3), ("w % 6", 2), ("h*w - h*w", 0), ("12", 12), ("(((h - 1)//2)) + 1", 5),
    ],
)  # fmt: skip
def test_expressions_are_evaluated_as_python_does(text, value) -> None:
    assert DimExpr(text).value({"h": 9, "w": 20}) == value
    assert evaluate(text, {"h": 9, "w": 20}) == value


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')", "h.__class__", "h[0]", "lambda: h", "[h for h in w]",
        "h ** 9999999", "h << 99999", "h if h else w", "h < 3", "h and w", "h, w", "'h'", "1.5",
        "True", "None", "abs(h)", "min()", "min(h, key=h)", "min(*h)", "h := 3", "~h", "not h",
        "", "h +", "\x00", "h\nw", "(" * 500 + "h" + ")" * 500, "-" * 5000 + "h",
        "+".join(["h"] * 3000), "h" * 20_000, "9" * 9000, "f(h)(w)", "f'{h}'", "+h",
    ],
)  # fmt: skip
def test_hostile_texts_are_refused(text) -> None:
    with pytest.raises(InputError):
        DimExpr(text)


def test_evaluation_errors_name_the_expression() -> None:
    for text, words in (
        ("h*w", "'h*w': no size given for w"),
        ("h/2", "'h/2': 9/2 is not a whole number"),
        ("h//(h - 9)", "divides by zero"),
        ("h % 0", "divides by zero"),
    ):
        with pytest.raises(InputError) as caught:
            DimExpr(text).value({"h": 9})
        assert words in str(caught.value)


def test_arithmetic_keeps_precedence() -> None:
    w = Dim("w", 1, 5, 100)
    sizes = {"h": 137, "w": 5}
    for expr, value in (
        (4 * H, 548),
        ((H + 1) // 2, 69),
        ((H - w) * (w + 1), 132 * 6),
        (2 * (H + w), 284),
        (10 - H - w, 10 - 137 - 5),
        (10 - (H - w), 10 - 132),
        ((H // 2) * 2, 136),
        (H * w // 3, 228),
    ):
        assert expr.value(sizes) == value, expr.text
        assert DimExpr(str(expr)).value(sizes) == value
    assert (4 * H).names == {"h"}
    assert DimExpr("max(h, 2)").names == {"h"}
    assert DimExpr("h") == H.expr
    assert size_text(H) == "h"
    assert size_text(4 * H) == "4 * h"
    assert shape_at((1, H, 4 * H, "h//2"), sizes) == (1, 137, 548, 68)


def test_solve_sizes() -> None:
    w = Dim("w", 1, 5, 100)
    shapes = {"a": (1, H, w), "b": (H, 3)}
    assert solve_sizes(shapes, {"a": (1, 200, 7), "b": (200, 3)}) == {"h": 200, "w": 7}
    for actual, words in (
        ({"a": (1, 200, 7), "b": (201, 3)}, "b axis 0: h=201, but a axis 1 has h=200"),
        ({"a": (1, 200), "b": (200, 3)}, "a: rank 2, expected 3"),
        ({"a": (2, 200, 7), "b": (200, 3)}, "a axis 0: size 2, expected 1"),
        ({"a": (1, 20, 7), "b": (200, 3)}, "a axis 1: h=20 is outside 135..2160"),
        ({"a": (1, 200, 7)}, "b: this input is missing; given: a"),
    ):
        with pytest.raises(InputError) as caught:
            solve_sizes(shapes, actual)
        assert words in str(caught.value)


def test_legal_gives_a_legal_size_near() -> None:
    dims = (H, B, Dim("c", 9, 9, 9), Dim("d", 3, 9, 21, 3), Dim("e", 1, 1, 2), Dim("f", 8, 8, 9))
    for dim in dims:
        every = list(range(dim.min, dim.max + 1, dim.multiple_of))
        for near in (*range(0, 40), 135, 136, 511, 512, 2159, 2160, 9999):
            size = dim.legal(near)
            dim.check(size)
            assert abs(size - near) <= min(abs(n - near) for n in every) + dim.multiple_of
            odd = dim.legal(near, odd=True)
            dim.check(odd)
            assert odd % 2 or all(n % 2 == 0 for n in every) or abs(odd - near) <= 1
            if any(n % 2 for n in every) and len(every) > 2:
                assert odd % 2


def test_padded_covers_every_size_and_stays_dynamic() -> None:
    for low, high in ((135, 2160), (1, 8), (130, 136), (7, 9)):
        padded = Dim("h", low, high, high).padded(8, "h_padded")
        assert padded.multiple_of == 8
        assert not padded.static
        assert padded.name == "h_padded"
        for size in range(low, high + 1):
            padded.check(-(-size // 8) * 8)


CACHE = Dim("past", 0, 6, 30)
SEQ = Dim("seq", 1, 4, 20)
ODD = Dim("n", 3, 9, 65, multiple_of=2, offset=1)


@pytest.mark.parametrize(
    ("given", "want", "said"),
    [
        ({"max": 64}, (1, 8, 64), ("min", "opt")),
        ({"min": 4, "max": 64}, (4, 16, 64), ("opt",)),
        ({"opt": 5, "max": 64}, (1, 5, 64), ("min",)),
        ({"min": 0, "max": 64}, (0, 8, 64), ("opt",)),
        ({"max": 64, "multiple_of": 8}, (8, 16, 64), ("min", "opt")),
        ({"max": 65, "multiple_of": 8, "offset": 1}, (1, 1, 65), ("min", "opt")),
        ({"max": 1}, (1, 1, 1), ("min", "opt")),
        ({"min": 2, "opt": 3, "max": 4}, (2, 3, 4), ()),
    ],
)
def test_sizes_left_out_have_defaults_that_are_said(given, want, said) -> None:
    dim = Dim("h", **given)
    assert (dim.min, dim.opt, dim.max) == want
    assert dim.defaulted == said
    for size in want:
        dim.check(size)


def test_a_max_can_not_be_left_out() -> None:
    with pytest.raises(InputError, match=r'dim h has no max: .* Write Dim\("h", max=...\) with'):
        Dim("h", 1, 4)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max": 9, "multiple_of": 4, "offset": 4}, "offset=4 is outside 0..3"),
        ({"max": 9, "offset": 1}, "offset=1 is outside 0..0"),
        ({"max": 9, "multiple_of": 4, "offset": -1}, "offset=-1 is outside 0..3"),
        ({"min": 4, "max": 9, "multiple_of": 4, "offset": 1}, "min=4 is not 1 more than a"),
        ({"min": 1, "max": 8, "multiple_of": 4, "offset": 1}, "max=8 is not 1 more than a"),
        ({"max": 5, "multiple_of": 8}, "min=8 is greater than max=5"),
        ({"min": 0, "opt": 0, "max": 0}, "max=0 must be at least 1"),
    ],
)
def test_offsets_and_defaults_that_can_not_be(given, words) -> None:
    with pytest.raises(InputError) as caught:
        Dim("h", **given)
    assert words in str(caught.value)


def test_offsets_and_zero() -> None:
    for size in (3, 5, 65):
        ODD.check(size)
    for size, words in (
        (4, "n=4 is not 1 more than a multiple of 2; nearest: 3, 5"),
        (1, "n=1 is outside 3..65"),
    ):
        with pytest.raises(InputError) as caught:
            ODD.check(size)
        assert str(caught.value) == words
    assert {ODD.legal(near) for near in range(70)} == set(range(3, 66, 2))
    CACHE.check(0)
    assert CACHE.legal(0) == 0


def test_expressions_in_shapes_are_solved_and_checked() -> None:
    """One dim has no axis: it is the sum minus the other dim."""
    h = Dim("h", 16, 32, 80, 8)
    shapes = {"mask": (CACHE + SEQ,), "x": (SEQ,), "small": (h // 8,), "pair": (2 * h + 1,)}
    dims = {dim.name: dim for dim in (CACHE, SEQ, h)}
    good = {"mask": (12,), "x": (7,), "small": (5,), "pair": (81,)}
    assert solve_sizes(shapes, good, (), dims) == {"seq": 7, "past": 5, "h": 40}
    assert solve_sizes(shapes, {**good, "mask": (7,)}, (), dims)["past"] == 0
    for name, size, words in (
        ("mask", 38, "mask axis 0: size 38 does not equal past + seq for any past in 0..30"),
        ("mask", 6, "mask axis 0: size 6 does not equal past + seq for any past in 0..30"),
        ("pair", 80, "pair axis 0: size 80, expected (2 * h) + 1 = 81 with h=40"),
        (
            "small",
            11,
            "small axis 0: size 11 does not equal h // 8 for any h in 16..80 in steps of 8",
        ),
    ):
        with pytest.raises(InputError) as caught:
            solve_sizes(shapes, {**good, name: (size,)}, (), dims)
        assert str(caught.value) == words
    with pytest.raises(InputError, match=r"can't compute (past|seq) from the inputs' shapes"):
        solve_sizes({"m": (CACHE + SEQ,)}, {"m": (9,)}, (), dims)


def test_rules() -> None:
    rules = ("past + seq <= 25", "past % 2 == 0")
    shapes = {"a": (CACHE,), "b": (SEQ,)}
    assert solve_sizes(shapes, {"a": (20,), "b": (5,)}, rules) == {"past": 20, "seq": 5}
    for past, seq, words in (
        (20, 6, "past + seq <= 25 does not hold at past=20,seq=6"),
        (5, 1, "past % 2 == 0 does not hold at past=5"),
    ):
        with pytest.raises(InputError) as caught:
            solve_sizes(shapes, {"a": (past,), "b": (seq,)}, rules)
        assert str(caught.value) == words
    for bad in (
        "past",
        "past <= ",
        "past = 3",
        "past < seq < 9",
        "past and seq",
        "__import__ < 3()",
    ):
        with pytest.raises(InputError):
            SizeRule(bad)
    assert not kept_rules(["a != b"], {"a": 3, "b": 3})
    assert kept_rules(["a != b"], {"a": 3})  # not known yet
