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

from pipeline.errors import InputError
from pipeline.models.transformers_library import import_transformers
from pipeline.source.factory import SourceFactory

_HF, _TIMM = "hf:", "timm/"
_SHOWN = 3  # weights in an error


def is_hub(source: str) -> bool:
    """True if a source's text names a hub."""
    return source.startswith(_HF) or (source.startswith(_TIMM) and ":" not in source)


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
    return SourceFactory(factory, (package,), functools.partial(_files_of, Path(name)))


def _files_of(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file()) if folder.is_dir() else []


def _of_transformers(name: str, trust: bool, /, **options: Any) -> Any:
    if options.get("trust_remote_code") and not trust:
        raise InputError(
            f"source hf:{name}: trust_remote_code runs Python code of the model's author. To allow "
            "it, pass --trust"
        )
    options = {"trust_remote_code": False, **options}  # without a word transformers would ask
    transformers = import_transformers()
    known = {k: options[k] for k in ("revision", "token", "trust_remote_code") if k in options}
    config = transformers.AutoConfig.from_pretrained(name, **known)
    named = (config.architectures or [""])[0]
    kind = getattr(transformers, named or "AutoModel", transformers.AutoModel)
    with _without_reports(transformers.utils.logging):
        module, found = kind.from_pretrained(name, output_loading_info=True, **options)
    missing = sorted(found["missing_keys"])
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise InputError(
            f"source hf:{name}: its files lack weights of {type(module).__name__}: "
            f"{', '.join(missing[:_SHOWN])}{more}. Choose a checkpoint of this model"
        )
    return module


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
    return importlib.import_module("timm").create_model(text, **{"pretrained": True, **options})
