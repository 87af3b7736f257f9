"""`pipeline passes`, `pipeline lint` and `pipeline rewrite` on ONNX files."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import onnx.parser
import pytest
from helpers import Run, files_under, refused

from pipeline.commands.main import main
from pipeline.commands.passes import _lint_verdict
from pipeline.passes import DEFAULT_PASSES
from pipeline.rewrite.lint import LintFinding, LintResult


def save(path: Path, text: str, opset: int = 18) -> Path:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> g {text}')
    for node in model.graph.node:
        node.name = f"the_{node.output[0]}"
        note = node.metadata_props.add()
        note.key = "pkg.torch.onnx.stack_trace"
        note.value = f'File "model.py", line {len(node.output[0])}, in forward\n    y = x'
    onnx.save(model, path)
    return path


FAULTY = (
    "(float[n,3,h,w] x, float[n,5,6,2] grid) => (float[n,3,p,q] y, float[n,3,1,1] m, int64[2] s) "
    "<int64[2] axes = {2, 3}, float[3] a = {1, 2, 3}, float[3] b = {0, 1, 2}> {"
    'y = GridSample<mode="linear">(x, grid) i = InstanceNormalization(x, a, b) '
    "m = ReduceMean<keepdims=1>(i, axes) s = Shape<start=2>(x) }"
)


def test_lint_names_every_planted_fault_of_8_6(cli: Run, tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", FAULTY, opset=20)
    code, out, _ = cli("lint", path, "--target", "tensorrt-8.6", "--json")
    found = {f["node"]: f for f in json.loads(out)["findings"]}
    assert {"the_y", "the_m", "the_i", "the_s"} <= set(found)
    assert all(f["mended"] for f in found.values())
    assert "model.py:1" in found["the_y"]["origin"]
    assert code == 0
    code, out, _ = cli("lint", path, "--target", "tensorrt-8.6")
    for word in (
        "GridSample the_y",
        "ReduceMean the_m",
        "InstanceNormalization the_i",
        "Shape the_s",
    ):
        assert word in out
    assert f": {len(found)} nodes would fail or be wrong without a rewrite; the passes fix" in out


@pytest.mark.parametrize("target", ["tensorrt-10", "tensorrt-11"])
def test_lint_of_an_opset_20_grid_sample(cli: Run, tmp_path: Path, target: str) -> None:
    path = save(tmp_path / "m.onnx", FAULTY, opset=20)
    _, out, _ = cli("lint", path, "--target", target)
    assert "GridSample the_y" in out
    assert "InstanceNormalization" not in out
    assert ": 1 node would fail or be wrong without a rewrite; the passes fix it\n" in out


def test_lint_of_a_good_model(cli: Run, tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", "(float[n,3] x) => (float[n,3] y) { y = Relu(x) }", 17)
    for target in ("rtx-1.7", "tensorrt-8.6"):
        code, out, _ = cli("lint", path, "--target", target)
        assert code == 0
        assert "no known fault" in out


SAYINGS = {
    "a kernel that is not there": "h = Cast<to=10>(k) s = Sin(h) c = Cast<to=1>(s) y = Add(x, c)",
    "a row that is not there": "i = Constant<value_ints=[9]>() c = Gather(k, i) y = Add(x, c)",
    "bfloat16": "h = Cast<to=16>(k) s = Sin(h) c = Cast<to=1>(s) y = Add(x, c)",
}


@pytest.mark.parametrize("nodes", SAYINGS.values(), ids=SAYINGS)
def test_lint_alone_speaks(tmp_path: Path, capfd: pytest.CaptureFixture[str], nodes: str) -> None:
    """ONNX Runtime and graph-surgeon print nothing about constants that they can't fold."""
    text = f"(float[b,4] x) => (float[b,4] y) <float[4] k = {{1, 2, 3, 4}}> {{ {nodes} }}"
    path = save(tmp_path / "m.onnx", text, opset=17)
    assert main(["lint", str(path), "--target", "tensorrt-8.6", "--json"]) == 0
    out, errors = capfd.readouterr()
    assert json.loads(out)["findings"] == []
    (line,) = errors.splitlines()
    assert json.loads(line)["step"] == f"lint {path} for tensorrt-8.6"


