"""An ONNX file as a source: its dims, its sizes, and unusable files."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from helpers import Run
from onnx import TensorProto, external_data_helper, helper, numpy_helper

from pipeline.errors import ConstraintError, ExportError, InputError
from pipeline.export.exported import Exported
from pipeline.probe.fit import formula
from pipeline.source.onnx.importing import import_onnx
from pipeline.source.onnx.spec import onnx_spec
from pipeline.spec.dims import Dim, evaluate

B, H, W = Dim("b", 1, 2, 8), Dim("h", 16, 64, 256), Dim("w", 16, 80, 256)
RELU = "g (float[b,3,h,w] x) => (float[b,3,h,w] y) { [act] y = Relu(x) }"


def parsed(body: str, opset: int = 18, extra: str = "") -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}{extra}]>\n{body}')


def written(folder: Path, body: str, opset: int = 18, extra: str = "") -> Path:
    path = folder / "model.onnx"
    onnx.save(parsed(body, opset, extra), path)
    return path


def imported(path: Path, *dims: Dim) -> Exported:
    spec = onnx_spec(path, {dim.name: dim for dim in dims})
    out = path.parent / "artifact"
    out.mkdir(exist_ok=True)
    return import_onnx(spec, out / "exported.onnx")


def run(path: Path, **feed: np.ndarray) -> list[np.ndarray]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return list(session.run(None, feed))


def sizes_in(path: Path) -> dict[str, list[int | str]]:
    graph = onnx.load(path, load_external_data=False).graph
    return {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in (*graph.input, *graph.output)
    }


# --- dims


def test_dims_without_a_range_are_asked_for_in_one_line(tmp_path: Path) -> None:
    path = written(tmp_path, "g (float[b,3,h,?] x) => (float[b,3,h,w] y) { y = Relu(x) }")
    with pytest.raises(InputError) as caught:
        onnx_spec(path, {"hh": H, "b": B})
    text = str(caught.value)
    assert "no dim hh; the file's dims are b, h, x_3" in text
    assert text.endswith("--dim h=MIN:OPT:MAX --dim x_3=MIN:OPT:MAX")
    assert "\n" not in text


def test_static_file(tmp_path: Path) -> None:
    path = written(tmp_path, "g (float[1,3] x) => (float[n,3] y) { y = Relu(x) }")
    done = imported(path)
    assert done.output_shapes == {"y": [1, 3]}
    assert sizes_in(done.path) == {"x": [1, 3], "y": [1, 3]}
    with pytest.raises(InputError, match=r"no dim h: the file's sizes are all fixed \(x:1x3\)"):
        onnx_spec(path, {"h": H})


@pytest.mark.parametrize(
    ("shape", "dims", "expected"),
    [
        ("batch-size,seq", ["batch_size", "seq"], ["batch_size", "seq"]),
        ('"8*_h",4', ["h"], ["h", 4]),
        ('"class","class"', ["class_"], ["class_", "class_"]),
        ('"a.b","a_b"', ["a_b", "a_b_2"], ["a_b_2", "a_b"]),
        ("None,?", ["x_0", "x_1"], ["x_0", "x_1"]),
        ('"_s","(_s//2)"', ["s"], ["s", "(s//2)"]),
    ],
)
def test_names_of_dims(
    tmp_path: Path, shape: str, dims: list[str], expected: list[int | str]
) -> None:
    texts = [text.strip('"') for text in shape.split(",")]
    sizes = [int(t) if t.isdigit() else t for t in texts]
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, sizes)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, None])
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [value], [y])
    path = tmp_path / "m.onnx"
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, path)
    done = imported(path, *(Dim(name, 8, 16, 32) for name in dims))
    assert sizes_in(done.path)["x"] == expected
    assert [evaluate(s, dict.fromkeys(dims, 24)) for s in done.output_shapes["y"]] == [
        evaluate(s, dict.fromkeys(dims, 24)) for s in expected
    ]
    assert done.spec.dims.keys() == set(dims)
    if dims == ["h"]:
        assert done.spec.dims["h"].multiple_of == 8


def test_a_cache_with_a_sum_of_dims(tmp_path: Path) -> None:
    """Optimum's form of a decoder: the mask covers the past and the new tokens."""
    path = written(
        tmp_path,
        "g (float[past] k, float[seq] new, int64[total] attention_mask) => (float[n] y) "
        "{ all = Concat<axis=0>(k, new) m = Cast<to=1>(attention_mask) [mul] y = Mul(all, m) }",
    )
    model = onnx.load(path)
    model.graph.input[2].type.tensor_type.shape.dim[0].dim_param = "past + seq"
    onnx.save(model, path)
    done = imported(path, Dim("past", 0, 8, 32), Dim("seq", 1, 4, 16))
    assert done.output_shapes == {"y": ["past + seq"]}
    mask = done.spec.inputs[2]
    assert (mask.low, mask.high) == (1, 2)
    assert done.spec.sizes_of({"k": (0,), "new": (5,), "attention_mask": (5,)}) == {
        "past": 0,
        "seq": 5,
    }


