"""Custom ops: the plugin of a node, plugins that don't load, and ops without an implementation."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnx.parser
import pytest

from pipeline.build import custom_nodes
from pipeline.build.build import Built, build
from pipeline.build.custom_nodes import prepare
from pipeline.build.settings import BuildOptions
from pipeline.errors import BuildError, InputError
from pipeline.machine.child import Child
from pipeline.machine.target import TARGETS, use
from pipeline.plugins import PLUGINS
from pipeline.plugins import loading as custom_ops
from pipeline.plugins.base import DOMAIN
from pipeline.plugins.loading import (
    creators,
    find_plugins,
    library_folder,
    load_plugins,
    provided_ops,
)
from pipeline.spec.dims import Dim
from pipeline.spec.interface import Interface
from pipeline.spec.profiles import Profile
from pipeline.spec.tensors import Input

RTX, OLD = TARGETS["rtx-1.7"], TARGETS["tensorrt-8.6"]
TWICE = str(Path(__file__).parents[1] / "support" / "twice_plugin.py")
H = Dim("h", 2, 4, 8)
HEAD = '<ir_version: 8, opset_import: ["" : 18, "mine" : 1, "his" : 1, "{domain}" : 1]>\n'
NODE = "g (float[1,h] x) => (float[1,h] y) {{ t = Relu(x) [dbl] y = {domain}.{op}(t) }}"
# TensorRT-RTX can't parse this body, so the result shows which one was used
BODY = """
<opset_import: ["" : 18], domain: "{domain}"> {op} (a) => (b)
{{ n = NonZero(a) m = Cast<to=1>(n) s = ReduceSum<keepdims=0>(m) b = Add(a, s) }}"""


def saved(tmp_path: Path, text: str, domain: str = "any", op: str = "Foo") -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model((HEAD + text).format(domain=domain, op=op)), path)
    return path


def built(path: Path, *plugins: object) -> Built:
    declared = Interface((Input("x", (1, H)),), profiles=(Profile("all").resolve({"h": H}),))
    options = BuildOptions(RTX, plugins=tuple(map(str, plugins)))
    return build(path, path.with_name("engine.plan"), declared, options)


def python_plugin(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "foo.py"
    path.write_text(text)
    return path


def test_python_plugin_builds(tmp_path: Path) -> None:
    path = saved(tmp_path, NODE, "mine", "Twice")
    done = built(path, TWICE)
    assert done.plugins == (TWICE,)
    assert done.plan_bytes > 1000
    with pytest.raises(
        BuildError,
        match=r"no plugin for the mine::Twice node dbl: pass the library that has the plugin: "
        r"--plugin libfoo\.so",
    ):
        built(path)


def test_plugin_asked_for_goes_before_the_function(tmp_path: Path) -> None:
    # TensorRT-RTX uses the function, even if a plugin is registered
    path = saved(tmp_path, NODE + BODY, "mine", "Twice")
    before = path.read_bytes()
    assert built(path, TWICE).plugins == (TWICE,)
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["engine.plan", "model.onnx"]
    with pytest.raises(BuildError, match="refuses the NonZero node"):
        built(path)


def test_plugin_that_no_node_needs_is_not_for_the_loader(tmp_path: Path) -> None:
    assert built(saved(tmp_path, "g (float[1,h] x) => (float[1,h] y) {{ y = Relu(x) }}"), TWICE)
    assert built(tmp_path / "model.onnx", TWICE).plugins == ()


def test_node_inside_of_a_branch_and_of_a_function(tmp_path: Path) -> None:
    branch = """g (float[1,h] x, bool[1] c) => (float[1,h] y) {{ y = If(c) <
    then_branch = t () => (float[1,h] p) {{ [in] p = {domain}.{op}(x) }},
    else_branch = e () => (float[1,h] q) {{ q = Identity(x) }}> }}"""
    with pytest.raises(BuildError, match="no plugin for the mine::Foo node in: "):
        built(saved(tmp_path, branch, "mine"))
    body = """g (float[1,h] x) => (float[1,h] y) {{ y = his.Call(x) }}
