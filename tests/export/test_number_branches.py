"""Branches that only choose numbers become arithmetic, and everything else stays a branch."""

from __future__ import annotations

import collections
import itertools
import threading

import numpy as np
import onnxruntime
import pytest
import torch
from torch.nn import functional

from pipeline.errors import ConstraintError
from pipeline.export import trace
from pipeline.export.export import export
from pipeline.export.number_branches import arithmetic_lines, selecting
from pipeline.spec.dims import Dim
from pipeline.spec.model import Input, ModelSpec, Output

SIZES = (1, 2, Dim("h", 8, 20, 24), Dim("w", 8, 21, 24))


class Net(torch.nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.forward = function  # type: ignore[method-assign]


def lines_of(function) -> set[tuple[str, int]]:
    code = function.__code__
    return {(code.co_filename, n) for n in range(code.co_firstlineno, code.co_firstlineno + 30)}


def check_every_size(spec: ModelSpec, path) -> None:
    """Compares the ONNX file with the module at every set of sizes."""
    module = spec.build(None)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    ranges = [[s] if isinstance(s, int) else range(s.min, s.max + 1) for s in spec.inputs[0].shape]
    for shape in itertools.product(*ranges):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
        (got,) = session.run(None, {"x": x.numpy()})
        want = module(x).numpy()
        assert got.shape == want.shape, shape
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, err_msg=str(shape))


def skip_connection(x):
    """The larger one of a pyramid's levels is padded to the smaller one's, as in MONAI's UNet."""
    up = functional.interpolate(functional.avg_pool2d(x, 2), scale_factor=2)
    pads = [0, 0, 0, 0]
    for i in range(2):
        if x.shape[-i - 1] != up.shape[-i - 1]:
            pads[2 * i + 1] = 1
    return x + functional.pad(up, pads, "replicate")


def shifted_windows(x):
    """A single window is not shifted, as in torchvision's Swin Transformer."""
    b, c, h, w = x.shape
    window, shift = [16, 16], [8, 8]
    y = functional.pad(x, (0, -w % window[1], 0, -h % window[0]))
    if window[0] >= y.shape[2]:
        shift[0] = 0
    if window[1] >= y.shape[3]:
        shift[1] = 0
    if sum(shift) > 0:
        y = torch.roll(y, shifts=(-shift[0], -shift[1]), dims=(2, 3))
    rows, columns = y.shape[2] // window[0], y.shape[3] // window[1]
    y = y.view(b, c, rows, window[0], columns, window[1])
    place = torch.arange(256.0).view(1, 1, 1, 16, 1, 16)
    y = (y + place).reshape(b, c, rows * window[0], columns * window[1])
    if sum(shift) > 0:
        y = torch.roll(y, shifts=(shift[0], shift[1]), dims=(2, 3))
    return y[:, :, :h, :w]


def smaller_windows(x):
    """A window is not larger than the image, as in MONAI's Swin UNETR."""
    window = [16, 16]
    for i in range(2):
        if x.shape[2 + i] <= window[i]:  # noqa: PLR1730
            window[i] = x.shape[2 + i]
    return functional.pad(x, (0, -x.shape[3] % window[1], 0, -x.shape[2] % window[0])) * 2


def conditional(x):
    h, w = x.shape[2:]
    more = 3 if h > 12 and not 15 < w <= 25 else w
    return functional.pad(x, (0, 0, 0, more)) * 2


def added(x):
    more, less = 1, 3
    if x.shape[2] > 15 or x.shape[3] % 2:
        more += x.shape[3] // 4
    else:
        more, less = 2, 5
    return functional.pad(x, (less, more)) * 2


