"""Named dims of an ONNX file that are always an expression of other dims."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.parser
import pytest
from helpers import Run, refused

from pipeline.artifact.artifact import Artifact
from pipeline.errors import ConstraintError, InputError
from pipeline.source.onnx.importing import import_onnx
from pipeline.source.onnx.spec import onnx_spec
from pipeline.spec.dims import Dim
from pipeline.spec.text import split_dims

# a decoder's mask covers the past and what is new
CACHE = """g (float[b,seq,4] x, float[b,past,4] old, float[b,t] mask)
=> (float[b,t,4] key, float[b,u] y) {
  axis = Constant<value_ints=[2]>()
  key = Concat<axis=1>(old, x) m = Unsqueeze(mask, axis) k = Mul(key, m)
  y = ReduceSum<keepdims=0>(k, axis) }"""
GRID = """g (float[b,h,w,4] x, float[b,hw,4] place) => (float[b,n,4] y) <int64[3] flat = {0,-1,4}> {
  f = Reshape(x, flat) y = Add(f, place) }"""
DIMS = {
    "b": Dim("b", 1, 2, 4), "seq": Dim("seq", 1, 4, 8), "past": Dim("past", 0, 4, 16),
    "h": Dim("h", 1, 4, 8), "w": Dim("w", 1, 4, 8),
}  # fmt: skip
RANGES = ("--dim", "b=1:2:4", "--dim", "seq=1:4:8", "--dim", "past=0:4:16")


def written(folder: Path, body: str) -> Path:
    path = folder / "model.onnx"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {body}'), path)
    return path


def of(*names: str) -> dict[str, Dim]:
    return {name: DIMS[name] for name in names}


def sizes_in(path: Path) -> dict[str, list[int | str]]:
    graph = onnx.load(path).graph
    return {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in (*graph.input, *graph.output)
    }


def test_the_profile_and_the_comparison_follow_the_expression(cli: Run, tmp_path: Path) -> None:
    written(tmp_path, CACHE)
    code, output, errors = cli("convert", "model.onnx", *RANGES, "--dim", "t=past+seq", "--details")
    assert code == 0, errors
    assert "mask: float32 [b, past+seq]" in output
    artifact = Artifact.open(tmp_path / "artifacts" / "model")
    assert list(artifact.manifest.interface.dims) == ["b", "seq", "past"]
    assert sizes_in(artifact.model)["mask"] == ["b", "past+seq"]
    assert sizes_in(artifact.model)["key"] == ["b", "past+seq", 4]
    comparison = artifact.manifest.comparison
    assert comparison is not None and comparison.passed
    assert {"b": 4, "seq": 8, "past": 16} in [p.sizes for p in comparison.points if p.compared]


def test_another_expression_converts_anew(cli: Run, tmp_path: Path) -> None:
    written(tmp_path, "g (float[a] x, float[c] z) => (float[a] y, float[c] v) "
                      "{ y = Relu(x) v = Relu(z) }")  # fmt: skip
    words = ("export", "model.onnx", "--dim", "a=1:4:8", "--out", "a")
    for text in ("2*a", "a+1"):
        assert cli(*words, "--dim", f"c={text}", "--force")[0] == 0
        assert sizes_in(tmp_path / "a" / "exported.onnx")["z"] == [text]


def test_sizes_inside_of_other_expressions(tmp_path: Path) -> None:
    nodes = "y = Concat<axis=0>(x, x) v = Relu(x)"
    path = written(
        tmp_path, f"g (float[t] x, float[d] z) => (float[s] y, float[t] v) {{ {nodes} }}"
    )
    model = onnx.load(path)
    model.graph.input[1].type.tensor_type.shape.dim[0].dim_param = "2*t"
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "2*t"
    onnx.save(model, path)
    spec = onnx_spec(path, of("past", "seq"), expressions={"t": "past + seq"})
    assert [[str(size) for size in i.shape] for i in spec.inputs] == [
        ["past + seq"], ["2*(past + seq)"],
    ]  # fmt: skip
    done = import_onnx(spec, tmp_path / "out.onnx")
    assert done.output_shapes == {"y": ["2*(past + seq)"], "v": ["past + seq"]}
    assert done.notes == ()


@pytest.mark.parametrize(
    ("body", "name", "dims", "expression"),
    [(CACHE, "t", ("b", "seq", "past"), "seq+past"), (GRID, "hw", ("b", "h", "w"), "h*w")],
    ids=["sum", "product"],
)
def test_an_expression_that_is_not_given_is_found(
    tmp_path: Path, body: str, name: str, dims: tuple[str, ...], expression: str
) -> None:
    path = written(tmp_path, body)
    spec = onnx_spec(path, {**of(*dims), name: Dim(name, 1, 16, 64)})
    with pytest.raises(ConstraintError) as caught:
        import_onnx(spec, tmp_path / "out.onnx")
    text = str(caught.value)
    assert f"{name} must be {expression}: the file fails at b=" in text
    assert text.endswith(f"; pass the expression in place of a range: --dim {name}={expression}")
    spec = onnx_spec(path, of(*dims), expressions={name: expression})
    import_onnx(spec, tmp_path / "out.onnx")


def test_two_dims_that_are_the_same_sum_are_both_found(tmp_path: Path) -> None:
    body = CACHE.replace("float[b,t] mask)", "float[b,t] mask, float[b,t2] more)")
    path = written(tmp_path, body.replace("(k, axis) }", "(k, axis) z = Add(mask, more) }"))
    model = onnx.load(path)
    model.graph.output.append(onnx.helper.make_tensor_value_info("z", 1, ["b", "n"]))
    onnx.save(model, path)
    dims = {**of("b", "seq", "past"), **{n: Dim(n, 1, 8, 24) for n in ("t", "t2")}}
    with pytest.raises(ConstraintError, match=r"--dim t=seq.past --dim t2=seq.past\Z"):
        import_onnx(onnx_spec(path, dims), tmp_path / "out.onnx")


@pytest.mark.parametrize(
    ("expressions", "words"),
    [
        ({"u": "past+seq"}, "no dim u; the file's dims are b, seq, past, t"),
        ({"t": "pst+seq"}, "dim t=pst+seq: no dim pst; the file's dims are b, seq, past, t"),
        ({"t": "t+1"}, "dim t=t+1: t is itself an expression"),
        ({"t": "2*seq", "seq": "t"}, "seq is itself an expression"),
    ],
)
def test_expressions_that_are_no_good(
    tmp_path: Path, expressions: dict[str, str], words: str
) -> None:
    with pytest.raises(InputError) as caught:
        onnx_spec(written(tmp_path, CACHE), of("b", "seq", "past"), expressions=expressions)
    assert words in str(caught.value)


def test_a_dim_that_stands_in_an_expression_only(tmp_path: Path) -> None:
    path = written(tmp_path, "g (float[t] x) => (float[t] y) { y = Relu(x) }")
    spec = onnx_spec(path, {"half": Dim("half", 1, 4, 8)}, expressions={"t": "2*half"})
    assert import_onnx(spec, tmp_path / "out.onnx").output_shapes == {"y": ["2*half"]}


def test_which_texts_are_expressions() -> None:
    texts = ["seq=1:8:64", "t=past + seq", "h=:64/8", "n=8", "m=past+", "k=2*(a//3)"]
    ranges, expressions = split_dims(texts)
    assert ranges == ["seq=1:8:64", "h=:64/8", "n=8", "m=past+"]
    assert expressions == {"t": "past + seq", "k": "2*(a//3)"}
    with pytest.raises(InputError, match="dim t is given twice"):
        split_dims(["t=past+seq", "t=1:2:3"])


def test_an_expression_is_for_onnx_files(cli: Run) -> None:
    words = ("export", "a.py:f", "--input", "x:{b}", "--dim", "b=:8", "--dim", "t=2*b")
    refused(
        cli(*words),
        "dim t=2*b: an expression works only for ONNX files: write {2*b} in its --input",
    )
    refused(
        cli("export", "a.pt2", "--dim", "t=2*b"),
        "dim t=2*b: an expression works only for ONNX files",
    )
    refused(cli("export", "a.onnx", "--dim", "t=2*"), "NAME=EXPRESSION of other dims, e.g. t=past")
