"""Damaged and forged files: manifests, ONNX files, .pt2 programs and other files of artifacts.

Each file is changed at random and given to a random command, in a process of its own. A command has
to end in time with an exit code that it documents and without a traceback. It must not write
outside of its artifact, and not run code that a file brings.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
from forks import forked
from hypothesis import strategies as st

LIMIT = 60.0
CODES = (0, 1, 2)
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 2**63, 2**70, 1e308, float("inf"), "", "..", "../../outside/x", "/outside",
    "a" * 300, "\x1b[31mred\x1b[0m", "\u202eabc", "\ud800", "name with spaces", "${HOME}", "%s%n",
    [], {}, [[]], {"a": {"b": []}}, "evil.py:factory", "file:///outside", "NaN", "h", [1, 2, 3],
)  # fmt: skip
NAMES = ("manifest.json", "model.onnx", "exported.onnx", "engine.plan", "comparison")


@dataclass(frozen=True)
class Mutation:
    """One change of one file, and the command that gets it.

    Args:
        file: The file's kind: one of `NAMES`, ``file.onnx`` or ``program.pt2``.
        how: The kind of the change.
        place: Where, as a part of the file's length or of its values, from 0 to 1.
        value: The new value's place in `ODD`, or new bytes.
        command: The command's place in the list for this kind of file.
        rehash: Whether the manifest gets the changed file's hash.
    """

    file: str
    how: str
    place: float
    value: int
    command: int
    rehash: bool


BYTES = ("flip", "cut", "insert", "repeat", "zero", "empty", "link", "fifo")
JSON = ("replace", "delete", "rename", "nest")
PROTO = ("replace", "delete", "repeat")


def mutations() -> st.SearchStrategy[Mutation]:
    def of(file: str, hows: Sequence[str]) -> st.SearchStrategy[Mutation]:
        return st.builds(
            Mutation, st.just(file), st.sampled_from(hows), st.floats(0, 1, exclude_max=True),
            st.integers(0, 255), st.integers(0, 7), st.booleans(),
        )  # fmt: skip

    return st.one_of(
        of("manifest.json", JSON), of("manifest.json", (*JSON, *BYTES)),
        of("model.onnx", (*PROTO, *BYTES)), of("exported.onnx", (*PROTO, *BYTES)),
        of("engine.plan", BYTES), of("comparison", (*JSON, *BYTES)),
        of("file.onnx", PROTO), of("file.onnx", (*PROTO, *BYTES)), of("program.pt2", BYTES),
    )  # fmt: skip


class Base:
    """The sound files that are changed.

    Args:
        folder: A folder with ``artifact``, ``file.onnx`` and ``program.pt2``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @staticmethod
    def make(folder: Path) -> Base:
        """Converts a small model for the files."""
        import torch

        from pipeline.convert.driver import run
        from pipeline.spec.config import Config

        folder.mkdir(parents=True, exist_ok=True)
        (folder / "evil.py").write_text(
            "from pathlib import Path\nPath('RAN').touch()\n\ndef factory(): pass\n"
        )
        (folder / "small.py").write_text(
            "import torch\n\ndef net():\n    torch.manual_seed(0)\n    return torch.nn.Sequential("
            "torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 1))\n"
        )
        dims = ("b=1:2:3", "h=8:16:24")
        source = f"{folder / 'small.py'}:net"
        run(Config(source, inputs=("input:{b}x3x{h}x12",), dims=dims, out=folder / "artifact"))
        shutil.copy(folder / "artifact" / "exported.onnx", folder / "file.onnx")
        b, h = torch.export.Dim("b", min=1, max=3), torch.export.Dim("h", min=8, max=24)
        net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU()).eval()
        program = torch.export.export(
            net, (torch.zeros(2, 3, 16, 12),), dynamic_shapes=({0: b, 2: h},)
        )
        torch.export.save(program, folder / "program.pt2")
        return Base(folder)


