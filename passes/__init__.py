"""The rewrite passes, in the order in which they run.

The list is all there is: no pass is registered anywhere else. Each runs only where its target
needs it (see `pipeline.passes.infra.Pass.needed_by`).
"""

from __future__ import annotations

from pipeline.machine.target import Versions
from pipeline.passes import (
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
from pipeline.passes.infra import Change, Pass, PassResult

__all__ = ["DEFAULT_PASSES", "Change", "Pass", "PassResult", "Versions"]

DEFAULT_PASSES: tuple[Pass, ...] = (
    # First: the others look at nodes.
    inline_functions.PASS,
    # Their bodies are lowered and mended like any other nodes.
    expand_functions.TO_17,
    expand_functions.TO_19,
    # What function bodies are written with.
    replace_cast_like.PASS,
    # Before sizes are folded: the ones that ONNX infers for such pools may be wrong.
    pad_ceil_pools.PASS,
    # Early: the others then see constants where there are any.
    fold_constants.PASS,
    # Right after, since a folded condition is a constant; early, so that nobody works on, or
    # stops at, a branch that is never taken.
    fold_if.PASS,
    # Leaves plain Resizes, and sizes for all axes: before scale_resize.
    expand_resize.PASS,
    # Follows the arithmetic that computes the sizes, and removes it where it is not needed any
    # more: before slice_shape, so that fewer Shape nodes are left to rewrite.
    scale_resize.PASS,
    # Only for sizes, which scale_resize does not follow through a Mod: anywhere after it.
    decompose_mod.PASS,
    # May make an ArgMax of one axis: before expand_one_hot.
    expand_hardmax.PASS,
    # Follows sizes, makes no op that another pass knows: anywhere.
    expand_one_hot.PASS,
    # Sizes that depend on data; before expand_scatter, which takes any ScatterND with a reduction.
    replace_nonzero.PASS,
    replace_nonzero.PASS_BELOW_10,
    replace_compress.PASS,
    replace_mask_product.PASS,
    # Knows the Where that replace_mask_product makes: after it.
    select_additive_mask.PASS,
    # What can be one LayerNormalization first, then what is left in half precision; before the
    # opset is lowered below LayerNormalization's.
    fuse_layer_norm.PASS,
    widen_mean_square.PASS,
    # Ops that TensorRT lacks: anywhere before the opset is lowered.
    expand_scatter.PASS,
    expand_col2im.PASS,
    expand_dft.PASS,
    expand_deform_conv.PASS,
    expand_bitwise.PASS,
    # Looks at equations alone: anywhere.
    relabel_einsum.PASS,
    # Looks at Loops alone: anywhere.
    add_loop_condition.PASS,
    # Before spread_deconv, which changes the dilations.
    pad_output_shape.PASS,
    # Versions a constant kernel: after fold_constants.
    spread_deconv.PASS,
    # Opset 19 has no AffineGrid: before lower_opset. Leaves the Shape that gives the sizes: before
    # slice_shape.
    decompose_affine_grid.PASS,
    # After the passes that mend what an older opset can't say (antialias, scatter reductions);
    # before those that rewrite what it makes: InstanceNormalization, Shape.
    lower_opset.TO_17,
    lower_opset.TO_19,
    # Makes and removes no Shape; after lower_opset, which makes InstanceNormalizations.
    decompose_instance_norm.PASS,
    # Follows Shape and what is computed from it: before slice_shape.
    fuse_pixel_shuffle.PASS,
    # Last, so that a Shape with start or end which an earlier pass may make is rewritten too.
    slice_shape.PASS,
    # After all that mend: what these find is what nobody could.
    refuse_passed_through.PASS,
    refuse_unsupported.PASS,
    refuse_unsupported.PASS_BELOW_10,
    refuse_unsupported.PASS_RTX,
    # After all that make nodes.
    merge_duplicates.PASS,
    # Last: merge_duplicates would make them one again.
    repeat_casts.PASS,
)
