"""The error mapper, on real failures of the installed TensorRT-RTX.

Each case is a small graph that TensorRT refuses, or that crashes it. The message must have the
node, its sizes, the ranges of their dims, and what to do.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx.parser
import pytest

from pipeline.build import build as build_module
from pipeline.build import refusal as failure
from pipeline.build.advice import ADVICE, declared_advice
from pipeline.build.build import Built, build
from pipeline.build.refusal import explain
from pipeline.build.refused_node import BuildFailure, NodeIndex, find
from pipeline.build.settings import BuildOptions
from pipeline.errors import BuildError, InputError
from pipeline.machine.target import TARGETS
from pipeline.spec.dims import Dim
from pipeline.spec.interface import Interface
from pipeline.spec.profiles import Profile, Range
from pipeline.spec.tensors import Input

RTX = TARGETS["rtx-1.7"]
OPSET = '<ir_version: 10, opset_import: ["" : 18, "mine" : 1]>'
ATTENTION = '<ir_version: 10, opset_import: ["" : 23]>'
OPSET_18 = "export at opset 18, which writes attention as MatMul and Softmax"
KERNEL = "<float[1,1,5,5] k = {" + ",".join(["1"] * 25) + "}>"


def converted(tmp_path: Path, text: str, head: str = OPSET, **ranges: Range) -> Built:
    """Builds a graph with these ranges of its dims."""
    model = onnx.parser.parse_model(f"{head}\n{text}")
    for node in model.graph.node:  # ONNX's text has no "/" in names
        node.name = node.name.replace("__", "/")
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    dims = {name: Dim(name, *low_opt_max) for name, low_opt_max in ranges.items()}
    inputs = tuple(
        Input(
            value.name,
            tuple(dims[d.dim_param] if d.dim_param else d.dim_value for d in shape.dim),
        )
        for value in model.graph.input
        for shape in [value.type.tensor_type.shape]
    )
    profile = Profile("wide").resolve(dims)
    return build(
        path, tmp_path / "engine.plan", Interface(inputs, profiles=(profile,)), BuildOptions(RTX)
    )


def whole_range(name: str, dim: Dim) -> Interface:
    """One input [1, dim], and a profile over all sizes of the dim."""
    return Interface((Input(name, (1, dim)),), profiles=(Profile("a").resolve({dim.name: dim}),))


@dataclass(frozen=True)
class Case:
    """A failure: a graph, its ranges, and parts of the message in order."""

    name: str
    text: str
    ranges: Mapping[str, Range]
    parts: tuple[str, ...]
    head: str = OPSET

    def __str__(self) -> str:
        return self.name


CASES = (
    Case(
        "data-dependent size",
        "g (float[1,h] x) => (int64[2,n] y) { [m__find] y = NonZero(x) }",
        {"h": (2, 4, 8)},
        ("refuses the NonZero node m/find: NonZero plugin", "(x [1, h] -> y [2, n]; h=2:4:8); ",
         "depends on the data"),
    ),
    Case(
        "op that the parser does not know",
        "g (float[1,h,h] x) => (float[1] y) { [d] y = Det(x) }",
        {"h": (2, 4, 8)},
        ("refuses the Det node d: the parser does not know the op (x [1, h, h] -> y [1]; h=2:4:8)",
         "; use ops that TensorRT has, or write a pass"),
    ),
    Case(
        "several nodes at once",
        "g (float[1,h] x) => (float[1,h] y) { [a] s = SequenceConstruct(x) "
        "[b] y = ConcatFromSequence<axis=0>(s) }",
        {"h": (2, 4, 8)},
        ("the SequenceConstruct node a: ", "(it also refuses ConcatFromSequence node b)",
         "; TensorRT has no sequences"),
    ),
    Case(
        "attribute that the parser does not take",
        "g (float[1,1,h,w] x) => (float[1,1,a,b] y) <float[4] s = {1,1,0.5,0.5}> "
        '{ [r] y = Resize<mode="linear",antialias=1>(x,,s) }',
        {"h": (4, 8, 16), "w": (4, 8, 16)},
        ("refuses the Resize node r: Antialiasing is not supported currently (x [1, 1, h, w], "
         "s = [1.0, 1.0, 0.5, 0.5] -> y [1, 1, a, b]; h=4:8:16, w=4:8:16); ",
         "use ops that TensorRT has, or write a pass"),
    ),
    Case(
        "parser names no node",
        "g (float[1,h,64] q) => (float[1,h,64] y) { t = Relu(q) [at] y = Attention(t,t,t) }",
        {"h": (2, 4, 8)},
        ("the Attention node at: Number of attention heads is not specified", "t [1, h, 64]"),
        ATTENTION,
    ),
    Case(
        "layer without a name of its own",
        "g (float[1,h] x) => (float[1,4000] y, int64[1,4000] i) <int64[1] k = {4000}> "
        "{ y, i = TopK(x, k) }",
        {"h": (4000, 4500, 5000)},
        ("refuses the TopK node that makes y: K exceeds the maximum value allowed (3840) "
         "(x [1, h], k = [4000] -> y [1, 4000], i [1, 4000]; h=4000:4500:5000); "
         "TensorRT supports K up to 3840",),
    ),
    Case(
        "branches of unequal ranks",
        "g (float[1,h] x, bool[1] c) => (float[d] y) { [pick] y = If(c) <"
        "then_branch = t () => (float[h] p) <int64[1] a = {0}> { p = Squeeze(x, a) }, "
        "else_branch = e () => (float[1,h] q) { q = Identity(x) }> }",
        {"h": (2, 4, 8)},
        ("refuses the If node pick: Must have inputs with equal ranks",
         "give both branches of the If the same rank"),
    ),
    Case(
        "sizes that don't divide",
        "g (float[1,h] x) => (float[a,3] y) <int64[2] s = {-1,3}> { [r] y = Reshape(x, s) }",
        {"h": (3, 4, 9)},
        ("refuses the Reshape node r: reshaping failed for tensor: x Reshape dimension of -1 has "
         "no solution, at the opt of profile wide (x [1, h], s = [-1, 3] -> y [a, 3]; h=3:4:9); ",
         "declare a multiple_of or another range for h"),
    ),
    Case(
        "matrices that match at some sizes only",
        "g (float[2,h] x, float[w,2] z) => (float[2,2] y) { [mm] y = MatMul(x, z) }",
        {"h": (2, 4, 8), "w": (2, 5, 8)},
        ("refuses the MatMul node mm: attempt to multiply two matrices with mismatching dimensions "
         "(4 != 5), at the opt of profile wide (x [2, h], z [w, 2] -> y [2, 2]; h=2:4:8, w=2:5:8);",
         "use the same Dim for sizes that must be equal (h, w)"),
    ),
    Case(
        "sums that match at some sizes only",
        "g (float[2,h] x, float[2,w] z) => (float[2,q] y) { [ad] y = Add(x, z) }",
        {"h": (2, 4, 8), "w": (3, 5, 8)},
        ("the Add node ad: dimensions not compatible for elementwise (4 != 5)", "use the same Dim"),
    ),
    Case(
        "parts that don't fit together",
        "g (float[1,h] x, float[2,h] z) => (float[1,q] y) { [cc] y = Concat<axis=1>(x, z) }",
        {"h": (2, 4, 8)},
        ("the Concat node cc: all concat input tensors must have the same dimensions",
         "(x [1, h], z [2, h] -> y [1, q]; h=2:4:8)"),
    ),
    Case(
        "one value has no variance",
        "g (float[n,2,1,1] x) => (float[n,2,1,1] y) <float[2] s = {1,1}, float[2] b = {0,0}> "
        "{ [norm] y = InstanceNormalization(x, s, b) }",
        {"n": (1, 1, 2)},
        ("the InstanceNormalization node norm: Total number of elements within given the first two "
         "dimensions must be > 1", "one value alone has no variance: raise the min of its size"),
    ),
    Case(
        "Myelin names a tensor",
        "g (float[1,1,h,8] x) => (float[1,1,a,b] y) <int64[4] five = {0,0,5,0}> { s = Shape(x) "
        'z = Sub(s, five) [rs] y = Resize<mode="linear">(x,,,z) }',
        {"h": (2, 8, 16)},
        ("the Resize node rs: Resize shape dims should be non-negative, but shape[2] is negative "
         "(x [1, 1, h, 8], z [4] -> y [1, 1, a, b]; h=2:8:16); ", "narrow the range of h"),
    ),
    Case(
        "two dtypes in one node",
        "g (float[1,h] x, float16[1,h] z) => (float[1,h] y) { [ad] y = Mul(x, z) }",
        {"h": (2, 4, 8)},
        ("the Mul node ad: ", "must have same input types", "Float and Half", "strongly typed"),
    ),
    Case(
        "bytes that are moved",
        "g (uint8[1,h,3] x) => (float[1,3,h] y) { [tr] z = Transpose<perm=[0,2,1]>(x) "
        "y = Cast<to=1>(z) }",
        {"h": (2, 4, 8)},
        ("the Transpose node tr: ", "has type UInt8", "convert the input before any other op"),
    ),
    Case(
        "words that name an op only",
        "g (float[1,2,h,8] q, float[1,2,h,8] k) => (float[1,2,h,8] y) "
        "{ v = Relu(k) [at] y = Attention(q, k, v) }",
        {"h": (2, 4, 8)},
        ("refuses the Attention node at: Attention operation was not supported by a dedicated "
         "kernel (q [1, 2, h, 8], k [1, 2, h, 8], v [1, 2, h, 8] -> y [1, 2, h, 8]; h=2:4:8); ",
         OPSET_18),
        ATTENTION,
    ),
    Case(
        "crash of the builder",
        "g (float16[1,2,h,64] q) => (float16[1,2,h,64] y) { [at] y = Attention(q, q, q) }",
        {"h": (2, 8, 64)},
        ("target rtx-1.7: TensorRT crashed: Segmentation fault (SIGSEGV), while compiling "
         "the Attention node at (q [1, 2, h, 64],", "h=2:8:64); ", OPSET_18),
        ATTENTION,
    ),
    Case(
        "crash of the builder on one of several nodes",
        "g (float16[1,2,h,64] q) => (float16[1,2,h,64] y) "
        "{ t = Sin(q) [a] u = Attention(t, t, t) [b] y = Attention(u, u, u) }",
        {"h": (2, 8, 64)},
        ("crashed: Segmentation fault (SIGSEGV), while compiling ", " nodes, among them Attention "
         "node a, Attention node b: TensorRT is known to crash on Attention; ", OPSET_18),
        ATTENTION,
    ),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_refusal_is_told(case: Case, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(failure, "_pass_advice", lambda *_: "")  # tests the entries of the table
    with pytest.raises(BuildError) as caught:
        converted(tmp_path, case.text, case.head, **case.ranges)
    text, detail = str(caught.value), caught.value.detail
    assert "\n" not in text
    assert text.startswith("target rtx-1.7")
    place = 0
    for part in case.parts:
        assert part in text[place:], text
        place = text.index(part, place) + len(part)
    assert "TensorRT's message:\n" in detail + "\n"
    assert caught.value.exit_code == 1
    assert not (tmp_path / "engine.plan").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("g (float[1,1,h,8] x) => (float[1,1,a,b] y) <float[4] s = {1,1,0.5,0.5}> "
         '{ [r] y = Resize<mode="linear",antialias=1>(x,,s) }',
         r"; pass \w+ rewrites this node, but did not run on this graph$"),
        ("g (float[1,h] x) => (int64[2,n] y) { [find] y = NonZero(x) }",
         r"; pass \w+ cannot rewrite it: .* depends on the data of x"),
    ],
)  # fmt: skip
def test_the_passes_are_asked_first(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(BuildError, match=told):
        converted(tmp_path, text, h=(4, 8, 16))


def test_detail_has_the_facts_by_lines_and_the_words_below(tmp_path: Path) -> None:
    with pytest.raises(BuildError) as caught:
        converted(
            tmp_path, "g (float[1,h] x) => (int64[2,n] y) { [f] y = NonZero(x) }", h=(2, 4, 8)
        )
    lines = caught.value.detail.splitlines()
    assert lines[:4] == [
        "node:       NonZero node f",
        "op:         NonZero",
        "sizes:      x [1, h] -> y [2, n]",
        "dims:       h=2:4:8",
    ]
    assert lines[4].startswith("to fix it: ")
    assert "depends on the data" in lines[4]
    assert lines[5] == "TensorRT's message:"
    assert any("In node 0 with name: f and operator: NonZero" in line for line in lines[6:])


def test_node_inside_of_a_branch(tmp_path: Path) -> None:
    text = """g (float[1,h] x, bool[1] c) => (float[d] y) { [pick] y = If(c) <
    then_branch = t () => (float[1,1] p) { [inner] p = Det(x) },
    else_branch = e () => (float[1,h] q) { q = Identity(x) }> }"""
    with pytest.raises(BuildError, match="the Det node inner: "):
        converted(tmp_path, text, h=(2, 4, 8))


def test_node_inside_of_a_function(tmp_path: Path) -> None:
    text = """g (float[1,h] x) => (float[1,h] y) { [call] y = mine.Count(x) }
