"""Running a Python file that the user names: a model's source, a pass, a plugin."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType


def run_python_file(file: Path, name: str) -> ModuleType:
    """Runs a Python file as a module.

    The module stays in `sys.modules`, where dataclasses and pickles look a class's module up. If
    the file fails, what was there before is put back.

    Args:
        file: the file; its name ends in ``.py``.
        name: the module's name.

    Raises:
        ImportError: the name does not end in ``.py``.
        Exception: whatever the file raises; see `line_of_error`.
    """
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file}: not a Python file (its name has to end in .py)")
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
        raise
    return module


def line_of_error(error: BaseException, file: Path) -> str:
    """``line 3`` of the file, where an error came from; ``line ?`` if it has no line there."""
    names = {str(file), str(file.absolute())}
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename in names]
    if isinstance(error, SyntaxError) and error.filename in names:
        lines.append(error.lineno)
    return f"line {lines[-1] if lines else '?'}"
