"""The nets that the engine's tests use."""

from __future__ import annotations

import numpy as np
from gpu_engines import BOOL, FLOAT, INT64, Net, node
from onnx import helper

RNG = np.random.default_rng(0)
WIDE = 65536  # elements of a row that is large


def _random(*shape: int) -> np.ndarray:
    return RNG.uniform(-1, 1, shape).astype(np.float32)


# a convolution, an instance norm (in parts: 8.6 has a plugin for it only), a resize
PICTURE = Net(
    nodes=[
        node("Conv", "x weight bias", "c", pads=[1, 1, 1, 1], kernel_shape=[3, 3]),
        node("ReduceMean", "c", "mean", axes=[2, 3], keepdims=1),
        node("Sub", "c mean", "centred"),
        node("Mul", "centred centred", "square"),
        node("ReduceMean", "square", "variance", axes=[2, 3], keepdims=1),
        node("Add", "variance epsilon", "lifted"),
        node("Sqrt", "lifted", "deviation"),
        node("Div", "centred deviation", "normal"),
        node("Resize", "normal - scales", "y", mode="nearest", nearest_mode="floor",
             coordinate_transformation_mode="asymmetric"),
        node("ReduceMean", "y", "z", axes=[2, 3], keepdims=0),
        node("ReduceMax", "y", "top", keepdims=0),
    ],
    inputs={"x": (FLOAT, (1, 3, "h", "w"))},
    outputs={"y": (FLOAT, (1, 4, "2*h", "2*w")), "z": (FLOAT, (1, 4)), "top": (FLOAT, ())},
    dims={"h": (4, 24, 96), "w": (4, 32, 96)},
    constants={
        "weight": _random(4, 3, 3, 3),
        "bias": _random(4),
        "epsilon": np.array(1e-3, np.float32),
        "scales": np.array([1, 1, 2, 2], np.float32),
    },
)  # fmt: skip

TWO_PROFILES = Net(
    nodes=[node("MatMul", "x weight", "m"), node("Relu", "m", "y")],
    inputs={"x": (FLOAT, ("b", "s", 8))},
    outputs={"y": (FLOAT, ("b", "s", 8))},
    dims={"b": (1, 4, 16), "s": (1, 32, 128)},
    constants={"weight": _random(8, 8)},
    profiles={
        "all": {},
        "decode": {"b": (1, 4, 16), "s": (1, 1, 1)},
        "one": {"b": (1, 1, 1), "s": (1, 100, 128)},
    },
)

# int64 and bool in, int64 out
IDS = Net(
    nodes=[
        node("Gather", "table ids", "rows", axis=0),
        node("Unsqueeze", "mask last", "wide"),
        node("Where", "wide rows zero", "y"),
        node("Add", "ids one", "next"),
    ],
    inputs={"ids": (INT64, ("b", "s")), "mask": (BOOL, ("b", "s"))},
    outputs={"y": (FLOAT, ("b", "s", 8)), "next": (INT64, ("b", "s"))},
    dims={"b": (1, 2, 4), "s": (1, 8, 64)},
    constants={
        "table": _random(50, 8),
        "last": np.array([2], np.int64),
        "zero": np.array(0, np.float32),
        "one": np.array(1, np.int64),
    },
)

# the output's size depends on the data
FOUND = Net(
    nodes=[node("Relu", "x", "r"), node("NonZero", "r", "places")],
    inputs={"x": (FLOAT, ("n",))},
    outputs={"places": (INT64, (1, "found"))},
    dims={"n": (1, 100, 5000)},
)

# an input and an output may have no elements
CACHE = Net(
    nodes=[node("Concat", "past new", "present", axis=1), node("Relu", "past", "kept")],
    inputs={"past": (FLOAT, (2, "past_len", 8)), "new": (FLOAT, (2, "s", 8))},
    outputs={"present": (FLOAT, (2, "past_len + s", 8)), "kept": (FLOAT, (2, "past_len", 8))},
    dims={"past_len": (0, 8, 32), "s": (1, 1, 32)},
    rules=("past_len + s <= 40",),
)

# a large output, and almost no activation memory
LARGE_OUTPUT = Net(
    nodes=[node("Mul", "x row", "y")],
    inputs={"x": (FLOAT, ("n", 1))},
    outputs={"y": (FLOAT, ("n", WIDE))},
    dims={"n": (1, 64, 8000)},
    constants={"row": _random(1, WIDE)},
)

# large activation memory, and a small output
LARGE_INSIDE = Net(
    nodes=[node("Mul", "x row", "wide"), node("MatMul", "wide column", "y")],
    inputs={"x": (FLOAT, ("n", 1))},
    outputs={"y": (FLOAT, ("n", 16))},
    dims={"n": (1, 64, 8000)},
    constants={"row": _random(1, WIDE), "column": _random(WIDE, 16) / WIDE},
)

# doubles x until its sum reaches 100: the number of rounds depends on the data
_BODY = helper.make_graph(
    [
        node("Add", "value value", "doubled"),
        node("ReduceSum", "doubled", "total", keepdims=0),
        node("Less", "total limit", "again"),
    ],
    "body",
    [
        helper.make_tensor_value_info("turn", INT64, []),
        helper.make_tensor_value_info("go", BOOL, []),
        helper.make_tensor_value_info("value", FLOAT, [4]),
    ],
    [
        helper.make_tensor_value_info("again", BOOL, []),
        helper.make_tensor_value_info("doubled", FLOAT, [4]),
    ],
)
LOOP = Net(
    nodes=[
        node("ReduceSum", "x", "sum", keepdims=0),
        node("Less", "sum limit", "first"),
        helper.make_node("Loop", ["", "first", "x"], ["y"], body=_BODY),
    ],
    inputs={"x": (FLOAT, (4,))},
    outputs={"y": (FLOAT, (4,))},
    constants={"limit": np.array(100, np.float32)},
    low=1,  # otherwise it never ends
)

# TensorRT reads `shape` on the host
EXPANDED = Net(
    nodes=[node("Expand", "x shape", "y")],
    inputs={"x": (FLOAT, (1, 3)), "shape": (INT64, (2,))},
    outputs={"y": (FLOAT, ("rows", 3))},
    values={"shape": ([1, 3], [4, 3], [50, 3])},
)

FIXED = Net(
    nodes=[node("Relu", "x", "y")],
    inputs={"x": (FLOAT, (2, 3))},
    outputs={"y": (FLOAT, (2, 3))},
)

# the inputs and outputs of the README's example
LIKE_RAFT = Net(
    nodes=[
        node("Sub", "image2 image1", "difference"),
        node("Slice", "difference starts ends axes", "flow"),
    ],
    inputs={"image1": (FLOAT, (1, 3, "h", "w")), "image2": (FLOAT, (1, 3, "h", "w"))},
    outputs={"flow": (FLOAT, (1, 2, "h", "w"))},
    dims={"h": (135, 440, 540), "w": (135, 1024, 1100)},
    constants={
        "starts": np.array([0], np.int64),
        "ends": np.array([2], np.int64),
        "axes": np.array([1], np.int64),
    },
)
