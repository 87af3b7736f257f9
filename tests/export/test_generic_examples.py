"""Ranges whose smallest sizes leave one element inside the model, and ranges of two sizes."""

from __future__ import annotations

import itertools

import pytest
import torch
from test_export import check
from torch import nn
from torch.nn import functional

from pipeline.export.export import export
from pipeline.probe.eager import EagerModule
from pipeline.probe.generic import generic_examples
from pipeline.probe.grid import legal_sizes
from pipeline.spec.dims import Dim, kept_rules
from pipeline.spec.model import Input, ModelSpec, Output, Tolerance

B, H, W = Dim("b", 1, 1, 2), Dim("h", 4, 64, 128), Dim("w", 4, 64, 128)
IMAGE = Input("x", (B, 3, H, W))


class Front(nn.Module):
    """A convolution gives one frame at the smallest size; the next layer pads it."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Conv1d(1, 16, 400, 320)
        self.positions = nn.Conv1d(16, 16, 32, padding=16, groups=4)

    def forward(self, x):
        h = self.front(x[:, None])
        return h + self.positions(h)[:, :, :-1]


class Levels(nn.Module):
    """Each level has half the size of the one before; the last has one element at small sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, 4, 1)
        self.rest = nn.ModuleList(nn.Conv2d(8, 8, 3, 2, 1) for _ in range(3))

    def forward(self, x):
        found, x = [], self.first(x)
        for layer in self.rest:
            x = layer(torch.relu(x))
            found.append(x.flatten(2).permute(0, 2, 1))
        return tuple(found)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        y = self.patches(x).flatten(2).transpose(1, 2)
        return self.attention(y, y, y, need_weights=False)[0]


class Pools(nn.Module):
    def forward(self, x):
        return functional.max_pool2d(functional.max_pool2d(x, 2), 2)


class Video(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv3d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv3d(8, 8, 3, 2, 1),
            nn.AdaptiveAvgPool3d(1), nn.Flatten(),
        )  # fmt: skip


class Window(nn.Module):
    """Two branches on a size, with the same operators."""

    def forward(self, x):
        return x * 2 if x.shape[2] <= 8 else x * 3


def spec_of(kind, inputs, outputs=1, **options) -> ModelSpec:
    def build(_):
        torch.manual_seed(0)
        return kind().eval()

    names = tuple(Output(f"y{n}") for n in range(outputs))
    return ModelSpec("m", build, inputs, names, Tolerance(1e-4, 1e-4, "a test"), **options)


WIDE = (Dim("h", 16, 80, 112), Dim("w", 16, 80, 112))
CASES = {
    "two batches": (Video, (Input("x", (B, 3, Dim("t", 4, 8, 16), 16, 16)),), 1),
    "two batches, opt 2": (Video, (Input("x", (Dim("b", 1, 2, 2), 3, 4, 16, 16)),), 1),
    "one frame": (Front, (Input("x", (Dim("b", 1, 2, 4), Dim("t", 400, 16000, 48000))),), 1),
    "levels": (Levels, (Input("x", (B, 3, *WIDE)),), 3),
    "pools": (Pools, (IMAGE,), 1),
    "attention": (Attention, (IMAGE,), 1),
}


@pytest.mark.parametrize("case", CASES)
def test_small_sizes_are_not_baked_in(tmp_path, case) -> None:
    kind, inputs, outputs = CASES[case]
    spec = spec_of(kind, inputs, outputs, refine_dims=False)
    done = export(spec, None, tmp_path / "m.onnx")
    assert done.spec.dims == spec.dims, "no range is narrower"
    dims = list(spec.dims.values())
    sets = [dict(zip(spec.dims, row, strict=True)) for row in itertools.product(
        *([dim.min, min(dim.min + 1, dim.max), dim.opt, dim.max] for dim in dims)
    )]  # fmt: skip
    check(done, sets)


SETS = [(2, 9, 4), (1, 10, 5), (1, 64, 64), (2, 128, 128)]


