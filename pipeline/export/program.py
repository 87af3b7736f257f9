"""A saved program as a module that takes its tensors one by one."""

from __future__ import annotations

import json
import logging
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_unflatten

from pipeline.errors import InputError, first_line


class ProgramModule(torch.nn.Module):
    """What an ExportedProgram computes.

    Its inputs are the program's tensors in order, whatever nested arguments they stood in;
    constants that it was exported with stay what they were. It returns what the program does.

    Args:
        program: the program. Its parameters are the module's.
    """

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        super().__init__()
        # the guards are found anew when it is exported again, over the range that is asked for
        self.program = program.module(check_guards=False)
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
        """Nothing: a program is what it was when it was exported, and refuses to be changed."""
        del mode
        return self


KINDS = {
    "SymIntArgument": "an integer",
    "SymFloatArgument": "a float",
    "SymBoolArgument": "a bool",
}


_NEVER_SAVED = "a .pt2 is written by torch.export.save"


def load_program(path: Path) -> torch.export.ExportedProgram:
    """The program in a file.

    Raises:
        InputError: there is none that this torch reads; says why.
    """
    version = _saved_with(path)
    import torch

    from pipeline.probe.eager import quiet

    log = _Caught()
    logger = logging.getLogger("torch.export")
    logger.addFilter(log)
    try:
        with quiet():
            return torch.export.load(path)
    except Exception as error:  # whatever a file's content leads to
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


class _Caught(logging.Filter):
    """Keeps the error that torch only logs, and its log out of the way."""

    error: BaseException | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info:
            self.error = self.error or record.exc_info[1]
        return False


def _saved_with(path: Path) -> str:
    """The version of torch that saved the file, whose checksums are looked at (torch does not).

    Raises:
        InputError: the file holds no program.
    """
    if path.is_dir() or not path.exists():
        raise InputError(f"{path}: {'a folder' if path.is_dir() else 'no such file'}")
    try:
        with path.open("rb") as file:
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
        what = f"a package of several programs ({found}); save the one alone, torch.export.save"
    elif any("data/aotinductor/" in n for n in names):
        what = "a package of compiled code (AOTInductor); save the program, torch.export.save"
    elif any("/code/" in n for n in names):
        what = (
            "a TorchScript file, no saved program: export its model with torch.export and save it"
        )
    elif any(n.endswith("data.pkl") for n in names):
        what = (
            f"written by torch.save (weights, or a pickled module): {_NEVER_SAVED}; for weights "
            "name the model's factory as the source, and the file with --weights"
        )
    else:
        what = f"a zip archive without a program: {_NEVER_SAVED}"
    raise InputError(f"{path}: {what}")
