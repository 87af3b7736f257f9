"""transformers' Llama (https://arxiv.org/abs/2302.13971), with its KV cache.

One graph serves prefill (an empty cache), decoding (one token) and everything between. Its
``position_ids`` are those of transformers' ``generate``, which do not count left padding. For the
whole attention mask `mask` they are ``(mask.cumsum(-1) - 1).clip(min=0)[:, -seq:]``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import InputError, first_line
from pipeline.machine.libraries import import_transformers
from pipeline.probe.eager import quiet
from pipeline.spec.dims import Dim
from pipeline.spec.model import Input, ModelSpec, Output, Tolerance
from pipeline.spec.profiles import Profile
from pipeline.spec.weights import load_weights

if TYPE_CHECKING:
    import torch

_SEED = 0

# Measured with the default sizes' seeded weights and random masks, over all sizes that are compared
# (logits, keys and values up to 5). tests/models/test_llama_faults.py plants the faults that have
# to be found; the smallest is an epsilon of 2e-6 instead of 1e-6 in one norm. Other sizes and
# weights round differently, so the conversion measures their tolerance.
_DEFAULTS = {"hidden": 128, "intermediate": 352, "layers": 2, "heads": 4, "kv_heads": 2}
_DEFAULTS |= {"vocab": 1000, "max_length": 128}
_TOLERANCE = Tolerance(
    rtol=1e-4,
    atol=5e-5,
    why="ONNX Runtime is within 1e-5 of torch, the smallest planted fault gives 5e-4",
)

_HALF = Tolerance(1e-2, 5e-2, "half.onnx is within 1.2e-2; no engine was compared")


def llama(  # noqa: PLR0913 - these are the names of --option
    *,
    hidden: int = 128,
    intermediate: int = 352,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 1000,
    max_length: int = 128,
    weights: Path | None = None,
) -> ModelSpec:
    """transformers' LlamaForCausalLM, with logits and KV cache as outputs.

    The inputs are input_ids and position_ids [batch, seq] and attention_mask [batch, past + seq]
    (1: a token, 0: padding), all int64. Each layer also has past_N_key and past_N_value [batch,
    kv_heads, past, channels of a head]. The outputs are logits [batch, seq, vocab], present_N_key
    and present_N_value. Pass the last two as the next call's past. For a token that may attend to
    nothing (padding), attention returns zeros, as in transformers' sdpa.

    Args:
        hidden: channels of a token, a multiple of 2 * `heads`.
        intermediate: channels inside the MLP.
        layers: the number of decoder layers.
        heads: the number of attention heads.
        kv_heads: the number of heads of the keys and values, a divisor of `heads`.
        vocab: the number of tokens in the vocabulary.
        max_length: the most tokens in the cache and the input together, at least 2.
        weights: a checkpoint folder from transformers, or a file with the tensors of a model of
            these sizes. A folder's config.json sets every argument except `max_length`.

    Raises:
        InputError: the sizes do not fit together, or the folder has no Llama.
    """
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    }
    options = {"hidden": hidden, "intermediate": intermediate, "layers": layers, "heads": heads}
    options |= {"kv_heads": kv_heads, "vocab": vocab, "max_length": max_length}
    _check(options)
    if weights is not None and weights.is_dir():
        for name, value in options.items():
            if name != "max_length" and value != _DEFAULTS[name]:
                raise InputError(
                    f"model llama: {name}={value}: {weights} sets the sizes; leave {name} out"
                )
        sizes = _read_config(weights, max_length)
        options = {"max_length": max_length}
    batch = Dim("batch", 1, 1, 10)
    seq = Dim("seq", 1, max(1, max_length // 4), max_length)
    past = Dim("past", 0, max_length // 2, max_length - 1)
    head = sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"]
    cache = (batch, sizes["num_key_value_heads"], past, head)
    grown = (batch, sizes["num_key_value_heads"], past + seq, head)
    count = sizes["num_hidden_layers"]
    return ModelSpec(
        name="llama",
        build=lambda path: _build(sizes, max_length, path),
        inputs={
            "input_ids": Input(shape=(batch, seq), dtype="int64", low=0, high=sizes["vocab_size"]),
            "attention_mask": Input(shape=(batch, past + seq), dtype="int64", low=0, high=2),
            "position_ids": Input(shape=(batch, seq), dtype="int64", low=0, high=max_length),
            "past": [{"key": Input(shape=cache), "value": Input(shape=cache)}] * count,
        },
        outputs=(
            Output("logits", (batch, seq, sizes["vocab_size"]), metric="top-1"),
            *(Output(f"present_{n}_{w}", grown) for n in range(count) for w in ("key", "value")),
        ),
        tolerance=_TOLERANCE if weights is None and options == _DEFAULTS else None,
        engine_tolerance={"fp16": _HALF} if weights is None and options == _DEFAULTS else {},
        rules=(f"past + seq <= {max_length}",),
        profiles=(
            Profile("prefill"),  # the whole range: prompts, and chunks on top of a cache
            Profile("decode", {"seq": (1, 1, 1), "past": (1, past.opt, past.max)}),
        ),
        libraries=("torch", "transformers"),
        seed=_SEED,
        options=options,
    )


def _check(options: Mapping[str, int]) -> None:
    for name, value in options.items():
        least = 2 if name == "max_length" else 1
        if type(value) is not int or value < least:
            raise InputError(
                f"model llama: {name}={value!r} must be a whole number, at least {least}"
            )
    hidden, heads, kv_heads = (options[name] for name in ("hidden", "heads", "kv_heads"))
    if hidden % (2 * heads):
        raise InputError(f"model llama: hidden={hidden} is not a multiple of 2 * heads={heads}")
    if heads % kv_heads:
        raise InputError(f"model llama: heads={heads} is not a multiple of kv_heads={kv_heads}")


_SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings",
)  # fmt: skip


def _read_config(folder: Path, max_length: int) -> dict[str, int]:
    """The sizes in a checkpoint folder's config.json, by transformers' names."""
    path = folder / "config.json"
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"weights {path}: {error.strerror}; is this a checkpoint?") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"weights {path}: damaged, or not JSON: {error}") from error
    kind = found.get("model_type") if isinstance(found, dict) else None
    if kind != "llama":
        raise InputError(f"weights {path}: model_type is {kind!r}, not 'llama'")
    try:
        config = import_transformers().LlamaConfig.from_dict(found)
    except Exception as error:  # transformers checks the types, and its errors have no common base
        raise InputError(f"weights {path}: {first_line(error)}", detail=str(error)) from error
    sizes = {name: getattr(config, name) for name in _SIZES}
    for name, value in sizes.items():
        if type(value) is not int or value < 1:
            raise InputError(f"weights {path}: {name}={value!r} must be a whole number, at least 1")
    if max_length > (most := sizes.pop("max_position_embeddings")):
        raise InputError(
            f"model llama: max_length={max_length}, but {path} allows {most} "
            "(max_position_embeddings)"
        )
    return sizes


def _build(sizes: Mapping[str, int], max_length: int, weights: Path | None) -> torch.nn.Module:
    import torch

    transformers = import_transformers()
    if weights is not None and weights.is_dir():
        model = _load_folder(transformers.LlamaForCausalLM, weights)
    else:
        config = transformers.LlamaConfig(
            **sizes,
            max_position_embeddings=max_length,
            initializer_range=sizes["hidden_size"] ** -0.5,  # so that attention affects the logits
            attn_implementation="sdpa",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            model = transformers.LlamaForCausalLM(config)
        if weights is not None:
            load_weights(model, weights)

    class WithCache(torch.nn.Module):
        """LlamaForCausalLM with its cache as tensors."""

        def __init__(self) -> None:
            super().__init__()
            self.llama = model

        def forward(
            self,
            input_ids: torch.Tensor,
            attention_mask: torch.Tensor,
            position_ids: torch.Tensor,
            past: Sequence[Mapping[str, torch.Tensor]],
        ) -> dict[str, Any]:
            cache = transformers.DynamicCache([(layer["key"], layer["value"]) for layer in past])
            out = self.llama(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=cache,
                use_cache=True,
            )
            present = [{"key": layer.keys, "value": layer.values} for layer in cache.layers]
            return {"logits": out.logits, "present": present}

    return WithCache().eval()


def _load_folder(kind: Any, folder: Path) -> torch.nn.Module:
    """Loads the model of a checkpoint folder in float32; every tensor has to exist."""
    import torch

    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)  # no table of the tensors: the error below names them
    try:
        with quiet():
            model, info = kind.from_pretrained(
                folder,
                local_files_only=True,
                dtype=torch.float32,
                attn_implementation="sdpa",
                ignore_mismatched_sizes=True,  # the error below reports them
                output_loading_info=True,
            )
    except Exception as error:  # damaged files can raise any type
        first = first_line(error)
        raise InputError(f"weights {folder}: {first}", detail=str(error)) from error
    finally:
        log.setLevel(level)
    problems = [
        f"{what}: {', '.join(sorted(map(str, info[key]))[:5])}"
        for key, what in (
            ("missing_keys", "missing"),
            ("unexpected_keys", "unexpected"),
            ("mismatched_keys", "of another shape"),
        )
        if info[key]
    ]
    if problems:
        raise InputError(f"weights {folder}: tensors {'; '.join(problems)}")
    loaded: torch.nn.Module = model
    return loaded
