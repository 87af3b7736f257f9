"""Loading a weights file into a module, strictly."""

from __future__ import annotations

import itertools
import pickletools
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import InputError, first_line

if TYPE_CHECKING:
    import torch

WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".ts", ".torchscript")
_WRAPPERS = ("state_dict", "model", "model_state_dict")
SCRIPTED = "TorchScript, which torch can't export with dynamic sizes"
_SHOWN = 5
_BEGIN = 4  # of a pickle's steps: an object begins with the name of its class
_PLAIN = ("collections.", "torch._utils.", "torch.storage.", "numpy.")


def load_weights(module: torch.nn.Module, path: Path) -> None:
    """Loads every parameter and buffer of `module` from a file, or none of them.

    A state dict under ``state_dict``, ``model`` or ``model_state_dict`` is unwrapped, and
    DataParallel's ``module.`` prefix is dropped.

    Args:
        module: The module to fill, in place.
        path: A ``.safetensors`` file, or a ``.pth`` or ``.pt`` file, which is read with
            ``weights_only``: no code in the file runs. The checksums in a ``.pth`` are checked. A
            ``.safetensors`` file has none.

    Raises:
        InputError: The file is missing, damaged, of an unknown kind, or for another model. The
            message names the first keys that don't fit.
    """
    state = read_state_dict(path)
    own = module.state_dict()
    # BatchNorm's counters are unused in eval mode, and old files lack them, which torch allows
    counters = {k: v for k, v in own.items() if k.endswith(".num_batches_tracked")}
    state = {**{k: v for k, v in counters.items() if k not in state}, **state}
    missing = [key for key in own if key not in state]
    extra = [key for key in state if key not in own]
    shapes = [
        f"{key} {tuple(state[key].shape)} instead of {tuple(own[key].shape)}"
        for key in own
        if key in state and state[key].shape != own[key].shape
    ]
    problems = [
        f"{len(keys)} {what}: {', '.join(keys[:_SHOWN])}{', ...' if len(keys) > _SHOWN else ''}"
        for keys, what in (
            (missing, "missing keys"),
            (extra, "unexpected keys"),
            (shapes, "keys with another shape"),
        )
        if keys
    ]
    if problems:
        raise InputError(f"weights {path} are for another model: {'; '.join(problems)}")
    module.load_state_dict(dict(state))


def read_state_dict(path: Path) -> Mapping[str, torch.Tensor]:
    """The tensors in a weights file by name; see `load_weights` for kinds and errors."""
    import torch

    if path.is_dir():
        raise InputError(
            f"weights {path}: a folder; this model needs a .pth, .pt or .safetensors file"
        )
    if not path.is_file():
        raise InputError(f"weights {path}: no such file")
    if path.suffix == ".safetensors":
        state: object = _read_safetensors(path)
    elif path.suffix in (".pth", ".pt", ".bin", ".ckpt"):
        if kind := whole_object(path):
            raise InputError(
                f"weights {path}: holds a whole {kind}, not a state dict. Where its code is "
                "installed, save the tensors: torch.save(torch.load(PATH, weights_only=False)"
                ".state_dict(), NEW_PATH). This runs code in the file, so do it only if you trust "
                "its author"
            )
        state = read_torch(path)
    else:
        raise InputError(f"weights {path}: unknown kind; use .pth, .pt or .safetensors")
    if isinstance(state, Mapping):
        for wrapper in _WRAPPERS:
            if isinstance(state.get(wrapper), Mapping):
                state = state[wrapper]
                break
    if not isinstance(state, Mapping) or not all(
        isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in state.items()
    ):
        raise InputError(f"weights {path}: not a state dict (a mapping of names to tensors)")
    if state and all(key.startswith("module.") for key in state):
        state = {key.removeprefix("module."): value for key, value in state.items()}
    return state


def what_it_holds(path: Path) -> str:
    """What a file of weights holds, if it is given as a source, and what to convert instead.

    Runs no code of the file. TorchScript is not converted, because torch.export takes no
    ScriptModule.
    """
    scripted = "the Python code that the model was made from: pipeline convert file.py:factory"
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        if any("/code/" in name for name in names):
            return f"{SCRIPTED}. Convert {scripted}"
    if path.suffix not in (".ts", ".torchscript"):
        try:
            read_state_dict(path)
        except InputError:
            pass
        else:
            return (
                "holds weights but no model. Name the code that makes the model: pipeline convert "
                f"file.py:factory --weights {path}"
            )
    return (
        "is no file that pipeline reads as a model. If it is a whole module from torch.save, it "
        "holds code by name: load it in a factory of yours (def model(): return "
        "torch.load(PATH, weights_only=False)), and convert file.py:model. Do so only if you trust "
        "the file's author"
    )


def whole_object(path: Path) -> str:
    """The class of the object that ``torch.save(model, path)`` has written; empty for tensors.

    Runs no code of the file: it reads the first name in the pickle.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            pickle = next((n for n in archive.namelist() if n.endswith("/data.pkl")), "")
            data = archive.read(pickle) if pickle else b""
        for code, argument, _ in itertools.islice(pickletools.genops(data), _BEGIN):
            if code.name == "GLOBAL":
                name = str(argument).replace(" ", ".")
                return "" if name.startswith(_PLAIN) else name
            if code.name not in ("PROTO", "FRAME"):
                break
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, zlib.error):  # it is damaged
        pass
    return ""


def read_torch(path: Path, what: str = "weights") -> object:
    """The content of a file from torch.save, without running code in it.

    Args:
        path: The file.
        what: What the file is, for the beginning of errors.

    Raises:
        InputError: The file is damaged, or holds other things than tensors and plain containers.
    """
    import torch

    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()  # torch.load does not check the checksums
            if damaged is not None:
                raise zipfile.BadZipFile(f"{damaged}: wrong checksum")
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise InputError(f"{what} {path}: {error.strerror or error}") from error
    except Exception as error:  # damaged bytes make the unpickler raise anything
        # torch's own message advises to run the code in the file
        raise InputError(
            f"{what} {path}: damaged, or not a torch file that holds only tensors",
            detail=str(error),
        ) from error


def _read_safetensors(path: Path) -> object:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        words = first_line(error)
        raise InputError(f"weights {path}: damaged, or not safetensors: {words}") from error
