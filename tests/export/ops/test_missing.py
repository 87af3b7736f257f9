"""Ops that torch's exporter lacks, or writes wrongly for large values."""

from __future__ import annotations

import importlib
import itertools
import math

import onnxruntime
import pytest
import torch
from onnx import helper
from op_exports import compare_op, export_op
from torch.nn import functional

from pipeline.errors import ExportError
from pipeline.machine.libraries import import_torchvision, import_transformers

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


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.int64])
def test_stable_sort(tmp_path, dim, descending, dtype) -> None:
    """Equal values keep their order: their places are compared too."""

    def function(x):
        return torch.sort(x, stable=True, dim=dim, descending=descending)

    path = tmp_path / "m.onnx"
    export_op(function, [ties(3, 5, 6).to(dtype)], path)
    for shape in ((1, 1, 1), (2, 3, 4), (17, 16, 15), (3, 2, 200)):
        compare_op(function, path, [ties(*shape).to(dtype)])
    compare_op(function, path, [torch.zeros(4, 3, 7).to(dtype)])
    if dtype.is_floating_point:  # torch counts NaN as larger than infinity
        x = ties(4, 8, 9).to(dtype)
        for number, value in enumerate((NAN, INF, -INF)):
            x[torch.rand(x.shape, generator=torch.Generator().manual_seed(number)) < 0.2] = value
        compare_op(function, path, [x])


def test_stable_argsort_of_a_mask(tmp_path) -> None:
    path, function = tmp_path / "m.onnx", lambda x: torch.argsort(x > 0, stable=True)
    export_op(function, [random(3, 5)], path)
    for shape in ((1, 1), (3, 200)):
        compare_op(function, path, [random(*shape)])


def test_sort_of_an_axis_that_may_be_too_long_is_refused(tmp_path) -> None:
    with pytest.raises(ExportError, match="median of up to 5000 values"):
        export_op(lambda x: x.median(1)[0], [random(3, 9)], tmp_path / "m.onnx", most=5000)


def test_stable_sort_of_a_long_axis_is_refused(tmp_path) -> None:
    with pytest.raises(ExportError, match="sort of 3841 values: TensorRT sorts 3840 at most"):
        export_op(lambda x: x.sort(stable=True)[0], [random(3, 3841)], tmp_path / "m.onnx", [[0]])


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


LARGE = torch.tensor([0.0, -0.0, 1, -1, 20, -20, 87, -87, 89, -89, -104, 200, -200, 1e30, -1e30])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_logsigmoid(tmp_path, dtype) -> None:
    path, near = tmp_path / "m.onnx", 1e-6 if dtype == torch.float32 else 1e-3
    export_op(functional.logsigmoid, [random(5).to(dtype)], path)
    for x in (torch.linspace(-300, 300, 999), LARGE[:-2], torch.tensor([INF, -INF, NAN])):
        compare_op(functional.logsigmoid, path, [x.to(dtype)], near=near)


SMALL = torch.cat([torch.logspace(-30, -0.01, 300), torch.tensor([0.25, 0.5])])