def test_values_of_integers(tmp_path: Path) -> None:
    body = (
        "g (int64[b] ids, int32[b] kind, uint8[b] image, bool[b] key_mask) => "
        "(float[b,2] y, int32[b] k, uint8[b] i, bool[b] m) <float[3,2] table = {1,2,3,4,5,6}> "
        "{ flat = Identity(ids) y = Gather(table, flat) k = Neg(kind) i = Identity(image) "
        "m = Not(key_mask) }"
    )
    spec = onnx_spec(written(tmp_path, body), {"b": B})
    assert [(i.low, i.high) for i in spec.inputs] == [(0, 3), (0, 2), (0, 256), (1, 2)]
    with pytest.raises(InputError, match="an ONNX file has no torch model to run"):
        spec.build(None)


# --- output shapes


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            "float[1] y) { p = MaxPool<kernel_shape=[8,8],strides=[8,8]>(x) "
            "s = Constant<value=int64[3] {0,3,-1}>() y = Reshape(p, s)",
            ["b", 3, "(h//8)*(w//8)"],
        ),
        (
            "float[1] y) { p = MaxPool<kernel_shape=[3,3],strides=[2,2]>(x) "
            "s = Constant<value=int64[1] {-1}>() y = Reshape(p, s)",
            ["3*b*((h - 1)//2)*((w - 1)//2)"],
        ),
        (
            "float[1] y) { p = MaxPool<kernel_shape=[3,3],strides=[2,2],pads=[1,1,1,1]>(x) "
            "t = Transpose<perm=[0,1,3,2]>(x) a = ReduceMean(x) y = Add(p, a)",
            ["b", 3, "(h + 1)//2", "(w + 1)//2"],
        ),
        (
            "float[1] y) { s = Constant<value=int64[3] {0,0,-1}>() r = Reshape(x, s) "
            "q = MaxPool<kernel_shape=[4,4],strides=[4,4]>(x) u = Reshape(q, s) "
            "y = Concat<axis=2>(r, u)",
            ["b", 3, "h*w + (h//4)*(w//4)"],
        ),
    ],
)  # fmt: skip
def test_output_shapes_are_found_by_running(
    tmp_path: Path, body: str, expected: list[int | str]
) -> None:
    path = written(tmp_path, f"g (float[b,3,h,w] x) => ({body} }}")
    model = onnx.load(path)
    rank = len(expected)
    model.graph.output[0].CopyFrom(
        helper.make_tensor_value_info("y", TensorProto.FLOAT, [f"y_dim_{n}" for n in range(rank)])
    )
    onnx.save(model, path)
    done = imported(path, B, H, W)
    for h, w in ((16, 16), (17, 23), (31, 40), (63, 97), (64, 96)):
        (y,) = run(done.path, x=np.zeros((3, 3, h, w), np.float32))
        got = tuple(evaluate(s, {"b": 3, "h": h, "w": w}) for s in done.output_shapes["y"])
        assert got == y.shape
        want = tuple(evaluate(s, {"b": 3, "h": h, "w": w}) for s in expected)
        assert got == want
    assert sizes_in(done.path)["y"] == list(done.output_shapes["y"])


