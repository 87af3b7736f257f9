"""Looks into a .pt2 file before torch loads it: a file of somebody else must not run code.

torch.export.load runs code from more places than pickles: torch 2.13 unpickles weights, constants
and sample inputs, loads compiled libraries, evaluates the text of sizes with sympy, imports modules
for enums, calls any op by its name, and writes names into Python code. Each of them is allowed here
only in the form in which torch.export.save writes a plain program.
"""

from __future__ import annotations

import ast
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from pipeline.errors import InputError

# Everything that a plain program has: other records are code, or old formats that are pickled
_RECORDS = re.compile(
    r"models/model\.json|archive_format|archive_version|version|byteorder|\.data/[\w.]+|extra/.*"
    r"|\.format_version|\.storage_alignment"
    r"|data/(weights/(weight_\d+|model_weights_config\.json)"
    r"|constants/(tensor_\d+|model_constants_config\.json)|sample_inputs/model\.pt)"
)
_CONFIGS = {
    "data/weights/model_weights_config.json": ("weight", re.compile(r"weight_\d+")),
    "data/constants/model_constants_config.json": ("constant", re.compile(r"tensor_\d+")),
}
_SAMPLES = "data/sample_inputs/model.pt"
_MODEL = "models/model.json"
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_PATH = re.compile(r"[^\"'\\\x00-\x1f\x7f]*")  # torch writes it into code, between quotes

_OPS = ("aten", "prims", "quantized_decomposed", "torchvision")
_REFUSED_OPS = ("from_file", "save", "_print", "warn")  # they write files, or to the terminal
_BLOCKS = (
    "cond", "while_loop", "scan", "associative_scan", "map_impl", "wrap_with_set_grad_enabled",
    "wrap_with_autocast", "invoke_subgraph", "auto_functionalized", "auto_functionalized_v2",
    "hints_wrapper", "out_dtype", "flex_attention",
)  # fmt: skip
_SYMPY = (
    "Symbol", "Integer", "Float", "Rational", "Add", "Mul", "Pow", "Abs", "Max", "Min", "Mod",
    "Equality", "Unequality", "StrictLessThan", "LessThan", "StrictGreaterThan", "GreaterThan",
    "Eq", "Ne", "And", "Or", "Not", "Piecewise", "ExprCondPair", "Tuple", "floor", "ceiling",
    "FloorDiv", "ModularIndexing", "Where", "PythonMod", "CleanDiv", "CeilToInt", "FloorToInt",
    "CeilDiv", "LShift", "RShift", "PowByNatural", "FloatPow", "FloatTrueDiv", "IntTrueDiv",
    "IsNonOverlappingAndDenseIndicator", "TruncToFloat", "TruncToInt", "RoundToInt",
    "RoundDecimal", "ToFloat", "Identity",
)  # fmt: skip
_IN_EXPRESSIONS = (
    ast.Expression, ast.Call, ast.keyword, ast.Name, ast.Load, ast.Constant, ast.UnaryOp, ast.USub,
    ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Compare, ast.Eq,
    ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE,
)  # fmt: skip
_CUSTOM = ("as_custom_obj", "custom_obj", "custom_obj_values")


def check_archive(path: Path) -> None:
    """Checks that loading a .pt2 file runs no code of its author.

    Args:
        path: A zip file with a saved program.

    Raises:
        InputError: The file has a part that could run code. The message names the part.
    """
    for what in _unsafe_parts(path):
        raise InputError(
            f"{path}: {what}, so loading it could run code of its author. If you trust the author, "
            "pass --trust (in Python: trust=True)"
        )


def _unsafe_parts(path: Path) -> Iterator[str]:
    """What could run code. torch's reader reads the file, as torch.export.load does."""
    reader = torch._C.PyTorchFileReader(str(path))
    records = reader.get_all_records()
    with zipfile.ZipFile(path) as archive:  # torch reads files of old versions with this reader
        names = archive.namelist()
    if sorted(name.partition("/")[2] for name in names) != sorted(records) or len(
        set(map(str.lower, records))
    ) < len(records):
        yield "its list of files is ambiguous"
    for record in records:
        if not _RECORDS.fullmatch(record):
            yield f"it holds {record!r}, which a plain program does not have"
    for config, (kind, form) in _CONFIGS.items():
        if config in records:
            yield from _pickled(json.loads(reader.get_record(config)), kind, form)
    try:
        sample = reader.get_record(_SAMPLES) if _SAMPLES in records else b""
        if sample:
            torch.load(io.BytesIO(sample), weights_only=True)
    except Exception:  # the unpickler refuses, or the bytes are damaged
        yield "its sample inputs are a pickle of other things than tensors and numbers"
    if _MODEL not in records:
        yield "it has the format of torch 2.7 or older, which is pickled"
    else:
        program = json.loads(reader.get_record(_MODEL))
        yield from _in_json(program.get("graph_module"), "")


