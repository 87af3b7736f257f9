"""Small graphs for every pass: ones to rewrite, near misses to leave alone, ones to refuse.

`pipeline passes --still-needed` and the contract test run them. One file a pass. What a target
that needs a GPU made of them is in `MEASURED`, by the target's name and the case's.
"""

from __future__ import annotations

from pipeline.passes.case import Case
from pipeline.passes.cases import (
    add_loop_condition,
    decompose_affine_grid,
    decompose_instance_norm,
    decompose_mod,
    expand_bitwise,
    expand_col2im,
    expand_deform_conv,
    expand_dft,
    expand_functions,
    expand_hardmax,
    expand_one_hot,
    expand_resize,
    expand_scatter,
    fold_constants,
    fold_if,
    fuse_layer_norm,
    fuse_pixel_shuffle,
    inline_functions,
    lower_opset,
    merge_duplicates,
    pad_ceil_pools,
    pad_output_shape,
    refuse_passed_through,
    refuse_unsupported,
    relabel_einsum,
    repeat_casts,
    replace_cast_like,
    replace_compress,
    replace_mask_product,
    replace_nonzero,
    scale_resize,
    select_additive_mask,
    slice_shape,
    spread_deconv,
    widen_mean_square,
)
from pipeline.passes.cases.measured import MEASURED

__all__ = ["CASES", "MEASURED"]

CASES: tuple[Case, ...] = (
    *inline_functions.CASES,
    *replace_cast_like.CASES,
    *fold_constants.CASES,
    *fold_if.CASES,
    *scale_resize.CASES,
    *decompose_mod.CASES,
    *expand_one_hot.CASES,
    *decompose_instance_norm.CASES,
    *expand_scatter.CASES,
    *merge_duplicates.CASES,
    *expand_col2im.CASES,
    *expand_dft.CASES,
    *expand_deform_conv.CASES,
    *expand_bitwise.CASES,
    *expand_hardmax.CASES,
    *slice_shape.CASES,
    *refuse_unsupported.CASES,
    *expand_resize.CASES,
    *expand_functions.CASES,
    *lower_opset.CASES,
    *fuse_layer_norm.CASES,
    *replace_compress.CASES,
    *replace_mask_product.CASES,
    *replace_nonzero.CASES,
    *widen_mean_square.CASES,
    *fuse_pixel_shuffle.CASES,
    *decompose_affine_grid.CASES,
    *pad_ceil_pools.CASES,
    *add_loop_condition.CASES,
    *refuse_passed_through.CASES,
    *pad_output_shape.CASES,
    *relabel_einsum.CASES,
    *spread_deconv.CASES,
    *repeat_casts.CASES,
    *select_additive_mask.CASES,
)