<opset_import: ["" : 18, "mine" : 1], domain: "his"> Call (a) => (b)
{{ [in] b = {domain}.{op}(a) }}"""
    with pytest.raises(BuildError, match="no plugin for the mine::Foo node in: "):
        built(saved(tmp_path, body, "mine"))


@pytest.mark.parametrize(
    ("domain", "op", "told"),
    [
        ("com.microsoft", "QuickGelu", "ONNX Runtime's optimiser made this op"),
        ("mmdeploy", "TRTBatchedNMS", "--plugin libmmdeploy_tensorrt_ops.so"),
        ("org.pytorch.aten", "ATen", "torch.onnx.export(dynamo=True)"),
        ("ai.onnx.contrib", "Tokenizer", "ONNX Runtime Extensions"),
        ("his", "Foo", "--plugin libfoo.so"),
        ("com.microsoft", "Gelu", "would parse the com.microsoft::Gelu node dbl as the standard "
         "Gelu of another domain: ONNX Runtime's optimiser made this op"),
        ("mine", "Sigmoid", "would parse the mine::Sigmoid node dbl as the standard Sigmoid "
         "of another domain: rename the op"),
    ],
)  # fmt: skip
def test_missing_op_is_told_with_where_to_get_it(
    tmp_path: Path, domain: str, op: str, told: str
) -> None:
    with pytest.raises(BuildError) as caught:
        built(saved(tmp_path, NODE, domain, op))
    assert f"{domain}::{op} node dbl" in str(caught.value)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_op_names_the_module_and_the_line(tmp_path: Path) -> None:
    path = saved(tmp_path, NODE, "mine")
    model = onnx.load(path)
    for key, value in (
        ("pkg.torch.onnx.name_scopes", "['', 'head', 'node']"),
        ("pkg.torch.onnx.stack_trace", 'File "net.py", line 12, in forward'),
    ):
        model.graph.node[1].metadata_props.add(key=key, value=value)
    onnx.save(model, path)
    with pytest.raises(BuildError, match=r"node dbl, from module head at net\.py:12: pass the"):
        built(path)


def test_another_version_of_the_plugin(tmp_path: Path) -> None:
    text = NODE.replace("(t)", '<plugin_version="2">(t)')
    with pytest.raises(
        BuildError,
        match=r"with version '2' and namespace ''; it has version '1' namespace ''\. Set the "
        "node's attributes plugin_version and plugin_namespace",
    ):
        built(saved(tmp_path, text, "mine", "Twice"), TWICE)


def test_functions_that_the_parser_would_take_for_something_else(tmp_path: Path) -> None:
    # TensorRT-RTX's parser ignores domains: a function with an op's name is read as that op,
    # and of two functions of one name only one is read
    text = """g (float[1,h] x) => (float[1,h] y, float[1,h] z, float[1,h] w)
{{ y = mine.Relu(x) z = mine.Two(x) w = his.Two(x) }}
<opset_import: ["" : 18], domain: "mine"> Relu (a) => (b) {{ b = Sin(a) }}
<opset_import: ["" : 18], domain: "mine"> Two (a) => (b) {{ b = Cos(a) }}
<opset_import: ["" : 18], domain: "his"> Two (a) => (b) {{ b = Exp(a) }}"""
    path = saved(tmp_path, text)
    spare = tmp_path / "spare.onnx"
    with Child() as child:
        ready = child.call(_prepared, path, spare)
    assert ready.model == spare
    parsed = onnx.load(spare)
    assert [node.op_type for node in parsed.graph.node] == ["Sin", "Cos", "Exp"]
    assert not parsed.functions
    assert built(path).layers == 3


def _prepared(path: Path, spare: Path) -> Any:
    trt = use(RTX)
    logger = trt.Logger(trt.Logger.ERROR)
    parser = trt.OnnxParser(trt.Builder(logger).create_network(1), logger)
    return prepare(trt, path, spare, RTX, {}, parser.supports_operator)


def test_functions_of_their_own_name_stay(tmp_path: Path) -> None:
    text = """g (float[1,h] x) => (float[1,h] y) {{ y = mine.Wave(x) }}