def test_formula() -> None:
    every = [{"h": h, "w": w} for h in (16, 17, 23, 24, 31, 50) for w in (16, 17, 23, 24, 47, 48)]

    def found(text: str) -> Any:
        return formula([(s, evaluate(text, s)) for s in every], {"h": 16, "w": 16})

    assert found("7") == 7
    for text in (
        "w", "4*h - 2", "h + w", "h//8 + w", "(h//8)*(w//8) + 1", "3*h*w", "(3*h + 1)//2"
    ):  # fmt: skip
        assert found(text) == text
    assert found("h % 5 + w * w % 7") is None


def test_a_name_of_an_input_axis_that_is_not_so_is_only_a_note(tmp_path: Path) -> None:
    body = (
        "g (float[b,3,h,w] x) => (float[b,3,h,w] y) <float[4] s = {1,1,4,4}> { y = Resize(x,,s) }"
    )
    done = imported(written(tmp_path, body), B, H, W)
    assert done.output_shapes == {"y": ["b", 3, "4*h", "4*w"]}
    assert "output y axis 2: the file states h, but the size is 4*h" in done.notes


# --- sizes that a file does not accept, or states wrongly


RESHAPE = (
    "g (float[b,4,h] x) => (float[b,n] y) <int64[2] s = {0,128}> { [baked] y = Reshape(x, s) }"
)


def test_a_baked_reshape_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, RESHAPE)
    with pytest.raises(ConstraintError) as caught:
        imported(path, B, Dim("h", 16, 32, 64))
    assert "h must be 32" in str(caught.value)
    assert "Reshape 'baked': The input tensor cannot be reshaped" in str(caught.value)
    with pytest.raises(ConstraintError, match="declare the number 32 in place of h"):
        imported(path, B, Dim("h", 16, 32, 64, auto=True))
    done = imported(path, B, Dim("h", 32, 32, 32))
    assert sizes_in(done.path)["x"] == ["b", 4, 32]
    assert done.free == {"b": "x axis 0"}


GROUPED = (
    "g (float[b,4,h] x) => (float[b,4,n,8] y) <int64[4] s = {0,4,-1,8}> "
    "{ [group] y = Reshape(x, s) }"
)


def test_a_lost_multiple_is_found(tmp_path: Path) -> None:
    path = written(tmp_path, GROUPED)
    (y,) = run(path, x=np.zeros((1, 4, 24), np.float32))  # the naive path: it works where tried
    assert y.shape == (1, 4, 3, 8)
    batch = Dim("b", 1, 1, 1)
    with pytest.raises(ConstraintError, match=r"h must be a multiple of 8.*Reshape 'group'"):
        imported(path, batch, Dim("h", 16, 64, 256))
    done = imported(path, batch, Dim("h", 16, 64, 256, auto=True))
    assert done.spec.dims["h"].multiple_of == 8


def test_sizes_that_must_be_equal(tmp_path: Path) -> None:
    path = written(tmp_path, "g (float[h] x, float[w] z) => (float[n] y) { [add] y = Add(x, z) }")
    with pytest.raises(ConstraintError, match=r"w must equal h.*Add 'add'"):
        imported(path, H, W)
    done = imported(path, Dim("h", 16, 64, 256, auto=True), Dim("w", 16, 80, 200, auto=True))
    assert [str(dim) for dim in done.spec.dims.values()] == ["h in 16..200"]
    assert done.spec.rules == ()
    assert done.output_shapes["y"] == ["h"]
    assert done.free == {"h": "x axis 0, z axis 0"}
    assert [rule.kind for rule in done.refinements] == ["equal"]
    assert sizes_in(done.path) == {"x": ["h"], "z": ["w"], "y": ["h"]}  # the file's axes stay


def test_a_number_that_is_stated_wrongly(tmp_path: Path) -> None:
    path = written(tmp_path, "g (float[b,4] x) => (float[3,4] y) { y = Relu(x) }")
    with pytest.raises(ExportError, match=r"output y axis 0: the file states 3.*gives \d at b=\d"):
        imported(path, B)


