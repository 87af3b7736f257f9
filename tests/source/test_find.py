"""Sources of a conversion: factories by module and by file, and factories that do not exist."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import Run, files_under, refused_late

from pipeline.artifact.artifact import Artifact
from pipeline.errors import InputError
from pipeline.source.factory import find_factory
from pipeline.source.find import find_source, name_for
from pipeline.spec.config import Config
from pipeline.spec.dims import shape_texts
from pipeline.spec.model import Input, ModelSpec

NETS = '''
import torch
from pipeline.spec.model import Input, ModelSpec
from pipeline.spec.dims import shape_texts, Dim


def net(channels=4, kind="plain"):
    """A module that keeps height and width, of multiples of 4 only."""
    layer = torch.nn.Conv2d(3, channels, 3, padding=1)
    return torch.nn.Sequential(layer, torch.nn.PixelUnshuffle(4), torch.nn.PixelShuffle(4))


def plain(out=3):
    return torch.nn.Linear(7, out)


def spec(size: int = 7):
    """A spec of its own."""
    inputs = (Input("x", (Dim("n", 1, 3, 9), size)),)
    return ModelSpec("own", lambda _: torch.nn.Linear(size, 2), inputs, seed=None)


def raises():
    raise RuntimeError("no checkpoint here\\nsecond line")


def other_weights():
    torch.nn.Linear(7, 2, bias=False).load_state_dict({"w": torch.ones(1)})


def quits():
    import no_such_library


def number():
    return 3


def own_weights(weights=None):
    module = plain()
    if weights is not None:
        with torch.no_grad():
            module.weight.fill_(float(weights.read_text()))
    return module


class Holder:
    @staticmethod
    def make():
        return plain()


table = {"net": net}
'''


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of factories in the working directory, forgotten afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "nets_of_a_test.py"
    path.write_text(NETS)
    before = set(sys.modules)
    yield path
    for name in set(sys.modules) - before:
        if name.startswith(("nets_of_a_test", "package_of_a_test")):
            del sys.modules[name]


LINEAR = ("--input", "input:{n}x7", "--dim", "n=1:3:9")


@pytest.mark.parametrize("form", ["nets_of_a_test:plain", "nets_of_a_test.py:plain"])
def test_a_module_of_ones_own(cli: Run, nets: Path, form: str) -> None:
    code, output, errors = cli(
        "convert", form, *LINEAR, "--out", "a", "--option", "out=5", "--details"
    )
    assert code == 0, errors
    manifest = Artifact.open(nets.parent / "a").manifest
    assert manifest.model.source == form
    assert [list(shape_texts(i.shape)) for i in manifest.interface.inputs] == [["n", 7]]
    assert [list(shape_texts(o.shape)) for o in manifest.interface.outputs] == [["n", 5]]
    assert manifest.interface.profiles[0].ranges == {"n": (1, 3, 9)}
    assert manifest.comparison is not None and manifest.comparison.passed
    assert "measured" in output
    again = ("convert", form, *LINEAR, "--out", "a", "--option", "out=5")
    assert "Nothing changed" in cli(*again)[1]
    nets.write_text(NETS.replace("Linear(7, out)", "Linear(7, out, bias=False)"))
    sys.modules.pop("nets_of_a_test", None)
    code, output, errors = cli(*again)
    assert code == 0 and "Nothing changed" not in output, errors


def test_dims_are_narrowed_unless_they_are_exact(cli: Run, nets: Path) -> None:
    words = ("nets_of_a_test.py:net", "--input", "input:1x3x{h}x{w}", "--dim", "h=5:18:40",
             "--dim", "w=8:16:40/8")  # fmt: skip
    code, _, errors = cli("export", *words, "--out", "a")
    assert code == 0, errors
    manifest = Artifact.open(nets.parent / "a").manifest
    assert [(d.name, d.min, d.max, d.multiple_of) for d in manifest.interface.dims.values()] == [
        ("h", 8, 40, 4),
        ("w", 8, 40, 8),
    ]
    assert manifest.export is not None and "h must be a multiple of 4" in str(
        manifest.export.refinements
    )
    code, output, errors = cli("export", *words, "--out", "b", "--exact-dims")
    assert (code, output) == (1, "")
    assert "h must be a multiple of 4" in errors
    assert not (nets.parent / "b").exists()


def test_a_range_becomes_one_size_only_if_that_is_allowed(cli: Run, nets: Path) -> None:
    words = ("nets_of_a_test.py:net", "--input", "input:1x{c}x16x16", "--dim", "c=2:3:4")
    code, output, errors = cli("export", *words, "--out", "a")
    assert (code, output) == (1, "")
    assert "c must be 3" in errors and "--allow-narrow" in errors
    code, output, errors = cli("export", *words, "--out", "a", "--allow-narrow")
    assert code == 0, errors
    assert "fewer sizes than you asked for: c" in output.splitlines()[-1]
    (c,) = Artifact.open(nets.parent / "a").manifest.interface.dims.values()
    assert (c.min, c.max) == (3, 3)


def test_the_time_for_trying_sizes_is_the_users(cli: Run, nets: Path) -> None:
    del nets
    words = ("export", "nets_of_a_test.py:plain", *LINEAR, "--out", "a", "--search-seconds")
    assert cli(*words, "5")[0] == 0
    code, _, errors = cli(*words, "0")
    assert code == 2 and "0 is no number of seconds" in errors


def test_a_spec_of_ones_own(cli: Run, nets: Path) -> None:
    code, _, errors = cli("export", "nets_of_a_test.py:spec", "--out", "a", "--option", "size=5")
    assert code == 0, errors
    assert [
        list(shape_texts(i.shape))
        for i in Artifact.open(nets.parent / "a", check=False).manifest.interface.inputs
    ] == [["n", 5]]


def test_a_module_by_its_name(cli: Run, nets: Path) -> None:
    """It is converted as it is, with its own weights, and is no factory to call."""
    text = "import torch\n\nkept = torch.nn.Sequential(torch.nn.Linear(7, 3), torch.nn.Dropout())\n"
    file = nets.parent / "kept_of_a_test.py"
    file.write_text(text)
    words = ("kept_of_a_test.py:kept", "--input", "input:{n}x7", "--dim", "n=:9")
    code, _, errors = cli("export", *words, "--out", "a")
    assert code == 0, errors
    found = find_factory(f"{file}:kept")
    assert found.in_hand and isinstance(found.make(), torch.nn.Sequential)
    assert file.resolve() in found.files()
    assert Artifact.open(nets.parent / "a", check=False).manifest.model.weights.seed is None
    code, _, errors = cli("export", *words, "--out", "a", "--option", "out=3")
    assert code == 2 and "no option 'out'" in errors


def test_a_class_attribute_and_a_package(nets: Path) -> None:
    found = find_factory("nets_of_a_test.py:Holder.make")
    assert isinstance(found.make(), torch.nn.Linear)
    assert nets.resolve() in found.files()
    package = nets.parent / "package_of_a_test"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("from nets_of_a_test import plain\n")
    found = find_factory("package_of_a_test.inner:plain")
    assert nets.resolve() in found.files()  # the file of the factory
    assert find_factory("torch.nn:ReLU").make is torch.nn.ReLU


def test_two_files_of_one_name_are_two(tmp_path: Path, nets: Path) -> None:
    del nets
    for n in (1, 2):
        (tmp_path / str(n)).mkdir()
        (tmp_path / str(n) / "nets_of_a_test_twice.py").write_text(f"def make():\n    return {n}\n")
    paths = [tmp_path / str(n) / "nets_of_a_test_twice.py" for n in (1, 2)]
    assert [find_factory(f"{path}:make").make() for path in paths] == [1, 2]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["none.py:net"], ["source none.py: no such file"]),
        (["nets_of_a_test.py"], ["no factory is named. Pass nets_of_a_test.py:FACTORY"]),
        (["nets_of_a_test.py:nett"], ["has no 'nett' (did you mean net?)"]),
        (["nets_of_a_test:Holder.mak"], ["has no 'mak' (did you mean make?)"]),
        (["nets_of_a_test.py:table"], ["table is dict, not a factory"]),
        (["no_such_package_of_a_test:f"], ["there is no module no_such_package_of_a_test"]),
        (
            ["nets_of_a_test.py:raises", *LINEAR],
            ["RuntimeError: no checkpoint here; second line (raised at nets_of_a_test.py:"],
        ),
        (
            ["nets_of_a_test.py:other_weights", *LINEAR],
            [
                "RuntimeError: Error(s) in loading state_dict for Linear: Missing key(s) in "
                'state_dict: "weight"',
                'Unexpected key(s) in state_dict: "w". (raised at nets_of_a_test.py:',
            ],
        ),
        (["nets_of_a_test.py:quits"], ["ModuleNotFoundError: No module named 'no_such_library'"]),
        (["nets_of_a_test.py:number", *LINEAR], ["int, not a torch.nn.Module"]),
        (["nets_of_a_test.py:number"], ["makes int, not a ModelSpec"]),
        (["nets_of_a_test.py:plain"], ["Describe each input: --input", "forward takes (input"]),
        (["nets_of_a_test.py:spec", *LINEAR], ["makes a ModelSpec; leave --input out"]),
        (["nets_of_a_test.py:spec", "--dim", "n=:9"], ["the factory's spec declares them"]),
        (["nets_of_a_test.py:plain", *LINEAR, "--option", "outs=3"], ["no option 'outs'", "out"]),
        (["nets_of_a_test.py:plain", "--input", "x:{n}x7"], ["character 4", "add --dim n="]),
        (["nets_of_a_test.py:plain", "--input", "x:3x7", "--dim", "n=:9"], ["no input uses it"]),
        (["nets_of_a_test.py:plain", "--input", "x:{n}x7", "--dim", "n=9"], ["n=:9"]),
        (["nets_of_a_test.py:plain", "--input", "inptu:{n}x7", "--dim", "n=:9"],
         ["model plain: its forward has no argument 'inptu' (did you mean 'input'?)"]),
        (["broken.py:net"], ["source broken.py: its import raises SyntaxError"]),
        (["failing.py:net"], ["source failing.py: its import raises ZeroDivisionError"]),
        (["needs.py:net"], ["needs.py", "no_such_library"]),
        (
            ["tiny", "--input", "x:1x3"],
            ["--input can't be used with a spec: the spec declares them"],
        ),
        (["tiny", "--dim", "h=:9"], ["--dim can't be used with a spec"]),
    ],
)  # fmt: skip
def test_bad_sources(cli: Run, nets: Path, words: list[str], parts: list[str]) -> None:
    folder = nets.parent
    (folder / "broken.py").write_text("def net(:\n")
    (folder / "failing.py").write_text("1 / 0\n")
    (folder / "needs.py").write_text("import no_such_library\n")
    refused_late(cli("convert", *words), *parts)  # the factory is called when the export begins
    assert not any(name.endswith((".onnx", ".json")) for name in files_under(folder))


@pytest.mark.usefixtures("nets")
def test_inputs_that_disagree_about_a_dim_are_refused() -> None:
    config = Config(
        "nets_of_a_test.py:plain", inputs=("a:{n}x3", "b:{n}x{m}"), dims=("n=:9", "m=:4")
    )
    spec = find_source(config)
    assert spec.sizes_of({"a": (2, 3), "b": (2, 4)}) == {"n": 2, "m": 4}
    with pytest.raises(InputError, match="b axis 0: n=3, but a axis 0 has n=2"):
        spec.sizes_of({"a": (2, 3), "b": (3, 4)})


def test_random_weights_are_seeded_and_files_are_loaded(nets: Path) -> None:
    config = Config("nets_of_a_test.py:plain", inputs=("input:{n}x7",), dims=("n=:9",))
    spec = find_source(config)
    state = torch.random.get_rng_state()
    one, two = spec.build(None), spec.build(None)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(one.weight, two.weight)
    path = nets.parent / "w.pth"
    torch.save({k: v + 1 for k, v in one.state_dict().items()}, path)
    assert torch.equal(spec.build(path).weight, one.weight + 1)
    with pytest.raises(InputError, match="are for another model"):
        find_source(
            Config(
                "nets_of_a_test.py:plain", options={"out": 2}, inputs=("i:{n}x7",), dims=("n=:9",)
            )
        ).build(path)
    (nets.parent / "w.txt").write_text("0.5")
    own = Config("nets_of_a_test.py:own_weights", inputs=("input:{n}x7",), dims=("n=:9",))
    assert (find_source(own).build(nets.parent / "w.txt").weight == 0.5).all()


def test_names_of_artifacts() -> None:
    assert name_for("timm:create_model", {"model_name": "resnet18", "n": 3}) == (
        "create_model-resnet18"
    )
    assert name_for("a.b:C.make", {}) == "make"
    assert name_for("f.py:net", {"path": "../../etc"}) == "net-.._.._etc"


def test_a_changed_helper_beside_the_file_is_another_model(tmp_path: Path) -> None:
    (tmp_path / "scale_of.py").write_text("SCALE = 1.0\n")
    (tmp_path / "net_with_helper.py").write_text(
        "import torch\nfrom scale_of import SCALE\n\n"
        "class Net(torch.nn.Module):\n    def forward(self, x):\n        return x * SCALE\n"
    )
    script = (
        "import sys\nfrom pipeline.spec.config import Config\n"
        "from pipeline.source.find import find_source\n"
        "config = Config('net_with_helper.py:Net', inputs=('x:{b}x3',), dims=('b=:8',))\n"
        "print(find_source(config).key)\n"
    )

    def key() -> str:
        return subprocess.run(
            [sys.executable, "-B", "-c", script], cwd=tmp_path, capture_output=True, text=True,
            check=True, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        ).stdout  # fmt: skip

    first = key()
    assert key() == first
    (tmp_path / "scale_of.py").write_text("SCALE = 7.0\n")
    assert key() != first


def test_the_range_of_a_bool_is_read_alike_in_both_options() -> None:
    mask = ModelSpec("m", lambda _: torch.nn.Identity(), (Input("mask", (100,), "bool"),))
    (true,) = find_source(Config(mask, ranges=("mask=1..2",))).inputs
    assert true.sample({}, 0).all()
    with pytest.raises(InputError, match=r"range mask=0\.\.5: 0\.\.5 is not a valid range"):
        find_source(Config(mask, ranges=("mask=0..5",)))


def test_a_file_of_weights_is_no_source(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 3)
    weights, whole, script = (tmp_path / name for name in ("w.pth", "m.pt", "s.pt"))
    torch.save(module.state_dict(), weights)
    torch.save(module, whole)
    torch.jit.trace(module, torch.ones(1, 2)).save(str(script))
    for path, words in (
        (weights, f"holds weights but no model. .* file.py:factory --weights {weights}"),
        (whole, r"def model\(\): return torch.load"),
        (script, "TorchScript, .* Convert the Python code"),
    ):
        with pytest.raises(InputError, match=words):
            find_source(Config(str(path), inputs=("x:{b}x2",), dims=("b=1:2:4",)))


def test_names_for_outputs_are_for_sources_without_names() -> None:
    own = ModelSpec("m", lambda _: torch.nn.Identity(), (Input("x", (2,)),))
    assert find_source(Config(own, output_names=("y",))).output_names == ("y",)
    with pytest.raises(InputError, match=r"names its outputs: .*Leave --output-name out"):
        find_source(Config("linear", output_names=("y",)))