<opset_import: ["" : 18], domain: "mine"> Count (a) => (b)
{ [inner] n = NonZero(a) m = Cast<to=1>(n) s = ReduceSum<keepdims=0>(m) b = Add(a, s) }"""
    with pytest.raises(BuildError, match=r"the NonZero node inner: .*\(a \[\?\] -> n \[\?\]\)"):
        converted(tmp_path, text, h=(2, 4, 8))


def test_input_of_a_fixed_size(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    text = "g (float[1,4] x) => (float[1,4] y) { y = Relu(x) }"
    onnx.save(onnx.parser.parse_model(f"{OPSET}\n{text}"), path)
    h = Dim("h", 5, 6, 7)
    with pytest.raises(BuildError) as caught:
        build(path, tmp_path / "p", whole_range("x", h), BuildOptions(RTX))
    assert "refuses model.onnx: Input tensor x has static dimensions" in str(caught.value)
    assert "(TensorRT names no node); this input has a fixed size" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "ranges", "parts"),
    [
        (
            f"g (float[1,1,h,8] x) => (float[1,1,a,b] y) {KERNEL} {{ [cv] y = Conv(x, k) }}",
            {"h": (2, 8, 16)},
            ("at the min of its profile: Conv node cv: ", "h=2:8:16", "narrow the range of h"),
        ),
        (
            "g (float[1,h] x) => (float[2,q] y) <int64[2] s = {2,2}> { [r] y = Reshape(x, s) }",
            {"h": (4, 4, 9)},
            ("at the max of its profile: Reshape node r: ", "would change volume 9 to 4", "for h"),
        ),
        (
            "g (float[1,h] x) => (float[1,a] y, float[1,b] z) <int64[2] s = {3,3}> "
            "{ [sp] y, z = Split<axis=1>(x, s) }",
            {"h": (2, 6, 8)},
            ("at the min of its profile: Split node sp: ", "out of bounds access on axis 1"),
        ),
    ],
)
def test_sizes_that_the_engine_can_not_run_are_told_in_the_warnings(
    tmp_path: Path, text: str, ranges: dict[str, Range], parts: tuple[str, ...]
) -> None:
    done = converted(tmp_path, text, **ranges)  # it builds: TensorRT-RTX warns of it only
    warning = next(w for w in done.warnings if w.startswith("the engine cannot run"))
    assert "\n" not in warning
    for part in parts:
        assert part in warning


def test_crash_of_the_parser_names_the_node(tmp_path: Path, monkeypatch: Any) -> None:
    import contextlib

    # TensorRT-RTX aborts when it creates a plugin if the path lacks the library's plain name
    monkeypatch.setattr(build_module, "library_folder", lambda _: contextlib.nullcontext({}))
    plugin = Path(__file__).parents[1] / "support" / "twice_plugin.py"
    path = tmp_path / "model.onnx"
    text = "g (float[1,h] x) => (float[1,h] y) { t = Relu(x) [dbl] y = mine.Twice(t) }"
    onnx.save(onnx.parser.parse_model(f"{OPSET}\n{text}"), path)
    h = Dim("h", 2, 4, 8)
    options = BuildOptions(RTX, plugins=(str(plugin),))
    with pytest.raises(BuildError) as caught:
        build(path, tmp_path / "p", whole_range("x", h), options)
    text = str(caught.value)
    assert "crashed: Aborted (SIGABRT), while parsing the mine::Twice node dbl (t [1, h]" in text
    assert "terminate called" in caught.value.detail


def test_the_process_that_asks_has_no_tensorrt(tmp_path: Path) -> None:
    import subprocess

    code = f"""