def test_a_batch_that_is_baked_in_silently(tmp_path: Path) -> None:
    body = "g (float[b,4] x) => (float[b,n] y) <int64[2] s = {1,-1}> { [flat] y = Reshape(x,s) }"
    path = written(tmp_path, body)
    (y,) = run(path, x=np.zeros((3, 4), np.float32))
    assert y.shape == (1, 12)  # no error, and the batch is gone
    with pytest.raises(ExportError, match=r"axis 0: the file states b.*gives 1.*Reshape 'flat'"):
        imported(path, B)


@pytest.mark.parametrize(
    ("body", "node"),
    [
        ("float[b,4] x) => (int64[2,n] y) { r = Relu(x) [find] y = NonZero(r)", "NonZero 'find'"),
        (
            "float[1,b,4] x, float[1,1,b] s) => (int64[n,3] y) <int64 k = {9}, float i = {0.5}, "
            "float t = {0.2}> { [nms] y = NonMaxSuppression(x, s, k, i, t)",
            "NonMaxSuppression 'nms'",
        ),
        (
            "float[b] x) => (int64[1,n] y) <float big = {1000}> "
            "{ c = Greater(x, big) [rare] y = NonZero(c)",
            "NonZero 'rare'",
        ),
    ],
)
def test_a_size_that_depends_on_the_data(tmp_path: Path, body: str, node: str) -> None:
    path = written(tmp_path, f"g ({body} }}")
    with pytest.raises(
        ExportError, match=f"output y axis [01] depends on the data, through {node}"
    ):
        imported(path, Dim("b", 2, 20, 64))


# --- files as torch writes them


def _export(path: Path, dynamo: bool, **how: Any) -> None:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = torch.nn.Conv2d(3, 12, 3, stride=2, padding=1)

        def forward(self, x: Any) -> Any:
            return torch.nn.functional.pixel_shuffle(self.down(x), 2)

    torch.manual_seed(0)
    x = torch.randn(2, 3, 40, 48)
    torch.onnx.export(
        Net().eval(), (x,), path, dynamo=dynamo, opset_version=18,
        input_names=["x"], output_names=["y"], **how,
    )  # fmt: skip


def test_a_file_of_the_torchscript_exporter(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    _export(path, False, dynamic_axes={"x": {0: "b", 2: "h", 3: "w"}, "y": {0: "b"}})
    done = imported(path, B, H, W)
    assert done.output_shapes == {"y": ["b", 3, "2*((h + 1)//2)", "2*((w + 1)//2)"]}
    check_same(path, done.path)


def test_a_file_of_the_dynamo_exporter(tmp_path: Path) -> None:
    import torch

    path = tmp_path / "net.onnx"
    names = {0: torch.export.Dim("batch"), 2: torch.export.Dim("h"), 3: torch.export.Dim("w")}
    _export(path, True, dynamic_shapes=(names,), external_data=True, verbose=False)
    done = imported(path, Dim("batch", 1, 2, 8), H, W)
    shape = done.output_shapes["y"]
    assert [evaluate(s, {"batch": 3, "h": 41, "w": 50}) for s in shape] == [3, 3, 42, 50]
    assert done.module is None
    assert done.opset == 18
    check_same(path, done.path)


def check_same(before: Path, after: Path) -> None:
    """The same nodes and the same numbers."""
    old, new = (onnx.load(p, load_external_data=False) for p in (before, after))
    assert list(old.graph.node) == list(new.graph.node)
    x = np.random.default_rng(0).normal(size=(3, 3, 41, 50)).astype(np.float32)
    assert np.array_equal(run(before, x=x)[0], run(after, x=x)[0])


# --- weights outside


def external(folder: Path, megabytes: int = 1, name: str = "weights.bin") -> Path:
    """x @ m0 @ m1, with the weights in two files, each twice as large as needed."""
    folder.mkdir(exist_ok=True)
    side = int((megabytes * 2**20 / 8) ** 0.5)
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(side, side)).astype(np.float32) / side for _ in range(2)]
    model = parsed(
        f"g (float[b,{side}] x) => (float[b,{side}] y) {{ t=MatMul(x,m0) y=MatMul(t,m1) }}"
    )
    for n, array in enumerate(arrays):
        tensor = numpy_helper.from_array(array, f"m{n}")
        external_data_helper.set_external_data(tensor, f"{n}_{name}", offset=16)
        (folder / f"{n}_{name}").write_bytes(bytes(16) + array.tobytes())
        tensor.ClearField("raw_data")
        model.graph.initializer.append(tensor)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def test_weights_outside_are_gathered(tmp_path: Path) -> None:
    path = external(tmp_path / "source", 20)
    done = imported(path, B)
    data = done.path.with_name("exported.onnx.data")
    assert 20 * 2**20 * 0.99 < data.stat().st_size < 20 * 2**20 * 1.01
    assert sorted(p.name for p in done.path.parent.iterdir()) == ["exported.onnx", data.name]
    assert done.path.stat().st_size < 2000
    side = done.output_shapes["y"][1]
    x = np.random.default_rng(0).normal(size=(3, side)).astype(np.float32)
    assert np.array_equal(run(path, x=x)[0], run(done.path, x=x)[0])
    onnx.checker.check_model(str(done.path), full_check=True)


