"""RAFT's correlation lookup on demand: computes windows from feature maps and coordinates, without
the volume.

`torch_op` is the op in torch, `translation` exports it to ONNX, and `function` is its body in
standard ONNX. `trt_plugin` is the TensorRT plugin, which runs kernel.cu through `cuda`. How plugins
work: docs/guide/plugins.md. The numbers: docs/results/correlation-lookup.md.
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