def test_the_side_of_a_branch_that_has_the_opt(tmp_path) -> None:
    done = export(spec_of(Window, (IMAGE,), refine_dims=True), None, tmp_path / "m.onnx")
    h = done.spec.dims["h"]
    assert (h.min, h.opt, h.max) == (9, 64, 128)
    assert "the model takes another branch at h=4" in str(done.refinements[0])
    check(done, [dict(zip("bhw", row, strict=True)) for row in SETS], exact=True)


class Two(nn.Module):
    """It takes two rows at most."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.rand(2, 4, 4))

    def forward(self, x):
        assert x.shape[0] <= 2
        return torch.bmm(x, self.rows[: x.shape[0]])


@pytest.mark.parametrize("opt", [1, 2])
def test_a_model_that_needs_the_range_of_two(tmp_path, opt) -> None:
    spec = spec_of(Two, (Input("x", (Dim("b", 1, opt, 2), 4, 4)),))
    done = export(spec, None, tmp_path / "m.onnx")
    check(done, [{"b": 1}, {"b": 2}])


class Inside(nn.Module):
    """A branch inside of a branch: torch leaves no guard on the inner one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x):
        n, y = x.shape[2], self.body(x)
        if n <= 128:
            return y.flip(1)
        return y * 3 if n % 256 == 0 else y.flip(1)


def test_a_branch_behind_a_branch_is_not_lost(tmp_path) -> None:
    n = Dim("n", 5, 100, 3000)
    spec = spec_of(Inside, (Input("x", (1, 8, n)),), refine_dims=True)
    done = export(spec, None, tmp_path / "m.onnx")
    n = done.spec.dims["n"]
    assert (n.min, n.max) == (5, 128)
    check(done, [{"n": size} for size in range(n.min, n.max + 1)])


class Trimmed(nn.Module):
    """A decoder whose output is cut to the input's length, as in Demucs; at t % 4 == 0 it fits."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv1d(3, 4, 8, 4), nn.ConvTranspose1d(4, 3, 8, 4)

    def forward(self, x):
        y = self.up(self.down(functional.pad(x, (1, 2))))
        more = y.shape[-1] - x.shape[-1]
        return y[..., more // 2 : -(more - more // 2)] if more else y


@pytest.mark.parametrize(("opt", "kept"), [(113, "t % 4 != 0"), (112, "t % 4 == 0")])
def test_a_branch_at_one_remainder(tmp_path, opt, kept) -> None:
    spec = spec_of(Trimmed, (Input("x", (B, 3, Dim("t", 20, opt, 200))),), refine_dims=True)
    done = export(spec, None, tmp_path / "m.onnx")
    t = done.spec.dims["t"]
    left = [n for n in range(20, 201) if kept_rules([kept], {"t": n})]
    legal = [n for n in legal_sizes(t, 200) if kept_rules(done.spec.rules, {"t": n})]
    assert legal == left
    assert "the model takes another branch at t=2" in str(done.refinements[0])
    check(done, [{"b": 1, "t": n} for n in left[::5]])


def test_a_branch_at_some_remainders_keeps_all_others(tmp_path) -> None:
    """torch suggests steps of 5."""

    class Some(nn.Module):
        def forward(self, x):
            return x * 2 if x.shape[2] % 5 >= 2 else x

    spec = spec_of(Some, (Input("x", (1, 3, Dim("h", 8, 37, 64))),), refine_dims=True)
    done = export(spec, None, tmp_path / "m.onnx")
    left = [n for n in range(8, 65) if kept_rules(done.spec.rules, {"h": n})]
    assert left == [n for n in range(8, 65) if n % 5 >= 2]
    check(done, [{"h": n} for n in left[::4]])


def test_the_smallest_sizes_that_are_like_the_opts() -> None:
    eager = EagerModule((IMAGE,), nn.Conv2d(3, 8, 3, 4, 1), 0)
    assert generic_examples(eager, ())[0] == {"b": 2, "h": 5, "w": 6}
    eager = EagerModule((IMAGE,), nn.Sequential(nn.AvgPool2d(4), nn.AvgPool2d(4)), 0)
    first = generic_examples(eager, ())[0]
    assert first["h"] != first["w"]
    assert all(32 <= first[name] < 64 for name in "hw")


class Windows(nn.Module):
    """Attention in windows of 8, of which there is one at the opts and many at the largest size."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x):
        b, t, c = x.shape
        y = functional.pad(x, (0, 0, 0, -t % 8)).view(b, -1, 8, c)
        if y.shape[1] != 1:  # what torch does with one window is right with more
            y = y.contiguous()
        return self.mix(y.transpose(2, 3)).transpose(2, 3).reshape(b, -1, c)[:, :t]