def _location(path: Path, text: str) -> None:
    model = onnx.load(path, load_external_data=False)
    for entry in model.graph.initializer[1].external_data:
        if entry.key == "location":
            entry.value = text
    path.write_bytes(model.SerializeToString())


def test_external_data_that_is_no_good(tmp_path: Path) -> None:
    def refused(path: Path, *parts: str) -> None:
        with pytest.raises(InputError) as caught:
            onnx_spec(path, {"b": B})
        text = str(caught.value)
        assert "\n" not in text
        for part in parts:
            assert part in text

    secret = tmp_path / "secret"
    secret.write_bytes(bytes(10**6))
    path = external(tmp_path / "missing")
    (path.parent / "1_weights.bin").unlink()
    refused(path, "its external data 1_weights.bin is missing")
    path = external(tmp_path / "short")
    os.truncate(path.parent / "1_weights.bin", 5000)
    refused(path, "1_weights.bin is cut short: m1 is in bytes 16 to", "but the file has 5000")
    path = external(tmp_path / "folder")
    (path.parent / "1_weights.bin").unlink()
    (path.parent / "1_weights.bin").mkdir()
    refused(path, "1_weights.bin is not a file")
    for n, outside in enumerate((str(secret), "../secret", "sub/../../secret", "C:\\s", "..\\s")):
        path = external(tmp_path / f"out{n}")
        _location(path, outside)
        refused(path, "is outside of the model's folder: refused")
    path = external(tmp_path / "link")
    (path.parent / "1_weights.bin").unlink()
    (path.parent / "1_weights.bin").symlink_to(secret)
    refused(path, "'1_weights.bin' is a symbolic link that leads out", str(secret), "refused")
    path = external(tmp_path / "deep")
    (path.parent / "sub").symlink_to(tmp_path)
    _location(path, "sub/secret")
    refused(path, "'sub/secret' is a symbolic link that leads out")
    path = external(tmp_path / "lying")
    model = onnx.load(path, load_external_data=False)
    entry = model.graph.initializer[0].external_data.add()
    entry.key, entry.value = "length", "12"
    path.write_bytes(model.SerializeToString())
    refused(path, "tensor m0 needs", "states 12 bytes in external data")


# --- unusable files


