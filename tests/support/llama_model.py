"""The model, and generation in ONNX Runtime, for all tests of Llama."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime
import torch

from pipeline.compare.runners import TorchRunner
from pipeline.export.module import built
from pipeline.models.llama import llama
from pipeline.spec.model import ModelSpec
from pipeline.spec.runner import run_once

Feed = dict[str, np.ndarray]
CHUNK, PREFILL = {"batch": 3, "seq": 7, "past": 5}, {"batch": 3, "seq": 7, "past": 0}
_CACHE = [f"past_{layer}_{kind}" for layer in (0, 1) for kind in ("key", "value")]


@cache
def made() -> tuple[ModelSpec, torch.nn.Module]:
    """The default spec and its module, which is called with one tensor for each input."""
    return built(llama(), None)


def session_of(path: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def reference(feed: Feed) -> Feed:
    """torch's outputs by name."""
    spec, module = made()
    return run_once(TorchRunner(module, [o.name for o in spec.outputs]), feed)


def positions(mask: np.ndarray, seq: int) -> np.ndarray:
    """position_ids, [batch, seq], for a full mask, as models/llama.py describes."""
    return (mask.cumsum(-1) - 1).clip(min=0)[:, -seq:]


def left_padded(mask: np.ndarray) -> np.ndarray:
    """Each row has one padding token more than the row before. One token at least remains."""
    rows = np.minimum(np.arange(len(mask)), mask.shape[1] - 1)
    return (np.arange(mask.shape[1]) >= rows[:, None]).astype(np.int64)


PROMPTS = {  # the prompt's length, the padding of each row, the new tokens
    "three prompts of different lengths": (12, (0, 3, 11), 20),
    "up to the last place in the cache": (1, (0,), 128),
    "a long prompt": (108, (0, 50), 20),
}


def prompt(case: str) -> tuple[np.ndarray, np.ndarray, int]:
    length, pads, count = PROMPTS[case]
    ids = np.random.default_rng(6).integers(3, 1000, (len(pads), length))
    mask = (np.arange(length) >= np.array(pads)[:, None]).astype(np.int64)
    return np.where(mask == 1, ids, 0), mask, count


@cache
def transformers_tokens(case: str) -> np.ndarray:
    """The tokens of transformers' greedy `generate`, [batch, new tokens]."""
    ids, mask, count = prompt(case)
    model = made()[1].model.llama
    model.generation_config.eos_token_id = None  # prevents an early stop
    with torch.no_grad():
        tokens = model.generate(
            torch.from_numpy(ids),
            attention_mask=torch.from_numpy(mask),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
    new: np.ndarray = tokens[:, ids.shape[1] :].numpy()
    assert new.shape == (len(ids), count)
    return new


def onnx_tokens(
    session: onnxruntime.InferenceSession, case: str, late: int = 0, lag: int = 0
) -> np.ndarray:
    """Generates the most likely tokens one by one. `late` and `lag` plant faults.

    Args:
        session: The exported model.
        case: A case of PROMPTS.
        late: Added to the positions of all tokens after the prompt.
        lag: The number of the mask's last places that are wrongly masked during decoding.
    """
    ids, mask, count = prompt(case)
    batch = len(ids)
    past = {name: np.zeros((batch, 2, 0, 32), np.float32) for name in _CACHE}
    names = ["logits", *(name.replace("past", "present") for name in _CACHE)]
    new: list[np.ndarray] = []
    while len(new) < count:
        shown = mask.copy()
        if new and lag:
            shown[:, -1 - lag : -1] = 0
        feed = {
            "input_ids": ids,
            "attention_mask": shown,
            "position_ids": positions(mask, ids.shape[1]) + (late if new else 0),
        }
        logits, *present = session.run(names, {**feed, **past})
        past = dict(zip(_CACHE, present, strict=True))
        new.append(logits[:, -1].argmax(-1))
        ids = new[-1][:, None]
        mask = np.concatenate([mask, np.ones_like(ids)], 1)
    return np.stack(new, 1)
