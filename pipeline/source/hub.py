"""Models of hubs as sources: ``hf:NAME`` of Hugging Face's transformers, and ``timm/NAME``.

NAME is what ``from_pretrained`` and ``timm.create_model`` take: a name that they download, or a
folder that ``save_pretrained`` wrote. The libraries load the weights.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import InputError, first_line
from pipeline.machine.libraries import import_transformers
from pipeline.source.factory import SourceFactory

_HF, _TIMM = "hf:", "timm/"
_SHOWN = 3  # weights in an error
_OF_CONFIG = (
    "revision", "code_revision", "token", "trust_remote_code", "subfolder", "cache_dir",
    "local_files_only", "force_download",
)  # fmt: skip


def is_hub(source: str) -> bool:
    """True if a source's text names a hub."""
    return source.startswith(_HF) or (source.startswith(_TIMM) and ":" not in source)


def hub_folder(source: str) -> Path | None:
    """The folder of a hub's model; None for a name that is downloaded, and for other sources."""
    folder = Path(source.removeprefix(_HF).removeprefix(_TIMM))
    return folder if is_hub(source) and folder.is_dir() else None


def find_hub(source: str, *, trust: bool) -> SourceFactory | None:
    """The model of a source's text; None if it names no hub.

    Args:
        source: The text.
        trust: Whether Python code that comes with a model may run (``trust_remote_code``).
    """
    if not is_hub(source):
        return None
    if source.startswith(_HF):
        name, package = source.removeprefix(_HF), "transformers"
        factory = functools.partial(_of_transformers, name, trust)
    else:
        name, package = source.removeprefix(_TIMM), "timm"
        factory = functools.partial(_of_timm, name)
    return SourceFactory(factory, (package,), list)  # the manifest's weights have the folder's hash


def _of_transformers(name: str, trust: bool, /, **options: Any) -> Any:
    kernel = str(options.get("attn_implementation", ""))
    if not trust and (options.get("trust_remote_code") or "/" in kernel):
        asked = "trust_remote_code" if options.get("trust_remote_code") else f"the kernel {kernel}"
        raise InputError(
            f"source hf:{name}: {asked} runs code of its author. To allow it, pass --trust"
        )
    options = {"trust_remote_code": False, **options}  # without a word transformers would ask
    transformers = import_transformers()
    known = {k: options[k] for k in _OF_CONFIG if k in options}
    try:
        config = transformers.AutoConfig.from_pretrained(name, **known)
    except OSError as error:
        if Path(name).exists():
            raise
        raise InputError(
            f"source hf:{name}: there is no folder {name} here, and the hub gives no such model: "
            f"{first_line(error)}"
        ) from error
    with _without_reports(transformers.utils.logging):
        kind = _class_of(transformers, name, config, trust=bool(options["trust_remote_code"]))
        module, found = kind.from_pretrained(name, output_loading_info=True, **options)
    keys = [key if isinstance(key, str) else key[0] for key in found["mismatched_keys"]]
    random = sorted([*found["missing_keys"], *keys])
    if random:
        more = f" and {len(random) - _SHOWN} more" if len(random) > _SHOWN else ""
        raise InputError(
            f"source hf:{name}: its files lack weights of {type(module).__name__}: "
            f"{', '.join(random[:_SHOWN])}{more}. Choose a checkpoint of this model"
        )
    return module


def _class_of(transformers: Any, name: str, config: Any, *, trust: bool) -> Any:
    """The class that the config names; `AutoModel` if it names none.

    Raises:
        InputError: The class is not of transformers, and the author's code may not run.
    """
    named = (config.architectures or [""])[0]
    if not named:
        return transformers.AutoModel
    own = getattr(transformers, named, None)
    if isinstance(own, type) and issubclass(own, transformers.PreTrainedModel):
        return own
    known = getattr(config, "auto_map", None) or {}
    autos = [auto for auto, code in known.items() if str(code).endswith(f".{named}")]
    if autos and trust:
        return getattr(transformers, autos[0])
    how = ". Its own code has it: pass --option trust_remote_code=true and --trust" if autos else ""
    raise InputError(f"source hf:{name}: transformers has no model {named}{how}")


@contextlib.contextmanager
def _without_reports(logging: Any) -> Iterator[None]:
    """Keeps transformers' table of missing weights off the screen, and its progress bar."""
    before, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bar:
            logging.enable_progress_bar()


def _of_timm(name: str, /, **options: Any) -> Any:
    if importlib.util.find_spec("timm") is None:
        raise InputError(f"source timm/{name}: timm is not installed: pip install --no-deps timm")
    folder = Path(name)
    text = f"local-dir:{folder.resolve()}" if folder.is_dir() else name
    options = {"pretrained": True, **options}
    module = importlib.import_module("timm").create_model(text, **options)
    classes = (getattr(module, "pretrained_cfg", None) or {}).get("num_classes")
    asked = options.get("num_classes", classes)
    if options["pretrained"] and asked not in (classes, 0):
        raise InputError(
            f"source timm/{name}: num_classes={asked} makes a last layer with random weights: the "
            f"files have {classes}. Leave the option out, or pass --option pretrained=false"
        )
    return module