def test_one_part_at_the_opts_and_many_at_the_largest_size(tmp_path) -> None:
    t = Dim("t", 2, 6, 64)
    x = Input("x", (2, t, 4))
    chosen = generic_examples(EagerModule((x,), Windows(), 0), ())
    assert chosen[0]["t"] > 8
    done = export(spec_of(Windows, (x,)), None, tmp_path / "m.onnx")
    assert (done.spec.dims["t"].min, done.spec.dims["t"].max) == (2, 64)
    check(done, [{"t": size} for size in range(2, 65)])


class AtTheEnd(nn.Module):
    """The branch matters for memory only; torch concludes a range from it."""

    def forward(self, x):
        y = x.flip(2)
        return functional.interpolate(y, size=x.shape[2:]) if (x.shape[2] - 1) // 64 > 0 else y


def test_a_branch_that_excludes_only_an_end_and_does_not_matter(tmp_path) -> None:
    x = Input("x", (1, 3, Dim("h", 64, 100, 200), Dim("w", 8, 16, 40)))
    done = export(spec_of(AtTheEnd, (x,)), None, tmp_path / "m.onnx")
    assert done.spec.dims["h"].min == 64
    check(done, [{"h": h, "w": w} for h in (64, 65, 200) for w in (8, 9, 40)])


class Different(AtTheEnd):
    def forward(self, x):
        y = super().forward(x)
        return y * 2 if x.shape[2] == 64 else y


def test_a_branch_at_an_end_that_matters(tmp_path) -> None:
    x = Input("x", (1, 3, Dim("h", 64, 100, 200), Dim("w", 8, 16, 40)))
    done = export(spec_of(Different, (x,), refine_dims=True), None, tmp_path / "m.onnx")
    h = done.spec.dims["h"]
    assert (h.min, h.max) == (65, 200)
    check(done, [{"h": size, "w": 9} for size in (65, 66, 200)])


class Nested(nn.Module):
    """Only at the smallest height there is a branch on the width."""

    def forward(self, x):
        h, w = x.shape[2:]
        if h > 64:
            return x * 2
        return x * 3 if w % 7 == 3 and w > 70 else x * 2


class NestedAtTheTop(nn.Module):
    def forward(self, x):
        h, w = x.shape[2:]
        if h < 200:
            return x.mean((2, 3))
        return x.mean((2, 3)) + (1 if 75 < w < 100 and w % 5 == 2 else 0)


@pytest.mark.parametrize(("kind", "ends"), [(Nested, (65, 200)), (NestedAtTheTop, (64, 199))])
def test_a_branch_on_another_dim_behind_an_end_is_not_lost(tmp_path, kind, ends) -> None:
    x = Input("x", (1, 3, Dim("h", 64, 100, 200), Dim("w", 64, 100, 200)))
    done = export(spec_of(kind, (x,), refine_dims=True), None, tmp_path / "m.onnx")
    h = done.spec.dims["h"]
    assert (h.min, h.max) == ends
    check(done, [{"h": size, "w": w} for size in ends for w in (64, 73, 77, 80, 200)])
