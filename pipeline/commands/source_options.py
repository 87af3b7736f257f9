"""The command line's words for what is converted: a source, its options, inputs and dims."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.errors import InputError
from pipeline.spec.tensors import Tolerance
from pipeline.spec.text import BOOL_FORM, DIM_FORM, INPUT_FORM


def add_options(sub: Any) -> None:
    """Adds SOURCE and its options to a command."""
    sub.add_argument(
        "model",
        metavar="SOURCE",
        nargs="?",
        help="a model's name (`pipeline models` lists them), package.module:factory, "
        "file.py:factory, a .pt2 program or an .onnx file",
    )
    sub.add_argument(
        "--weights", type=Path, metavar="PATH",
        help=".pth, .pt or .safetensors, or a checkpoint's folder where the model takes one",
    )  # fmt: skip
    sub.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE",
        help="an argument of the model's factory, e.g. updates=20",
    )  # fmt: skip
    sub.add_argument(
        "--input", action="append", default=[], metavar="NAME:SHAPE",
        help=f"an argument of the module's forward: {_plain(INPUT_FORM)}",
    )  # fmt: skip
    sub.add_argument(
        "--dim", action="append", default=[], metavar="NAME=RANGE", help=_plain(DIM_FORM)
    )
    sub.add_argument(
        "--range", action="append", default=[], metavar="INPUT=LOW..HIGH",
        help="random values of an input are from here (integers without HIGH), e.g. ids=0..32000; "
        + BOOL_FORM,
    )  # fmt: skip
    sub.add_argument(
        "--exact-dims",
        action="store_true",
        help="fail where the model does not take every size; without it a --dim is narrowed to "
        "what it takes",
    )
    sub.add_argument(
        "--tolerance", type=_tolerance, metavar="RTOL,ATOL[,DIFFERING]",
        help="of the comparison, where the source states none (default: measured); DIFFERING: the "
        "share of integers that may differ",
    )  # fmt: skip
    engine_tolerance(sub)


def engine_tolerance(sub: Any) -> None:
    """Adds ``--engine-tolerance``."""
    sub.add_argument(
        "--engine-tolerance", type=_engine_tolerance, metavar="RTOL,ATOL[,DIFFERING]",
        help="of an engine in this precision, against the fp32 reference (default: what the "
        "source states for the precision, or else what it states for all)",
    )  # fmt: skip


def config_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """What `add_options` parsed, as fields of a `Config`.

    Raises:
        InputError: no source, or an option that is not NAME=VALUE.
    """
    if arguments.model is None:
        raise InputError("no SOURCE: give a model's name, module:factory, or a file")
    return {
        "model": arguments.model,
        "options": dict(_option(text) for text in arguments.option),
        "weights": arguments.weights,
        "inputs": tuple(arguments.input),
        "dims": tuple(arguments.dim),
        "ranges": tuple(arguments.range),
        "exact": arguments.exact_dims,
        "tolerance": arguments.tolerance,
        "engine_tolerance": arguments.engine_tolerance,
    }


def _plain(text: str) -> str:
    return text.replace("%", "%%")


def _option(text: str) -> tuple[str, Any]:
    """``updates=20`` as ("updates", 20): a JSON value, or else text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"option {text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _engine_tolerance(text: str) -> Tolerance:
    return replace(_tolerance(text), why="given with --engine-tolerance")


def _tolerance(text: str) -> Tolerance:
    """``1e-3,1e-4`` as a tolerance; ``1e-3,1e-4,1e-3``: of integers that share may differ."""
    try:
        rtol, atol, *more = (float(part) for part in text.split(","))
        (differing,) = more or [0.0]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not RTOL,ATOL[,DIFFERING]") from error
    return Tolerance(rtol, atol, "given with --tolerance", differing)
