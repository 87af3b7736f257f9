"""The forms of texts that describe inputs, dims and ranges, for help and errors.

The help of the command line needs them, so this file imports nothing.
"""

INPUT_FORM = (
    "NAME:SIZExSIZE...[:DTYPE[:LOW..HIGH]], e.g. image:1x3x{h}x{w}, ids:{b}x{s}:int64:0..1000 or "
    "lengths:{b}:int64:1..s. For a mask, write prefix, padding, causal or all in place of "
    "LOW..HIGH. "
    "For many parts of one shape: past[0..27][0..1]:{b}x2x{past}x64"
)
DIM_FORM = (
    "NAME=MIN:OPT:MAX[/MULTIPLE[+OFFSET]], e.g. h=135:440:2160/8. NAME=:MAX is enough. For an "
    "ONNX file also NAME=EXPRESSION of other dims, e.g. t=past+seq"
)
RANGE_FORM = "LOW..HIGH, or prefix, padding, causal or all"
BOOL_FORM = "for a bool: 1..2 (all true), 0..0 (all false) or 0..1 (both)"
