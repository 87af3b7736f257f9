"""CorrelationLookup as an ONNX function: the reference that ONNX Runtime runs.

A Loop runs over the rows of the first feature map. Per row and level, it gathers the features of
the second map at the (2 * radius + 2) ** 2 whole positions around each window's centre. A MatMul
multiplies them by the row's features, and the products are blended. Only one row's windows are in
memory at a time: W * 100 * C floats, 49 MB at 2160x3840. The all-pairs volume takes 67 GB.
"""

from __future__ import annotations

import onnx
from onnx import parser

from pipeline.plugins.base import DOMAIN

NAME = "CorrelationLookup"
LEVELS = 4  # RAFT's number of levels; an ONNX function has a fixed number of inputs

# Only ops whose form is the same at opsets 17 to 19, axes from constants, shapes by Concat.
# Positions outside the map, NaN included, read position 0 and are masked afterwards.
_BEFORE = """
  one = Constant <value = int64 {1}> ()
  zero = Constant <value = int64 {0}> ()
  true = Constant <value = bool {1}> ()
  axis_0 = Constant <value = int64[1] {0}> ()
  axis_1 = Constant <value = int64[1] {1}> ()
  axis_2 = Constant <value = int64[1] {2}> ()
  axis_3 = Constant <value = int64[1] {3}> ()
  last = Constant <value = int64[1] {-1}> ()
  most = Constant <value = int64[1] {9223372036854775807}> ()
  rest = Constant <value = int64[1] {-1}> ()
  keep_2 = Constant <value = int64[2] {0, 0}> ()
  keep_2_rest = Constant <value = int64[3] {0, 0, -1}> ()
  zero_f = Constant <value = float {0.0}> ()
  one_f = Constant <value = float {1.0}> ()
  half = Constant <value = float {0.5}> ()
  radius = Constant <value_int: int = @radius> ()
  two = Constant <value = int64 {2}> ()
  first_step = Neg (radius)
  after_step = Add (radius, two)
  steps_i = Range (first_step, after_step, one)
  steps = Cast <to = 1> (steps_i)
  count = Sub (after_step, first_step)
  count_v = Unsqueeze (count, axis_0)
  window_shape = Concat <axis = 0> (keep_2, count_v, count_v)
  sizes = Shape (features)
  batch = Gather <axis = 0> (sizes, zero)
  height = Gather <axis = 0> (sizes, one)
  three = Constant <value = int64 {3}> ()
  width = Gather <axis = 0> (sizes, two)
  channels = Gather <axis = 0> (sizes, three)
  channels_v = Unsqueeze (channels, axis_0)
  flat_shape = Concat <axis = 0> (rest, channels_v)
  channels_f = Cast <to = 1> (channels)
  root = Sqrt (channels_f)
  images = Range (zero, batch, one)
"""
# Restores the sizes: shape inference does not know how often a Loop runs.
_AFTER = """
  windows_f = Transpose <perm = [1, 2, 0, 3]> (rows)
  side = Sub (count, one)
  points_of_level = Mul (side, side)
  number_of_levels = Constant <value = int64 {LEVELS}> ()
  points = Mul (points_of_level, number_of_levels)
  points_v = Unsqueeze (points, axis_0)
  batch_v = Unsqueeze (batch, axis_0)
  height_v = Unsqueeze (height, axis_0)
  width_v = Unsqueeze (width, axis_0)
  windows_shape = Concat <axis = 0> (batch_v, points_v, height_v, width_v)
  windows_r = Reshape (windows_f, windows_shape)
  windows = CastLike (windows_r, features)
""".replace("LEVELS", str(LEVELS))
_BEFORE_LEVEL = """
  flat_N = Reshape (level_N, flat_shape)
  sizes_N = Shape (level_N)
  height_N = Gather <axis = 0> (sizes_N, one)
  width_N = Gather <axis = 0> (sizes_N, two)
  area_N = Mul (height_N, width_N)
  start_N = Mul (images, area_N)
  starts_a_N = Unsqueeze (start_N, axis_1)
  starts_b_N = Unsqueeze (starts_a_N, axis_2)
  starts_N = Unsqueeze (starts_b_N, axis_3)
  height_f_N = Cast <to = 1> (height_N)
  width_f_N = Cast <to = 1> (width_N)
  right_N = Sub (width_f_N, one_f)
  bottom_N = Sub (height_f_N, one_f)
"""
_ROW = """
  on_out = Identity (on)
  row_any = Gather <axis = 1> (features, row)
  row_f = Cast <to = 1> (row_any)
  row_c = Unsqueeze (row_f, axis_3)
  centre = Gather <axis = 2> (coordinates, row)
  x_0 = Gather <axis = 1> (centre, zero)
  y_0 = Gather <axis = 1> (centre, one)
"""
_ROW_LEVEL = """
  x_w_N = Floor (x_N)
  y_w_N = Floor (y_N)
  x_part_N = Sub (x_N, x_w_N)
  y_part_N = Sub (y_N, y_w_N)
  x_a_N = Unsqueeze (x_part_N, axis_2)
  x_blend_N = Unsqueeze (x_a_N, axis_3)
  y_a_N = Unsqueeze (y_part_N, axis_2)
  y_blend_N = Unsqueeze (y_a_N, axis_3)
  x_c_N = Unsqueeze (x_w_N, axis_2)
  y_c_N = Unsqueeze (y_w_N, axis_2)
  xs_N = Add (x_c_N, steps)
  ys_N = Add (y_c_N, steps)
  x_from_N = GreaterOrEqual (xs_N, zero_f)
  x_to_N = LessOrEqual (xs_N, right_N)
  x_in_N = And (x_from_N, x_to_N)
  y_from_N = GreaterOrEqual (ys_N, zero_f)
  y_to_N = LessOrEqual (ys_N, bottom_N)
  y_in_N = And (y_from_N, y_to_N)
  x_safe_N = Where (x_in_N, xs_N, zero_f)
  y_safe_N = Where (y_in_N, ys_N, zero_f)
  column_N = Cast <to = 7> (x_safe_N)
  line_N = Cast <to = 7> (y_safe_N)
  offset_N = Mul (line_N, width_N)
  column_u_N = Unsqueeze (column_N, axis_3)
  offset_u_N = Unsqueeze (offset_N, axis_2)
  place_N = Add (column_u_N, offset_u_N)
  index_w_N = Add (place_N, starts_N)
  index_N = Reshape (index_w_N, keep_2_rest)
  near_any_N = Gather <axis = 0> (flat_N, index_N)
  near_N = Cast <to = 1> (near_any_N)
  product_N = MatMul (near_N, row_c)
  scaled_N = Div (product_N, root)
  window_N = Reshape (scaled_N, window_shape)
  x_in_u_N = Unsqueeze (x_in_N, axis_3)
  y_in_u_N = Unsqueeze (y_in_N, axis_2)
  inside_N = And (x_in_u_N, y_in_u_N)
  dots_N = Where (inside_N, window_N, zero_f)
  dots_left_N = Slice (dots_N, axis_0, last, axis_2)
  dots_right_N = Slice (dots_N, axis_1, most, axis_2)
  x_slope_N = Sub (dots_right_N, dots_left_N)
  x_rise_N = Mul (x_slope_N, x_blend_N)
  lines_N = Add (dots_left_N, x_rise_N)
  lines_above_N = Slice (lines_N, axis_0, last, axis_3)
  lines_below_N = Slice (lines_N, axis_1, most, axis_3)
  y_slope_N = Sub (lines_below_N, lines_above_N)
  y_rise_N = Mul (y_slope_N, y_blend_N)
  points_N = Add (lines_above_N, y_rise_N)
  found_N = Reshape (points_N, keep_2_rest)
"""


