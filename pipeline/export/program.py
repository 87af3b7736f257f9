"""Loads a saved program and makes it a module that takes its tensors one by one."""

from __future__ import annotations

import json
import logging
import re
import traceback
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_unflatten

from pipeline.errors import InputError, first_line
from pipeline.export.negative_bases import module_of
from pipeline.export.program_archive import check_archive
from pipeline.machine.files import open_plain
from pipeline.probe.eager import quiet


class ProgramModule(torch.nn.Module):
    """Runs an ExportedProgram with flat inputs.

    Its inputs are the program's tensors in order, without the nested arguments that held them.
    Constants of the export keep their values. The result is the program's own.

    Args:
        program: the program; its parameters become the module's.
    """

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        super().__init__()
        # the next export finds the guards again, over the declared ranges
        self.program = module_of(program)
        _without_detach_in_place(self.program)
        spec = program.call_spec.in_spec
        assert spec is not None
        self._spec = spec
        arguments = [
            s.arg for s in program.graph_signature.input_specs if s.kind.name == "USER_INPUT"
        ]
        self._constants = [
            (type(a).__name__ != "TensorArgument", getattr(a, "value", None)) for a in arguments
        ]

    def forward(self, *tensors: torch.Tensor) -> Any:
        rest = iter(tensors)
        leaves = [value if constant else next(rest) for constant, value in self._constants]
        args, kwargs = tree_unflatten(leaves, self._spec)
        return self.program(*args, **kwargs)

    def train(self, mode: bool = True) -> ProgramModule:
        """Does nothing: an exported program can't change its mode."""
        del mode
        return self


def _without_detach_in_place(program: torch.nn.Module) -> None:
    """Replaces ``detach_`` by ``detach``, which gives the same values.

    torch writes ``detach_`` for a tensor literal, and can't export it again: while it traces, the
    literal is a view, and views can't be detached in place.
    """
    for module in program.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                if node.target is torch.ops.aten.detach_.default:
                    node.target = torch.ops.aten.detach.default
            module.recompile()


KINDS = {
    "SymIntArgument": "an integer",
    "SymFloatArgument": "a float",
    "SymBoolArgument": "a bool",
}


_NEVER_SAVED = "torch.export.save writes .pt2 files"


def load_program(path: Path, *, trust: bool = False) -> torch.export.ExportedProgram:
    """Loads the program in a .pt2 file.

    Args:
        path: the file.
        trust: True to load parts of the file that could run code of its author.

    Raises:
        InputError: this torch can't load a program from the file, or the file has parts that could
            run code. The text says why.
    """
    version = _saved_with(path)
    if not trust:
        _check_parts(path)
    log = _Caught()
    logger = logging.getLogger("torch.export")
    logger.addFilter(log)
    try:
        with quiet():
            return torch.export.load(path)
    except Exception as error:  # a file's content can raise anything
        cause: BaseException = log.error or error
        while cause.__cause__ or cause.__context__:
            cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
        first = first_line(cause)
        first = first.partition(". ")[0]
        other = "" if version == torch.__version__ else f"; it was saved by torch {version}"
        raise InputError(
            f"{path}: torch {torch.__version__} can't load it: {first}{other}",
            detail=str(error),
        ) from error
    finally:
        logger.removeFilter(log)


def _check_parts(path: Path) -> None:
    """Raises `InputError` if a part of the file could run code, or if the file is damaged."""
    try:
        check_archive(path)
    except InputError:
        raise
    except Exception as error:  # a file's content can raise anything
        raise InputError(
            f"{path}: damaged: its list of parts can't be read. Save the program again",
            detail="".join(traceback.format_exception(error)),
        ) from error


class _Caught(logging.Filter):
    """Keeps the error that torch only logs, and hides the log."""

    error: BaseException | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info:
            self.error = self.error or record.exc_info[1]
        return False


def _saved_with(path: Path) -> str:
    """The version of torch that saved the file. Checks the file's checksums; torch does not.

    Raises:
        InputError: the file holds no program.
    """
    if path.is_dir() or not path.exists():
        raise InputError(f"{path}: {'a folder' if path.is_dir() else 'no such file'}")
    try:
        with open_plain(path) as file:
            start = file.read(2)
        if start != b"PK":
            raise InputError(f"{path}: not a .pt2 file: {_NEVER_SAVED}")
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            _check_kind(path, names)
            damaged = archive.testzip()
            if damaged is not None:
                raise InputError(f"{path}: damaged: {damaged} has a wrong checksum")
            for name in names:
                if re.search(r"(^|/)models/model\.json$", name):
                    found = json.loads(archive.read(name)).get("torch_version")
                    return str(found or "before 2.9")
            return "before 2.8"
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror or error}") from error
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError, AttributeError) as error:
        raise InputError(f"{path}: damaged or truncated: {error}") from error


def _check_kind(path: Path, names: list[str]) -> None:
    """Raises `InputError` unless an archive of these files is a saved program."""
    models = [n for n in names if re.search(r"(^|/)models/[^/]+\.json$", n)]
    if (
        any(n.endswith("/model.json") for n in models)
        or "serialized_exported_program.json" in names
    ):
        return
    if models:
        found = ", ".join(Path(n).stem for n in models)
        what = f"a package of several programs ({found}); save one program with torch.export.save"
    elif any("data/aotinductor/" in n for n in names):
        what = "a package of compiled code (AOTInductor); save the program with torch.export.save"
    elif any("/code/" in n for n in names):
        what = (
            "a TorchScript file, not a saved program: export its model with torch.export and "
            "save it"
        )
    elif any(n.endswith("data.pkl") for n in names):
        what = (
            f"written by torch.save (weights, or a pickled module): {_NEVER_SAVED}; to use "
            "weights, give the model's factory as the source and the file with --weights"
        )
    else:
        what = f"a zip archive without a program: {_NEVER_SAVED}"
    raise InputError(f"{path}: {what}")