<opset_import: ["" : 18], domain: "mine"> Wave (a) => (b) {{ b = Sin(a) }}"""
    path = saved(tmp_path, text)
    with Child() as child:
        assert child.call(_prepared, path, tmp_path / "s").model == path
    assert built(path).layers == 1


@pytest.mark.parametrize(
    ("plugin", "told"),
    [
        ("nowhere/libfoo.so", "plugin nowhere/libfoo.so: no such file"),
        ("nowhere/libfoo.so.1", "plugin nowhere/libfoo.so.1: no such file"),
        ("nowhere/foo.py", "plugin nowhere/foo.py: no such file"),
        ("correlation", "unknown plugin 'correlation': give a library (libfoo.so), a Python file "
         "(foo.py) or one of the pipeline's own, or of an installed package: correlation_lookup"),
    ],
)  # fmt: skip
def test_plugin_that_is_not_there(tmp_path: Path, plugin: str, told: str) -> None:
    with pytest.raises(InputError) as caught:
        built(saved(tmp_path, NODE, "mine"), plugin)
    assert str(caught.value) == told


def test_library_that_does_not_load(tmp_path: Path) -> None:
    path = saved(tmp_path, NODE, "mine")
    library = tmp_path / "libfoo.so"
    library.write_bytes(b"\x7fELF no library at all")
    with pytest.raises(InputError) as caught:
        built(path, library)
    text = str(caught.value)
    assert text.startswith(
        f"plugin {library}: the library does not load: {library}: "
    )  # the loader's words
    assert "file too short" in text or "invalid ELF header" in text
    assert caught.value.exit_code == 2


def test_library_without_plugins_does_not_hide_what_is_missing(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("_ctypes")
    assert spec is not None
    assert spec.origin is not None
    if ".so" not in spec.origin:
        pytest.skip("this Python has no shared library at hand")
    with pytest.raises(BuildError, match="no plugin for the mine::Foo node dbl"):
        built(saved(tmp_path, NODE, "mine"), spec.origin)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import nowhere_to_be_found", "line 1: ModuleNotFoundError: No module named 'nowhere"),
        ("def register(trt):\n    trt.get_plugin_registry().no_such()", "line 2: AttributeError: "),
        ("x = 1\ny = (", "line 2: SyntaxError: '(' was never closed"),
        ("raise SystemExit(3)", "line 1: SystemExit: 3"),
        ("x = 1", "registers no plugin creator; define register(trt)"),
    ],
)
def test_python_plugin_that_does_not_load(tmp_path: Path, text: str, told: str) -> None:
    path = python_plugin(tmp_path, text)
    with pytest.raises(InputError) as caught:
        built(saved(tmp_path, NODE, "mine"), path)
    assert str(caught.value).startswith(f"plugin {path}: {told}")
    assert "\n" not in str(caught.value)


def test_plugin_that_ends_the_process(tmp_path: Path) -> None:
    path = python_plugin(tmp_path, "import os\nos.abort()")
    with pytest.raises(BuildError) as caught:
        built(saved(tmp_path, NODE, "mine"), path)
    assert str(caught.value) == (
        f"target rtx-1.7: TensorRT crashed: Aborted (SIGABRT), while loading the plugin {path}"
    )


def test_no_python_plugins_before_10() -> None:
    with pytest.raises(InputError, match=r"tensorrt-8\.6 has no Python plugins \(IPluginV3 came"):
        find_plugins([TWICE], OLD)
    assert [p.name for p in find_plugins([TWICE, TWICE], TARGETS["tensorrt-10"])] == [TWICE]


def test_own_plugin_that_the_target_lacks_leaves_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    own = SimpleNamespace(name="Foo", runs_on=lambda target: target is RTX, register=None)
    monkeypatch.setattr(custom_ops, "find_plugin", lambda _: own)
    registry = SimpleNamespace(plugin_creator_list=[])  # 8.6 has no all_creators
    trt = SimpleNamespace(get_plugin_registry=lambda: registry)
    name = next(iter(PLUGINS))
    brought, warnings = load_plugins(trt, find_plugins([name], OLD), OLD)
    assert brought == {name: set()}
    assert warnings == [
        f"plugin {name} does not exist for target tensorrt-8.6: the op's ONNX body is used in its "
        "place"
    ]


def test_own_plugin_is_named_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = SimpleNamespace(name="Foo", runs_on=lambda target: target is RTX)
    monkeypatch.setattr(custom_nodes, "find_plugin", lambda _: own)
    path = saved(tmp_path, NODE, "trt_pipeline")
    trt = SimpleNamespace(get_plugin_registry=lambda: SimpleNamespace(all_creators=[]))
    name = next(iter(PLUGINS))
    for target, told in ((RTX, f"pass --plugin {name}"), (OLD, "but not for this target")):
        with pytest.raises(BuildError, match=f"the op comes with pipeline, {told}$"):
            prepare(trt, path, tmp_path / "spare", target, {}, lambda _: False)


def test_own_plugin_goes_before_its_body(tmp_path: Path) -> None:
    plugin = custom_ops.find_plugin("correlation_lookup")
    levels = ", ".join(f"float[1,h{n},w{n},64] level_{n}" for n in range(4))
    graph = f"""g (float[1,h,w,64] features, {levels}, float[1,2,h,w] coordinates)