def function(opset: int = 18) -> onnx.FunctionProto:
    """The ONNX function ``CorrelationLookup``, with standard ops of opset 17.

    Inputs: features [N, H, W, C], level_0 to level_3 [N, h, w, C], float32 or float16, and
    coordinates [N, 2, H, W], float32. Attribute: radius. Output: [N, 4 * (2 * radius + 1) ** 2,
    H, W], with the dtype of the features. See `torch_op.correlation_lookup`.
    """
    before, row = _BEFORE, _ROW
    for number in range(LEVELS):
        before += _level(_BEFORE_LEVEL, number)
        if number:
            row += _level("  x_N = Mul (x_P, half)\n  y_N = Mul (y_P, half)\n", number)
        row += _level(_ROW_LEVEL, number)
    found = ", ".join(f"found_{number}" for number in range(LEVELS))
    levels = ", ".join(f"level_{number}" for number in range(LEVELS))
    return parser.parse_function(
        f"""<domain: "{DOMAIN}", opset_import: ["" : {opset}]>
{NAME} <radius> (features, {levels}, coordinates) => (windows)
{{{before}
  rows = Loop (height, true) <body = one_row (int64 row, bool on)
    => (bool on_out, float[n, k, w] windows_of_row) {{{row}
  found = Concat <axis = 2> ({found})
  windows_of_row = Transpose <perm = [0, 2, 1]> (found)
  }}>{_AFTER}}}"""
    )


def schema() -> onnx.defs.OpSchema:
    """The op's signature, which onnxscript needs to write the node. Not registered with onnx."""
    parameter = onnx.defs.OpSchema.FormalParameter
    inputs = [parameter("features", "T"), *(parameter(f"level_{n}", "T") for n in range(LEVELS))]
    return onnx.defs.OpSchema(
        NAME,
        DOMAIN,
        1,
        doc=function.__doc__ or "",
        inputs=[*inputs, parameter("coordinates", "tensor(float)")],
        outputs=[parameter("windows", "T")],
        type_constraints=[("T", ["tensor(float)", "tensor(float16)"], "")],
        attributes=[onnx.defs.OpSchema.Attribute("radius", onnx.defs.OpSchema.AttrType.INT, "")],
    )


def _level(text: str, number: int) -> str:
    """The text for one level: ``_N`` becomes its number, ``_P`` the number before."""
    return text.replace("_N", f"_{number}").replace("_P", f"_{number - 1}")
