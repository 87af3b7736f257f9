"""The user's values of an input at their own and at other sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeline.errors import InputError
from pipeline.spec.dims import Dim
from pipeline.spec.model import Input
from pipeline.spec.values import Values

B, T = Dim("b", 1, 2, 8), Dim("t", 1, 8, 64)


def given(array: Any, shape: tuple[Any, ...]) -> Input:
    array = np.asarray(array)
    return Input("x", shape, array.dtype.name, 0, 9, values=Values.of(array))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "uint8", "bool"])
def test_at_their_own_and_at_smaller_sizes_they_are_the_users(dtype: str) -> None:
    array = (np.arange(2 * 3 * 5).reshape(2, 3, 5) % 7).astype(dtype)
    one = given(array, (B, 3, T))
    same = one.sample({"b": 2, "t": 5}, 0)
    assert same.dtype == array.dtype and np.array_equal(same, array)
    assert np.array_equal(one.sample({"b": 1, "t": 4}, 0), array[:1, :, :4])


def test_floats_are_repeated_and_each_copy_is_scaled() -> None:
    one = given(np.array([[1.0, 2.0, 4.0]], np.float32), (B, T))
    got = one.sample({"b": 3, "t": 7}, 0)
    assert got.dtype == np.float32 and got.shape == (3, 7)
    for row in range(3):
        for start in (0, 3, 6):
            part = got[row, start : start + 3]
            factor = part[0] / 1.0
            assert part == pytest.approx(factor * np.array([1, 2, 4])[: part.size])
            assert (factor == 1) if (row, start) == (0, 0) else (0.5 <= factor < 1)
    firsts = {float(got[row, start]) for row in range(3) for start in (0, 3, 6)}
    assert len(firsts) == 9  # no two copies are equal


def test_integers_are_shifted_so_that_rows_differ_and_only_the_users_values_occur() -> None:
    one = given(np.array([[5, 6, 9]]), (B, T))
    got = one.sample({"b": 3, "t": 3}, 0)
    assert got.tolist() == [[5, 6, 9], [6, 9, 5], [9, 5, 6]]
    assert set(one.sample({"b": 8, "t": 50}, 0).ravel().tolist()) == {5, 6, 9}
    # after a crop, a row has the elements of the cropped first row: a mask keeps its True
    mask = given(np.array([[True, False, False]]), (B, T))
    assert mask.sample({"b": 8, "t": 2}, 0).any(axis=1).all()


def test_fixed_axes_are_never_mixed() -> None:
    table = np.arange(4)[None] * 10  # one kind of number a column
    got = given(table, (B, 4)).sample({"b": 5}, 0)
    assert np.array_equal(got, np.repeat(table, 5, axis=0))


def test_other_seeds_give_other_values() -> None:
    for array in (np.array([[1.5, 2.5]], np.float32), np.array([[1, 2]])):
        one = given(array, (B, T))
        sizes = {"b": 1, "t": 2}
        assert not np.array_equal(one.sample(sizes, 1), one.sample(sizes, 0))


def test_a_scalar_and_an_expression() -> None:
    assert given(np.float32(3.0), ()).sample({}, 0) == 3.0
    got = given(np.arange(4), (2 * T,)).sample({"t": 4}, 0)
    assert got.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("array", "shape", "words"),
    [
        (np.zeros((2, 3), "f"), (B, T, 1), "has 3 axes, but its values have 2"),
        (np.zeros((2, 3), "f"), (B, 4), "axis 1: its values have size 3, not 4"),
        (np.zeros((1, 0), "f"), (B, T), "axis 1: its values have no element"),
    ],
)
def test_values_that_do_not_fit(array: Any, shape: tuple[Any, ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        given(array, shape)


def test_the_dtype_has_to_be_the_inputs() -> None:
    with pytest.raises(InputError, match=r"x is float32, but its values are float64.*x:SHAPE:fl"):
        Input("x", (B,), values=Values.of(np.zeros(2)))


def test_the_hash_is_of_dtype_shape_and_content() -> None:
    base = np.array([[1, 2]])
    others = [base.T, base.astype("int32"), base + 1]
    assert len({Values.of(a).sha256 for a in (base, *others)}) == 4
    assert Values.of(base) == Values.of(base.copy())


def test_values_without_their_file_are_not_replaced_by_random_ones() -> None:
    known = Values.of(np.zeros(2, "f"))
    bare = Input("x", (T,), values=Values(known.sha256, known.shape))
    with pytest.raises(InputError, match=r"inputs\.npz"):
        bare.sample({"t": 2}, 0)
