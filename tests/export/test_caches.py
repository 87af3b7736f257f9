"""Caches of transformers as inputs and outputs, compared with torch in ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from pipeline.errors import InputError
from pipeline.export.caches import cache_arguments, with_caches
from pipeline.export.export import export
from pipeline.export.module import built, flat_outputs
from pipeline.machine.libraries import import_transformers
from pipeline.spec.model import ModelSpec, Tolerance
from pipeline.spec.structure import leaves
from pipeline.spec.text import parse_dims, parse_inputs

transformers = import_transformers()
SIZES = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


def llama() -> torch.nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()


def cache(rows: int, past: int) -> list[list[torch.Tensor]]:
    return [[torch.randn(rows, 2, past, 8) for _ in range(2)] for _ in range(2)]


def test_a_decoder_takes_and_returns_its_cache(tmp_path: Path) -> None:
    dims = parse_dims(["b=1:2:3", "s=1:4:8", "past=1:6:20"])
    inputs = parse_inputs(
        [
            "input_ids:{b}x{s}:int64:0..100",
            "attention_mask:{b}x{past+s}:int64:1..2",
            "past_key_values[0..1][0..1]:{b}x2x{past}x8",
        ],
        dims,
    )
    spec = ModelSpec("m", lambda _: llama(), inputs, tolerance=Tolerance(1e-4, 1e-4, "attention"))
    done = export(spec, None, tmp_path / "m.onnx")
    caches = [f"past_key_values_{n}_{k}" for n in range(2) for k in range(2)]
    assert [o.name for o in done.spec.outputs] == ["logits", *(f"{name}_out" for name in caches)]
    session = onnxruntime.InferenceSession(done.path, providers=["CPUExecutionProvider"])
    model = llama()
    for b, s, past in ((1, 1, 1), (2, 3, 7), (3, 8, 20)):
        feed = spec.sample({"b": b, "s": s, "past": past}, 1)
        pairs = [[torch.from_numpy(feed[f"past_key_values_{n}_{k}"].copy()) for k in range(2)]
                 for n in range(2)]  # fmt: skip
        with torch.no_grad():
            result = model(
                torch.from_numpy(feed["input_ids"]),
                attention_mask=torch.from_numpy(feed["attention_mask"]),
                past_key_values=transformers.DynamicCache(pairs),
            )
        want = [result.logits]
        want += [t for layer in result.past_key_values.layers for t in (layer.keys, layer.values)]
        for got, torchs in zip(session.run(None, feed), want, strict=True):
            np.testing.assert_allclose(got, torchs.numpy(), rtol=1e-4, atol=1e-4)


def test_without_a_cache_object_the_model_refuses_the_tuple() -> None:
    """Why there is anything to do."""
    ids = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises((AttributeError, ValueError, TypeError)):
        llama()(ids, past_key_values=tuple(map(tuple, cache(1, 3))))


def test_a_cache_that_is_only_returned() -> None:
    inputs = parse_inputs(["input_ids:{b}x{s}:int64:0..100"], parse_dims(["b=1:2:3", "s=1:4:8"]))
    spec, module = built(ModelSpec("m", lambda _: llama(), inputs), None)
    assert len(spec.outputs) == 5
    ids = torch.ones(2, 4, dtype=torch.int64)
    with torch.no_grad():
        assert [t.shape[-1] for t in flat_outputs(module(ids))] == [100, 8, 8, 8, 8]


def test_which_arguments_are_caches() -> None:
    def forward(x: Any, cache: transformers.Cache | None = None, more: tuple[int] = (1,)) -> None:
        pass

    assert cache_arguments(forward) == {"cache": 1}
    assert set(cache_arguments(llama().forward)) == {"past_key_values"}
    assert cache_arguments(torch.nn.Linear(2, 2).forward) == {}


def test_layers_by_name_by_place_and_with_an_encoder() -> None:
    layers = cache(1, 3)
    named = tuple({"key": key, "value": value} for key, value in layers)
    (got,), more = with_caches({"cache": 0}, llama(), (named,), {})
    assert more == {}
    _, again = with_caches({"cache": 0}, llama(), (), {"cache": tuple(layers), "x": 1})
    assert again["x"] == 1
    for made in (got, again["cache"]):
        flat = [t for _, t in leaves(made)]
        assert all(map(torch.equal, flat, (t for layer in layers for t in layer)))
    four = tuple((*layer, *layer) for layer in layers)
    _, both = with_caches({"cache": 0}, torch.nn.Identity(), (), {"cache": four})
    assert isinstance(both["cache"], transformers.EncoderDecoderCache)
    assert [path for path, _ in leaves(both["cache"])] == [
        (n, k) for n in range(2) for k in range(4)
    ]


def test_a_layer_of_three_tensors_is_refused() -> None:
    three = tuple((*layer, layer[0]) for layer in cache(1, 3))
    with pytest.raises(InputError, match=r"cache\[0\.\.N\]\[0\.\.1\]"):
        with_caches({"cache": 0}, torch.nn.Identity(), (), {"cache": three})


def test_other_values_stay() -> None:
    tensor = torch.ones(2)
    args, _ = with_caches({"cache": 0}, torch.nn.Identity(), (tensor,), {})
    assert args == (tensor,)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (
            lambda: transformers.MistralConfig(**SIZES, sliding_window=8),
            "DynamicSlidingWindowLayer",
        ),
        (
            lambda: transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 3}),
            "has 3 layers, and 2",
        ),
    ],
)
def test_what_a_tuple_of_keys_and_values_can_not_hold(config: Any, kind: str) -> None:
    """A sliding window also counts the tokens that it has seen; without the count it is wrong."""
    model = torch.nn.Identity()
    model.config = config()
    with pytest.raises(InputError, match=kind):
        with_caches({"cache": 0}, model, (tuple(cache(1, 3)),), {})


def test_a_returned_cache_that_holds_more_is_refused() -> None:
    torch.manual_seed(0)
    config = transformers.MistralConfig(**SIZES, sliding_window=8)
    inputs = parse_inputs(["input_ids:{b}x{s}:int64:0..100"], parse_dims(["b=1:2:3", "s=1:4:8"]))
    spec = ModelSpec("m", lambda _: transformers.MistralForCausalLM(config).eval(), inputs)
    with pytest.raises(InputError, match="is of type DynamicSlidingWindowLayer, not a tensor"):
        built(spec, None)


def test_an_argument_for_another_cache_is_left_alone() -> None:
    def forward(x: Any, cache: transformers.StaticCache | None = None) -> None:
        pass

    assert cache_arguments(forward) == {}
