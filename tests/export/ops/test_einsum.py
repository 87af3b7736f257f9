"""einsum of two tensors is a matrix product, and the rest stays Einsum."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from op_exports import compare_op, export_op

PRODUCTS = [
    "bhid,bhjd->bhij",  # scores
    "bhij,bhjd->bhid",
    "bihd,bjhd->bhij",  # with the sequence first
    "bhij,bjhd->bihd",
    "bth,hk->btk",
    "th,bkh->btk",
    "bij,bjk",
    "bi,bi->b",
    "bi,i->b",
    "i,i->",
    "bchw,bdhw->bcd",  # two sums, as in a Gram matrix
    "bchw,bcHw->bhH",
    "cij,bcj->ibc",
    "bxy,bcxy->cb",
    "...ij,...jk->...ik",
    "...ij,jk->...ik",
    "ij,kj->ki",
    "ij,jk->...ik",
]
OUTER = ["bi,bj->bij", "bcij,c->bcij", "i,j->ji", "bhw,bchw->cbwh", "b,b->b", "i,->i"]
OTHERS = [
    "bij,bjk,bkl->bil",
    "bhid,bhjd->bh",  # sums of one tensor
    "bii,bij->bj",
    "bi->b",
    "bij,kjl->bikl",  # the sizes of both would have to be multiplied
]
LABELS = dict(zip("bhijkdtcwHxyl", range(2, 15), strict=True))


def ops(equation: str, folder: Path, fixed: str = "") -> Counter[str]:
    """The ops of the equation's graph, which is compared with torch at two sets of sizes."""
    terms = equation.split("->", maxsplit=1)[0].split(",")
    terms = [term.replace("...", "bh") for term in terms]
    generator = torch.Generator().manual_seed(0)

    def tensors(more: int) -> list[torch.Tensor]:
        return [
            torch.randn([LABELS[n] + (0 if n in fixed else more) for n in term],
                        generator=generator)
            for term in terms
        ]  # fmt: skip

    def function(*args: torch.Tensor) -> torch.Tensor:
        return torch.einsum(equation, *args)

    dynamic = [[k for k, n in enumerate(term) if n not in fixed] for term in terms]
    model = export_op(function, tensors(0), folder / "m.onnx", dynamic)
    compare_op(function, folder / "m.onnx", tensors(0), near=1e-5)
    compare_op(function, folder / "m.onnx", tensors(3), near=1e-5)
    return Counter(node.op_type for node in model.graph.node)


@pytest.mark.parametrize("equation", PRODUCTS)
def test_a_product_of_two(equation: str, tmp_path: Path) -> None:
    found = ops(equation, tmp_path)
    assert found["MatMul"] == 1 and not found["Einsum"]


@pytest.mark.parametrize("equation", OUTER)
def test_a_product_without_a_sum(equation: str, tmp_path: Path) -> None:
    found = ops(equation, tmp_path)
    assert found["Mul"] == 1 and not found["Einsum"] + found["MatMul"]


@pytest.mark.parametrize(
    ("equation", "fixed"), [("bth,hcd->btcd", "cd"), ("bijk,jkcd->bicd", "jkcd")]
)
def test_weights_with_several_axes(equation: str, fixed: str, tmp_path: Path) -> None:
    found = ops(equation, tmp_path, fixed)
    assert found["MatMul"] == 1 and not found["Einsum"]


@pytest.mark.parametrize("equation", OTHERS)
def test_what_stays(equation: str, tmp_path: Path) -> None:
    assert ops(equation, tmp_path)["Einsum"] == 1


def test_an_axis_of_size_1_is_repeated(tmp_path: Path) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bij,bjk->bik", x, y)

    args = [torch.randn(3, 4, 5), torch.randn(1, 5, 6)]
    model = export_op(function, args, tmp_path / "m.onnx", [[1], [2]])
    assert "Einsum" in {node.op_type for node in model.graph.node}
    compare_op(function, tmp_path / "m.onnx", args, near=1e-5)


def test_integers_stay(tmp_path: Path) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,bi->b", x, x)

    x = torch.arange(12, dtype=torch.int32).reshape(3, 4)
    model = export_op(function, [x], tmp_path / "m.onnx")
    assert "Einsum" in {node.op_type for node in model.graph.node}
