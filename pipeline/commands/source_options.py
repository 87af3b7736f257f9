"""The options that describe a source: its factory arguments, inputs, dims and tolerances."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import InputError
from pipeline.spec.forms import BOOL_FORM, DIM_FORM, INPUT_FORM

if TYPE_CHECKING:
    from pipeline.spec.tensors import Tolerance

_WORDS = {"True": True, "False": False, "None": None}


def add_options(sub: Any) -> None:
    """Adds SOURCE and its options to a command."""
    sub.add_argument(
        "model",
        metavar="SOURCE",
        nargs="?",
        help="Model to convert: a name (`pipeline models` lists them), package.module:factory, "
        "file.py:factory, a model of a hub (hf:NAME, timm/NAME), a .pt2 program or an .onnx file",
    )
    sub.add_argument(
        "--weights", type=Path, metavar="PATH",
        help="Load weights from a .pth, .pt or .safetensors file, or from a checkpoint's folder if "
        "the model accepts one (default: random weights, or those of your factory)",
    )  # fmt: skip
    sub.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE",
        help="Pass an argument to the model's factory, e.g. updates=20 or free=false. Lists are "
        "written as in JSON. Repeat for more",
    )  # fmt: skip
    sub.add_argument(
        "--input", action="append", default=[], metavar="NAME:SHAPE",
        help="Describe an argument of the module's forward. Repeat for more. Form: "
        + _plain(INPUT_FORM),
    )  # fmt: skip
    sub.add_argument(
        "--inputs", type=Path, metavar="FILE",
        help="Use the values in this .npz or .pt file in place of random ones. The file holds "
        "arrays by the names of inputs, or in their order. Values at other sizes are made by "
        "cropping and repeating",
    )  # fmt: skip
    sub.add_argument(
        "--dim", action="append", default=[], metavar="NAME=RANGE",
        help=f"Set the range of a dynamic dim. Repeat for more. Form: {_plain(DIM_FORM)}",
    )  # fmt: skip
    sub.add_argument(
        "--range", action="append", default=[], metavar="INPUT=LOW..HIGH",
        help="Draw the random values of an input from this range, e.g. ids=0..32000. Integers stay "
        f"below HIGH, but an end that is an expression of dims is included: lengths=1..t. "
        f"{BOOL_FORM[0].upper()}{BOOL_FORM[1:]}. A mask can be prefix, padding, causal or all",
    )  # fmt: skip
    sub.add_argument(
        "--rule", action="append", default=[], metavar="RULE",
        help='Leave out the sizes that break this rule on several dims, e.g. "h*w != 1155" or '
        '"past + seq <= 128". Repeat for more. Quote it: a shell reads < and > otherwise',
    )  # fmt: skip
    sub.add_argument(
        "--exact-dims",
        action="store_true",
        help="Fail if the model does not accept every size of a --dim. By default, the range is "
        "narrowed to the sizes that the model accepts",
    )
    sub.add_argument(
        "--allow-narrow",
        action="store_true",
        help="Convert even if the model accepts only one size of a --dim. By default, that is an "
        "error",
    )
    sub.add_argument(
        "--search-seconds", type=float, metavar="N",
        help="Try sizes for N seconds of CPU time, to find which ones the model accepts (default: "
        "20)",
    )  # fmt: skip
    sub.add_argument(
        "--state", action="append", default=[], metavar="NAME",
        help="Allow calls of the model to change this attribute, e.g. encoder.seen. The conversion "
        "is of a first call. Repeat for more",
    )  # fmt: skip
    sub.add_argument(
        "--dtype", choices=("float32",),
        help="Convert the module's weights and inputs to float32 first (default: as the source "
        "made it, except for bfloat16, which becomes float32)",
    )  # fmt: skip
    sub.add_argument(
        "--output-name", action="append", default=[], metavar="NAME",
        help="Name the outputs in their order. Repeat for each (default: their place in the "
        "result, such as output_0 or logits)",
    )  # fmt: skip
    sub.add_argument(
        "--tolerance", type=_of_output, action="append", default=[],
        metavar="[OUTPUT=]RTOL,ATOL[,DIFFERING]",
        help="Set the comparison's tolerance if the source declares none (default: measured). "
        "With OUTPUT=, set it for one output, e.g. boxes=1e-3,0.05. Repeat for more. "
        "DIFFERING is the share of integers that may differ (default: 0)",
    )  # fmt: skip
    engine_tolerance(sub)
    sub.add_argument(
        "--reference", type=Path, metavar="FILE",
        help="Compare an .onnx file with the outputs of this one, such as the model before it was "
        "quantised. Needs --tolerance (default: the file is its own reference)",
    )  # fmt: skip
    sub.add_argument(
        "--trust", action="store_true",
        help="Load a .pt2 that could run code of its author (pickles, custom objects). Pass it "
        "only if you trust the author",
    )  # fmt: skip


def engine_tolerance(sub: Any) -> None:
    """Adds ``--engine-tolerance``."""
    sub.add_argument(
        "--engine-tolerance", type=_engine_tolerance, metavar="RTOL,ATOL[,DIFFERING]",
        help="Set the tolerance between the engine and the fp32 reference (default: the source's "
        "tolerance for the engine's precision; else measured, or that of fp32 for an fp32 engine)",
    )  # fmt: skip


def config_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns what `add_options` parsed, as fields of a `Config`.

    Raises:
        InputError: There is no source, or an option is not NAME=VALUE.
    """
    if arguments.model is None:
        raise InputError("no SOURCE: pass a model's name, module:factory, or a file")
    tolerances: dict[str, Tolerance] = {}
    for output, tolerance in arguments.tolerance:
        if output in tolerances:
            whose = f"output {output} has" if output else "all outputs have"
            raise InputError(f"--tolerance: {whose} two tolerances. Pass one")
        tolerances[output] = tolerance
    return {
        "model": arguments.model,
        "options": dict(_option(text) for text in arguments.option),
        "weights": arguments.weights,
        "inputs": tuple(arguments.input),
        "dims": tuple(arguments.dim),
        "ranges": tuple(arguments.range),
        "rules": tuple(arguments.rule),
        "exact": arguments.exact_dims,
        "allow_narrow": arguments.allow_narrow,
        "search_seconds": arguments.search_seconds,
        "state": tuple(arguments.state),
        "dtype": arguments.dtype,
        "output_names": tuple(arguments.output_name),
        "tolerance": tolerances.pop("", None),
        "output_tolerances": tolerances,
        "engine_tolerance": arguments.engine_tolerance,
        "trust": arguments.trust,
        "values": arguments.inputs,
        "reference": arguments.reference,
    }


