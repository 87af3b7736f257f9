"""Ops that torch's exporter lacks: cummax, erfinv, searchsorted, small matrices, group counts."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from op_exports import compare_op, export_op
from torch.nn import functional

from pipeline.errors import ExportError

NAN, INF = math.nan, math.inf


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ties(*shape):
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["cummax", "cummin"])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_cumulative(tmp_path, name, dim) -> None:
    path, function = tmp_path / "m.onnx", lambda x: getattr(torch, name)(x, dim)
    export_op(function, [random(3, 5, 6)], path)
    for shape in ((1, 1, 1), (2, 3, 4), (17, 16, 15), (3, 2, 200)):
        compare_op(function, path, [random(*shape)])
        compare_op(function, path, [ties(*shape).float()])  # torch takes the last of equal values
        x = ties(*shape).float()
        x[torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.1] = NAN
        x[torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.1] = INF
        x[torch.rand(shape, generator=torch.Generator().manual_seed(4)) < 0.1] = -INF
        compare_op(function, path, [x])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float16])
def test_cumulative_dtypes(tmp_path, dtype) -> None:
    path, function = tmp_path / "m.onnx", lambda x: torch.cummax(x, 1)
    export_op(function, [ties(3, 5).to(dtype)], path)
    compare_op(function, path, [ties(4, 9).to(dtype)])
    lowest = torch.full((2, 3), torch.iinfo(dtype).min if not dtype.is_floating_point else -INF)
    compare_op(function, path, [lowest.to(dtype)])


def test_cumulative_of_a_fixed_axis_has_few_steps(tmp_path) -> None:
    model = export_op(lambda x: torch.cummax(x, 1)[0], [random(3, 5)], tmp_path / "m.onnx", [[0]])
    assert [n.op_type for n in model.graph.node].count("Where") == 3  # 1, 2, 4 places


def test_erfinv(tmp_path) -> None:
    """The reference is float64: torch's own float32 on a CPU is off by 1e-3 near 1."""
    path = tmp_path / "m.onnx"

    def function(x):
        return torch.erfinv(x), torch.erfinv(x) / x  # small values relative to themselves

    def exact(x):
        return tuple(y.float() for y in function(x.double()))

    export_op(function, [random(5)], path)
    near_1 = 1 - torch.tensor([2.0**-n for n in range(1, 25)])
    for x in (torch.linspace(-0.999, 0.998, 198), torch.logspace(-30, -1, 200), near_1, -near_1):
        compare_op(exact, path, [x], near=1e-6)
    ends = torch.tensor([0.0, -0.0, 1.0, -1.0, 1.5, -2.0, INF, NAN])
    compare_op(function, path, [ends])


