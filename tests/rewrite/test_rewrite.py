"""The rewrite stage: kept data, checks, and files of every kind."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_graphsurgeon as gs
import pytest

from pipeline.errors import InputError, RewriteError
from pipeline.graph import files as _onnx_file
from pipeline.machine.target import TARGETS
from pipeline.passes import DEFAULT_PASSES, Change, Pass, PassResult, Versions
from pipeline.rewrite.rewrite import Rewritten, raise_refused, rewrite

OLD, RTX = TARGETS["tensorrt-8.6"], TARGETS["rtx-1.7"]
TEXT = """<ir_version: 8, opset_import: ["" : 17], producer_name: "torch">
g (float[n,3,h,w] x, bool c) => (float[n,3,h,w] y, int64[2] s, int64[k] t)
<float[3] a = {1, 2, 3}, float[3] b = {0, 1, 2}>
{ r = Relu(x) s = Shape<start=2>(x) z = InstanceNormalization(x, a, b) y = Add(z, r)
t = If(c) <then_branch = p () => (int64[k] u) { u = Shape<start=1>(x) },
else_branch = q () => (int64[k] v) { v0 = Shape(a) v = Mul(v0, v0) }> }"""


@pytest.fixture
def model() -> onnx.ModelProto:
    """A model with metadata on every node, on a value, on the graph and on the model."""
    model = onnx.parser.parse_model(TEXT)
    for node in _onnx_file.nodes_of(model.graph):
        node.name = f"/layer/{node.op_type}_{node.output[0]}"
        _note(node, "namespace", f"Model/{node.op_type}")
        _note(node, "pkg.torch.onnx.stack_trace", "model.py, line 7")
    _note(model, "author", "someone")
    _note(model.graph, "signature", "f(x)")
    model.graph.value_info.append(
        onnx.helper.make_tensor_value_info("r", onnx.TensorProto.FLOAT, ["n", 3, "h", "w"])
    )
    _note(model.graph.value_info[0], "kind", "activation")
    model.doc_string = "a model"
    onnx.checker.check_model(model, full_check=True)
    return model


def _note(proto, key: str, value: str) -> None:
    note = proto.metadata_props.add()
    note.key, note.value = key, value


def save(model: onnx.ModelProto, folder: Path, **how) -> Path:
    path = folder / "source.onnx"
    onnx.save_model(model, path, **how)
    return path


def test_metadata_is_carried_over_and_inherited(model, tmp_path) -> None:
    result = rewrite(save(model, tmp_path), tmp_path / "out.onnx", OLD)
    after = onnx.load(tmp_path / "out.onnx")
    assert result.changed
    assert result.nodes_after > result.nodes_before
    for node in _onnx_file.nodes_of(after.graph):
        notes = {note.key: note.value for note in node.metadata_props}
        assert notes["pkg.torch.onnx.stack_trace"] == "model.py, line 7", node.name
    by_name = {n.name: n for n in _onnx_file.nodes_of(after.graph)}
    new = by_name["/layer/InstanceNormalization_z/mean"]
    assert new.metadata_props[0].value == "Model/InstanceNormalization"
    assert by_name["/layer/Shape_u/slice"].metadata_props[0].value == "Model/Shape"
    assert after.metadata_props == model.metadata_props
    assert after.graph.metadata_props == model.graph.metadata_props
    assert (after.ir_version, after.doc_string, after.producer_name) == (8, "a model", "torch")
    assert after.graph.value_info[0] == model.graph.value_info[0]
    assert list(after.graph.input) == list(model.graph.input)
    assert list(after.graph.output) == list(model.graph.output)
    onnx.checker.check_model(after, full_check=True)


def test_untouched_nodes_and_weights_stay_the_same(model, tmp_path) -> None:
    model.graph.node[0].attribute.append(  # an attribute that graph-surgeon can't write
        onnx.helper.make_attribute("notes", [], attr_type=onnx.AttributeProto.INTS)
    )
    model.graph.node[0].domain = "com.example"
    model.opset_import.append(onnx.helper.make_opsetid("com.example", 1))
    rewrite(save(model, tmp_path), tmp_path / "out.onnx", OLD)
    after = onnx.load(tmp_path / "out.onnx")
    assert after.graph.node[0] == model.graph.node[0]
    # the body of the other branch reads an outer constant, which is not repeated in it
    bodies = [a.g for n in after.graph.node for a in n.attribute if a.HasField("g")]
    assert len(bodies) == 2
    assert not any(t.name == "a" for body in bodies for t in body.initializer)
    assert "a" in {t.name for t in after.graph.initializer}


def test_result_says_it_all_and_is_json(model, tmp_path) -> None:
    result = rewrite(save(model, tmp_path), tmp_path / "out.onnx", OLD)
    data = json.loads(json.dumps(dataclasses.asdict(result)))
    assert [p["name"] for p in data["passes"]] == [p.name for p in DEFAULT_PASSES]
    by_name = {p["name"]: p for p in data["passes"]}
    assert by_name["scale_resize"]["needed"]
    assert not by_name["scale_resize"]["rewritten"]
    assert {c["node"] for c in by_name["slice_shape"]["rewritten"]} == {
        "/layer/Shape_s",
        "/layer/Shape_u",
    }
    assert by_name["slice_shape"]["needs"] == ["tensorrt below 10"]
    assert (data["opset"], data["warnings"], data["refused"]) == (17, [], [])


def test_refusals_are_collected(tmp_path) -> None:
    path = save(
        onnx.parser.parse_model(
            '<ir_version: 8, opset_import: ["" : 18]> g (float[n,3,1,1] x) => (float[n,3,1,1] y) '
            "<float[3] a = {1, 2, 3}> { y = InstanceNormalization(x, a, a) }"
        ),
        tmp_path,
    )
    result = rewrite(path, tmp_path / "out.onnx", OLD)
    # the node has no name in the file, so it gets a unique name
    assert [c.node for c in result.refused] == ["InstanceNormalization_y"]
    assert result.opset == 17


def test_nothing_needed_is_a_plain_copy(model, tmp_path) -> None:
    source = save(model, tmp_path)
    result = rewrite(source, tmp_path / "out.onnx", RTX)
    assert not result.changed
    assert not any(p.rewritten for p in result.passes)
    assert (tmp_path / "out.onnx").read_bytes() == source.read_bytes()


def test_needed_but_nothing_found_is_a_plain_copy(tmp_path) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[n] x) => (float[n] y) { y = Relu(x) }'
    )
    source = save(model, tmp_path)
    assert not rewrite(source, tmp_path / "out.onnx", OLD).changed
    assert (tmp_path / "out.onnx").read_bytes() == source.read_bytes()


def _broken(name: str, run) -> Pass:
    return Pass(name, run, (Versions("tensorrt"),), "breaks something", ("this test",))


def _changed(graph: gs.Graph) -> PassResult:
    graph.nodes[0].op = "Sigmoid"
    return PassResult((Change(graph.nodes[0].name, "Relu", "Sigmoid"),))


def _loses_axis(graph: gs.Graph) -> PassResult:
    graph.outputs[0].shape = [1, 3, 8, 8]
    return _changed(graph)


def _renames(graph: gs.Graph) -> PassResult:
    graph.inputs[0].name = "image"
    return _changed(graph)


def _lies(graph: gs.Graph) -> PassResult:
    _changed(graph)
    return PassResult(())


def _boasts(graph: gs.Graph) -> PassResult:
    return PassResult((Change(graph.nodes[0].name, "Relu", "nothing"),))


def _invalid(graph: gs.Graph) -> PassResult:
    graph.nodes[0].attrs["no_such_attribute"] = 1
    return PassResult((Change(graph.nodes[0].name, "Relu", "an attribute"),))


def _raises(graph: gs.Graph) -> PassResult:
    raise KeyError(graph.name)


def _alters_constant(graph: gs.Graph) -> PassResult:
    norm = next(n for n in graph.nodes if n.op == "InstanceNormalization")
    norm.inputs[1].values = np.zeros(3, np.float32)
    return _changed(graph)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (_loses_axis, "changed the graph's outputs"),
        (_renames, "changed the graph's inputs"),
        (_lies, "reports modified=False, but the graph changed"),
        (_boasts, "reports modified=True, but the graph did not change"),
        (_invalid, "invalid graph"),
        (_raises, "KeyError"),
        (_alters_constant, "Give new constants new names"),
    ],
)
def test_a_broken_pass_is_caught_and_named(model, tmp_path, run, words) -> None:
    passes = (*DEFAULT_PASSES[:1], _broken("bad_one", run), *DEFAULT_PASSES[1:])
    with pytest.raises(RewriteError) as caught:
        rewrite(save(model, tmp_path), tmp_path / "out.onnx", OLD, passes)
    text = str(caught.value)
    assert "pass bad_one" in text
    assert words in text
    assert f"run before it: {DEFAULT_PASSES[0].name}" in text
    assert "\n" not in text
    assert not (tmp_path / "out.onnx").exists()


def _with_weight(model: onnx.ModelProto) -> onnx.ModelProto:
    weight = np.arange(3 * 4096, dtype=np.float32).reshape(3, 4096)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "weight"))
    model.graph.node.append(onnx.helper.make_node("Identity", ["weight"], ["out"], "id"))
    model.graph.output.append(onnx.helper.make_tensor_value_info("out", 1, [3, 4096]))
    return model


@pytest.mark.parametrize("target", [OLD, RTX], ids=str)
def test_external_data_stays_external(model, tmp_path, target) -> None:
    outside = {"save_as_external_data": True, "location": "w.bin", "size_threshold": 1024}
    source = save(_with_weight(model), tmp_path, **outside)
    out = tmp_path / "out"
    out.mkdir()
    result = rewrite(source, out / "out.onnx", target)
    assert result.changed == (target is OLD)
    names = {path.name for path in out.iterdir()}
    assert names == {"out.onnx", "out.onnx.data" if result.changed else "w.bin"}
    after = onnx.load(out / "out.onnx")
    (weight,) = (t for t in after.graph.initializer if t.name == "weight")
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(weight).ravel(), np.arange(12288))
    assert onnx.numpy_helper.to_array(
        next(t for t in onnx.load(source).graph.initializer if t.name == "weight")
    ).any()


def test_large_models_are_checked_without_their_weights(model, tmp_path, monkeypatch) -> None:
    """Uses the code for models above 2 GB, with lower limits."""
    monkeypatch.setattr(_onnx_file, "EXTERNAL_ABOVE", 1 << 10)
    monkeypatch.setattr(_onnx_file, "_HEAVY", 1 << 12)
    seen = []
    real = onnx.checker.check_model
    monkeypatch.setattr(onnx.checker, "check_model", lambda m, *a: (seen.append(m), real(m, *a))[1])
    source = save(_with_weight(model), tmp_path)
    rewrite(source, tmp_path / "out.onnx", OLD)
    assert (tmp_path / "out.onnx.data").stat().st_size >= 3 * 4096 * 4
    assert len(seen) >= 3  # at the start, after each pass that changed it, and at the end
    for light in seen:
        assert "weight" in {value.name for value in light.graph.input}
    after = onnx.load(tmp_path / "out.onnx")
    assert "weight" not in {value.name for value in after.graph.input}
    assert "weight" in {t.name for t in after.graph.initializer}


def test_a_file_written_tensor_by_tensor_is_the_same_model(model, tmp_path) -> None:
    model = _with_weight(model)
    rng = np.random.default_rng(0)
    large = rng.normal(size=(300, 200)).astype(np.float32)
    model.graph.initializer.insert(0, onnx.numpy_helper.from_array(large, "large"))
    _onnx_file.save_model(model, tmp_path / "out.onnx", external=False)
    after = onnx.load(tmp_path / "out.onnx")
    assert [t.name for t in after.graph.initializer][-1] == "large"  # large tensors are last
    by_name = {t.name: t for t in after.graph.initializer}
    assert by_name == {t.name: t for t in model.graph.initializer}
    for part in (after, model):
        del part.graph.initializer[:]
    assert after == model


FUNCTION = """<ir_version: 8, opset_import: ["" : 17, "local" : 1]>
g (float[n,3] x) => (int64[1] y) { y = local.last (x) }
<domain: "local", opset_import: ["" : 17]> last (x) => (y) { y = Shape<start=1>(x) }"""


def test_functions_are_inlined_and_rewritten(tmp_path) -> None:
    source = save(onnx.parser.parse_model(FUNCTION), tmp_path)
    result = rewrite(source, tmp_path / "out.onnx", OLD)
    after = onnx.load(tmp_path / "out.onnx")
    assert not after.functions
    assert [n.op_type for n in after.graph.node] == ["Shape", "Slice"]
    assert result.passes[0].name == "inline_functions"
    assert result.passes[0].rewritten[0].op == "local::last"


def test_functions_with_a_plugin_stay(tmp_path) -> None:
    source = save(onnx.parser.parse_model(FUNCTION), tmp_path)
    kept = rewrite(source, tmp_path / "out.onnx", RTX, keep_functions=["last"])
    assert not kept.changed
    assert onnx.load(tmp_path / "out.onnx").functions
    assert rewrite(source, tmp_path / "out.onnx", RTX).changed
    assert not onnx.load(tmp_path / "out.onnx").functions


def test_nodes_of_a_function_are_told_from_its_calls(tmp_path) -> None:
    model = onnx.parser.parse_model(
        FUNCTION.replace("{ y = local.last (x) }", "{ r = Relu(x) y = local.last (r) }")
    )
    for number, node in enumerate(model.graph.node):
        node.name = f"n{number}"
        _note(node, "pkg.torch.onnx.stack_trace", f"model.py, line {number}")
    rewrite(save(model, tmp_path), tmp_path / "out.onnx", RTX)
    relu, shape = onnx.load(tmp_path / "out.onnx").graph.node
    assert (relu.name, shape.name) == ("n0", "n1/shape_0")
    assert shape.metadata_props[0].value == "model.py, line 1"


def test_nameless_and_twice_named_nodes_get_names(tmp_path) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[n,3] x) => (int64[1] s, int64[1] t) '
        "{ s = Shape<start=1>(x) t = Shape<end=1>(x) }"
    )
    model.graph.node[0].name = model.graph.node[1].name = "same"
    rewrite(save(model, tmp_path), tmp_path / "out.onnx", OLD)
    names = [n.name for n in onnx.load(tmp_path / "out.onnx").graph.node]
    assert names == ["same/whole", "same/slice", "same_t/slice"]  # both read one Shape now


def test_bad_files_are_input_errors(model, tmp_path) -> None:
    (tmp_path / "text.onnx").write_text("no model")
    (tmp_path / "empty.onnx").write_bytes(b"")
    for name in ("none.onnx", "text.onnx", "empty.onnx"):
        with pytest.raises(InputError, match=name):
            rewrite(tmp_path / name, tmp_path / "out.onnx", OLD)
    source = save(model, tmp_path)
    with pytest.raises(InputError, match="same name"):
        rewrite(source, source, OLD)


@pytest.mark.parametrize("location", ["../w.bin", "/etc/hostname", "gone.bin"])
def test_external_data_must_be_in_the_folder(model, tmp_path, location) -> None:
    outside = {"save_as_external_data": True, "location": "w.bin", "size_threshold": 1024}
    source = save(_with_weight(model), tmp_path, **outside)
    broken = onnx.load(source, load_external_data=False)
    for tensor in broken.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    source.write_bytes(broken.SerializeToString())
    with pytest.raises(InputError, match="external data"):
        rewrite(source, tmp_path / "out.onnx", OLD)


def test_int64_inputs_are_said_to_be_narrowed_below_10(tmp_path) -> None:
    text = "g (int64[n] ids, float[n] x) => (int64[n] y) { y = Neg(ids) }"
    source = save(
        onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}'), tmp_path
    )
    (warning,) = rewrite(source, tmp_path / "out.onnx", OLD).warnings
    assert warning.startswith("ids: tensorrt-8.6 computes int64 as int32")
    assert not rewrite(source, tmp_path / "out.onnx", RTX).warnings


@pytest.mark.parametrize("target", [OLD, RTX])
def test_float64_is_said_to_be_narrowed_everywhere(tmp_path, target) -> None:
    text = "g (double[n] x, float[n] z) => (double[n] y, float[n] u) { y = Neg(x) u = Neg(z) }"
    source = save(
        onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}'), tmp_path
    )
    (warning,) = rewrite(source, tmp_path / "out.onnx", target).warnings
    assert warning.startswith(f"x, y: {target} computes float64 as float32")


def test_a_refusal_says_the_line_once() -> None:
    refused = tuple(Change(f"n{k}", "NonZero", f"depends on v{k}") for k in range(3))
    lines = {"n0": "module moe at net.py:5", "n1": "module moe at net.py:5", "n2": ""}
    result = Rewritten("rtx-1.7", 18, False, 3, 3, (), refused, (), lines=lines)
    with pytest.raises(RewriteError) as caught:
        raise_refused(result)
    assert str(caught.value) == (
        "target rtx-1.7 cannot run this graph correctly: "
        "NonZero 'n0' (module moe at net.py:5): depends on v0; NonZero 'n2': depends on v2 "
        "(and 1 more)"
    )