def _plain(text: str) -> str:
    return text.replace("%", "%%")


def _option(text: str) -> tuple[str, Any]:
    """Splits ``updates=20`` into ("updates", 20). A value is JSON or Python's; others stay text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"--option {text!r} is not NAME=VALUE. Write for example updates=20")
    if value in _WORDS:
        return name, _WORDS[value]
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _engine_tolerance(text: str) -> Tolerance:
    return replace(_tolerance(text), why="given with --engine-tolerance")


def _of_output(text: str) -> tuple[str, Tolerance]:
    """Reads ``boxes=1e-3,0.05``; the name is empty if the tolerance is for all outputs."""
    name, equals, numbers = text.rpartition("=")
    if equals and not name:
        raise argparse.ArgumentTypeError(
            f"{text!r} names no output; write for example boxes=1e-3,0.05"
        )
    return name, _tolerance(numbers)


def _tolerance(text: str) -> Tolerance:
    """Reads ``RTOL,ATOL`` or ``RTOL,ATOL,DIFFERING`` (a share of integers) as a tolerance."""
    from pipeline.spec.tensors import Tolerance

    try:
        rtol, atol, *more = (float(part) for part in text.split(","))
        (differing,) = more or [0.0]
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not RTOL,ATOL[,DIFFERING]; write for example 1e-3,1e-4"
        ) from error
    return Tolerance(rtol, atol, "given with --tolerance", differing)