def _zip() -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(torch.nn.Linear(2, 2).state_dict(), buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "data", "parts"),
    [
        ("m.onnx", b"", ["empty (0 bytes)"]),
        ("m.onnx", _zip, ["not an ONNX file but a zip archive, as torch.save"]),
        ("m.onnx", b"version https://git-lfs.github.com/spec/v1\n", ["git lfs pull"]),
        ("m.onnx", b"<!DOCTYPE html><html>", ["a web page"]),
        ("m.onnx", b'<ir_version: 8, opset_import: ["": 18]>', ["ONNX as text"]),
        ("m.onnx", b"\x1c\0\0\0TFL3rest", ["TensorFlow Lite"]),
        ("m.ort", b"\x1c\0\0\0ORTMrest", ["ONNX Runtime's own format (.ort)", "Pass the .onnx"]),
        ("m.onnx", b"\x10\0\0\0\0\0\0\0{}xxxxxxxxxxxxxxxx", ["safetensors"]),
        ("m.onnx", b"hello, I am no model at all", ["damaged, or not an ONNX", "its 27 bytes"]),
        ("m.pb", b"hello, I am no model at all", ["damaged", "TensorFlow graph (.pb)", "tf2onnx"]),
        ("m.onnx", b"\x08\x08", ["the file has no graph"]),
        ("m.onnx", lambda: parsed(RELU).SerializeToString().replace(b"Relu", b"Re\xd3u"), [
            "damaged: the field onnx.NodeProto.op_type is not text"]),
        ("m.onnx", lambda: parsed(RELU).SerializeToString()[:-9], [
            "cut short", "download the file again"]),
    ],
)  # fmt: skip
def test_files_that_are_no_onnx(tmp_path: Path, name: str, data: Any, parts: list[str]) -> None:
    path = tmp_path / name
    path.write_bytes(data() if callable(data) else data)
    with pytest.raises(InputError) as caught:
        onnx_spec(path, {})
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def test_damage_of_any_byte_is_one_line_or_none(tmp_path: Path) -> None:
    """With any changed byte, there is a one-line error, or the file runs."""
    path = tmp_path / "m.onnx"
    _export(path, False, dynamic_axes={"x": {0: "b", 2: "h", 3: "w"}})
    data, random = path.read_bytes(), np.random.default_rng(0)
    refused = 0
    for _ in range(120):
        broken = bytearray(data)
        for place in random.integers(0, len(data), 3):
            broken[place] = random.integers(0, 256)
        path.write_bytes(bytes(broken))
        try:
            onnx_spec(path, {"b": B, "h": H, "w": W})
        except InputError as error:
            assert "\n" not in str(error)
            refused += 1
    assert 20 < refused < 120


def test_an_input_that_sets_a_shape(tmp_path: Path) -> None:
    body = "g (float[b] x, int64[1] count) => (float[n] y) { y = Tile(x, count) }"
    with pytest.raises(ExportError, match=r"depends on the data.*integer inputs.*\(count 0\.\.1\)"):
        imported(written(tmp_path, body), B)


def test_places_that_hold_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        onnx_spec(tmp_path / "none.onnx", {})
    written(tmp_path, RELU)
    with pytest.raises(
        InputError, match=r"a folder, not an ONNX file. Pass one of its files: model\.onnx"
    ):
        onnx_spec(tmp_path, {})


def _changed(change: Callable[[onnx.ModelProto], object]) -> Callable[[], onnx.ModelProto]:
    def make() -> onnx.ModelProto:
        model = parsed(RELU)
        change(model)
        return model

    return make


def _input(model: onnx.ModelProto, value: onnx.ValueInfoProto) -> None:
    model.graph.input.append(value)


TRAINING = (
    "g (float[b,3,h,w] x) => (float[b,3,h,w] y) <float[3] s = {1,1,1}> "
    "{ [norm] y, m, v = BatchNormalization<training_mode=1>(x, s, s, s, s) }"
)


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (
            _changed(lambda m: setattr(m, "ir_version", 99)),
            "but the file has 99. Install a newer onnx",
        ),
        (
            _changed(lambda m: setattr(m.opset_import[0], "version", 99)),
            "opset 99 is not supported",
        ),
        (_changed(lambda m: setattr(m.opset_import[0], "version", 7)), "opset 7 is not supported"),
        (_changed(lambda m: m.ClearField("opset_import")), "the file has no opset"),
        (_changed(lambda m: m.graph.ClearField("output")), "the graph has no output"),
        (_changed(lambda m: m.graph.ClearField("input")), "the graph has no input"),
        (_changed(lambda m: setattr(m.graph.node[0], "op_type", "Rule")), "Rule"),
        (_changed(lambda m: m.graph.node.append(m.graph.node[0])), "onnx.checker refuses it"),
        (_changed(lambda m: m.graph.output.append(m.graph.output[0])), "are called 'y'"),
        (_changed(lambda m: m.graph.output.append(m.graph.input[0])), "output x is also an input"),
        (
            _changed(lambda m: m.graph.input[0].type.tensor_type.ClearField("shape")),
            "input x has no shape. State its shape",
        ),
        (
            _changed(lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", 8)),
            "input x is string. Use float16, float",
        ),
        (
            _changed(lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", 16)),
            "input x is bfloat16. Use float16, float",
        ),
        (
            _changed(lambda m: _input(m, helper.make_tensor_sequence_value_info("s", 1, ["n"]))),
            "input s is a sequence. Only use tensors as inputs",
        ),
        (lambda: parsed(TRAINING), "BatchNormalization 'norm' has training_mode=1"),
        (
            lambda: parsed(RELU.replace("Relu", "mmdeploy.Roi"), extra=', "mmdeploy": 1'),
            "mmdeploy.Roi (the first is node 'act'). Add an ONNX function",
        ),
    ],
)
def test_models_that_are_no_good(
    tmp_path: Path, make: Callable[[], onnx.ModelProto], part: str
) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(make().SerializeToString())
    with pytest.raises(InputError) as caught:
        onnx_spec(path, {"b": B, "h": H, "w": W})
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_default_input_is_a_constant(tmp_path: Path) -> None:
    model = parsed("g (float[b] x, float[1] k) => (float[b] y) { y = Mul(x, k) }")
    model.graph.initializer.append(numpy_helper.from_array(np.array([2], np.float32), "k"))
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    done = imported(path, B)
    assert [i.name for i in done.spec.inputs] == ["x"]
    assert sizes_in(done.path) == {"x": ["b"], "y": ["b"]}
    assert any("the file has a default for each of these inputs" in note for note in done.notes)