def command_for(mutation: Mutation) -> list[str]:
    """The command line that gets the file."""
    if mutation.file == "file.onnx":
        commands = [
            ["lint", "file.onnx"],
            ["rewrite", "file.onnx", "--out", "artifact/out.onnx"],
            ["check", "file.onnx"],
            ["lint", "file.onnx", "--target", "tensorrt-8.6"],
        ]
    elif mutation.file == "program.pt2":
        commands = [["check", "program.pt2"]]
    else:
        commands = [["inspect", "artifact"], ["inspect", "artifact", "--json"],
                    ["verify", "artifact"], ["rewrite", "artifact"], ["build", "artifact"],
                    ["verify", "artifact", "--torch"], ["bench", "artifact"],
                    ["locate", "artifact"]]  # fmt: skip
    return commands[mutation.command % len(commands)]


def apply(mutation: Mutation, folder: Path) -> bool:
    """Changes the file in a copy of the base. False if the change is none."""
    path = folder / mutation.file
    if mutation.file in NAMES:
        path = folder / "artifact" / mutation.file
    if mutation.file == "comparison":
        files = sorted(p for p in path.rglob("*") if p.is_file())
        path = files[int(mutation.place * len(files))]
    before = path.read_bytes()
    if mutation.how in ("link", "fifo"):
        path.unlink()
        if mutation.how == "fifo":
            os.mkfifo(path)
        else:
            path.symlink_to(folder / "outside" / "kept")
        return True
    changed = _changed(mutation, before, path.suffix)
    if changed is None or changed == before:
        return False
    path.write_bytes(changed)
    if mutation.rehash and path.name != "manifest.json" and folder / "artifact" in path.parents:
        _rehash(folder / "artifact", path)
    return True


def _changed(mutation: Mutation, before: bytes, suffix: str) -> bytes | None:
    if mutation.how in BYTES:
        return _bytes(mutation, before)
    try:
        if suffix == ".json":
            return _json(mutation, before)
        if suffix == ".onnx":
            return _proto(mutation, before)
    except (ValueError, TypeError, RecursionError):  # the value does not fit the field
        return None
    return _bytes(replace(mutation, how="flip"), before)


def _bytes(mutation: Mutation, before: bytes) -> bytes:
    at = int(mutation.place * len(before))
    new = bytes([mutation.value])
    return {
        "flip": before[:at] + bytes([before[at] ^ (mutation.value or 1)]) + before[at + 1 :],
        "cut": before[:at],
        "insert": before[:at] + new * 9 + before[at:],
        "repeat": before[:at] + before[at : at + 64] * 20 + before[at + 64 :],
        "zero": before[:at] + bytes(64) + before[at + 64 :],
        "empty": b"",
    }[mutation.how]


def _json(mutation: Mutation, before: bytes) -> bytes:
    data = json.loads(before)
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in list(pairs):
            places.append((value, key))
            if isinstance(item, (dict, list)):
                walk(item)

    walk(data)
    holder, key = places[int(mutation.place * len(places))]
    odd = ODD[mutation.value % len(ODD)]
    if mutation.how == "replace":
        holder[key] = odd
    elif mutation.how == "nest":
        holder[key] = [holder[key]] if mutation.value % 2 else {"x": holder[key]}
    elif mutation.how == "rename" and isinstance(holder, dict):
        holder[str(odd)] = holder.pop(key)
    else:
        del holder[key]
    return json.dumps(data).encode("utf-8", "surrogatepass")


def _proto(mutation: Mutation, before: bytes) -> bytes:
    model = onnx.ModelProto.FromString(before)
    places: list[tuple[Any, Any]] = []

    def walk(message: Any) -> None:
        for field, value in message.ListFields():
            places.append((message, field))
            if field.message_type is not None:
                for item in value if _repeated(field) else [value]:
                    walk(item)

    walk(model)
    message, field = places[int(mutation.place * len(places))]
    if mutation.how == "delete":
        message.ClearField(field.name)
    elif mutation.how == "repeat" and _repeated(field):
        value = getattr(message, field.name)
        value.extend(list(value))
    elif field.message_type is not None:
        message.ClearField(field.name)
    else:
        _replace(message, field, mutation.value)
    return model.SerializeToString()