@pytest.mark.parametrize("function", [torch.log1p, torch.expm1])
def test_functions_of_a_small_number(tmp_path, function) -> None:
    """Their values are as small, and have all digits; ``log(1 + x)`` has none below 6e-8."""
    export_op(lambda x: function(x) / x, [random(5)], tmp_path / "m.onnx")
    for x in (SMALL, -SMALL):
        compare_op(lambda x: (function(x.double()) / x).float(), tmp_path / "m.onnx", [x], 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("function", [torch.log1p, torch.expm1])
def test_functions_of_any_number(tmp_path, function, dtype) -> None:
    path, near = tmp_path / "m.onnx", 1e-3 if dtype == torch.float16 else 1e-6
    export_op(function, [random(5).to(dtype)], path)
    ends = torch.tensor([0.0, -0.0, -1, -2, INF, -INF, NAN])
    for x in (torch.linspace(-0.999, 10, 999), ends):
        compare_op(function, path, [x.to(dtype)], near=near)


def test_the_digits_of_a_small_logsigmoid(tmp_path) -> None:
    def function(x):
        return functional.logsigmoid(x) * torch.exp(x)

    export_op(function, [random(5)], tmp_path / "m.onnx")
    compare_op(function, tmp_path / "m.onnx", [torch.linspace(5, 80, 99)], near=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("function", [torch.logaddexp, torch.logaddexp2])
def test_logarithms_of_sums(tmp_path, function, dtype) -> None:
    path, near = tmp_path / "m.onnx", 1e-6 if dtype == torch.float32 else 1e-3
    export_op(function, [random(5).to(dtype), random(5).to(dtype)], path)
    values = torch.cat([LARGE[:-2], torch.tensor([INF, -INF, NAN])]).to(dtype)
    a, b = torch.cartesian_prod(values, values).T
    compare_op(function, path, [a.contiguous(), b.contiguous()], near=near)


@pytest.mark.parametrize("function", [torch.special.erfcx, torch.special.log_ndtr])
def test_functions_without_right_digits_are_refused(tmp_path, function) -> None:
    with pytest.raises(ExportError, match="no right digit above 4"):
        export_op(function, [random(5)], tmp_path / "m.onnx")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("mode", ["trunc", "floor"])
def test_division_of_large_integers(tmp_path, mode, dtype) -> None:
    """Flat indices of a large image are above 2**24."""
    path = tmp_path / "m.onnx"

    def function(x, y):
        return torch.div(x, y, rounding_mode=mode), torch.div(x, -7, rounding_mode=mode)

    export_op(function, [ties(5).to(dtype) + 9, ties(5).to(dtype) + 9], path)
    values = torch.tensor([0, 1, -1, 6, -7, 8, 16777217, -16777217, 50000001, 2**31 - 1, -(2**31)])
    a, b = torch.cartesian_prod(values, torch.tensor([1, 2, -3, 7, 16777217])).to(dtype).T
    compare_op(function, path, [a.contiguous(), b.contiguous()])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_remainder_of_integers(tmp_path, dtype) -> None:
    """torch's exporter turns the 3 of ``x % 3`` into a tensor if x is int32."""
    path, function = tmp_path / "m.onnx", lambda x: (x % 3, x % -4, torch.remainder(x, 7), x // 3)
    export_op(function, [ties(5).to(dtype)], path)
    values = torch.tensor([*range(-9, 10), 16777217, 2**31 - 1, -(2**31) + 1])
    compare_op(function, path, [values.to(dtype)])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_remainder_of_integers_by_a_size(tmp_path, dtype) -> None:
    """Rows and columns of flat indices: ``index // x.shape[2]`` and ``index % x.shape[2]``."""
    path = tmp_path / "m.onnx"

    def function(x, y):
        n = y.shape[0]
        return x % n, x // n, x % (2 * n + 1), torch.remainder(x, n), x % (n - 1 + 1)

    export_op(function, [ties(5).to(dtype), random(4)], path)
    values = torch.tensor([*range(-9, 10), 16777217, 2**31 - 1, -(2**31) + 1]).to(dtype)
    for n in (1, 2, 3, 7, 8, 199, 200):
        compare_op(function, path, [values, random(n)])


def test_remainder_by_a_size_that_may_be_negative_is_refused(tmp_path) -> None:
    with pytest.raises(ExportError, match="% by a negative number, or by a size that may"):
        export_op(lambda x: x.argsort() % (x.shape[0] - 9), [random(5)], tmp_path / "m.onnx")


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_logcumsumexp(tmp_path, dim) -> None:
    path, function = tmp_path / "m.onnx", lambda x: torch.logcumsumexp(x, dim)
    export_op(function, [random(3, 5, 6)], path)
    for shape in ((1, 1, 1), (2, 3, 4), (17, 16, 15), (3, 2, 200)):
        compare_op(function, path, [random(*shape)], near=1e-5)
        compare_op(function, path, [random(*shape) * 1e4], near=1e-2)
        x = ties(*shape).float()
        x[torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.3] = -INF
        compare_op(function, path, [x], near=1e-5)


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


def experts(bits: torch.dtype, ends: list[int]):
    weights = random(len(ends), 8, 16, seed=3).to(bits)

    def function(x):
        offs = torch.tensor(ends, dtype=torch.int32)
        return functional.grouped_mm(x.to(bits), weights, offs=offs)[: ends[-1]].float()

    return function


@pytest.mark.parametrize("bits", [torch.float32, torch.float16])
def test_each_group_of_rows_has_its_matrix(tmp_path, bits) -> None:
    """The first group has no rows, and the others differ. Only rows inside a group are compared."""
    path, function = tmp_path / "m.onnx", experts(bits, [0, 2, 3, 9])
    export_op(function, [random(12, 8)], path, [[0]])
    for rows in (9, 40):
        x = random(rows, 8)
        x[2] = NAN  # of the third group: it must not reach the other rows
        compare_op(function, path, [x], near=2e-3 if bits is torch.float16 else 1e-5)


def test_the_same_op_of_transformers(tmp_path) -> None:
    """Its mixtures of experts use it while they are traced. Rows after the last group are zero."""
    pytest.importorskip("transformers")
    import_transformers()
    importlib.import_module("transformers.integrations.moe")
    weights = random(3, 4, 5, seed=3)

    def function(x):
        ends = torch.tensor([2, 2, 6], dtype=torch.int32)
        return torch.ops.transformers.grouped_mm_fallback(x, weights, ends)

    path = tmp_path / "m.onnx"
    export_op(function, [random(12, 4)], path, [[0]])
    for rows in (6, 7, 40):
        compare_op(function, path, [random(rows, 4)], near=1e-5)


def test_groups_along_another_axis_are_refused(tmp_path) -> None:
    def function(x):
        return functional.grouped_mm(x.mT, x, offs=torch.tensor([4, 8], dtype=torch.int32))

    with pytest.raises(ExportError, match=r"aten._grouped_mm at .*: only rows .* can be exported"):
        export_op(function, [random(8, 4)], tmp_path / "m.onnx", [[]])


def test_a_batch_of_matrices_is_a_plain_product(tmp_path) -> None:
    path, function = tmp_path / "m.onnx", lambda x: functional.grouped_mm(x, weights)
    weights = random(3, 8, 16, seed=3)
    export_op(function, [random(3, 5, 8)], path, [[1]])
    compare_op(function, path, [random(3, 7, 8)], near=1e-5)


SCHEMA = (
    "(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, "
    "SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, "
    "SymInt groups, SymInt offset_groups, bool use_mask) -> Tensor"
)  # torchvision/csrc/ops/deform_conv2d.cpp


def onnx_deform_conv(x, weight, offset, mask, bias, *options):
    """ONNX Runtime's DeformConv, for torchvision's arguments."""
    *pairs, groups, offset_groups, use_mask = options
    strides, pads, dilations = pairs[:2], pairs[2:4], pairs[4:]
    node = helper.make_node(
        "DeformConv", ["x", "w", "o", "b", "m" if use_mask else ""], ["y"], strides=strides,
        pads=[*pads, *pads], dilations=dilations, group=groups, offset_group=offset_groups,
        kernel_shape=weight.shape[2:],
    )  # fmt: skip
    feed = {"x": x, "w": weight, "o": offset, "b": bias, **({"m": mask} if use_mask else {})}
    values = [helper.make_tensor_value_info(n, 1, list(v.shape)) for n, v in feed.items()]
    out = helper.make_tensor_value_info("y", 1, [None] * 4)
    graph = helper.make_graph([node], "g", values, [out])
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9
    ).SerializeToString()
    session = onnxruntime.InferenceSession(model)
    (y,) = session.run(None, {n: v.contiguous().numpy() for n, v in feed.items()})
    return torch.from_numpy(y)


@pytest.fixture(scope="module")
def deform_conv():
    """torchvision's op; where its kernel is not compiled, ONNX Runtime's kernel in its place."""
    import_torchvision()
    if hasattr(torch.ops.torchvision, "deform_conv2d"):
        yield
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define(f"deform_conv2d{SCHEMA}")
    library.impl("deform_conv2d", onnx_deform_conv, "CPU")

    def shape(x, weight, offset, *_):
        return x.new_empty(x.shape[0], weight.shape[0], *offset.shape[2:])

    library.impl("deform_conv2d", shape, "Meta")
    yield
    library._destroy()


DEFORMED = [
    ((1, 1), (0, 0), (1, 1), 1, 1, True),
    ((2, 1), (1, 2), (1, 2), 2, 1, False),
    ((1, 3), (2, 1), (2, 1), 2, 4, True),
]


@pytest.mark.usefixtures("deform_conv")
@pytest.mark.parametrize("options", DEFORMED, ids=str)
def test_deformable_convolution(tmp_path, options) -> None:
    """Offsets of several pixels also read outside of the image."""
    stride, pad, dilation, groups, offset_groups, use_mask = options
    weight, bias = random(6, 8 // groups, 3, 2, seed=1), random(6, seed=2)
    numbers = (*stride, *pad, *dilation, groups, offset_groups, use_mask)

    def function(x, offset, mask):
        return torch.ops.torchvision.deform_conv2d(x, weight, offset, mask, bias, *numbers)

    def args(b, h, w):
        high = (h + 2 * pad[0] - dilation[0] * 2 - 1) // stride[0] + 1
        wide = (w + 2 * pad[1] - dilation[1] * 1 - 1) // stride[1] + 1
        moved = 3 * random(b, offset_groups * 12, high, wide, seed=4)
        return random(b, 8, h, w), moved, random(b, offset_groups * 6, high, wide, seed=5)

    path = tmp_path / "m.onnx"
    export_op(function, args(2, 9, 11), path, [[0, 2, 3]] * 3)
    for sizes in ((1, 3, 2), (3, 5, 8), (2, 20, 31)):
        compare_op(function, path, args(*sizes), near=2e-5)


def frames_by_strides(x):
    """Overlapping windows of 16 samples, one after each 8 samples."""
    b, t = x.shape
    return x.as_strided((b, (t - 16) // 8 + 1, 16), (t, 8, 1)) * 2


@pytest.mark.parametrize("function", [frames_by_strides, lambda x: x.unfold(1, 16, 8) * 2])
def test_overlapping_windows(tmp_path, function) -> None:
    path = tmp_path / "m.onnx"
    export_op(function, [random(3, 50)], path)
    for b, t in ((1, 17), (2, 24), (4, 111), (3, 160)):
        compare_op(function, path, [random(b, t)])