def test_stale_shapes_inside_are_left_out(tmp_path: Path) -> None:
    model = parsed("g (float[2,b] x) => (float[b,2] y) { t = Transpose(x) y = Relu(t) }")
    model.graph.value_info.append(helper.make_tensor_value_info("t", TensorProto.FLOAT, [5, 7, 9]))
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    done = imported(path, B)
    assert not onnx.load(done.path).graph.value_info
    assert "contradict its nodes: the shapes were removed" in done.notes[0]


def test_an_ir_version_that_onnx_runtime_does_not_read_is_lowered(tmp_path: Path) -> None:
    """onnx writes its newest version."""
    model = parsed(RELU)
    model.ir_version = onnx.IR_VERSION
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    try:
        run(path, x=np.zeros((1, 3, 16, 16), np.float32))
    except Exception as error:
        assert "Unsupported model IR version" in str(error)  # the naive path
    else:
        pytest.skip("this ONNX Runtime reads what this onnx writes")
    done = imported(path, B, H, W)
    (y,) = run(done.path, x=np.zeros((1, 3, 16, 16), np.float32))
    assert y.shape == (1, 3, 16, 16)
    assert any(
        f"the IR version was lowered from {onnx.IR_VERSION} to" in note for note in done.notes
    )


BANDED = """g (float[1,1,h,8] x) => (float[1,2,k,m] y)
    <float[1,1,3,3] w = {1,1,1,1,1,1,1,1,1}, float[4] s = {1, 1, 2, 1}> {
    a = Conv<pads = [1,1,1,1], strides = [2,1]>(x, w)
    b = Conv<pads = [1,1,1,1], strides = [2,1]>(a, w)
    c = Resize<mode = "nearest">(b, , s)
    y = Concat<axis = 1>(a, c) }"""


def test_a_rule_that_no_dim_expresses_is_what_to_declare(tmp_path: Path, cli: Run) -> None:
    """And values at a size that breaks it are noted, because they are used at other sizes only."""
    path = written(tmp_path, BANDED)
    words = ("convert", path, "--dim", "h=8:16:64", "--out", tmp_path / "a")
    code, _, errors = cli(*words, "--exact-dims")
    assert code == 1 and '    do: declare rules=("(h + 1) % 4 < 2",)' in errors
    assert '(on the command line: --rule "(h + 1) % 4 < 2")' in errors
    code, _, errors = cli(*words, "--exact-dims", "--rule", "(h + 1) % 4 < 2")
    assert code == 0, errors
    np.savez(tmp_path / "x.npz", x=np.ones((1, 1, 17, 8), np.float32))
    code, output, errors = cli(*words, "--inputs", tmp_path / "x.npz", "--details")
    assert code == 0, errors
    assert "the model does not accept the sizes of your values of x: they were cropped" in output
