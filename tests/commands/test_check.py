"""`pipeline check`: modules with different faults, and its messages."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from helpers import Run, files_under, refused
from tiny import TOLERANCE, of

from pipeline.artifact.manifest import ComparisonInfo, PointInfo
from pipeline.build.shape_inference import ORACLE
from pipeline.commands.check.check import CheckReport, Finding, check, comparison_findings
from pipeline.convert.driver import run_export
from pipeline.convert.findings import constraint_findings
from pipeline.errors import ConstraintError, ExportError
from pipeline.spec.config import Config
from pipeline.spec.dims import Dim
from pipeline.spec.findings import Facts, Note, note
from pipeline.spec.model import Input, ModelSpec, Output
from pipeline.spec.rules import Rule
from pipeline.spec.verdicts import Check, RowChange, Verdict


def quiet(_: str) -> None:
    pass


def checked(spec: ModelSpec, **how: Any) -> CheckReport:
    return check(Config(spec, **how), quiet)


def blocking(report: CheckReport, section: str = "") -> list[Finding]:
    return [f for f in report.findings if f.blocks and section in ("", f.section)]


def said(report: CheckReport, section: str) -> str:
    return "\n".join(f"{f.what} {f.where} {f.do}" for f in report.findings if f.section == section)


def wide(forward: Any, outputs: Sequence[str] = ("y",), **how: Any) -> ModelSpec:
    """A spec of an image [1, 3, h, w] of 16..64."""
    h, w = Dim("h", 16, 32, 64, **how), Dim("w", 16, 32, 64, **how)
    names = tuple(map(Output, outputs))
    return of(forward, shape=(1, 3, h, w), outputs=names)


def eights(x: torch.Tensor) -> torch.Tensor:
    small = torch.nn.functional.avg_pool2d(x, 8)
    return x + torch.nn.functional.interpolate(small, scale_factor=8.0)


def test_nothing_in_the_way_and_nothing_left_behind(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    code, output, errors = cli("check", "tiny", "--shape", "h=7")
    assert code == 0, output + errors
    assert output.startswith("tiny, for rtx-1.7\n\ndims\n  h: 5..40, opt 18\n")
    assert output.endswith("\n\nNo findings block a conversion\n")
    for part in (
        "every size that was tried runs",
        " true at every declared size",
        "tensorrt_rtx parses model.onnx",
        "all runs agree within the tolerance at ",
        "TensorRT's shape inference agrees on the output sizes at",
    ):
        assert part in output
    assert [line for line in output.splitlines() if line.startswith("!")] == []
    own = [name for name in files_under(tmp_path) if "torchinductor" not in name]  # torch's cache
    assert own == ["scratch"]


def test_a_multiple_is_named_and_the_rest_looked_at_there() -> None:
    report = checked(wide(eights))
    found = blocking(report)
    assert [f.dim for f in found] == ["h", "w"]
    assert all(f.section == "dims" and "must be a multiple of 8" in f.what for f in found)
    assert "test_check.py" in found[0].where and "in eights: return x + " in found[0].where
    assert 'Dim("h", min=16, opt=32, max=64, multiple_of=8)' in found[0].do
    assert 'padding=Padding({"h": 8})' in found[0].do
    assert "the lines below apply to h in 16..64 in steps of 8" in said(report, "dims")
    assert "all runs agree" in said(report, "comparison")
    assert str(report).endswith("\n2 findings block a conversion")


def test_a_dim_that_may_be_narrowed_is_in_nobodys_way() -> None:
    report = checked(wide(eights, auto=True))
    assert report.ok
    assert "nothing. pipeline does it as if you declared: Dim(" in said(report, "dims")


def test_a_dim_is_narrowed_only_where_it_is() -> None:
    def rows(x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.avg_pool2d(x, (8, 1)).repeat_interleave(8, 2)

    told = said(checked(wide(rows, auto=True)), "dims")
    assert 'as if you declared: Dim("h", min=16, opt=32, max=64, multiple_of=8)' in told
    assert 'as if you declared: Dim("w"' not in told
    assert "is narrowed" not in told
    assert "w: 16..64, opt 32; may be narrowed to the sizes that the model accepts" in told


def test_a_model_that_runs_nowhere_is_one_finding() -> None:
    """It was told once for the sizes, and again by each export with fewer dims."""
    spec = wide(lambda x: x @ torch.ones(5, 7))
    (only,) = blocking(checked(spec))
    assert only.kind == "nowhere"
    assert only.do.startswith("declare other fixed sizes (such as channels), axes or dtypes")
    with pytest.raises(ExportError, match=r"it runs at none of the \d+ .*; declare other fixed"):
        run_export(Config(replace(spec, refine_dims=True)))


def test_defaults_are_said() -> None:
    h = Dim("h", max=64)
    report = checked(of(lambda x: x * 2, shape=(1, 3, h, 8)))
    assert report.ok
    assert "h: 1..64, opt 8 (min and opt by default)" in said(report, "dims")


def test_what_torch_export_alone_asks_for_is_all_told() -> None:
    def halves(x: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[2] % 4 == 0)  # not a check of the eager run
        torch._check(x.shape[3] % 2 == 0)
        return x * 2

    report = checked(wide(halves))
    assert {f.dim for f in blocking(report, "dims")} == {"h", "w"}
    assert "all runs agree" in said(report, "comparison")


def test_a_baked_size_is_fixed_and_the_rest_looked_at() -> None:
    def baked(x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(int(x.shape[2]), 1)

    report = checked(wide(baked))
    (found,) = blocking(report)
    assert "h is baked in" in found.what
    assert "in baked: return x + torch.ones(int(x.shape[2]), 1)" in found.where
    assert "keep it symbolic" in found.do
    assert "the lines below apply to h=64 only" in said(report, "dims")
    assert "all runs agree within the tolerance at 5 sets of sizes" in said(report, "comparison")


class Branches(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        if x.shape[1] == y.shape[1]:
            return x + 1, y
        return x * 2, y


@pytest.mark.parametrize(
    ("opt", "what", "do"),
    [
        (
            23,
            "t != s must hold in one export: the model takes another branch where they are equal",
            "declare one Dim for both t and s, or ranges of t and s that share no size",
        ),
        (16, "s must equal t", "declare one Dim for both t and s"),
    ],
)
def test_a_branch_on_equal_sizes_is_one_finding(opt: int, what: str, do: str) -> None:
    t, s = Dim("t", 8, 16, 64), Dim("s", 8, opt, 64)
    inputs = Input("x", (2, t)), Input("y", (2, s))
    spec = ModelSpec("m", lambda _: Branches(), inputs, (Output("a"), Output("c")))
    report = checked(spec)
    (found,) = blocking(report)
    assert (found.what, found.do) == (what, do)
    assert "in forward: if x.shape[1] == y.shape[1]:" in found.where
    assert "the lines below apply to s=t only" in said(report, "dims")
    assert "all runs agree within the tolerance" in said(report, "comparison")


class Joined(torch.nn.Module):
    """A decoder's step: `past` [b, p] before `x` [b, 4]. With `empty`, there is no past."""

    def __init__(self, empty: bool) -> None:
        super().__init__()
        self.empty = empty

    def forward(self, x: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        if self.empty and past.shape[1] > 0:
            raise ValueError("no past, please")
        return torch.cat([past, x], 1) + len(list(range(past.shape[1])))


def joined(empty: bool, p: Dim) -> CheckReport:
    b = Dim("b", 1, 2, 8)
    inputs = (Input("x", (b, 4)), Input("past", (b, p)))
    return checked(ModelSpec("joined", lambda _: Joined(empty), inputs, (Output("y"),), TOLERANCE))


def test_a_dim_that_has_to_be_0_can_not_be_fixed() -> None:
    report = joined(True, Dim("p", 0, 3, 7))
    assert blocking(report)[0].what == "p must be 0: the model fails at p=1: no past, please"
    assert blocking(report)[0].do == "declare no dim p: every Dim has a size above 0"
    assert "p cannot be fixed at 0, and the model ran at no other size" in said(report, "dims")
    assert "not checked: the export failed, so there is no ONNX file" in said(report, "comparison")


def test_a_dim_whose_opt_is_0_is_fixed_above_it() -> None:
    report = joined(False, Dim("p", 0, 0, 7))
    (found,) = blocking(report)
    assert found.what == "p must be 0: the model fixes it"
    assert "the lines below apply to p=1 only" in said(report, "dims")
    assert "all runs agree" in said(report, "comparison")


def test_a_way_that_is_up_to_the_data() -> None:
    def branch(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x * 2
        return x - 1

    report = checked(wide(branch))
    (found,) = blocking(report)
    assert found.section == "nodes"
    assert "Could not guard on data-dependent expression" in found.what
    assert found.where.endswith("in branch: if x.sum() > 0:")
    assert "torch.where" in found.do
    assert "not checked" in said(report, "comparison")
    assert "every size that was tried runs" in said(report, "dims")


class Backward(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def energy(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            z = x.detach().requires_grad_(True)
            return torch.autograd.grad(self.energy(z), z)[0]


class Derivative(Backward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(self.energy)(x)


class DerivativeOfSquare(Backward):  # fails in the exporter to ONNX, not in torch.export
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda z: z.square().sum())(self.layer(x))


@pytest.mark.parametrize("model", [Backward, Derivative, DerivativeOfSquare])
def test_a_gradient_in_forward(model: type[torch.nn.Module]) -> None:
    spec = replace(of(torch.abs, shape=(Dim("n", 1, 2, 4), 8)), build=lambda _: model())
    found, *_ = blocking(checked(spec), "nodes")
    assert "write the derivative" in found.do


def test_an_output_whose_size_is_up_to_the_data() -> None:
    report = checked(wide(torch.nonzero))
    (found,) = blocking(report)
    assert "output y axis 0: its size is u0" in found.what


def test_a_node_that_nothing_mends_does_not_hide_the_rest() -> None:
    def both(x: torch.Tensor) -> torch.Tensor:
        places = torch.nn.functional.max_pool2d(x, 3, 1, 1, return_indices=True)[1]
        return eights(x) * places

    report = checked(wide(both))
    assert [f.section for f in blocking(report)][:3] == ["dims", "dims", "nodes"]
    node = next(f for f in blocking(report, "nodes") if f.what.startswith("MaxPool: "))
    assert "tests/support/tiny.py:" in node.where
    assert "TensorRT has no MaxPool with indices" in node.do
    assert "target rtx-1.7 refuses the MaxPool node" in said(
        report, "nodes"
    )  # by the command's parser
    assert "all runs agree" in said(report, "comparison")
    without = checked(wide(both), target="tensorrt-8.6")
    assert "TensorRT's parser did not run: tensorrt is not installed" in said(without, "nodes")


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: torch.nn.functional.adaptive_avg_pool2d(x, (6, 5)),
        lambda x: torch.nn.functional.interpolate(x, size=(7, 9), mode="area"),
        lambda x: torch.fft.rfft2(x).abs() / 64,
    ],
    ids=["adaptive pool", "area", "fft"],
)
def test_what_the_pipeline_mends_is_in_nobodys_way(forward: Any) -> None:
    spec = wide(forward)
    if "fft" in forward.__code__.co_names:
        spec = replace(spec, tolerance=replace(TOLERANCE, atol=1e-4))
    report = checked(spec)
    assert report.ok, str(report)
    if "fft" in forward.__code__.co_names:
        assert "pass expand_dft fixes" in said(report, "nodes")


def test_runs_that_disagree() -> None:
    def skewed(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if torch.compiler.is_exporting() else x * 2 + 0.01

    report = checked(wide(skewed))
    (found,) = blocking(report)
    assert found.section == "comparison"
    assert "y of exported differs from torch at 7 of 7 sets of sizes, first at min" in found.what
    assert "differs by up to 0.01" in found.what


def test_one_nan_stands_in_the_way_once() -> None:
    """Also if a pass rewrites a node, so that there are three pairs of runs."""

    def logarithm(x: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.instance_norm(x) - 50).log()

    report = checked(wide(logarithm), target="tensorrt-8.6")
    (found,) = blocking(report)
    assert "at 7 of 7 sets of sizes, first at min (h=16,w=16): torch has NaN" in found.what
    assert found.do.startswith("If the input values cause this, limit them: --range")
    assert found.do.endswith(
        "If a size causes it, such as std over 1 element, declare a range without it"
    )
    assert found.where == ""


def test_comparison_findings_are_told_once_with_their_node() -> None:
    def point(size: int, *results: Verdict, left_out: Note | None = None) -> PointInfo:
        return PointInfo(f"at {size}", {"h": size}, 1, results, left_out)

    where = "Add node a, from module m at f.py:3: off by 3"
    facts: Facts = {"index": (0,), "largest": 4.0, "where": where}
    bad = Verdict("differs", ("torch", "exported"), "y", 3.0, 0.5, facts)
    refuses = Verdict("sizes-refused", ("torch", ORACLE), "y", facts={"reason": "x"})
    shape = Verdict("shape-differs", ("torch", ORACLE), "y", facts={"got": (1,), "want": (2,)})
    notes = tuple(
        note("sizes-not-inferred", label=f"at {n}", sizes={"h": n}, reason=f"weird at {n}")
        for n in (1, 2)
    )
    left_out = note("not-stored", run="torch")
    points = (point(1, bad, refuses), point(2, bad, shape), point(3, left_out=left_out))
    found = comparison_findings(ComparisonInfo(1, points, notes))
    first, second, *others = found
    assert first.what.endswith("2 of 3 sets of sizes, first at at 1 (h=1): differs by up to 3 at "
                               "index [0]; the largest value is 4")  # fmt: skip
    assert first.where == where
    assert "1 of 3" in second.what and "its shape is [1], not [2]" in second.what
    assert [f.what for f in others] == [
        f"h=3 was not compared: {left_out.text}",
        f"{notes[0].text} (and at 1 more sets of sizes)",
    ]


def test_a_check_beside_the_numbers_that_fails() -> None:
    passed = Check("batch rows", "exported", "rows-independent", {"b": 2})
    moved = (RowChange("position", "y", 0.5),)
    failed = Check("batch rows", "rewritten", "rows-depend", {"b": 2}, rows=moved)
    ran = Verdict("agrees", ("torch", "exported"), "y", 0.0, 0.0)
    points = (PointInfo("min", {"b": 1}, 1, (ran,)),)
    (found,) = comparison_findings(ComparisonInfo(1, points, (), (passed, failed)))
    assert found.blocks
    assert found.what == (
        "batch rows of rewritten at b=2: a row changes with its position in the batch: y by up to "
        "0.5"
    )


def test_rules_of_an_error_become_findings() -> None:
    narrow = Dim("h", 8, 8, 32, 8)
    rules = (
        Rule("multiple", "h", refined=narrow, multiple=8, line="/a b/m.py:3 in f: g(x)"),
        Rule("baked-in", "w"),
        Rule("equal", "h", ("b",), line="m.py:4 in f: x(1, (2)); declare that"),
    )
    found = constraint_findings(ConstraintError("model m: in any words", rules=rules))
    assert [f.kind for f in found] == ["multiple", "baked-in", "equal"]
    assert [f.dim for f in found] == ["h", "w", "h"]
    assert [f.what for f in found] == [r.text() for r in rules]
    assert [f.where for f in found] == [r.line for r in rules]
    assert [f.do for f in found] == [r.advice() for r in rules]
    assert all(f.blocks for f in found)
    (other,) = constraint_findings(ConstraintError("something else"))
    assert (other.what, other.kind, other.blocks) == ("something else", "export", True)


def test_an_onnx_file(tmp_path: Path, cli: Run) -> None:
    head = '<ir_version: 8, opset_import: ["" : 18]>'
    text = f"{head} g (float[1, n] x) => (float[1, n] y) {{ y = Relu(x) }}"
    onnx.save(onnx.parser.parse_model(text), tmp_path / "relu.onnx")
    code, output, errors = cli("check", "relu.onnx", "--dim", "n=2:8:16")
    assert code == 0, output + errors
    assert "n: 2..16, opt 8" in output
    assert "tensorrt_rtx parses model.onnx" in output


def test_an_onnx_file_with_a_shape_baked_in(tmp_path: Path, cli: Run) -> None:
    """A range is not narrowed to one size."""
    head = '<ir_version: 8, opset_import: ["" : 18]>'
    text = f"{head} g (float[n, 4] x) => (float[a, 4] y) <int64[2] s = {{4, 4}}> "
    onnx.save(onnx.parser.parse_model(text + "{ y = Reshape(x, s) }"), tmp_path / "baked.onnx")
    code, output, errors = cli("check", "baked.onnx", "--dim", "n=2:4:8")
    assert code == 1, output + errors
    assert "! n must be 4" in output
    assert "do: declare the number 4 in place of n" in output
    code, output, errors = cli("check", "baked.onnx", "--dim", "n=4:4:4")
    assert code == 0, output + errors


def test_several_inputs_that_must_have_one_size() -> None:
    class Sum(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a + b

    def summed(auto: bool, **how: Any) -> CheckReport:
        h, w = Dim("h", 16, 32, 64, auto=auto), Dim("w", 8, 16, 48, auto=auto)
        inputs = (Input("a", (1, h)), Input("b", (1, w)))
        return checked(ModelSpec("sum", lambda _: Sum(), inputs, (Output("y"),), TOLERANCE), **how)

    (found,) = blocking(summed(False))
    assert "w must equal h" in found.what
    assert "one Dim for both" in found.do
    report = summed(True)  # a conversion does this without you
    assert report.ok, str(report)
    assert "nothing. pipeline does it as if you declared: one Dim for both h and w" in said(
        report, "dims"
    )
    assert "the lines below apply to h in 16..48 only" in said(report, "dims")
    assert "all runs agree" in said(report, "comparison")
    # profiles and sizes may name both
    report = summed(True, profiles=("h=16:20:32,w=20:24:40",), shapes=("h=24,w=24", "w=30", "h=50"))
    assert report.ok, str(report)
    assert [f.what for f in report.findings if f.kind == "left-out"] == [
        "shape h=50 is not checked: its sizes are outside these ranges"
    ]


def test_profiles_and_shapes_that_a_narrowed_dim_has_not() -> None:
    report = checked(wide(eights), profiles=("h=17:18:19",), shapes=("h=20", "h=24"))
    assert "profile profile0 is not checked: its sizes are outside these ranges" in said(
        report, "dims"
    )
    assert "shape h=20 is not checked" in said(report, "dims")
    assert "shape h=24" not in said(report, "dims")


def test_json_and_exit_code(cli: Run) -> None:
    code, output, _ = cli("check", "skewed", "--json")
    assert code == 1
    told = json.loads(output)
    assert told["ok"] is False
    assert {f["section"] for f in told["findings"]} == {"dims", "nodes", "comparison"}
    assert sum(f["blocks"] for f in told["findings"]) == 1


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ((), "no SOURCE"),
        (("nothing",), "unknown model"),
        (("tiny", "--shape", "h=4"), "outside 5..40"),
        (("tiny", "--profile", "h=4"), "outside 5..40"),
        (("tiny", "--target", "none"), "unknown target"),
        (("tiny", "--weights", "none.pth"), "none.pth"),
        (("tiny", "--out", "a"), "--out"),
        (("none.py:f",), "none.py: no such file"),
    ],
)
def test_bad_input(cli: Run, words: tuple[str, ...], part: str) -> None:
    code, output, errors = cli("check", *words)
    refused((code, output, errors.splitlines()[-1] + "\n"), part)


MANY = '''
import torch


class Many(torch.nn.Module):
    """Takes one width only, and calls an op without a translation."""

    def forward(self, x):
        y = torch.kthvalue(x, 2, -1).values
        return y, x * torch.ones(1, 1, 1, 24)


class One(torch.nn.Module):
    def forward(self, x):
        return x * torch.ones(1, 1, 1, 24)


class TwoOps(torch.nn.Module):
    def forward(self, x):
        y = torch.kthvalue(x, 2, -1).values
        return y + torch.special.i0(x).sum(-1)
'''


def test_a_conversion_lists_everything_that_blocks_it(cli: Run, tmp_path: Path) -> None:
    (tmp_path / "many.py").write_text(MANY)
    words = ("--input", "x:1x3x{h}x{w}", "--dim", "h=16:40", "--dim", "w=16:24:40", "--out", "a")
    code, output, errors = cli("convert", "many.py:Many", *words)
    assert (code, output) == (1, "")
    lines = errors.partition("error: ")[2].splitlines()
    assert lines[0] == "model Many: 2 findings block the conversion:"
    assert [line[:2] for line in lines].count("! ") == 2
    assert "w must be 24" in lines[1] and "at: " in lines[2] and "in forward" in lines[2]
    assert any(line.startswith("! aten.kthvalue") for line in lines)
    assert not (tmp_path / "a").exists()


def test_ops_that_block_a_conversion_are_listed(cli: Run, tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(MANY)
    code, _, errors = cli("convert", "two.py:TwoOps", "--input", "x:3x16", "--out", "a")
    assert code == 1
    lines = errors.partition("error: ")[2].splitlines()
    assert lines[0] == "model TwoOps: 2 findings block the conversion:"
    assert [line[:7] for line in lines[1:-1]] == ["! aten.", "    at:", "    do:"] * 2
    assert lines[-1] == "(--debug shows the full text)"


def test_one_finding_is_not_listed_twice(cli: Run, tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(MANY)
    words = ("--input", "x:1x3x{h}x{w}", "--dim", "h=16:40", "--dim", "w=16:24:40", "--out", "a")
    code, _, errors = cli("convert", "one.py:One", *words)
    assert code == 1
    lines = errors.partition("error: ")[2].splitlines()
    assert lines[0] == "model One: 1 finding blocks the conversion:"
    assert [line[:2] for line in lines].count("! ") == 1
    assert lines[1].startswith("! w must be 24") and "at: " in lines[2] and "do: " in lines[3]
