"""Llama over its whole range, and its generation compared with transformers'."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
from llama_model import (
    CHUNK,
    PROMPTS,
    left_padded,
    made,
    onnx_tokens,
    positions,
    reference,
    session_of,
    transformers_tokens,
)

from pipeline.artifact.artifact import Artifact
from pipeline.commands.still_needed import apply as apply_passes
from pipeline.compare.run_names import TORCH
from pipeline.compare.verdict import judge
from pipeline.errors import InputError
from pipeline.machine.target import TARGETS
from pipeline.models.llama import llama
from pipeline.passes import DEFAULT_PASSES
from pipeline.spec.dims import shape_texts

pytestmark = pytest.mark.slow

POINTS = [
    (1, 1, 0), (1, 2, 0), (3, 7, 0), (10, 128, 0), (1, 1, 1), (2, 1, 64), (10, 1, 127),
    (3, 3, 5), (10, 60, 68),
]  # fmt: skip


@pytest.fixture(scope="module")
def artifact(zoo_artifact: Callable[[str], Artifact]) -> Artifact:
    """The artifact of `pipeline convert llama`."""
    return zoo_artifact("llama")


@pytest.fixture(scope="module")
def session(artifact: Artifact) -> onnxruntime.InferenceSession:
    return session_of(artifact.model)


def test_manifest_says_what_was_done(artifact: Artifact) -> None:
    manifest = artifact.manifest
    assert {d.name: (d.min, d.max) for d in manifest.interface.dims.values()} == {
        "batch": (1, 10),
        "seq": (1, 128),
        "past": (0, 127),
    }
    shapes = {i.name: list(shape_texts(i.shape)) for i in manifest.interface.inputs}
    assert shapes["attention_mask"] == ["batch", "past + seq"]
    assert shapes["past_1_value"] == ["batch", 2, "past", 32]
    outputs = {o.name: list(shape_texts(o.shape)) for o in manifest.interface.outputs}
    assert outputs["logits"] == ["batch", "seq", 1000]
    assert outputs["present_1_value"] == ["batch", 2, "past + seq", 32]
    prefill, decode = manifest.interface.profiles
    assert prefill.ranges == {"batch": (1, 1, 10), "seq": (1, 32, 128), "past": (0, 64, 127)}
    assert decode.ranges == {"batch": (1, 1, 10), "seq": (1, 1, 1), "past": (1, 64, 127)}
    comparison = manifest.comparison
    assert comparison is not None and comparison.passed
    assert all(p.compared for p in comparison.points)
    compared = {(p.sizes["batch"], p.sizes["seq"], p.sizes["past"]) for p in comparison.points}
    assert all(seq + past <= 128 for _, seq, past in compared)
    assert {(1, 1, 0), (1, 32, 64), (10, 1, 127)} <= compared


def test_engine_is_well_formed(artifact: Artifact) -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    runtime = trt.Runtime(trt.Logger(trt.Logger.INTERNAL_ERROR))
    malformed = int(trt.EngineInvalidityDiagnostics.MALFORMED_ENGINE)
    _, diagnostics = runtime.get_engine_validity(artifact.plan.read_bytes())
    assert not int(diagnostics) & malformed


@pytest.mark.parametrize("mask", ["random", "left", "ones"])
@pytest.mark.parametrize("size", POINTS, ids=str)
def test_onnx_runtime_agrees_with_torch(
    session: onnxruntime.InferenceSession, size: tuple[int, int, int], mask: str
) -> None:
    spec, _ = made()
    assert spec.tolerance is not None
    feed = spec.sample(dict(zip(("batch", "seq", "past"), size, strict=True)), seed=1)
    if mask != "random":
        ones = np.ones_like(feed["attention_mask"])
        feed["attention_mask"] = left_padded(ones) if mask == "left" else ones
        feed["position_ids"] = positions(feed["attention_mask"], size[1])
    want = reference(feed)
    got = dict(zip(want, session.run(list(want), feed), strict=True))
    for result in judge(TORCH, "model", want, got, spec.tolerance):
        assert result.passed, result.text


def test_sizes_beyond_the_cache_are_refused() -> None:
    spec, _ = made()
    feed = spec.sample({"batch": 1, "seq": 3, "past": 126}, seed=0)
    with pytest.raises(InputError, match=r"past \+ seq <= 128"):
        spec.sizes_of({name: value.shape for name, value in feed.items()})


# properties of a language model that do not need torch


def test_no_token_sees_a_later_one(session: onnxruntime.InferenceSession) -> None:
    spec, _ = made()
    for size in ({"batch": 2, "seq": 2, "past": 0}, CHUNK, {"batch": 1, "seq": 128, "past": 0}):
        feed = spec.sample(size, seed=2)
        feed["attention_mask"] = np.ones_like(feed["attention_mask"])
        (before,) = session.run(["logits"], feed)
        at = size["seq"] - 1
        feed["input_ids"][:, at] = (feed["input_ids"][:, at] + 1) % 1000
        (after,) = session.run(["logits"], feed)
        np.testing.assert_allclose(after[:, :at], before[:, :at], atol=1e-5)
        assert np.abs(after[:, at] - before[:, at]).max() > 0.1
        if at:  # every token sees the token before it
            feed["input_ids"][:, at - 1] = (feed["input_ids"][:, at - 1] + 1) % 1000
            (last,) = session.run(["logits"], feed)
            assert np.abs(last[:, at] - after[:, at]).max() > 0.01


def test_chunks_give_what_the_whole_prompt_gives(session: onnxruntime.InferenceSession) -> None:
    spec, _ = made()
    whole = spec.sample({"batch": 3, "seq": 40, "past": 0}, seed=3)
    whole["attention_mask"] = left_padded(np.ones_like(whole["attention_mask"]))
    whole["position_ids"] = positions(whole["attention_mask"], 40)
    want = session.run(None, whole)
    cache = {name: value for name, value in whole.items() if name.startswith("past")}
    logits = []
    for start, end in ((0, 1), (1, 14), (14, 15), (15, 40)):
        names = [output.name for output in session.get_outputs()]
        out = dict(
            zip(
                names,
                session.run(
                    names,
                    {
                        "input_ids": whole["input_ids"][:, start:end],
                        "attention_mask": whole["attention_mask"][:, :end],
                        "position_ids": whole["position_ids"][:, start:end],
                        **cache,
                    },
                ),
                strict=True,
            )
        )
        cache = {name: out[name.replace("past", "present")] for name in cache}
        logits.append(out["logits"])
    np.testing.assert_allclose(np.concatenate(logits, 1), want[0], atol=5e-5)
    for got, value in zip(cache.values(), want[1:], strict=True):
        np.testing.assert_allclose(got, value, atol=5e-5)


def test_left_padding_changes_nothing(session: onnxruntime.InferenceSession) -> None:
    spec, _ = made()
    alone = spec.sample({"batch": 1, "seq": 9, "past": 0}, seed=4)
    alone["attention_mask"] = np.ones_like(alone["attention_mask"])
    alone["position_ids"] = positions(alone["attention_mask"], 9)
    (want,) = session.run(["logits"], alone)
    for pads in (1, 5, 119):
        padded = spec.sample({"batch": 1, "seq": 9 + pads, "past": 0}, seed=5)
        padded["input_ids"][:, pads:] = alone["input_ids"]
        padded["attention_mask"][:, :pads], padded["attention_mask"][:, pads:] = 0, 1
        padded["position_ids"] = positions(padded["attention_mask"], 9 + pads)
        (got,) = session.run(["logits"], padded)
        np.testing.assert_allclose(got[:, pads:], want, atol=5e-5)


# generation


@pytest.mark.parametrize("case", PROMPTS)
def test_generation_equals_transformers(session: onnxruntime.InferenceSession, case: str) -> None:
    want = transformers_tokens(case)
    assert all(len(set(row)) > 5 for row in want.tolist())  # the tokens are not all the same
    np.testing.assert_array_equal(onnx_tokens(session, case), want)


@pytest.mark.parametrize("fault", [{"late": 1}, {"lag": 1}], ids=str)
def test_generation_notices_a_fault_in_the_loop(
    session: onnxruntime.InferenceSession, fault: dict[str, int]
) -> None:
    case = next(iter(PROMPTS))
    assert (onnx_tokens(session, case, **fault) != transformers_tokens(case)).any(1).all()


def test_sizes_that_do_not_fit_are_refused() -> None:
    for bad, words in (
        ({"hidden": 100}, r"hidden=100 is not a multiple of 2 \* heads=4"),
        ({"kv_heads": 3}, "heads=4 is not a multiple of kv_heads=3"),
        ({"layers": 0}, "layers=0 must be a whole number, at least 1"),
        ({"max_length": 1}, "max_length=1 must be a whole number, at least 2"),
        ({"vocab": True}, "vocab=True must be a whole number"),
    ):
        with pytest.raises(InputError, match=words):
            llama(**bad)  # type: ignore[arg-type]


def test_masks_are_added_but_for_8_6(artifact: Artifact) -> None:
    """8.6 mixes up the masks of the batch's rows; see select_additive_mask."""
    for name, count in (("tensorrt-8.6", 0), ("rtx-1.7", 2), ("tensorrt-10", 2)):
        target = TARGETS[name]
        model = onnx.load(artifact.exported)
        after = apply_passes(model, [p for p in DEFAULT_PASSES if p.needed_by(target)])
        made = {o: node for node in after.graph.node for o in node.output}
        masks = [
            node
            for node in after.graph.node
            if node.op_type == "Add"
            and any(i in made and made[i].op_type == "Where" for i in node.input)
        ]
        assert len(masks) == count, name
