"""The text of a recipe: what it means, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import InputError
from pipeline.spec.recipe import Recipe, all_but, matches, parse_recipe, read_recipe

TEXT = """
# everything in half precision, but for one module
* = fp16

encoder.norm = fp32
encoder.norm/Mul = fp16
"""


def test_the_last_line_that_matches_decides() -> None:
    recipe = parse_recipe(TEXT, "recipe")
    assert recipe.precision == "fp16" and recipe.islands == ("encoder.norm",)
    assert recipe.decide(["encoder.conv"]) == ("*", "fp16")
    assert recipe.decide(["encoder.norm", "encoder.norm/Pow"]) == ("encoder.norm", "fp32")
    assert recipe.decide(["encoder.norm", "encoder.norm/Mul"]) == ("encoder.norm/Mul", "fp16")
    assert parse_recipe("head = bf16", "recipe").decide(["encoder"]) is None


def test_its_text_is_read_again() -> None:
    recipe = all_but("bf16", ["a.b", "model.py:12", "/x = y/Add"])
    text = recipe.text({"*": "first\nsecond", "a.b": "module a.b at model.py:3"})
    assert text.startswith("# first\n# second\n* = bf16\n# module a.b at model.py:3\na.b = fp32\n")
    assert parse_recipe(text, "recipe") == recipe


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.bc", False),
        ("a.b", "aXb", False),
        ("blocks.*.norm", "blocks.11.norm", True),
        ("*norm*", "blocks.11.norm1/Pow", True),
        ("node[0]", "node[0]", True),
        ("*[0]", "node[0]", True),
    ],
)
def test_a_star_stands_for_any_text(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, [name]) is expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("* = fp16\nnorm", "line 2: 'norm' has no pattern"),
        ("= fp16", "line 1: '= fp16' has no pattern"),
        ("* = half", "line 1: unknown precision 'half'; known: fp32, fp16, bf16"),
        ("* = tf32", "unknown precision 'tf32'"),
        ("* = fp32", "names no half precision"),
        ("", "names no half precision"),
        ("* = fp16\nnorm = bf16", "mixes fp16 and bf16"),
    ],
)
def test_what_is_no_recipe_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=r"^recipe") as caught:
        parse_recipe(text, "recipe")
    assert message in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"recipe .*: can't be read: No such file"):
        read_recipe(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"can't be read: not UTF-8"):
        read_recipe(tmp_path / "bytes")
    (tmp_path / "good").write_text("* = fp16\n")
    assert read_recipe(tmp_path / "good") == Recipe((("*", "fp16"),))