def _pickled(config: Any, kind: str, form: re.Pattern[str]) -> Iterator[str]:
    for name, entry in config["config"].items():
        if not _PATH.fullmatch(name):
            yield f"the name {name!r} of a {kind} is not plain text"
        if entry["use_pickle"] is not False or not form.fullmatch(entry["path_name"]):
            yield f"its {kind} {name!r} is pickled ({entry['path_name']!r})"


def _in_json(value: Any, key: str) -> Iterator[str]:
    """What could run code in a part of the program; `key` is the part's name."""
    if key in _CUSTOM and value:
        yield "it has a custom object"
    elif isinstance(value, dict):
        for name, inner in value.items():
            if name not in ("metadata", "treespec_namedtuple_fields"):  # only text for people
                yield from _in_json(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _in_json(inner, key)
    elif isinstance(value, str) and key in _TEXTS:
        yield from _TEXTS[key](value)


def _in_op(text: str) -> Iterator[str]:
    if not _is_op(text):
        yield f"it calls {text!r}, which is not an operator of torch for tensors"


def _in_name(text: str) -> Iterator[str]:
    if text and not _NAME.fullmatch(text):
        yield f"the name {text!r} is not an identifier"


def _in_path(text: str) -> Iterator[str]:
    if not _PATH.fullmatch(text):
        yield f"the name {text!r} is not plain text"


def _in_expression(text: str) -> Iterator[str]:
    """A size as text, which sympy evaluates as Python."""
    short = f"it has the size {text[:60]!r}, which is not a plain formula"
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        yield short
        return
    for node in ast.walk(tree):
        plain = isinstance(node, _IN_EXPRESSIONS)
        if isinstance(node, ast.Call):
            plain = isinstance(node.func, ast.Name) and node.func.id in _SYMPY
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            plain = re.fullmatch(r"[\w.+-]{1,64}", node.value, re.ASCII) is not None
        if not plain:
            yield short
            return


def _is_op(text: str) -> bool:
    parts = text.split(".")
    if parts[0] in ("_operator", "math") or parts[:2] != ["torch", "ops"]:
        from torch._export.serde.serialize import _SYM_OPS

        return text in {f"{op.__module__}.{op.__name__}" for op in _SYM_OPS}
    found: Any = torch.ops
    for part in parts[2:]:
        if not _NAME.fullmatch(part):
            return False
        found = getattr(found, part, None)
    if isinstance(found, torch._ops.HigherOrderOperator):
        return len(parts) == 4 and parts[2] == "higher_order" and parts[3] in _BLOCKS
    known = found is None or isinstance(found, torch._ops.OpOverload)  # torch refuses None
    return known and parts[2] in _OPS and parts[3] not in _REFUSED_OPS


def _in_arguments(text: str) -> Iterator[str]:
    """How the arguments are made from flat ones; torch writes their names into code."""
    spec = json.loads(text)[1]
    yield from _in_treespec(spec)
    if len(spec["children_spec"]) == 2:
        named = spec["children_spec"][1]["context"]
        keys = json.loads(named) if isinstance(named, str) else None
        for name in keys if isinstance(keys, list) else ():
            if not (isinstance(name, str) and _NAME.fullmatch(name)):
                yield f"the name {name!r} of an argument is not an identifier"


def _in_result(text: str) -> Iterator[str]:
    yield from _in_treespec(json.loads(text)[1])


def _in_treespec(spec: Any) -> Iterator[str]:
    if spec["type"] == "collections.defaultdict":  # torch imports the module of its default
        yield "an argument is a defaultdict"
    context = spec["context"]
    if isinstance(context, str) and "__enum__" in context:  # torch imports the module of an enum
        yield "a key of an argument is an enum"
    for inner in spec["children_spec"]:
        yield from _in_treespec(inner)


# the check of each text by its key in the program's JSON
_TEXTS: Mapping[str, Callable[[str], Iterator[str]]] = {
    "expr_str": _in_expression,
    **dict.fromkeys(("target", "as_operator"), _in_op),
    **dict.fromkeys(("name", "as_name", "forward_arg_names", "field_names"), _in_name),
    **dict.fromkeys(
        ("parameter_name", "buffer_name", "tensor_constant_name", "user_input_name", "fqn"),
        _in_path,
    ),
    "in_spec": _in_arguments,
    "out_spec": _in_result,
}
