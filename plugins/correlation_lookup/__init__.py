"""RAFT's correlation lookup on demand: feature maps and coordinates in, windows out, no volume.

`torch_op` is the op in torch, `translation` its way into ONNX, `function` its body in standard
ONNX, `trt_plugin` the TensorRT plugin, `cuda` and kernel.cu what the plugin runs. How it works:
docs/guide/plugins.md. The numbers: docs/results/correlation-lookup.md.
"""

from pipeline.machine.target import FROM_10, RTX
from pipeline.plugins.base import Plugin
from pipeline.plugins.correlation_lookup.function import NAME, function
from pipeline.plugins.correlation_lookup.trt_plugin import VERSION, register

PLUGIN = Plugin(
    name=NAME,
    version=VERSION,
    function=function,
    register=register,
    targets=(RTX, FROM_10),
    summary="RAFT's correlation lookup from feature maps, without the all-pairs volume",
    state=(
        "engines with it build on a CPU (TensorRT-RTX 1.7, float32 and float16); the kernel was "
        "run on an H200 against torch; not yet run inside an engine, nor on TensorRT 10, 11"
    ),
)