BOUNDARIES = {
    "sorted": lambda n: torch.sort(ties(n).float())[0],
    "not sorted": lambda n: ties(n).float(),
    "with NaN": lambda n: torch.cat([torch.arange(n - n // 3).float(), torch.full((n // 3,), NAN)]),
}
VALUES = torch.tensor([[-3.0, -2, -1.5, -1, 0, 0.5], [2, 3, 4, NAN, INF, -INF]])


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("kind", BOUNDARIES)
def test_search_in_one_row(tmp_path, right, kind) -> None:
    path = tmp_path / "m.onnx"

    def function(x, boundaries):
        return (
            torch.searchsorted(boundaries, x, right=right),
            torch.bucketize(x, boundaries, right=right, out_int32=True),
        )

    export_op(function, [VALUES, BOUNDARIES[kind](7)], path)
    for n in (1, 2, 3, 4, 8, 9, 31, 200):
        compare_op(function, path, [VALUES, BOUNDARIES[kind](n)])


@pytest.mark.parametrize("side", ["left", "right"])
def test_search_in_rows(tmp_path, side) -> None:
    path = tmp_path / "m.onnx"

    def function(boundaries, x):
        order = boundaries.argsort(-1)
        return (
            torch.searchsorted(boundaries, x, side=side, sorter=order),
            torch.searchsorted(boundaries.sort(-1)[0], x, side=side),
        )

    def args(b, n, m):
        return [ties(b, 2, n).float(), ties(b, 2, m).float()]

    same = [[0, 2], [0, 2]]
    export_op(function, args(3, 5, 6), path, same)
    for sizes in ((1, 1, 1), (2, 9, 4), (5, 16, 33)):
        compare_op(function, path, args(*sizes))


def test_search_of_integers_and_numbers(tmp_path) -> None:
    path = tmp_path / "m.onnx"

    def function(x):
        edges = torch.tensor([-1, 0, 0, 2])
        return (
            torch.bucketize(x, edges),
            torch.searchsorted(edges, 0, right=True),
            torch.searchsorted(edges.float(), 1.5),
        )

    export_op(function, [ties(5)], path)
    compare_op(function, path, [ties(50)])


def matrices(n, count=7):
    """Matrices that need exchanges: zeros on the diagonal, and any order of sizes."""
    plain = random(count, n, n, seed=n)
    scaled = random(count, n, n, seed=n + 9) * torch.tensor([1e-3, 1, 1e3, 30.0])[:n, None]
    zeros = random(count, n, n, seed=n + 5) * (1 - torch.eye(n)) if n > 1 else plain + 9
    shuffled = torch.eye(n)[list(itertools.permutations(range(n)))[-1],].expand(count, n, n)
    return torch.cat([plain, scaled, zeros, shuffled])


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_small_matrices(tmp_path, n) -> None:
    path = tmp_path / "m.onnx"

    def function(a, b):
        return (
            torch.linalg.inv(a) @ a,
            torch.linalg.solve(a, b),
            torch.linalg.solve(a, b[:, :, 0]),
            torch.linalg.solve(a, b.mT, left=False),
            torch.linalg.solve(a[0], b),
            torch.inverse(a[0]) @ a[0],
        )

    def exact(a, b):
        return tuple(y.float() for y in function(a.double(), b.double()))

    export_op(function, [matrices(n, 2), random(8, n, 3)], path, [[0], [0, 2]])
    a = matrices(n)
    a = a[torch.linalg.cond(a.double()) < 1e4]  # eps * 1e4 is the error of any method
    assert len(a) >= 14
    compare_op(exact, path, [a, random(len(a), n, 5)], near=3e-3)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_determinants(tmp_path, n) -> None:
    path = tmp_path / "m.onnx"

    def function(a):
        return (torch.linalg.det(a), torch.det(a[0]), *torch.linalg.slogdet(a))

    def exact(a):
        return tuple(y.float() for y in function(a.double()))

    model = export_op(function, [matrices(n, 2)], path, [[0]])
    assert "Det" not in {node.op_type for node in model.graph.node}
    a = matrices(n)
    compare_op(exact, path, [a[torch.linalg.cond(a.double()) < 1e4]], near=3e-3)
    singular = torch.stack([torch.zeros(n, n), torch.ones(n, n) * (n > 1)])
    compare_op(function, path, [singular])


def test_larger_matrices_are_refused_with_their_line(tmp_path) -> None:
    for function in (torch.linalg.inv, torch.det, lambda a: torch.linalg.solve(a, a)):
        with pytest.raises(ExportError, match=r"op_exports.py:\d+ in forward.*up to 4x4") as error:
            export_op(function, [random(3, 5, 5)], tmp_path / "m.onnx", [[0]])
        assert error.value.line


@pytest.mark.parametrize("ex", [torch.linalg.inv_ex, lambda a: torch.linalg.solve_ex(a, a)])
def test_error_codes_are_refused(tmp_path, ex) -> None:
    with pytest.raises(ExportError, match="use the result only"):
        export_op(ex, [random(3, 4, 4)], tmp_path / "m.onnx", [[0]])
    export_op(lambda a: ex(a)[0], [random(3, 4, 4)], tmp_path / "m.onnx", [[0]])


OPTIONS = [
    {},
    {"padding": 1},
    {"stride": 2, "padding": (2, 1)},
    {"dilation": (2, 1), "padding": (0, 2)},
]


def grouped(options, *, transposed=False):
    """Another kernel for each image, as in StyleGAN2."""

    def function(x, kernel, bias):
        b, c, h, w = x.shape
        x = x.reshape(1, b * c, h, w)
        kernel = kernel.reshape(-1, *kernel.shape[2:])
        if transposed:
            y = functional.conv_transpose2d(x, kernel, bias.flatten(), groups=b, **options)
        else:
            y = functional.conv2d(x, kernel, bias.flatten(), groups=b, **options)
        return y.reshape(b, -1, *y.shape[2:])

    return function


def grouped_args(b, h, w, *, transposed=False):
    kernel = (b, 3, 5, 3, 2) if transposed else (b, 5, 3, 3, 2)
    return [random(b, 3, h, w), random(*kernel), random(b, 5)]


@pytest.mark.parametrize("options", [*OPTIONS, {"stride": 2, "output_padding": 1}], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_kernel_for_each_image(tmp_path, options, transposed) -> None:
    if "output_padding" in options and not transposed:
        options = {"stride": (1, 3)}
    path, function = tmp_path / "m.onnx", grouped(options, transposed=transposed)
    example = grouped_args(4, 9, 11, transposed=transposed)
    export_op(function, example, path, [[0, 2, 3], [0], [0]])
    for sizes in ((1, 7, 7), (2, 8, 5), (3, 20, 31)):
        compare_op(function, path, grouped_args(*sizes, transposed=transposed), near=1e-5)


def test_groups_and_a_kernel_that_follow_sizes_are_refused(tmp_path) -> None:
    def function(x):
        b, c, h, w = x.shape
        kernel = x.new_ones(b, c, h // 4, 3)
        return functional.conv2d(x.reshape(1, b * c, h, w), kernel, groups=b)

    with pytest.raises(ExportError, match=r"aten.conv2d at .*its groups follow a size"):
        export_op(function, [random(3, 4, 9, 11)], tmp_path / "m.onnx", [[0, 2, 3]])