import sys; sys.path[:] = {sys.path!r}
from pathlib import Path
import test_refusal
done = test_refusal.converted(
    Path({str(tmp_path)!r}), "g (float[1,h] x) => (float[1,h] y) {{ y = Relu(x) }}", h=(2, 4, 8))
assert done.peak_memory > 50 << 20, done
assert not [name for name in sys.modules if name.startswith("tensorrt")]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("g (float[1,h] x) => (float[1,h] y) { [foo] y = Softmax<axes=7>(x) }",
         "Softmax node foo: Unrecognized attribute: axes for operator Softmax"),
        ("g (float[1,h] x) => (float[1,h] y) { [foo] y = Add(x) }",
         "Add node foo: Node(foo) with schema(::Add:14) has input size 1 not in range"),
        ("g (float[1,h] x) => (float[1,h] y) { y = Add(x, nobody) }",
         "Add node without a name: Nodes in a graph must be topologically sorted, however input "
         "'nobody'"),
        ("g (float[1,h] x) => (float[1,h] y) { [foo] y = Quux(x) }",
         "Quux node foo: No Op registered for Quux"),
        ("g (float[1,h] x) => (float[1,h] y) { y = Relu(x) y = Relu(x) }", "SSA"),
    ],
)  # fmt: skip
def test_model_that_the_checker_refuses(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(InputError) as caught:
        converted(tmp_path, text, h=(2, 4, 8))
    assert str(caught.value).startswith("model.onnx: not a valid ONNX model: ")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_is_claimed_that_the_words_do_not_say(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    text = "g (float[1,h] x) => (float[1,h] y) { [one] t = Relu(x) [two] y = Relu(t) }"
    onnx.save(onnx.parser.parse_model(f"{OPSET}\n{text}"), path)
    told = str(explain(path, RTX, BuildFailure("[E] out of something")))
    assert told == "target rtx-1.7 refuses model.onnx: out of something (TensorRT names no node)"
    told = str(
        explain(path, RTX, BuildFailure("", "Killed (SIGKILL)", "build", layers=("one", "two")))
    )
    assert told == (
        "target rtx-1.7: TensorRT crashed: Killed (SIGKILL), while compiling 2 nodes, "
        "among them Relu node one, Relu node two: the exact node is not known"
    )
    told = str(explain(path, RTX, BuildFailure("", "Killed (SIGKILL)", "build")))
    assert told.endswith("while building model.onnx; the node is not known")
    told = str(explain(path, RTX, BuildFailure("[I] a\nptxas fatal", "exit code 1", "build")))
    assert "TensorRT crashed: exit code 1 (ptxas fatal), while building model.onnx; the" in told
    told = str(explain(path, RTX, BuildFailure("", "Killed (SIGKILL)", "plugin libfoo.so")))
    assert told.endswith("while loading the plugin libfoo.so")
    # names of layers that only begin like a node's are not that node
    for words in ("(ILayer one_more: why)", "(on: why)", "(xone: why)"):
        assert find(NodeIndex(path), BuildFailure(words)).nodes == ()
    assert find(NodeIndex(path), BuildFailure("(ILayer one_relu: why)")).nodes[0].name == "one"


def test_words_that_name_an_op_of_which_there_are_two(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    text = """g (float[1,2,h,8] q) => (float[1,2,h,8] y)
    { t = Relu(q) [a] u = Attention(q, q, t) [b] y = Attention(u, t, q) }"""
    onnx.save(onnx.parser.parse_model(f"{ATTENTION}\n{text}"), path)
    words = (  # TensorRT-RTX 1.7.1's message for one node; with two nodes its builder crashes
        "[E] IBuilder::buildSerializedNetwork: Error Code 1: Myelin ([myelin_graph.h:1295: "
        "attachExceptionMsgToGraph] MyelinCheckException: decompose_composite_ops.cpp:59: "
        "CHECK(composite_op->is_decomposable()) failed. Attention operation was not supported by "
        "a dedicated kernel.  (See https://docs.nvidia.com/ for shapes and datatypes)"
    )
    told = str(explain(path, RTX, BuildFailure(words)))
    assert told.startswith(
        "target rtx-1.7 refuses one of these: Attention node a, Attention node b: Attention "
        "operation was not supported by a dedicated kernel; "
    )


def test_words_of_tensorrt_8_6(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    text = "g (float[1,h] x) => (float[1,h] y) { t = Relu(x) [two] y = Abs(t) }"
    onnx.save(onnx.parser.parse_model(f"{OPSET}\n{text}"), path)
    words = "[E] In node 1 (importAbs): UNSUPPORTED_NODE: Assertion failed: (a && b): No such thing"
    told = str(explain(path, TARGETS["tensorrt-8.6"], BuildFailure(words)))
    assert told.startswith("target tensorrt-8.6 refuses the Abs node two: No such thing (t [1, h]")


def test_every_advice_of_the_table_can_be_given() -> None:
    for advice in ADVICE:
        assert advice.says.format(dims="h")
    assert "raise the min of h" in declared_advice(
        "InstanceNormalization", "Total number of elements", False,
        lambda axis: {"h"} if axis == 2 else {"n", "h"},
    )  # fmt: skip
    for op, words in (("Foo", "use ops that TensorRT has"), ("SequenceAt", "no sequences")):
        assert words in declared_advice(op, "[E] UNSUPPORTED_NODE: false", False, lambda _: set())
    assert declared_advice("Relu", "nothing known", False, lambda _: set()) == ""