=> (float[1,324,h,w] y) {{{{ [look] y = {{domain}}.{{op}} <radius = 4>
(features, level_0, level_1, level_2, level_3, coordinates) }}}}"""
    path = saved(tmp_path, graph, DOMAIN, plugin.name)
    dims = {"h": Dim("h", 16, 64, 64), "w": Dim("w", 16, 64, 64)}
    shapes = {"features": (1, dims["h"], dims["w"], 64), "coordinates": (1, 2, *dims.values())}
    for n in range(4):
        small = [Dim(f"{name}{n}", 16 >> n, 64 >> n, 64 >> n) for name in "hw"]
        dims |= {dim.name: dim for dim in small}
        shapes[f"level_{n}"] = (1, *small, 64)

    def layers(*plugins: str) -> tuple[int, tuple[str, ...]]:
        inputs = tuple(Input(name, shape) for name, shape in shapes.items())
        declared = Interface(inputs, profiles=(Profile("all").resolve(dims),))
        done = build(path, tmp_path / "p", declared, BuildOptions(RTX, plugins=plugins))
        return done.layers, done.plugins

    with pytest.raises(
        BuildError, match="the op comes with pipeline, pass --plugin correlation_lookup"
    ):
        layers()
    model = onnx.load(path)
    model.functions.append(plugin.function())
    onnx.save(model, path)
    assert layers("correlation_lookup") == (1, ("correlation_lookup",))
    count, needed = layers()
    assert count > 50
    assert needed == ()


def test_ops_that_plugins_bring(tmp_path: Path) -> None:
    assert provided_ops([TWICE, "correlation_lookup"], RTX) == {"Twice", "CorrelationLookup"}
    assert provided_ops(["correlation_lookup"], OLD) == frozenset()
    with pytest.raises(BuildError, match=r"crashed: Aborted .* while loading the plugin"):
        provided_ops([str(python_plugin(tmp_path, "import os\nos.abort()"))], RTX)
    with pytest.raises(InputError, match="line 1: NameError"):
        provided_ops([str(python_plugin(tmp_path, "nothing"))], RTX)


def test_own_plugins_are_what_they_say() -> None:
    for name in PLUGINS:
        plugin = custom_ops.find_plugin(name)
        assert plugin.function().name == plugin.name
        assert plugin.function().domain == DOMAIN


def test_creators_of_old_and_new_registries() -> None:
    one = SimpleNamespace(name="A", plugin_version="1", plugin_namespace="n")
    for words in ({"all_creators": [one]}, {"plugin_creator_list": [one]}):
        registry = SimpleNamespace(**words)
        trt = SimpleNamespace(get_plugin_registry=lambda r=registry: r)
        assert creators(trt) == {("A", "1", "n")}


def test_folder_with_the_librarys_plain_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/before")
    with library_folder(RTX) as env:
        folder, before = env["LD_LIBRARY_PATH"].split(os.pathsep)
        assert before == "/before"
        assert (
            (Path(folder) / "libtensorrt_rtx.so").resolve().name.startswith("libtensorrt_rtx.so.")
        )
    assert not Path(folder).exists()
    with library_folder(OLD) as env:
        assert env == {}