def _repeated(field: Any) -> bool:
    return bool(field.is_repeated)


def _replace(message: Any, field: Any, number: int) -> None:
    texts = [odd for odd in ODD if isinstance(odd, str) and odd != "\ud800"]
    numbers = [-1, 0, 1, 7, 99, 2**31 - 1, -(2**31), 10**6]
    kinds = {field.TYPE_STRING: texts[number % len(texts)],
             field.TYPE_BYTES: [b"", b"\xff\xfe", b"x" * 99][number % 3],
             field.TYPE_FLOAT: [float("nan"), -1.0, 1e38][number % 3]}  # fmt: skip
    value = kinds.get(field.type, numbers[number % len(numbers)])
    if _repeated(field):
        held = getattr(message, field.name)
        held[number % len(held)] = value
    else:
        setattr(message, field.name, value)


def _rehash(artifact: Path, path: Path) -> None:
    manifest = artifact / "manifest.json"
    data = json.loads(manifest.read_text())
    entry = data["files"].get(str(path.relative_to(artifact)))
    if isinstance(entry, dict):
        content = path.read_bytes()
        entry["sha256"] = hashlib.sha256(content).hexdigest()
        if "bytes" in entry:
            entry["bytes"] = len(content)
    manifest.write_text(json.dumps(data))


def _run(words: list[str], folder: Path) -> tuple[int, str]:
    """Runs a command in this process, which is a fork. Returns its exit code and its output."""
    from pipeline.commands.main import main

    os.chdir(folder)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")
    sys.path.insert(0, str(folder))
    with (
        (folder / "said").open("w", encoding="utf-8", errors="surrogateescape") as said,
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        code = main(words)
    return code, (folder / "said").read_text(encoding="utf-8", errors="replace")


def _tree(folder: Path) -> dict[str, str]:
    """Every file outside of the artifact and of the folder for temporary files."""
    found = {}
    for path in folder.rglob("*"):
        if path.relative_to(folder).parts[0] in ("artifact", "tmp", "said"):
            continue
        content = path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest()
        found[str(path.relative_to(folder))] = str(content)
    return found


def verdict(base: Base, mutation: Mutation) -> dict[str, Any] | None:
    """The result for one mutation; None if it changes nothing."""
    words = command_for(mutation)
    with tempfile.TemporaryDirectory(prefix="torture-") as name:
        folder = Path(name) / "work"
        shutil.copytree(base.folder, folder)
        (folder / "tmp").mkdir()
        (folder / "outside").mkdir()
        (folder / "outside" / "kept").write_text("kept")
        if not apply(mutation, folder):
            return None
        before = _tree(folder)
        done = forked(_run, words, folder, limit=LIMIT)
        code, said = done.result or (None, "")
        problems = [
            *([done.failure.strip().splitlines()[-1]] if done.failure else []),
            *([f"exit code {code}"] if not done.failure and code not in CODES else []),
            *(["a traceback"] if "Traceback" in said else []),
            *(["an escape character on the terminal"] if "\x1b" in said else []),
            *(["it ran code of a file"] if (folder / "RAN").exists() else []),
            *(["it wrote outside"] if _tree(folder) != before else []),
        ]
        hashed = mutation.file in NAMES and mutation.file != "manifest.json" and not mutation.rehash
        if code == 0 and hashed and words[0] in ("inspect", "verify"):
            problems.append("a damaged file was accepted")
    return {
        "what": f"{mutation.how} in {mutation.file}",
        "verdict": "failed" if problems else f"exit {code}",
        "text": "; ".join(problems) + (f": {done.failure or said[-2000:]}" if problems else ""),
        "seconds": round(done.seconds, 1),
        "again": repr(mutation),
    }
