"""linspace and affine_grid over symbolic sizes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
import torch
from op_exports import spec_of
from torch.nn import functional

from pipeline.errors import ExportError
from pipeline.export.export import export
from pipeline.export.torch_2_13 import symbolic_steps
from pipeline.spec.dims import Dim
from pipeline.spec.model import Output

H, W, D = Dim("h", 2, 24, 61), Dim("w", 5, 32, 67), Dim("d", 3, 4, 9)


def grid(align):
    def function(x):
        theta = torch.eye(2, 3)[None] + 0.1 * x.mean((1, 2, 3)) * torch.ones(1, 2, 3)
        return functional.affine_grid(theta, x.shape, align_corners=align)

    return function


def volume(x):
    theta = torch.eye(3, 4)[None] + 0.1 * x.mean()
    return functional.affine_grid(theta, list(x.shape), align_corners=False)


CASES = {
    "linspace": (lambda x: x + torch.linspace(-1, 1, x.shape[3]), (1, 3, H, W)),
    "linspace by name": (lambda x: x + torch.linspace(3, 7.5, steps=x.shape[3]), (1, 3, H, W)),
    "affine_grid": (grid(False), (1, 3, H, W)),
    "affine_grid, corners": (grid(True), (1, 3, H, W)),
    "cdist": (lambda x: torch.cdist(x[0], x[0] + 1), (1, 3, H, 4)),
    "cdist, p=1": (lambda x: torch.cdist(x[0], x[0] + 1, 1), (1, 3, H, 4)),
    "chunk in two": (lambda x: torch.cat([c.mean(3) for c in x.chunk(2, 3)], 1), (1, 3, H, W)),
    "chunk in three": (
        lambda x: torch.cat([c.mean(3) * n for n, c in enumerate(x.chunk(3, 3), 1)], 1),
        (1, 3, H, W),
    ),
    "split by half a size": (
        lambda x: torch.stack([c.mean(3) for c in x.split((x.shape[3] + 1) // 2, 3)]),
        (1, 3, H, W),
    ),
    "split by a size": (
        lambda x: sum(
            c * n for n, c in enumerate(torch.split(torch.cat([x, x + 1], 3), x.shape[3], dim=3))
        ),
        (1, 3, H, W),
    ),
    "affine_grid of a volume": (volume, (1, 3, D, H, W)),
    "adaptive max, 1d": (
        lambda x: functional.adaptive_max_pool1d(x[0], x.shape[3] // 2 + 1),
        (1, 3, H, W),
    ),
    "adaptive max, 2d": (
        lambda x: functional.adaptive_max_pool2d(x, ((x.shape[2] + 3) // 4, x.shape[3] // 4)),
        (1, 3, H, W),
    ),
    "adaptive max, 2d, larger": (
        lambda x: functional.adaptive_max_pool2d(x, (x.shape[2] + 5, None)),
        (1, 3, H, W),
    ),
    "adaptive max, 3d": (
        lambda x: functional.adaptive_max_pool3d(x, (2, x.shape[3], x.shape[4] // 3)),
        (1, 3, D, H, W),
    ),
    "max, 1d": (lambda x: functional.max_pool1d(x[0], 3, 2, 1, ceil_mode=True), (1, 3, H, W)),
    "max, 1d, apart": (
        lambda x: torch.nn.MaxPool1d((2,), stride=(3,), dilation=(4,))(x[0]),
        (1, 3, H, W),
    ),
    "max, 1d, the whole axis": (
        lambda x: functional.max_pool1d(x[0], x.shape[3]).squeeze(-1),
        (1, 3, H, W),
    ),
    "average, 1d, the whole axis": (
        lambda x: functional.avg_pool1d(x[0], x.shape[3]),
        (1, 3, H, W),
    ),
    "average, 2d, both axes": (
        lambda x: functional.avg_pool2d(functional.max_pool2d(x, 2), [s // 2 for s in x.shape[2:]]),
        (1, 3, H, W),
    ),
    "average, 2d, one axis": (
        lambda x: functional.avg_pool2d(x, (x.shape[2], 3), (1, 2), ceil_mode=True),
        (1, 3, H, W),
    ),
    "max, 2d, both axes": (lambda x: functional.max_pool2d(x, x.shape[2:]), (1, 3, H, W)),
    "max, 2d, one axis": (lambda x: functional.max_pool2d(x, (2, x.shape[3])), (1, 3, H, W)),
    "max, 2d, one axis, by position": (
        lambda x: functional.max_pool2d(x, (x.shape[2], 2), (x.shape[2], 3), 0, 1, True),
        (1, 3, H, W),
    ),
    "average, 3d": (lambda x: functional.avg_pool3d(x, x.shape[-3:]), (1, 3, D, H, W)),
    "max, 3d": (lambda x: functional.max_pool3d(x, (2, *x.shape[-2:])), (1, 3, D, H, W)),
    "one_hot of a size": (
        lambda x: functional.one_hot(x[:, 0].relu().long(), x.shape[3] + 5),
        (1, 3, H, W),
    ),
    "adaptive average, 1d": (
        lambda x: functional.adaptive_avg_pool1d(x[0], x.shape[3] // 2 + 1),
        (1, 3, H, W),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_sizes_stay_symbolic(tmp_path, monkeypatch, name) -> None:
    function, shape = CASES[name]
    spec = spec_of(function, shape)
    done = export(spec, None, tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(str(done.path))
    for sizes in ({"h": 2, "w": 5, "d": 3}, {"h": 3, "w": 67, "d": 9}, {"h": 61, "w": 20, "d": 4}):
        sizes = {k: v for k, v in sizes.items() if k in spec.dims}  # noqa: PLW2901
        x = spec.sample(sizes, 3)["x"]
        want = function(torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(session.run(None, {"x": x})[0], want, rtol=1e-5, atol=1e-6)

    monkeypatch.setattr(symbolic_steps, "_OTHERS", {})
    with pytest.raises(ExportError):
        export(spec, None, tmp_path / "n.onnx")


def test_a_pool_with_gaps_in_its_window_is_not_the_whole_axis(tmp_path) -> None:
    """With ceil_mode torch accepts such a window, and reads every other element."""
    spec = spec_of(
        lambda x: functional.max_pool2d(x, x.shape[2:], 1, dilation=2, ceil_mode=True),
        (1, 3, H, W),
    )
    with pytest.raises(ExportError):
        export(spec, None, tmp_path / "m.onnx")


RANGES = {  # and whether torch's own is wrong
    "by a fraction": (lambda x: torch.arange(0, x.shape[3], 0.7), True),
    "by name": (lambda x: torch.arange(2, end=x.shape[3], step=0.7), True),
    "by a fraction of a size": (lambda x: torch.arange(0, 1, 1 / x.shape[3]), True),
    "to a float": (lambda x: torch.arange(0, x.shape[3] / 3), False),
    "by one": (lambda x: torch.arange(x.shape[3], dtype=torch.float32), False),
    "of integers": (lambda x: torch.arange(0, x.shape[3], 2.5, dtype=torch.int64), False),
}


@pytest.mark.parametrize("name", RANGES)
def test_arange_has_as_many_elements_as_in_torch(tmp_path, monkeypatch, name) -> None:
    made, without = RANGES[name]
    spec = spec_of(lambda x: x + made(x).sum(), (1, 3, H, W))

    def wrong(path) -> list[int]:
        session = onnxruntime.InferenceSession(str(export(spec, None, path).path))
        images = {w: torch.zeros(1, 3, 2, w) for w in range(5, 68)}
        got = {w: session.run(None, {"x": x.numpy()})[0] for w, x in images.items()}
        return [w for w in got if abs(got[w] - made(images[w]).sum().item()).max() > 1e-2]

    assert wrong(tmp_path / "m.onnx") == []
    monkeypatch.setattr(symbolic_steps, "_OTHERS", {})
    assert bool(wrong(tmp_path / "n.onnx")) == without


def test_arange_from_a_float_of_sizes_to_a_size(tmp_path) -> None:
    """Without a dtype, torch's exporter takes the type of one of the ends."""

    def function(x):
        return x + torch.arange(x.shape[3] / 3, x.shape[3]).sum() + torch.arange(0, 3.0).sum() / 2

    path = export(spec_of(function, (1, 3, H, W)), None, tmp_path / "m.onnx").path
    session = onnxruntime.InferenceSession(str(path))
    for w in range(5, 68):
        x = torch.zeros(1, 3, 2, w)
        got = session.run(None, {"x": x.numpy()})[0]
        np.testing.assert_allclose(got, function(x).numpy(), rtol=1e-5)


