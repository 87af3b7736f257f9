"""Chooses the passes that run: the default passes and user-supplied ones."""

from __future__ import annotations

import difflib
import hashlib
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.errors import InputError
from pipeline.machine.offered import PASSES, offered_file, offered_names
from pipeline.machine.python_file import line_of_error, run_python_file
from pipeline.machine.target import EVERY
from pipeline.passes import DEFAULT_PASSES, Pass


def pass_file(name: Path | str) -> Path:
    """The file of a user-supplied pass: the name of an installed pass, or a path.

    Raises:
        InputError: see `offered_file`.
    """
    path = Path(name)
    plain = not path.suffix and path.name == str(name) and not path.exists()
    return (offered_file(PASSES, path.name) if plain else None) or path


def load_pass(path: Path) -> Pass:
    """Loads a user-supplied pass from a Python file.

    The file defines ``run(graph: onnx_graphsurgeon.Graph) -> PassResult``. To choose the targets,
    it defines ``PASS = Pass(...)`` instead. The contract is checked each time that the pass runs.

    Raises:
        InputError: the file does not exist, fails (the message has its error and line), or defines
            neither.
    """
    if not path.is_file():
        known = ", ".join(offered_names(PASSES))
        installed = f". Installed packages offer {known}" if known else ""
        raise InputError(f"pass {path}: no such file{installed}")
    if path.suffix != ".py":
        raise InputError(f"pass {path}: not a Python file. Its name must end in .py")
    try:
        module = run_python_file(path, f"_own_pass_{path.stem}")
    except Exception as error:
        raise InputError(
            f"pass {path}: {line_of_error(error, path)}: {type(error).__name__}: {error}",
            detail=traceback.format_exc(),
        ) from error
    made, run = getattr(module, "PASS", None), getattr(module, "run", None)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    source = f"{path.name}, sha256 {digest[:16]}"
    if isinstance(made, Pass):
        return replace(made, own=True, evidence=(*made.evidence, source))
    if not callable(run):
        raise InputError(
            f"pass {path}: the file defines no pass. Define run(graph) -> PassResult, or "
            "PASS = Pass(...). docs/guide/write-a-pass.md has an example"
        )
    summary = next(iter((run.__doc__ or module.__doc__ or "").strip().splitlines()), path.stem)
    return Pass(path.stem, run, EVERY, summary, (source,), own=True)


def all_passes(own: Iterable[Path | str] = ()) -> tuple[Pass, ...]:
    """The passes in their order. User-supplied passes run right after functions are inlined.

    Args:
        own: files of user-supplied passes, or names that installed packages offer.

    Raises:
        InputError: see `load_pass` and `pass_file`; or two passes have the same name.
    """
    mine = tuple(load_pass(pass_file(path)) for path in own)
    passes = (*DEFAULT_PASSES[:1], *mine, *DEFAULT_PASSES[1:])
    names = [p.name for p in passes]
    for p in mine:
        if names.count(p.name) > 1:
            raise InputError(f"pass {p.name}: another pass has that name. Rename the file")
    return passes


def to_skip(passes: Sequence[Pass], only: Sequence[str], skip: Sequence[str]) -> frozenset[str]:
    """The names of the passes to leave out.

    Args:
        only: if not empty, all other passes are left out, except user-supplied ones.
        skip: the passes to leave out.

    Raises:
        InputError: a name is unknown (the message lists similar names), or is in both.
    """
    names = [p.name for p in passes]
    for name in (*only, *skip):
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3, cutoff=0.3)
            hint = f"the nearest: {', '.join(near)}" if near else f"known: {', '.join(names)}"
            raise InputError(f"unknown pass {name!r}; {hint} (`pipeline passes` lists them)")
    both = sorted({*only} & {*skip})
    if both:
        raise InputError(f"pass {both[0]}: --only and --skip both name it. Name it in one of them")
    others = {p.name for p in passes if p.name not in only and not p.own} if only else set()
    return frozenset({*skip, *others})