def test_lint_of_what_cannot_be_mended(cli: Run, tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", "(float[n,3] x) => (int64[2,k] y) { y = NonZero(x) }")
    code, out, _ = cli("lint", path)
    assert code == 1
    assert "NOT FIXED" in out
    assert "depends on the data" in out
    assert ": 1 node would fail or be wrong without a rewrite; no pass fixes it\n" in out
    code, _, err = cli("rewrite", path)
    assert code == 1
    assert "the_y" in err
    assert not (tmp_path / "m.rtx-1.7.onnx").exists()


def test_rewrite_of_any_onnx_file(cli: Run, tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", FAULTY, opset=20)
    code, out, _ = cli("rewrite", path, "--target", "tensorrt-8.6", "--diff")
    assert code == 0, out
    made = onnx.load(tmp_path / "m.tensorrt-8.6.onnx")
    onnx.checker.check_model(made, full_check=True)
    assert made.opset_import[0].version == 17
    assert "InstanceNormalization" not in {n.op_type for n in made.graph.node}
    lines = [line.strip() for line in out.splitlines()]
    assert any(line.startswith("- ") and "InstanceNormalization" in line for line in lines)
    assert any(line.startswith("+ ") and "the_i/mean" in line for line in lines)
    code, out, _ = cli(
        "rewrite", path, "--target", "tensorrt-8.6", "--only", "slice_shape", "--out", "o.onnx"
    )
    assert code == 0
    ops = {n.op_type for n in onnx.load(tmp_path / "o.onnx").graph.node}
    assert {"InstanceNormalization", "Slice"} <= ops
    assert "passes that tensorrt-8.6 needs were skipped" in out
    code, out, _ = cli("rewrite", path, "--target", "tensorrt-8.6", "--skip", "slice_shape")
    assert "slice_shape: skipped on request, although tensorrt-8.6 needs this pass" in out
    assert "; 1 pass that tensorrt-8.6 needs was skipped; numbers were not compared" in out


def test_lint_of_a_custom_op(cli: Run, tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["" : 18, "my" : 1]> g (float[n] x) => (float[n] y) '
    model = onnx.parser.parse_model(text + "{ [the_foo] y = my.Foo(x) }")
    onnx.save(model, tmp_path / "m.onnx")
    code, out, _ = cli("lint", "m.onnx")
    assert code == 1
    assert "my::Foo the_foo" in out
    assert "--plugin libfoo.so" in out
    code, _, err = cli("rewrite", "m.onnx", "--plugin", "no_such.so")
    assert code == 2
    assert "no_such.so" in err


def test_own_pass_runs_beside_only(cli: Run, tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", "(float[n,3] x) => (float[n,3] y) { y = Relu(x) }", 17)
    (tmp_path / "mine.py").write_text(
        "from pipeline.passes import Change, PassResult\n"
        "def run(graph):\n"
        "    done = [n for n in graph.nodes if n.op == 'Relu']\n"
        "    for n in done:\n"
        "        n.op = 'Abs'\n"
        "    return PassResult(tuple(Change(n.name, 'Relu', 'Abs') for n in done))\n"
    )
    words = ("--pass", "mine.py", "--only", "fold_if", "--out", "o.onnx")
    code, _, _ = cli("rewrite", path, *words)
    assert code == 0
    assert [n.op_type for n in onnx.load(tmp_path / "o.onnx").graph.node] == ["Abs"]
    code, _, err = cli("rewrite", path, "--only", "fold_if", "--skip", "fold_if")
    assert (code, "fold_if" in err) == (2, True)


def test_bad_input_is_one_line(cli: Run, tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", "(float[n,3] x) => (float[n,3] y) { y = Relu(x) }")
    for words in (
        ("lint", "none.onnx"),
        ("rewrite", "none.onnx"),
        ("rewrite", path, "--skip", "slise_shape"),
        ("rewrite", path, "--pass", "none.py"),
        ("rewrite", path, "--out", "no/such/folder.onnx"),
        ("lint", path, "--target", "tensorrt-7"),
        ("passes", "--only", "nothing_such"),
    ):
        code, _, err = cli(*words)
        assert code == 2, words
        assert len([line for line in err.splitlines() if line.startswith("error")]) == 1


@pytest.mark.parametrize("command", ["lint", "rewrite"])
def test_external_data_outside_of_the_folder_is_refused(
    cli: Run, tmp_path: Path, command: str
) -> None:
    """By its name or by a link. Data that is cut short is also refused, before a pass reads it."""
    (tmp_path / "secret").write_bytes(bytes(64))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "whole").write_bytes(bytes(64))
    (folder / "short").write_bytes(bytes(60))
    (folder / "link").symlink_to(tmp_path / "secret")
    path = save(folder / "m.onnx", "(float[n,16] x) => (float[n,16] y) { y = Add(x, w) }")
    model = onnx.load(path)
    weight = model.graph.initializer.add(name="w", data_type=onnx.TensorProto.FLOAT, dims=[16])

    def place(location: str) -> None:
        weight.raw_data = b""
        onnx.external_data_helper.set_external_data(weight, location)
        weight.ClearField("raw_data")
        path.write_bytes(model.SerializeToString())

    for location, said in (
        ("../secret", "is outside of the model's folder: refused"),
        (str(tmp_path / "secret"), "is outside of the model's folder: refused"),
        ("link", "is a symbolic link that leads out of the model's folder"),
        ("short", "is cut short: w is in bytes 0 to 64, but the file has 60"),
        ("gone", "its external data gone is missing. Put it beside the model"),
    ):
        place(location)
        code, output, errors = cli(command, path)
        progress, error = errors.splitlines()
        assert progress.endswith(f"{command} {path}" + " for rtx-1.7" * (command == "lint"))
        refused((code, output, f"{error}\n"), str(path), location, said)
        assert files_under(folder) == ["link", "m.onnx", "short", "whole"]
    place("whole")
    assert cli(command, path)[0] == 0


def test_the_table_of_passes(cli: Run) -> None:
    code, out, _ = cli("passes", "--json")
    facts = json.loads(out)
    assert code == 0
    assert [f["name"] for f in facts] == [p.name for p in DEFAULT_PASSES]
    assert all(f["evidence"] and f["targets"] for f in facts)
    assert all(f["fault"] for f in facts if not f["clean_up"])
    _, text, _ = cli("passes", "--target", "rtx-1.7")
    assert "slice_shape" not in text


def test_still_needed_tries_the_cases_on_the_installed_tensorrt(cli: Run) -> None:
    code, out, _ = cli("passes", "--still-needed", "--only", "slice_shape", "--json")
    (verdict,) = json.loads(out)
    assert code == 0
    assert not verdict["declared"]
    assert verdict["answer"] in ("open", "needless")
    assert {t["after"]["verdict"] for t in verdict["trials"]} <= {"builds", "right"}


def test_lint_does_not_count_what_no_pass_changed_as_fixed() -> None:
    fixed = LintFinding("a", "Mod", "", "is refused", True, "decompose_mod: ...")
    maybe = LintFinding("b", "Resize", "", "is wrong at some scales", False, "...", certain=False)
    text = _lint_verdict(LintResult("tensorrt-8.6", (fixed, maybe, fixed), ()))
    assert text == (
        "3 nodes would or may fail or be wrong without a rewrite: 2 fixed by the passes, 1 not "
        "fixed, and may be right as it is"
    )
