"""Branches behind branches: what the model asks on the side that torch.export did not trace."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from pipeline.errors import ConstraintError, ExportError
from pipeline.export import broken_rules
from pipeline.export.asked import Asked, listening
from pipeline.export.choices import _each_holds, choices
from pipeline.export.export import export
from pipeline.export.guards import Symbol
from pipeline.export.torch_call import Task, torch_export
from pipeline.machine.resources import Stopwatch
from pipeline.spec.dims import Dim
from pipeline.spec.model import Input, ModelSpec, Output

SIZES = (Dim("b", 1, 2, 4), 3, Dim("h", 64, 120, 200), Dim("w", 64, 128, 200))

EXAMPLE = {"b": 2, "h": 130, "w": 132}


class Net(torch.nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.forward = function  # type: ignore[method-assign]


def make(function) -> ModelSpec:
    return ModelSpec("net", lambda _: Net(function), (Input("x", SIZES),), (Output("y"),))


def single(x):
    if x.shape[2] == 100:  # single's line
        return x * 3 if x.shape[3] == 130 else x * 2
    return x * 2


def at_the_end(x):
    if x.shape[2] == 64:
        return x * 3 if x.shape[3] % 67 == 1 else x * 2
    return x * 2


def one_image(x):
    if x.shape[0] > 1:
        return x * 2
    return x * 3 if x.shape[2] == 130 else x * 2


def as_wide_as_high(x):
    if x.shape[2] == x.shape[3]:
        return x * 3 if x.shape[2] == 131 else x * 2
    return x * 2


def three(x):
    if x.shape[2] == 100:
        y = x * 2
        if x.shape[3] == 130:
            y = y * (1.5 if x.shape[0] == 3 else 1.0)
        return y
    return x * 2


def chosen(x):
    size = x.shape[3] if x.shape[2] == 100 else 70
    return x * 3 if size == 131 else x * 2


def both(x):
    more = 1.0 if x.shape[3] == 137 else 0.0
    return x * 2 + (more if x.shape[2] == 109 else 0.0)


def known_before(x):
    if x.shape[3] == 130:
        x = x + 0
    if x.shape[2] == 100:
        return x * 3 if x.shape[3] == 130 else x * 2
    return x * 2


def odd_batches(x):
    b, _, h, _ = x.shape
    if b % 2 == 1:
        return x * (3 if (b, h) == (3, 131) else 2)
    return x * 2


def a_loop(x):
    if x.shape[2] == 100:
        return x * 3 if len(range(x.shape[3])) == 130 else x * 2
    return x * 2


def caught(x):
    if x.shape[2] == 100:
        try:
            return x.flatten(2).view(x.shape[0], 3, 100, -1, 13).flatten(3) * 3
        except RuntimeError:
            return x * 2
    return x * 2


def after_a_division(x):
    w = x.shape[3]
    if x.shape[2] == 100:
        return x * 3 if w != 90 and 500 // (w - 90) == 15 else x * 2
    return x * 2


def odd_widths(x):
    w = x.shape[3]
    if x.shape[2] == 100:
        return functional.pad(x[..., : w // 2 * 2], (0, w % 2)) * 2
    return x * 2


def multiples(x):
    if x.shape[2] % 32 == 0 and x.shape[3] == 137:
        return x * 3
    return x * 2


def arithmetic(x):
    return x * (2 + (x.shape[2] == 131) * (x.shape[3] == 137))


BEHIND = [single, at_the_end, one_image, as_wide_as_high, three, chosen, multiples]
TOGETHER = [
    both,
    known_before,
    odd_batches,
    a_loop,
    caught,
    after_a_division,
    odd_widths,
    arithmetic,
]


@pytest.mark.parametrize("function", TOGETHER, ids=lambda f: f.__name__)
def test_what_only_shows_on_the_other_side_is_found(tmp_path, function) -> None:
    with pytest.raises(ConstraintError) as caught:
        export(make(function), None, tmp_path / "m.onnx")
    assert f"in {function.__name__}: " in str(caught.value)


@pytest.mark.parametrize("function", BEHIND, ids=lambda f: f.__name__)
def test_a_branch_behind_another_is_found(tmp_path, monkeypatch, function) -> None:
    with pytest.raises(ConstraintError) as caught:
        export(make(function), None, tmp_path / "m.onnx")
    assert f"in {function.__name__}: " in str(caught.value)
    monkeypatch.setattr(broken_rules, "choices_at", lambda *_: [])  # without the second trace
    assert export(make(function), None, tmp_path / "m.onnx").free.keys() == {"b", "h", "w"}


def padded(x):
    """To whole blocks and back, as window attention does."""
    h, w = x.shape[2:]
    more = -h % 8, -w % 8
    y = functional.pad(x, (0, more[1], 0, more[0])) if any(more) else x
    y = functional.interpolate(functional.avg_pool2d(y, 8), size=(h, w))
    return y[:, :, :h, :w] if any(more) else y


def partitioned(x):
    """Windows of Segment Anything: torch fails to solve its guards for the dims."""
    x = functional.avg_pool2d(x, 8)
    b, c, h, w = x.shape
    more = (4 - h % 4) % 4, (4 - w % 4) % 4
    y = functional.pad(x, (0, more[1], 0, more[0])) if more[0] > 0 or more[1] > 0 else x
    rows, columns = h + more[0], w + more[1]
    y = y.view(b, c, rows // 4, 4, columns // 4, 4).permute(0, 2, 4, 1, 3, 5).reshape(-1, c, 4, 4)
    y = y * y.mean((2, 3), keepdim=True)
    b = y.shape[0] // (rows * columns // 4 // 4)
    y = y.view(b, rows // 4, columns // 4, c, 4, 4).permute(0, 3, 1, 4, 2, 5)
    y = y.reshape(b, c, rows, columns)
    return y[:, :, :h, :w].contiguous() if rows > h or columns > w else y


def faster_alone(x):
    if x.shape[0] == 1:
        return torch.relu(x[0])[None] if x.shape[3] % 2 else torch.relu(x)
    return torch.relu(x)


@pytest.mark.parametrize("function", [padded, faster_alone], ids=lambda f: f.__name__)
def test_branches_to_the_same_result_keep_every_size(tmp_path, function) -> None:
    done = export(make(function), None, tmp_path / "m.onnx")
    assert not done.refinements
    assert [done.spec.dims[n].max for n in "bhw"] == [4, 200, 200]


def test_the_side_that_pads_is_exported_where_torch_solves_no_guard(tmp_path) -> None:
    sizes = (Dim("b", 1, 1, 2), 3, Dim("h", 64, 128, 256), Dim("w", 64, 128, 256))
    spec = replace(make(partitioned), inputs=(Input("x", sizes),))
    assert not export(spec, None, tmp_path / "m.onnx").refinements


def windows(x):
    y = functional.pad(x, (0, 0, 0, -x.shape[2] % 32))
    y = y.flip(2).flip(2) if y.shape[2] % 64 == 0 else y  # the same
    return (y * 3 if y.shape[2] > 128 else y * 2)[:, :, : x.shape[2]]


def test_a_harmless_branch_beside_another_is_no_rule(tmp_path) -> None:
    """Some sizes take both branches, and only one of them has another result."""
    with pytest.raises(ConstraintError, match=r"h must be in 64\.\.128 .*else y \* 2"):
        export(make(windows), None, tmp_path / "m.onnx")


def holes(x):
    y = x * 3 if x.shape[2] == 100 else x * 2
    y = y * 5 if x.shape[2] > 180 else y
    return y + 1 if x.shape[2] == 131 else y


def test_single_sizes_become_rules_on_sizes(tmp_path) -> None:
    spec = make(holes)
    with pytest.raises(ConstraintError, match=r"h must be in 64\.\.180 .*y \* 5 if"):
        export(spec, None, tmp_path / "m.onnx")
    auto = tuple(replace(size, auto=True) if isinstance(size, Dim) else size for size in SIZES)
    done = export(replace(spec, inputs=(Input("x", auto),)), None, tmp_path / "m.onnx")
    assert sorted(done.spec.rules) == ["h != 100", "h != 131"]
    assert [done.spec.dims[n].max for n in "bhw"] == [4, 180, 200]
    lines = {rule.size_rule: rule.line for rule in done.refinements}
    assert "== 131" in lines["h != 131"] and "== 100" in lines["h != 100"]


def exact(x):
    return x * 3 if x.shape[2] == 120 else x * 2


def test_a_rule_that_excludes_the_opt_says_so(tmp_path) -> None:
    words = (
        r'h != 120 must hold .*Dim\("h", min=121, opt=121, max=200\) .*, which excludes your opt'
    )
    with pytest.raises(ConstraintError, match=words):
        export(make(exact), None, tmp_path / "m.onnx")


def even_then_one(x):
    y = x * 2 if x.shape[2] % 2 == 0 else x + x  # the same
    return y * 3 if x.shape[2] == 144 and x.shape[3] == 145 else y


def wider_then_one(x):
    y = x * 2 if x.shape[2] > x.shape[3] else x + x  # the same
    return y * 3 if x.shape[2] == 141 and x.shape[3] == 136 else y


@pytest.mark.parametrize("function", [even_then_one, wider_then_one], ids=lambda f: f.__name__)
def test_a_choice_that_an_earlier_one_excludes_is_turned_too(tmp_path, function) -> None:
    with pytest.raises(ConstraintError, match=r"return y \* 3 if x.shape"):
        export(make(function), None, tmp_path / "m.onnx")


def third_then_one(x):
    y = x * 2 if x.shape[2] % 3 == 0 else x + x  # the same
    return y + 1 if x.shape[2] == 99 else y


def opt_beside_one(x):
    y = x * 2 if x.shape[2] != 99 else x * 5
    return y * 2 if x.shape[3] != 128 else y + y  # the same


@pytest.mark.parametrize("function", [third_then_one, opt_beside_one], ids=lambda f: f.__name__)
def test_only_the_size_that_matters_is_excluded(tmp_path, function) -> None:
    auto = tuple(replace(size, auto=True) if isinstance(size, Dim) else size for size in SIZES)
    spec = replace(make(function), inputs=(Input("x", auto),))
    done = export(spec, None, tmp_path / "m.onnx")
    assert done.spec.rules == ("h != 99",)
    assert [done.spec.dims[n].max for n in "bhw"] == [4, 200, 200]


def to_even(x):
    """Resizes odd features, as MobileViT does. The side that resizes serves every size."""
    y = x[:, :, ::8, ::8]
    h, w = y.shape[2:]
    even = h + h % 2, w + w % 2
    odd = even != (h, w)
    y = functional.interpolate(y, size=even, mode="bilinear") if odd else y
    y = y.unflatten(2, (even[0] // 2, 2)).flip(3).flatten(2, 3)
    return functional.interpolate(y, size=(h, w), mode="bilinear") if odd else y


def test_the_side_that_serves_every_size_is_exported(tmp_path) -> None:
    sizes = (1, 3, Dim("h", 64, 128, 200), 128)
    spec = replace(make(to_even), inputs=(Input("x", sizes),))
    assert not export(spec, None, tmp_path / "m.onnx").refinements


def batch_as_a_number(x):
    """Windows at their training size use a stored mask, and int() of a quotient, as SwinIR does."""
    b, _, h, w = x.shape
    y = functional.pad(x, (0, -w % 8, 0, -h % 8))
    windows = y.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
    if y.shape[2:] == (72, 72):
        n = 81
        windows = windows.reshape(windows.shape[0] // n, n, 3, 8, 8) + torch.zeros(n, 1, 1, 1)
        windows = windows.reshape(-1, 3, 8, 8)
        b = int(windows.shape[0] / (y.shape[2] * y.shape[3] / 64))
    y = windows.reshape(b, y.shape[2] // 8, y.shape[3] // 8, -1).sum(3)
    return y.mean((1, 2))


def test_a_number_of_few_values_on_the_other_side_is_no_rule(tmp_path) -> None:
    assert not export(make(batch_as_a_number), None, tmp_path / "m.onnx").refinements


def a_value_of_a_number(x):
    if x.shape[2] == 100:
        n = len([0] * x.shape[0])
        return x * 3 if n == 3 and x.shape[3] == 131 else x * 2
    return x * 2


def many_values_of_a_number(x):
    if x.shape[2] == 100:
        n = len([0] * x.shape[3])
        return x * 3 if n == 131 else x * 2
    return x * 2


@pytest.mark.parametrize("function", [a_value_of_a_number, many_values_of_a_number])
def test_what_a_number_hides_is_found(tmp_path, function) -> None:
    with pytest.raises(ConstraintError) as caught:
        export(make(function), None, tmp_path / "m.onnx")
    assert f"in {function.__name__}: " in str(caught.value)


def patches(x):
    """torch concludes from unfold that there are at least two patches, as in MobileViTV2."""
    y = functional.avg_pool2d(x, 32)
    return functional.unfold(y, 2, stride=2).sum((1, 2)) * 1e-3


def patches_then_one(x):
    y = patches(x)
    return y * 3 if x.shape[3] < 96 and x.shape[2] == 77 else y


def test_a_range_that_torch_concludes_is_no_rule(tmp_path) -> None:
    task = Task(make(patches), Net(patches), 0, Stopwatch())
    program = torch_export(task, EXAMPLE, relaxed=True).program
    assert any(span.lower > 64 for span in program.range_constraints.values())
    assert not export(make(patches), None, tmp_path / "m.onnx").refinements


def test_what_is_outside_of_a_concluded_range_is_found(tmp_path) -> None:
    with pytest.raises(ConstraintError):
        export(make(patches_then_one), None, tmp_path / "m.onnx")


def alone(x):
    return x * 3 if x.squeeze(0).dim() == 3 and x.shape[3] == 131 else x * 2


def test_what_an_op_decides_by_a_size_of_1_is_found(tmp_path) -> None:
    """torch takes it for granted that a batch is no 1, and leaves no guard."""
    with pytest.raises(ConstraintError, match=r"b must be in 2\.\.4"):
        export(make(alone), None, tmp_path / "m.onnx")


def on_one_line(x):
    return x * 3 if x.shape[2] == 100 and x.shape[3] == 130 else x * 2


def of_tuples(x):
    return x * 3 if x.shape[2:] == (100, 130) else x * 2


def in_a_list(x):
    return x * 3 if x.shape[2:] in [(7, 9), (100, 130)] else x * 2


def in_a_loop(x):
    return x * 3 if all(a == b for a, b in zip(x.shape[2:], (100, 130), strict=True)) else x * 2


def asked_before(x):
    is_100 = x.shape[2] == 100
    _unused = not is_100
    return of_tuples(x)


def again(x):
    for h, w, factor in ((70, 71, 2), (100, 130, 3)):
        if x.shape[2] == h and x.shape[3] == w:
            return x * factor
    return x * 2


HIDING = [single, on_one_line, of_tuples, in_a_list, in_a_loop, alone, asked_before, again]


@pytest.mark.parametrize("function", HIDING, ids=lambda f: f.__name__)
def test_a_quick_export_finds_what_a_branch_hides(tmp_path, function) -> None:
    """It has no budget for traces, as the export of a large program."""
    with pytest.raises(ConstraintError):
        export(make(function), None, tmp_path / "m.onnx", quick=True)


def nothing_new(x):
    is_100 = x.shape[2] == 100
    _unused = not is_100
    return x * 2


@pytest.mark.parametrize("quick", [False, True], ids=["whole", "quick"])
def test_a_quick_export_traces_no_side_that_runs_nothing_new(tmp_path, monkeypatch, quick) -> None:
    traced = []
    monkeypatch.setattr(
        broken_rules, "choices_at", lambda _, sizes: traced.append(sizes["h"] == 100) or []
    )
    assert not export(make(nothing_new), None, tmp_path / "m.onnx", quick=quick).refinements
    assert (True in traced) is not quick


def without_past(x, past):
    y = x + past.sum(1, keepdim=True)
    return y * 3 if past.shape[1] == 0 and x.shape[1] == 1131 else y * 2


def with_any_past(x, past):
    y = x + past.sum(1, keepdim=True)
    return y * 2 if past.shape[1] or x.shape[1] % 177 else y * 3


def without_a_difference(x, past):
    y = x + past.sum(1, keepdim=True)
    return y if past.shape[1] == 0 else y * (1.0 if x.shape[1] > 7 else 2.0)


def with_past(function) -> ModelSpec:
    b, n, past = Dim("b", 1, 2, 4), Dim("n", 8, 64, 2000), Dim("past", 0, 9, 1000)
    inputs = (Input("x", (b, n, 4)), Input("past", (b, past, 4)))
    return ModelSpec("net", lambda _: Net(function), inputs, (Output("y"),))


@pytest.mark.parametrize("function", [without_past, with_any_past])
def test_a_branch_behind_a_size_of_0_is_found(tmp_path, function) -> None:
    """torch takes it for granted that no size is 0, so nothing is heard of ``past == 0``."""
    with pytest.raises(ConstraintError, match=r"past must be in 1\.\.1000"):
        export(with_past(function), None, tmp_path / "m.onnx")


def test_a_size_of_0_is_kept_if_nothing_differs(tmp_path) -> None:
    assert not export(with_past(without_a_difference), None, tmp_path / "m.onnx").refinements


def a_third(x):
    return x * 3 if x.shape[2] * x.shape[3] * (1 / 3) == 131 * 137 * (1 / 3) else x * 2


def test_floats_keep_all_their_digits(tmp_path) -> None:
    """sympy prints 15 digits of a third. With these, the condition never holds."""
    with pytest.raises(ConstraintError, match=r"must hold \(\S+ in a_third: "):
        export(make(a_third), None, tmp_path / "m.onnx")


class Rarely(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept = 2.0

    def forward(self, x):
        y = x * self.kept
        if x.shape[2] == 131 and x.shape[3] > 180:
            self.kept = 3.0
        return y


def test_what_a_model_remembers_of_a_rare_size_is_found(tmp_path) -> None:
    spec = replace(make(None), build=lambda _: Rarely())
    with pytest.raises(ExportError, match=r"h=131,w=\d+, which changes kept \(.*kept = 3\.0\)"):
        export(spec, None, tmp_path / "m.onnx")
    export(replace(spec, state=("kept",)), None, tmp_path / "m.onnx")


def test_only_the_models_own_questions_are_heard() -> None:
    def net(x):
        y = torch.nn.functional.conv2d(x, torch.ones(1, 3, 3, 3)) if x.shape[2] > 3 else x
        return y.flatten(1) @ torch.ones(1, 1) if max(x.shape[2], 5) == 4 else y

    x = torch.zeros(2, 3, 70, 80)
    shapes = ({2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO},)
    with listening() as asked:
        torch.export.export(Net(net), (x,), dynamic_shapes=shapes)
    before = torch.SymBool.__bool__
    assert {a.line.rpartition(" in net: ")[2].split(" if ")[1] for a in asked} == {
        "x.shape[2] > 3 else x",
        "max(x.shape[2], 5) == 4 else y",
    }
    assert torch.SymBool.__bool__ is before


def on_values(x):
    if x.shape[2] == 100:
        return x * 2 if x.sum() * 0 == 0 else x * 3
    return x * 2


def unknown(x):
    if x.shape[2] == 100:
        return x * 3 if math.fmod(x.shape[3], 130.0) == 0.0 else x * 2
    return x * 2


@pytest.mark.parametrize("function", [on_values, unknown], ids=lambda f: f.__name__)
def test_a_side_that_cant_be_known_is_refused(tmp_path, function) -> None:
    with pytest.raises(ConstraintError) as caught:
        export(make(function), None, tmp_path / "m.onnx")
    assert f"in {function.__name__}: " in str(caught.value)
    assert "torch can't trace all that" in str(caught.value)


@pytest.mark.parametrize("condition", ["other(s0) > 1", "s0//0 == 1"])
def test_a_condition_that_cant_be_evaluated_is_unknown(condition) -> None:
    asked = [Asked(condition, condition), Asked("s0 < 3", "s0 < 3"), Asked("u0 < 3", "u0 < 3")]
    dim = Dim("h", 1, 2, 4)
    found, unknown = choices(asked, {"s0": Symbol(dim)}, [dim], ())
    assert unknown == asked[:1]
    assert [one.guard.sizes.tolist() for one in found] == [[[3], [4]]]


def test_a_part_of_a_condition_by_numpy_is_exact() -> None:
    """Where a condition fails at some sizes, numpy evaluates the others in parts."""
    n, h = (part.ravel() for part in np.meshgrid(np.arange(8), np.arange(1000, 9000, 1000)))
    formula = "(h**5 > 100) & (10//(1-n) > -100)"
    found = _each_holds(formula, {"n": n, "h": h})
    assert found.tolist() == [-1 if size == 1 else 1 for size in n]
    assert _each_holds("n > 1", {"n": np.zeros(0, int)}).tolist() == []
    shifted = _each_holds("RShift(h, n-3) > 0", {"n": n, "h": h})
    assert shifted.tolist() == [-1 if size < 3 else 1 for size in n]
