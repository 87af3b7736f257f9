"""An input that is also an output of the network, on the installed TensorRT-RTX."""

from __future__ import annotations

import pytest
from pass_harness import PASSES, apply, own

from pipeline.build.try_graph import attempt
from pipeline.machine.child import Child
from pipeline.machine.target import TARGETS, installed_version

RTX = TARGETS["rtx-1.7"]


@pytest.mark.skipif(installed_version(RTX) is None, reason="tensorrt-rtx is not installed")
def test_tensorrt_rtx_renames_the_input() -> None:
    (case,) = own("refuse_passed_through", "refusal")
    with Child() as child:
        outcome = attempt(child, case.model(), [case.feeds(s) for s in case.shapes], RTX)
    assert outcome.verdict == "build"
    assert outcome.detail == "the network has no input x, but has __x"


def test_the_output_is_named_with_what_to_do() -> None:
    (case,) = own("refuse_passed_through", "refusal")
    (refused,) = apply(PASSES["refuse_passed_through"], case.model())[1].refused
    assert refused.detail.startswith("the network's input x is also an output")
    assert "x.clone()" in refused.detail


def test_an_input_that_nothing_else_reads_is_refused_too() -> None:
    (case,) = own("refuse_passed_through", "refusal")
    model = case.model()
    del model.graph.node[:]
    del model.graph.output[0]
    (refused,) = apply(PASSES["refuse_passed_through"], model)[1].refused
    assert (refused.op, refused.node) == ("output", "x")