def trimmed(x):
    """What is longer is cut on both sides, as in Demucs."""
    longer = functional.pad(x, (0, 3))
    y = longer[..., : longer.shape[-1] // 4 * 4]
    delta = y.size(-1) - x.size(-1)
    if delta:
        y = y[..., delta // 2 : -(delta - delta // 2)]
    return x + y


def reflected(x):
    """A short signal is made longer before it is reflected, as in EnCodec."""
    more = 0
    if x.shape[-1] <= 12:
        more = 12 - x.shape[-1] + 1
        x = functional.pad(x, (0, more))
    y = functional.pad(x[0], (12, 0), mode="reflect")[None]
    return y[..., : y.shape[-1] - more]


def reflected_by_a_tensor(x):
    """In EnCodec itself, the number is a tensor where the signal is short."""
    most, more = torch.tensor(12), 0
    if x.shape[-1] <= most:
        more = most - x.shape[-1] + 1
        x = functional.pad(x, (0, more))
    y = functional.pad(x[0], (12, 0), mode="reflect")[None]
    end = y.shape[-1] - more
    return y[..., :end]


def on_both_sides(x):
    if x.shape[3] % 2:
        x = x[:, :, :, :-1]
    else:
        x = functional.pad(x, (0, 1, 0, 1), value=2.0)
        x = x[..., 1:]
        x = x[..., -(x.shape[3] // 2 * 2) :].contiguous()
    return x * 2


def from_the_end(x):
    n = x.shape[3] % 3
    if n > 0:
        x = x[:, :, -(n + 1) :, n:]
    return x * 2


def written_later(x):
    """A pad by 0 is a copy, and nobody has the other tensor."""
    if x.shape[-1] % 4:
        x = x[..., : -(x.shape[-1] % 4)]
    y = x * 2
    y.add_(1)
    return y


def a_number_that_nobody_needs(x):
    if x.shape[2] > 15:
        more = 2
        x = functional.pad(x, (0, more))
    return x


def whole_parts_of_floats(x):
    """A factor that is no half: 0.37 * h is 37 * h // 100 at all sizes here."""
    h, w = x.shape[2:]
    return functional.interpolate(x, size=(int(h * 0.37), int(w / 1.5)))


def whole_part_of_a_root(x):
    return x[:, :, : int(x.shape[2] ** 0.5)].sum(2) * int(x.shape[3] * 0.7)


def number_of_elements(x):
    return x.sum((2, 3)) / x.shape[2:].numel() + x.size().numel()


NUMBERS = [
    whole_parts_of_floats, whole_part_of_a_root, number_of_elements,
    skip_connection, shifted_windows, smaller_windows, conditional, added, trimmed, reflected,
    on_both_sides, from_the_end, a_number_that_nobody_needs, written_later,
    reflected_by_a_tensor,
]  # fmt: skip


@pytest.mark.parametrize("function", NUMBERS, ids=lambda f: f.__name__)
def test_branches_that_choose_numbers_keep_every_size(tmp_path, monkeypatch, function) -> None:
    spec = ModelSpec("net", lambda _: Net(function), (Input("x", SIZES),), (Output("y"),))
    done = export(spec, None, tmp_path / "m.onnx")
    assert not done.refinements
    check_every_size(spec, tmp_path / "m.onnx")
    monkeypatch.setattr(trace, "arithmetic_lines", lambda lines: frozenset())  # noqa: ARG005
    with pytest.raises(ConstraintError, match=rf"in {function.__name__}: "):
        export(spec, None, tmp_path / "m.onnx")


def test_a_class_that_a_function_defines(tmp_path) -> None:
    def made(rows):
        class Inner(torch.nn.Module):
            def forward(self, x):
                if x.shape[2] > 15:
                    x = functional.pad(x, (0, 0, 0, rows))
                return x * 2

        return torch.nn.Sequential(Inner())

    spec = ModelSpec("net", lambda _: made(3), (Input("x", SIZES),), (Output("y"),))
    assert not export(spec, None, tmp_path / "m.onnx").refinements
    check_every_size(spec, tmp_path / "m.onnx")


def tensors(x):
    if x.shape[2] > 15:
        x = x * 2
    return x


def floats(x):
    scale = 1.0
    if x.shape[2] > 15:
        scale = 2.0
    return x * scale


def in_place(x):
    y = x + 0
    if x.shape[2] > 15:
        y[:, 0] = 1
    return y


def own_function(x):
    def pad(x, n):
        return x + n + 1

    if x.shape[2] > 15:
        x = pad(x, x.shape[2])
    return x * 2


def of_unknown_sign(x):
    n = x.shape[2] - 15
    if n > 2 or n < -2:
        x = x[..., n:]
    return x * 2


def with_steps(x):
    if x.shape[2] > 15:
        x = x[..., ::2]
    return x * 2


def one_place(x):
    if x.shape[2] > 15:
        x = x[..., 0, :5]
    return x * 2


def written_after_a_copy(x):
    y = x * 1
    z = y
    if x.shape[-1] % 4 == 0:
        y = y[..., :-1].contiguous()
    y.add_(1)
    return z + y.sum()


def written_after_a_pad(x):
    y = x * 1
    z = y
    if x.shape[-1] % 4:
        y = functional.pad(y, (0, -y.shape[-1] % 4))
    y = functional.relu(y, inplace=True)
    return z + y.sum()


def the_other_one_is_written(x):
    y = x * 1
    z = y.view(-1)
    if x.shape[-1] % 4:
        y = functional.pad(y, (0, -y.shape[-1] % 4))
    z.mul_(3)
    return z.sum() + y * 2


def assigned_before(x):
    z = x * 3 + 1
    if x.shape[-1] % 4:
        x = z
        x = functional.pad(x, (0, -x.shape[-1] % 4))
    return x * 2


def another_name(x):
    y = x * 5
    if x.shape[-1] % 4:
        x = functional.pad(x, (0, -x.shape[-1] % 4))
        y = x
    return y * 2


def an_element_of_a_list(x):
    values = [x * 5, x]
    if x.shape[-1] % 4:
        x = functional.pad(x, (0, -x.shape[-1] % 4))
        values[0] = x
    return values[0] * 2


def another_tensor_on_the_second_side(x):
    y = x * 5
    if x.shape[-1] % 4:  # noqa: SIM108
        x = functional.pad(x, (0, -x.shape[-1] % 4))
    else:
        x = y
    return x * 2


def a_list_that_is_turned(x):
    s = [x.shape[2], x.shape[3]]
    if s[0] > s[1]:
        s = s[::-1]
    return functional.pad(x, (0, s[0]))


def a_list_with_two_names(x):
    s = [x.shape[2] // 2, 3]
    t = s
    if x.shape[2] > 15:
        s = [1, 2]
    s[0] = 5
    return torch.roll(x, tuple(t), (2, 3))


def one_of_two_lists(x):
    s, u = [x.shape[2], 3], [1, 2]
    t = s if x.shape[2] > 15 else u
    t[0] = 5
    return torch.roll(x, (s[0], u[0]), (2, 3))


def a_part_of_a_list(x):
    s = [1, 2]
    if x.shape[2] > 15:
        s[0:1] = [4, 5]
    return torch.roll(x, sum(s), 3)


def a_place_that_moves(x):
    s, i = [0, 0, x.shape[3]], 0
    if x.shape[2] > 15:
        i = 1
        s[i] = x.shape[2]
    return torch.roll(x, s[1] - s[0] + i, 3)


def a_tensor_with_two_names(x):
    a = torch.tensor(x.shape[3])
    n = a
    if x.shape[2] > 15:
        n = torch.tensor(5)
    n += 1
    return x[..., : a - 5]


def a_tensor_that_is_divided(x):
    """Tensors divide in float32."""
    n, size = 3, torch.tensor(x.shape[2])
    if x.shape[2] > 15:
        n = size
    return x * (n / 3)


def a_tensor_that_is_written_later(x):
    a = torch.tensor(x.shape[3] - 1)
    n = a
    if x.shape[2] <= 15:
        n = n - 2
    a -= 5
    return x[..., :n].sum(3)


def an_element_that_is_written_later(x):
    t = torch.tensor([x.shape[3] - 1, 3])
    n = t[0]
    if x.shape[2] <= 15:
        n = 4
    t.clamp_(max=6)
    return x[..., :n].sum(3)


def a_truth(x):
    causal = True if x.shape[2] > 12 else False  # noqa: SIM210
    if causal is True:
        x = x * 2
    return x


def padded_or_not(x):
    y = x
    if x.shape[2] < 15:
        y = functional.pad(y, (0, 0, 0, 15 - x.shape[2]))
    out = y * 2
    if y is not x:
        out = out - 1
    return out.sum((2, 3))


def a_place_in_the_list_itself(x):
    p = [0, 5]
    if x.shape[2] > 15:
        p[p[0]] = 1
    return torch.roll(x, p[0] + p[1], 3)


def on_one_side_only(x):
    if x.shape[2] > 15:
        n = 3
    try:
        k = n
    except NameError:
        k = 5
    return torch.roll(x, k, 3)


def a_pad_that_torch_only_traces(x):
    n = 12 - x.shape[3]
    if n > 0:  # torch fails at four axes, also where n is 0
        x = functional.pad(x, (n, n), mode="reflect")
    y = x.flatten(1)
    if y.shape[1] > 800:
        y = y + 1
    return y


OTHERS = [
    a_pad_that_torch_only_traces,
    a_tensor_that_is_written_later, an_element_that_is_written_later, a_truth, padded_or_not,
    a_place_in_the_list_itself, on_one_side_only,
    a_list_that_is_turned, a_list_with_two_names, one_of_two_lists, a_part_of_a_list,
    a_place_that_moves, a_tensor_with_two_names, a_tensor_that_is_divided,
    tensors, floats, in_place, own_function, of_unknown_sign, with_steps, one_place,
    written_after_a_copy, written_after_a_pad, the_other_one_is_written, assigned_before,
    another_name, an_element_of_a_list, another_tensor_on_the_second_side,
]  # fmt: skip


@pytest.mark.parametrize("factor", [0.7, 0.1])
def test_a_float_in_several_steps_stays_a_number(tmp_path, factor) -> None:
    """sympy would fold 0.7 * 10 to 7, and Python has 83 at a size of 12."""

    def folded(x):
        return functional.interpolate(x, size=(int(x.shape[2] * factor * 10), 4))

    spec = ModelSpec("net", lambda _: Net(folded), (Input("x", SIZES),), (Output("y"),))
    with pytest.raises(ConstraintError, match="h is baked in"):
        export(spec, None, tmp_path / "m.onnx")


@pytest.mark.parametrize("function", OTHERS, ids=lambda f: f.__name__)
def test_other_branches_stay(tmp_path, function) -> None:
    spec = ModelSpec("net", lambda _: Net(function), (Input("x", SIZES),), (Output("y"),))
    with pytest.raises(ConstraintError, match=rf"in {function.__name__}: "):
        export(spec, None, tmp_path / "m.onnx")


def short_signals(x):
    if x.shape[-1] <= 40:
        x = functional.pad(x, (0, 41 - x.shape[-1]))
    return functional.pad(x, (40, 0), mode="reflect")


def test_a_few_sizes_of_very_many_count(tmp_path) -> None:
    shape = (1, 2, Dim("t", 20, 4000, 20000))
    spec = ModelSpec("net", lambda _: Net(short_signals), (Input("x", shape),), (Output("y"),))
    assert not export(spec, None, tmp_path / "m.onnx").refinements
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    for t in (20, 40, 41, 42, 20000):
        x = torch.randn(1, 2, t)
        assert np.array_equal(session.run(None, {"x": x.numpy()})[0], short_signals(x).numpy())


def at_the_top(x):
    if x.shape[2] < 24:
        return functional.pad(x, (0, 1))
    more = 1 if 12 < x.shape[3] < 15 else 2  # not asked at smaller heights
    return functional.pad(x, (0, more - 1))[..., :-1] + functional.pad(x, (0, 0))[..., -1:]


def test_a_choice_of_numbers_behind_a_branch_is_found(tmp_path) -> None:
    """The program from the other side would make the choice at every height."""
    spec = ModelSpec("net", lambda _: Net(at_the_top), (Input("x", SIZES),), (Output("y"),))
    with pytest.raises(ConstraintError, match="in at_the_top: "):
        export(spec, None, tmp_path / "m.onnx")


def every_form(h, w, s):
    """Called with numbers and with sizes."""
    out, k = [1, 2], 0
    if h <= 7:
        out[0] = h
        if s is not None:
            k = s
    else:
        out[0] = 7
    if h > 3 and w != 5:
        k += 1
    sides = [0 if r <= 4 else r for r in (h, w)]
    if not (2 < h < 6):
        k = k + 10
    if w != 6 and 12 // (w - 6) == 3:  # fails if both are evaluated
        k = k + 100
    far = (h, w) if h == w else (1, k)
    if w:
        k = k - 1
    return [*out, k, *sides, *far]


class Sums(torch.nn.Module):
    def forward(self, x):
        values = every_form(*x.shape, 3)
        return torch.stack([torch.arange(value + 1)[-1] for value in values]) + 0 * x.sum().long()


def test_arithmetic_is_the_branch_at_every_size() -> None:
    free = torch.export.Dim.DYNAMIC
    module, before = Sums(), every_form.__code__
    with selecting(arithmetic_lines(lines_of(every_form))):
        assert every_form.__code__ is not before
        program = torch.export.export(
            module, (torch.ones(9, 7),), dynamic_shapes=({0: free, 1: free},), strict=False
        )
        numbers = [every_form(h, w, None) for h in range(9) for w in range(9)]
    assert every_form.__code__ is before
    assert numbers == [every_form(h, w, None) for h in range(9) for w in range(9)]
    graph = program.module(check_guards=False)
    for h, w in itertools.product(range(2, 12), repeat=2):
        if w != 6:
            x = torch.ones(h, w)
            assert graph(x).tolist() == module(x).tolist(), (h, w)


def objects(n, log):
    total = [0]
    if n > 2:
        log.append(n)
    if n > 3:
        total += [n]
    if n > 4:
        log.size = n
    return total


def test_a_branch_with_an_effect_is_not_meant() -> None:
    """Neither a call nor an attribute; ``+=`` of a list is found out when it runs."""
    found = {
        line - objects.__code__.co_firstlineno for _, line in arithmetic_lines(lines_of(objects))
    }
    assert found & set(range(8)) == {4}
    log = type("Log", (list,), {})()
    results = []

    def hear(x):
        results.append(len(objects(x.shape[0], log)))
        return x + 1

    free = torch.export.Dim.DYNAMIC
    with selecting(lines_of(objects)):
        torch.export.export(
            Net(hear), (torch.ones(9),), dynamic_shapes={"x": {0: free}}, strict=False
        )
    assert results == [2] and len(log) == 1


def test_to_look_at_an_element_changes_nothing() -> None:
    def grown(x, found):
        if x.shape[0] > 15:
            found["a"] = x.shape[0]
        return x[:, : len(found) + 1]

    def used(x):
        return grown(x, collections.defaultdict(int))

    free = torch.export.Dim.DYNAMIC
    with selecting(lines_of(grown)):
        program = torch.export.export(
            Net(used), (torch.ones(9, 9),), dynamic_shapes={"x": {0: free}}, strict=False
        )
    assert program.module(check_guards=False)(torch.ones(9, 9)).shape == (9, 1)


def test_other_threads_run_the_same() -> None:
    found: list[object] = []
    with selecting(lines_of(every_form)):
        other = threading.Thread(target=lambda: found.append(every_form(3, 6, 2)))
        other.start()
        other.join()
    assert found == [every_form(3, 6, 2)]
