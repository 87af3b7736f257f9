"""The rewrite passes, in the order in which they run.

No pass is registered anywhere else. A pass runs only if the target needs it
(`pipeline.passes.infra.Pass.needed_by`).
"""

from __future__ import annotations

from pipeline.machine.target import Versions
from pipeline.passes import (
    add_loop_condition,
    decompose_affine_grid,
    decompose_instance_norm,
    decompose_mod,
    dequantize_constants,
    expand_bitwise,
    expand_col2im,
    expand_deform_conv,
    expand_dft,
    expand_elu,
    expand_functions,
    expand_hardmax,
    expand_integer_ops,
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
    shape_attention,
    slice_shape,
    spread_deconv,
    squeeze_pooled,
    widen_mean_square,
)
from pipeline.passes.infra import Change, Pass, PassResult

__all__ = ["DEFAULT_PASSES", "Change", "Pass", "PassResult", "Versions"]

DEFAULT_PASSES: tuple[Pass, ...] = (
    # First: the other passes do not look into functions.
    inline_functions.PASS,
    # Early: the other passes rewrite the nodes of the bodies too.
    expand_functions.TO_17,
    expand_functions.TO_19,
    # After the bodies, which contain CastLike.
    replace_cast_like.PASS,
    # Before sizes are folded: ONNX may infer wrong sizes for these pools.
    pad_ceil_pools.PASS,
    # Early, so that later passes see constants.
    fold_constants.PASS,
    # After fold_constants, which leaves quantisation alone.
    dequantize_constants.PASS,
    # After fold_constants, which makes conditions constant. Early, so that no pass rewrites or
    # refuses a branch that is never taken.
    fold_if.PASS,
    # Before scale_resize, which needs plain Resizes with sizes for all axes.
    expand_resize.PASS,
    # Before slice_shape: it removes the arithmetic of the sizes, so fewer Shape nodes are left.
    scale_resize.PASS,
    # Anywhere after scale_resize, which cannot follow a size through a Mod.
    decompose_mod.PASS,
    # Before expand_one_hot: it may create an ArgMax of rank 1.
    expand_hardmax.PASS,
    # Anywhere: it creates no op that another pass rewrites.
    expand_one_hot.PASS,
    # Before expand_scatter, which rewrites any ScatterND with a reduction.
    replace_nonzero.PASS,
    replace_nonzero.PASS_BELOW_10,
    replace_compress.PASS,
    replace_mask_product.PASS,
    # After replace_mask_product, whose Where it recognises.
    select_additive_mask.PASS,
    # First the norms that can be one LayerNormalization, then the rest in half precision. Before
    # the opset may be lowered below 17, where LayerNormalization began.
    fuse_layer_norm.PASS,
    widen_mean_square.PASS,
    # After fold_constants, which makes sizes and scales constant. After select_additive_mask, which
    # follows the masks to the scores. Before slice_shape: K^T may be computed from a Shape.
    shape_attention.PASS,
    # Anywhere before the opset is lowered: ops that TensorRT lacks.
    expand_scatter.PASS,
    expand_col2im.PASS,
    expand_dft.PASS,
    expand_elu.PASS,
    expand_deform_conv.PASS,
    expand_bitwise.PASS,
    expand_integer_ops.PASS,
    # Anywhere: it changes only equations.
    relabel_einsum.PASS,
    # Anywhere: it changes only Loops.
    add_loop_condition.PASS,
    # Before spread_deconv, which changes the dilations.
    pad_output_shape.PASS,
    # After fold_constants: it needs a constant kernel.
    spread_deconv.PASS,
    # Before lower_opset, since opset 19 has no AffineGrid. Before slice_shape, since the Shape
    # that gives the sizes stays.
    decompose_affine_grid.PASS,
    # After the passes that replace what an older opset lacks (antialias, scatter reductions).
    # Before the passes that rewrite its results: InstanceNormalization, Shape.
    lower_opset.TO_17,
    lower_opset.TO_19,
    # After lower_opset, which creates InstanceNormalization.
    decompose_instance_norm.PASS,
    # Before slice_shape: it follows the arithmetic on Shape.
    fuse_pixel_shuffle.PASS,
    # After all passes that may create a Shape with start or end.
    slice_shape.PASS,
    # After fold_constants, which makes the Reshape's shape constant.
    squeeze_pooled.PASS,
    # After all rewrites: these refuse what is left.
    refuse_passed_through.PASS,
    refuse_unsupported.PASS,
    refuse_unsupported.PASS_BELOW_10,
    refuse_unsupported.PASS_RTX,
    # After all passes that create nodes.
    merge_duplicates.PASS,
    # Last: merge_duplicates would merge the Casts again.
    repeat_casts.PASS,
)
