"""Saved programs of somebody else: no code in them runs without --trust."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from helpers import Run, refused
from torch.export import Dim

from pipeline.export.program import ProgramModule, load_program

Files = dict[str, bytes]
WEIGHTS = "data/weights/model_weights_config.json"
CONSTANTS = "data/constants/model_constants_config.json"
SAMPLES = "data/sample_inputs/model.pt"
MODEL = "models/model.json"


class Net(torch.nn.Module):
    """Nested arguments, names that are no identifiers, sizes with a factor, and a literal."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleDict({"a-b": torch.nn.Linear(4, 4)})

    def forward(self, x: torch.Tensor, input: dict[str, Any]) -> torch.Tensor:
        y = self.layers["a-b"](x) * torch.tensor([1.0, 2.0, 3.0, 4.0])
        return y.reshape(x.shape[0] // 2, 2, 4) + input["k"] * input["n"]


ARGUMENTS = {"input": {"k": torch.ones(4), "n": 3}}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "a.pt2"
    batch = Dim("batch", min=1, max=8)
    dims = {"x": {0: 2 * batch}, "input": {"k": None, "n": None}}
    program = torch.export.export(
        Net().eval(), (torch.rand(4, 4),), ARGUMENTS, dynamic_shapes=dims, strict=False
    )
    torch.export.save(program, path, extra_files={"notes.txt": "mine"})
    return path


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def change_json(files: Files, name: str, change: Callable[[Any], None]) -> None:
    content = json.loads(files[name])
    change(content)
    files[name] = json.dumps(content).encode()


def in_weights(files: Files, mark: Path) -> None:
    def change(content: Any) -> None:
        entry = next(iter(content["config"].values()))
        entry["use_pickle"] = True
        files[f"data/weights/{entry['path_name']}"] = saved(Payload(mark))

    change_json(files, WEIGHTS, change)


def in_constants(prefix: str, data: bytes) -> Callable[[Files, Path], None]:
    def change(content: Any) -> None:
        content["config"]["c"] = {
            "path_name": f"{prefix}7", "is_param": False, "use_pickle": True, "tensor_meta": None,
        }  # fmt: skip

    def payload(files: Files, mark: Path) -> None:
        files[f"data/constants/{prefix}7"] = (saved if data else pickle.dumps)(Payload(mark))
        change_json(files, CONSTANTS, change)

    return payload


def in_old_weights(files: Files, mark: Path) -> None:
    files["data/weights/model.pt"] = saved(Payload(mark))


def in_old_constants(files: Files, mark: Path) -> None:
    files["data/constants/model.pt"] = saved(Payload(mark))


def in_samples(files: Files, mark: Path) -> None:
    files[SAMPLES] = saved(((Payload(mark),), {}))


def in_a_size(files: Files, mark: Path) -> None:
    text = f"__import__('os').mkdir('{mark}')"
    size = b"Mul(Integer(2), Symbol("
    start = files[MODEL].index(size)
    end = files[MODEL].index(b'"', start)
    files[MODEL] = files[MODEL].replace(files[MODEL][start:end], text.encode())


def graph(content: Any) -> Any:
    return content["graph_module"]["graph"]


def signature(content: Any) -> Any:
    return content["graph_module"]["module_call_graph"][0]["signature"]


def in_an_op(files: Files, mark: Path) -> None:
    """The op that maps a file into memory makes the file."""

    def argument(name: str, value: Any) -> Any:
        return {"name": name, "arg": value, "kind": 1}

    def change(content: Any) -> None:
        node = {
            "target": "torch.ops.aten.from_file.default",
            "inputs": [
                argument("filename", {"as_string": str(mark)}),
                argument("shared", {"as_bool": True}),
                argument("size", {"as_int": 4}),
            ],
            "outputs": [{"as_tensor": {"name": "made"}}],
            "metadata": {},
            "is_hop_single_tensor_return": None,
            "name": "made",
        }
        graph(content)["nodes"].insert(0, node)
        graph(content)["tensor_values"]["made"] = graph(content)["tensor_values"]["input_k"]

    change_json(files, MODEL, change)


def in_a_key(files: Files, mark: Path) -> None:
    """torch imports the module of an enum."""
    module = mark.with_name("payload_module.py")
    module.write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    key = {"__enum__": True, "fqn": "payload_module:Kind", "name": "A"}

    def change(content: Any) -> None:
        spec = json.loads(signature(content)["in_spec"])
        spec[1]["children_spec"][1]["context"] = json.dumps([key])
        signature(content)["in_spec"] = json.dumps(spec)

    change_json(files, MODEL, change)


PAYLOADS: dict[str, tuple[Callable[[Files, Path], None], str]] = {
    "weights": (in_weights, "its weight 'layers.a-b.weight' is pickled"),
    "old weights": (in_old_weights, "it holds 'data/weights/model.pt'"),
    "constants": (in_constants("tensor_", b"zip"), "its constant 'c' is pickled"),
    "opaque constants": (
        in_constants("opaque_obj_", b""),
        "it holds 'data/constants/opaque_obj_7'",
    ),
    "old constants": (in_old_constants, "it holds 'data/constants/model.pt'"),
    "sample inputs": (in_samples, "its sample inputs are a pickle of other things"),
    "a size": (in_a_size, "it has the size \"__import__('os')"),
    "an op": (in_an_op, "it calls 'torch.ops.aten.from_file.default'"),
    "a key": (in_a_key, "a key of an argument is an enum"),
}


def changed(plain: Path, path: Path, change: Callable[[Files], None]) -> None:
    """A copy of an archive with other files. Its checksums are right."""
    with zipfile.ZipFile(plain) as old:
        files = {name.partition("/")[2]: old.read(name) for name in old.namelist()}
    change(files)
    with zipfile.ZipFile(path, "w") as new:
        for name, content in files.items():
            new.writestr(f"a/{name}", content)


@pytest.mark.parametrize("where", PAYLOADS)
def test_no_code_of_a_program_runs_without_trust(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: Path, where: str
) -> None:
    payload, words = PAYLOADS[where]
    mark = tmp_path / "mark"
    monkeypatch.syspath_prepend(tmp_path)
    changed(plain, tmp_path / "a.pt2", lambda files: payload(files, mark))
    for name in ("convert", "check", "export"):
        refused(cli(name, "a.pt2"), f"a.pt2: {words}", "--trust")
        assert not mark.exists()
    with contextlib.suppress(Exception):  # the payload is real: torch runs it
        ProgramModule(load_program(tmp_path / "a.pt2", trust=True))(torch.rand(4, 4), torch.ones(4))
    assert mark.exists()


def insert_name(content: Any) -> None:
    node = graph(content)["nodes"][0]
    node["name"] = node["outputs"][0]["as_tensor"]["name"] = "linear = print(); linear"


def insert_argument(content: Any) -> None:
    signature(content)["forward_arg_names"] = ["x", "input=print()"]


def insert_key(content: Any) -> None:
    spec = json.loads(signature(content)["in_spec"])
    spec[1]["children_spec"][1]["context"] = json.dumps(["input=print()"])
    signature(content)["in_spec"] = json.dumps(spec)


def insert_path(content: Any) -> None:
    spec = content["graph_module"]["signature"]["input_specs"][0]
    spec["parameter"]["parameter_name"] = 'a", print(), "b'


def insert_target(content: Any) -> None:
    graph(content)["nodes"][0]["target"] = "torch.os.system"


def insert_inner_op(content: Any) -> None:
    graph(content)["nodes"][0]["target"] = "torch.ops.aten.linear.__class__"


def insert_custom(content: Any) -> None:
    graph(content)["custom_obj_values"] = {"c": {"name": "c", "class_fqn": "C"}}


@pytest.mark.parametrize(
    ("insert", "words"),
    [
        (insert_name, "the name 'linear = print(); linear' is not an identifier"),
        (insert_argument, "the name 'input=print()' is not an identifier"),
        (insert_key, "the name 'input=print()' of an argument is not an identifier"),
        (insert_path, "is not plain text"),
        (insert_target, "it calls 'torch.os.system'"),
        (insert_inner_op, "it calls 'torch.ops.aten.linear.__class__'"),
        (insert_custom, "it has a custom object"),
    ],
)
def test_names_that_torch_writes_into_code(
    cli: Run, tmp_path: Path, plain: Path, insert: Callable[[Any], None], words: str
) -> None:
    changed(plain, tmp_path / "a.pt2", lambda files: change_json(files, MODEL, insert))
    refused(cli("convert", "a.pt2"), words, "--trust")


@pytest.mark.parametrize(
    "text",
    [
        "Symbol('s0').__class__",
        "(lambda: 1)()",
        "Symbol('__import__(1)')",
        "[x for x in (1,)]",
        "eval('1')",
        "f'{1}'",
        "sympify('1')",
        "1 if 1 else 2",
        "",
        "s0 +",
    ],
)
def test_sizes_that_are_more_than_formulas(
    cli: Run, tmp_path: Path, plain: Path, text: str
) -> None:
    def change(content: Any) -> None:
        graph(content)["tensor_values"]["x"]["sizes"][0]["as_expr"]["expr_str"] = text

    changed(plain, tmp_path / "a.pt2", lambda files: change_json(files, MODEL, change))
    refused(cli("convert", "a.pt2"), "it has the size", "--trust")


def test_an_archive_with_two_files_of_one_name(cli: Run, tmp_path: Path, plain: Path) -> None:
    path = tmp_path / "a.pt2"
    changed(plain, path, lambda _: None)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("a/models/Model.json", archive.read("a/models/model.json"))
    refused(cli("convert", "a.pt2"), "its list of files is ambiguous", "--trust")


def test_a_plain_program_needs_no_trust(plain: Path) -> None:
    module = ProgramModule(load_program(plain))
    x, k = torch.rand(6, 4), torch.rand(4)
    program = torch.export.load(plain).module()
    torch.testing.assert_close(module(x, k), program(x, input={"k": k, "n": 3}))


class Literal(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([1.0, 2.0, 3.0, 4.0])


def test_a_literal_in_forward_converts(cli: Run, tmp_path: Path) -> None:
    program = torch.export.export(
        Literal(), (torch.rand(3, 4),), dynamic_shapes=({0: Dim("b", min=1, max=8)},), strict=False
    )
    assert "detach_" in str(program.graph)  # what torch can't export again
    torch.export.save(program, tmp_path / "a.pt2")
    code, _, errors = cli("export", "a.pt2", "--out", "done")
    assert code == 0, errors
    (found,) = onnxruntime.InferenceSession(tmp_path / "done" / "exported.onnx").run(
        None, {"x": np.ones((2, 4), np.float32)}
    )
    assert found.tolist() == [[1.0, 2.0, 3.0, 4.0]] * 2


def test_trust_loads_what_is_refused(cli: Run, tmp_path: Path) -> None:
    """A sample input with a class of its own."""
    path = tmp_path / "a.pt2"
    program = torch.export.export(torch.nn.Linear(4, 2).eval(), (torch.rand(3, 4),), strict=False)
    torch.export.save(program, path)
    value = saved(((torch.rand(3, 4),), {"other": Path("x")}))
    changed(path, tmp_path / "b.pt2", lambda files: files.update({SAMPLES: value}))
    refused(cli("export", "b.pt2"), "its sample inputs", "--trust")
    code, _, errors = cli("export", "b.pt2", "--trust", "--out", "done")
    assert code == 0, errors