FLOAT_RANGES = {
    "from a fraction": lambda n: torch.arange(0.5, n),
    "from a fraction of a size": lambda n: torch.arange(n / 3, n),
    "to a fraction of a size": lambda n: torch.arange(0, n * 0.5),
    "from a whole float": lambda n: torch.arange(2.0, n),
    "down": lambda n: torch.arange(n / 3.0, 0, -0.7),
    "by a size": lambda n: torch.arange(0.0, 50, n),
    "of numbers": lambda n: torch.arange(0.5, 6) * n,
}


@pytest.mark.parametrize("name", FLOAT_RANGES)
def test_arange_of_floats_is_of_floats(tmp_path, name) -> None:
    """The exporter made int64 of it, if the other numbers are sizes."""
    made = FLOAT_RANGES[name]
    spec = spec_of(lambda x: made(x.shape[3]), (1, 3, H, W))
    done = export(spec, None, tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(str(done.path))
    for w in range(5, 68):
        (got,) = session.run(None, {"x": np.zeros((1, 3, 2, w), np.float32)})
        want = made(w).numpy()
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_arange_from_a_whole_float_has_the_size_of_its_axis(tmp_path) -> None:
    spec = spec_of(lambda x: x * torch.arange(0.0, x.shape[3]), (1, 3, H, W))
    done = export(spec, None, tmp_path / "m.onnx")
    assert list(done.output_shapes["y"])[3] == "w"


@pytest.mark.parametrize("chunks", [2, 3, 4, 5])
def test_chunk_always_gives_the_same_number_of_pieces_or_is_refused(tmp_path, chunks) -> None:
    def function(x):
        return sum(c.sum(1) * n for n, c in enumerate(x.chunk(chunks, 1), 1))

    least = (chunks - 1) ** 2 + 1
    assert all(len(torch.empty(n).chunk(chunks)) == chunks for n in range(least, 200))
    assert len(torch.empty(least - 1).chunk(chunks)) < chunks
    done = export(spec_of(function, (3, Dim("w", least, 30, 60))), None, tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(str(done.path))
    for size in range(least, 61):
        x = done.spec.sample({"w": size}, 3)["x"]
        want = function(torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(session.run(None, {"x": x})[0], want, rtol=1e-5, atol=1e-5)

    if chunks > 2:  # torch's own trace takes sizes above 1 for granted
        with pytest.raises(ExportError, match=f"at least {least}, or use torch.tensor_split"):
            export(spec_of(function, (3, Dim("w", 2, 30, 60))), None, tmp_path / "n.onnx")


def test_tensor_split_keeps_no_piece_of_the_example(tmp_path, monkeypatch) -> None:
    """Where an axis has fewer elements than pieces, some pieces are empty."""

    def function(x):
        first, *_ = x.tensor_split(3, -1)
        split = torch.tensor_split(x, sections=4, dim=1)
        return first, torch.stack([c.sum(1) * n for n, c in enumerate(split, 1)])

    def differing(path) -> list[int]:
        session = onnxruntime.InferenceSession(str(path))
        found = []
        for size in range(1, 61):
            x = spec.sample({"w": size}, 3)["x"]
            want = [y.numpy() for y in function(torch.from_numpy(x))]
            got = session.run(None, {"x": x})
            if not all(
                a.shape == b.shape and np.allclose(a, b, 1e-5, 1e-5)
                for a, b in zip(got, want, strict=True)
            ):
                found.append(size)
        return found

    spec = replace(spec_of(function, (3, Dim("w", 1, 30, 60))), outputs=(Output("y"), Output("z")))
    assert differing(export(spec, None, tmp_path / "m.onnx").path) == []
    monkeypatch.setattr(symbolic_steps, "_OTHERS", {})
    assert differing(export(spec, None, tmp_path / "n.onnx").path)


SPLITS = {
    "hsplit": lambda x: torch.hsplit(torch.cat([x, x * 2], 1), 2),
    "vsplit": lambda x: torch.cat([x.T, x.T * 2]).vsplit(2),
    "split into given sizes": lambda x: x.split([x.shape[1] // 3, x.shape[1] - x.shape[1] // 3], 1),
    "split by a size": lambda x: x.split(split_size=x.shape[1] // 2 + 1, dim=1),
}


@pytest.mark.parametrize("name", SPLITS)
def test_splits_of_a_dynamic_axis(tmp_path, name) -> None:
    def function(x):
        return sum(c.sum() * n for n, c in enumerate(SPLITS[name](x), 1))

    done = export(spec_of(function, (3, Dim("w", 5, 20, 40))), None, tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(str(done.path))
    for size in (5, 7, 12, 39, 40):
        x = done.spec.sample({"w": size}, 3)["x"]
        want = function(torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(session.run(None, {"x": x})[0], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("at", [(2, 5), [2, -3], (-4,), (5, 2), (0, 30)])
def test_tensor_split_at_indices(tmp_path, at) -> None:
    """Some pieces are empty, or shorter, at small sizes."""

    def function(x):
        first, last = torch.tensor_split(x, at, 1), x.mT.tensor_split(indices=at)
        return sum(p.sum() * n for n, p in enumerate((*first, *last), 1)) + first[0].sum(0).mean()

    def pieces(x):
        return torch.tensor_split(x, at, 1)

    names = tuple(Output(f"y{n}") for n in range(len(at) + 1))
    for made, outputs in ((function, (Output("y"),)), (pieces, names)):
        spec = replace(spec_of(made, (3, Dim("w", 1, 20, 40))), outputs=outputs)
        if made is function and at[0] in (0, -4):
            continue  # the mean of no elements
        session = onnxruntime.InferenceSession(str(export(spec, None, tmp_path / "m.onnx").path))
        for size in range(1, 41):
            x = spec.sample({"w": size}, 3)["x"]
            want = made(torch.from_numpy(x))
            want = list(want) if isinstance(want, tuple) else [want]
            for got, expected in zip(session.run(None, {"x": x}), want, strict=True):
                assert got.shape == tuple(expected.shape)
                np.testing.assert_allclose(got, expected.numpy(), rtol=1e-5, atol=1e-5)


def test_another_number_of_pieces_is_refused_with_the_sizes_of_one(tmp_path) -> None:
    def function(x):
        return torch.stack([c.amax(1) for c in x.split(x.shape[1] // 2, 1)])

    with pytest.raises(ExportError, match="w must be a multiple of 2"):
        export(spec_of(function, (3, Dim("w", 5, 20, 40))), None, tmp_path / "m.onnx")


CALLS = {
    "torch.chunk": lambda x: torch.chunk(x, 3, 2),
    "torch.chunk by name": lambda x: torch.chunk(input=x, chunks=3, dim=2),
    "torch.chunk by numpy's names": lambda x: torch.chunk(x=x, chunks=3, axis=2),
    "Tensor.chunk": lambda x: x.chunk(3, -1),
    "Tensor.chunk by name": lambda x: x.chunk(chunks=3, dim=2),
    "Tensor.chunk of another axis": lambda x: x.transpose(0, 2).chunk(chunks=3),
    "Tensor.unsafe_chunk": lambda x: x.unsafe_chunk(3, 2),
    "torch.tensor_split": lambda x: torch.tensor_split(x, 3, 2),
    "torch.tensor_split by name": lambda x: torch.tensor_split(input=x, sections=3, dim=2),
    "torch.tensor_split by indices": lambda x: torch.tensor_split(input=x, indices=[2, 4], dim=2),
    "Tensor.tensor_split": lambda x: x.tensor_split(3, -1),
    "Tensor.tensor_split by name": lambda x: x.tensor_split(sections=3, dim=2),
    "Tensor.tensor_split of another axis": lambda x: x.transpose(0, 2).tensor_split(sections=3),
    "torch.cdist by name": lambda x: [torch.cdist(x1=x.mT, x2=x.mT + 1, p=1.0)],
    "adaptive_avg_pool1d by name": lambda x: [
        torch.adaptive_avg_pool1d(input=x, output_size=x.shape[2] // 2)
    ],
    "adaptive_max_pool1d by name": lambda x: [
        functional.adaptive_max_pool1d(input=x, output_size=x.shape[2] // 2)
    ],
}


@pytest.mark.parametrize("name", CALLS)
def test_positional_and_keyword_arguments(tmp_path, name) -> None:
    def function(x):
        return sum(c.sum((0, 1, 2)) * n for n, c in enumerate(CALLS[name](x), 1))

    done = export(spec_of(function, (1, 3, Dim("w", 5, 20, 40))), None, tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(str(done.path))
    for size in (5, 7, 12, 39, 40):
        x = done.spec.sample({"w": size}, 3)["x"]
        want = function(torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(session.run(None, {"x": x})[0], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 255, 1024])
def test_linspace_is_torchs(steps) -> None:
    for start, end in ((-1.0, 1.0), (0.0, 0.3), (5.0, -2.0)):
        want = torch.linspace(start, end, steps)
        torch.testing.assert_close(
            symbolic_steps.linspace(start, end, steps), want, rtol=2e-7, atol=1e-7
        )
