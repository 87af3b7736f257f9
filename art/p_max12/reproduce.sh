#!/bin/sh
# Repeats the comparison of this artifact. Needs polygraphy and onnxruntime.
# --engine compares the engine too; that needs TensorRT and a GPU it can run on.
CDPATH= cd -- "$(dirname -- "$0")" || exit 2
failed=0

polygraphy run ./exported.onnx --onnxrt --graph-optimization-level ORT_DISABLE_ALL --validate --load-inputs ./comparison/default/inputs.json --load-outputs ./comparison/default/torch.json --rtol 0.0001 --atol 1e-05 || failed=1

polygraphy run ./model.onnx --onnxrt --graph-optimization-level ORT_DISABLE_ALL --validate --load-inputs ./comparison/default/inputs.json --load-outputs ./comparison/default/torch.json --rtol 0.0001 --atol 1e-05 || failed=1

if [ "${1:-}" = --engine ]; then
export POLYGRAPHY_USE_TENSORRT_RTX=1
polygraphy run ./engine.plan --trt --model-type engine --optimization-profile 0 --validate --load-inputs ./comparison/default/inputs.json --load-outputs ./comparison/default/torch.json --rtol 0.0001 --atol 1e-05 || failed=1
fi

exit "$failed"
