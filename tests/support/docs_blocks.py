"""The code blocks of README, docs/guide and docs/reference, and how each of them is tested."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from readme_commands import PAGES

GPU = "needs a GPU"
TRT_8_6 = "needs TensorRT 8.6, and a GPU"
NETWORK = "needs the network"
MINUTES = "takes minutes"
PLUGIN = "needs a library that is compiled for TensorRT"
CONTAINER = "needs a container engine"
ENVIRONMENT = "changes the environment"
TRITON = "needs NVIDIA's container, and a GPU"
SERVER = "needs a Triton server; tests/commands/test_triton_replay.py runs it"
WAITS = "waits for Ctrl-C; tests/commands/test_view.py runs it"
COMPILED = "needs TensorRT's headers; tests/examples/test_cpp.py compiles it where they are"
EXAMPLE = "tests/examples/test_cpp.py runs it on another artifact"
BESIDE = "tests/docs/test_readme.py runs it"
FARM = "needs a cluster; tests/commands/test_farm.py runs such commands on one"
TWICE = "differs in a name from a command that is run"

# The pages that each test of tests/docs/test_commands.py runs, but for the commands in `NOT_RUN`.
# All commands of the other pages are in `NOT_RUN`.
RUN: Mapping[str, tuple[str, ...]] = {
    "test_a_model_in_a_file": (
        "README.md", "docs/index.md", "docs/guide/sizes-and-dims.md",
        "docs/guide/when-it-fails.md", "docs/guide/write-a-pass.md",
    ),
    "test_a_model_of_ones_own": ("docs/guide/own-model.md",),
    "test_caches_and_masks": ("docs/guide/kv-cache.md", "docs/guide/masks-and-lengths.md"),
    "test_a_gpu_machine_and_a_comparison": (
        "docs/guide/gpu-machine.md", "docs/guide/what-is-compared.md", "docs/guide/triton.md",
    ),
    "test_engines_for_several_gpus": ("docs/guide/several-gpus.md",),
    "test_half_precision": ("docs/guide/half-precision.md",),
    "test_a_shared_store": ("docs/guide/shared-store.md",),
    "test_the_examples_of_the_commands": ("docs/reference/command-line.md",),
}  # fmt: skip
# Each `sh` command that is not run there, and why.
NOT_RUN: Mapping[str, str] = {
    "make convert MODEL=raft": BESIDE,
    "make test": "runs this test too",
    ".venv/bin/python -m pip install --quiet --no-deps timm==1.0.31": BESIDE,
    ".venv/bin/python -m pipeline convert timm:create_model --option model_name=resnet10t "
    "--input 'x:{batch}x3x{h}x{w}' --dim batch=1:8:16 --dim h=64:224:320 --dim w=64:224:320":
    BESIDE,
    # docs/index.md
    "make convert MODEL=raft_small": MINUTES,
    ". .venv/bin/activate": ENVIRONMENT,
    # docs/guide/cpp.md
    "apt install cmake g++ nlohmann-json3-dev libssl-dev": ENVIRONMENT,
    'cmake -S examples/cpp -B build/cpp -DCMAKE_PREFIX_PATH="TENSORRT;CUDA"': COMPILED,
    "cmake --build build/cpp": COMPILED,
    "python examples/cpp/write_cases.py artifacts/raft cases": EXAMPLE,
    "build/cpp/load artifacts/raft cases": GPU,
    # docs/guide/gpu-machine.md
    "python3.10 -m venv venv86 && . venv86/bin/activate": ENVIRONMENT,
    "pip install '.[runtime]' 'tensorrt==8.6.0'": NETWORK,
    "pipeline build raft86 --precision fp32": TRT_8_6,
    "pipeline verify raft86": TRT_8_6,
    "pipeline bench raft86 --shape h=184,w=248": TRT_8_6,
    "pipeline convert net.onnx --target tensorrt-8.6": TRT_8_6,
    "pip install '.[rtx,runtime]' 'tensorrt-rtx==1.7.1.116'": NETWORK,
    "pipeline bench raft-rtx --shape h=184,w=248": GPU,
    "pipeline tune raft86 --shape h=184,w=248 --minutes 20": TRT_8_6,
    # docs/guide/several-gpus.md
    "pipeline build raft86 --hardware-compatible": TRT_8_6,
    "pipeline build raft86 --version-compatible": TRT_8_6,
    # docs/guide/new-weights.md
    "pipeline convert net.py:net --input 'x:{b}x3x{h}x{w}' --dim b=1:8 --dim h=64:512 "
    "--dim w=64:512 --target tensorrt-8.6 --refit": TRT_8_6,
    "pipeline refit artifacts/net --weights new.safetensors --trust": TRT_8_6,
    # docs/guide/half-precision.md
    "pipeline convert vit --precision auto": MINUTES,
    "pipeline verify raft86 --engine-tolerance 1e-2,5e-3": TRT_8_6,
    # docs/guide/install.md
    "pip install -c constraints.txt '.[export,rtx]' "
    "--extra-index-url https://download.pytorch.org/whl/cpu": NETWORK,
    "python3 -m venv venv": ENVIRONMENT,
    "venv/bin/python -m pip install -c constraints.txt '.[rtx]'": NETWORK,
    "python -m pip wheel --no-deps --wheel-dir dist .": NETWORK,
    'pip install "trt-pipeline[rtx,runtime] @ '
    'file:///FOLDER/dist/trt_pipeline-0.1.0-py3-none-any.whl"': NETWORK,
    "python -m pytest tests/export/torch_2_13": MINUTES,
    "podman build -t pipeline .": CONTAINER,
    "podman run --rm -v \"$PWD:/work\" pipeline convert net.py:net --input 'x:{b}x3x{h}x{w}' "
    "--dim b=1:8 --dim h=64:512 --dim w=64:512": CONTAINER,
    # docs/guide/kv-cache.md
    "pipeline convert llama --profile seq=1:64:128 --profile seq=1,past=1:64:127": MINUTES,
    # docs/guide/own-model.md
    "pipeline convert timm:create_model --option model_name=resnet10t --input 'x:{b}x3x{h}x{w}' "
    "--dim b=:8 --dim h=64:320 --dim w=64:320": NETWORK,
    "pipeline convert hf:google-bert/bert-base-uncased --option attn_implementation=eager "
    "--input 'input_ids:{b}x{t}:int64:0..30522' --dim b=:8 --dim t=1:128": NETWORK,
    "pipeline convert raft --weights raft_large.pth --option updates=20": MINUTES,
    "pipeline convert llama --weights my-checkpoint-folder --option max_length=2048": MINUTES,
    "pipeline convert my_llm.py:model --input 'input_ids:{b}x{s}:int64:0..32000' "
    "--input 'attention_mask:{b}x{past+s}:int64:1..2' "
    "--input 'past_key_values[0..27][0..1]:{b}x4x{past}x64' "
    "--dim b=:4 --dim s=1:16:128 --dim past=1:64:1024": MINUTES,
    "pipeline convert --all": MINUTES,
    # docs/guide/plugins.md
    "pipeline convert raft --option correlation=on_demand --plugin correlation_lookup": MINUTES,
    "pipeline convert mine.onnx --plugin libfoo.so": PLUGIN,
    "pipeline verify artifacts/mine --plugin libfoo.so": PLUGIN,
    "pipeline bench artifacts/mine --plugin libfoo.so": GPU,
    # docs/guide/run-the-engine.md
    "pipeline bench artifacts/raft --shape h=440,w=1024": GPU,
    # docs/guide/metrics.md
    "pip install '.[runtime,metrics]'": NETWORK,
    # docs/guide/sizes-and-dims.md
    "pipeline convert raft --profile h=135:440:1080,w=135:1024:1920 --profile h=2160,w=3840":
    MINUTES,
    # docs/guide/triton.md
    "pip install '.[triton]'": NETWORK,
    "pip install --no-deps nvidia-pytriton==0.7.0": NETWORK,
    "python -m pytest tests/commands/test_triton_replay.py": "runs with all other tests",
    "docker run --rm --gpus=all -p 8000:8000 -p 8001:8001 -v \"$PWD/models:/models\" "
    "nvcr.io/nvidia/tritonserver:24.05-py3 tritonserver --model-repository=/models": TRITON,
    "pipeline triton-replay artifacts/raft": SERVER,
    "pipeline triton-replay artifacts/raft --protocol http --url gpu-machine:8000": SERVER,
    # docs/guide/when-it-fails.md
    "pipeline locate raft86 --shape h=184,w=248": TRT_8_6,
    # docs/guide/write-a-pass.md and docs/reference/targets.md
    "pipeline passes --still-needed": MINUTES,
    # docs/guide/shared-store.md
    "pip install '.[store]'": NETWORK,
    # docs/guide/farm.md
    "pip install '.[export,rtx,zoo,ray,store]'": NETWORK,
    **dict.fromkeys((
        "ray start --head",
        "ray start --address HOST:6379",
        "export RAY_AUTH_MODE=token",
        "pipeline convert --all --ray HOST:6379 --store /mnt/store",
        "pipeline convert --all --ray HOST:6379 --store /mnt/store --gpu sm86 --gpu sm120",
        """ray start --address HOST:6379 --resources '{"sm90": 8}'""",
        "pipeline convert --all --ray HOST:6379 --store /mnt/store --target tensorrt-10 "
        "--gpu sm90",
        "pipeline matrix --kubernetes IMAGE --store s3://BUCKET/PATH --gpu sm86 --gpu sm120 "
        "| kubectl apply -f -",
    ), FARM),
    # docs/reference/command-line.md
    "pipeline matrix --kubernetes IMAGE --store s3://BUCKET/PATH": FARM,
    "pipeline convert my_model.py:net --input 'x:{b}x3x{h}x{w}' "
    "--dim b=1:8 --dim h=64:512 --dim w=64:512": TWICE,
    "pipeline check my_model.py:net --input 'x:{b}x3x{h}x{w}' "
    "--dim b=1:8 --dim h=64:512 --dim w=64:512": TWICE,
    "pipeline store pull store raft_small pulled":
    "its artifact has another name here; tests/convert/test_shared.py runs it",
    "pipeline view artifacts/raft_small": WAITS,
    "pipeline view artifacts/raft_small --exported": WAITS,
    "pipeline bench artifacts/raft_small --shape h=440,w=1024": GPU,
    "pipeline tune artifacts/raft_small --shape h=440,w=1024 --minutes 20": GPU,
    "pipeline locate artifacts/raft_small": GPU,
    "pipeline refit artifacts/raft_small --weights new.safetensors": TRT_8_6,
    "pipeline triton-replay artifacts/raft_small": SERVER,
    "pipeline triton-replay artifacts/raft_small --protocol http --url localhost:8000": SERVER,
}  # fmt: skip

# The beginnings of the `text` blocks that are not the output of the last `sh` block above them.
# tests/docs/test_commands.py makes these outputs with commands of its own.
SHOWN = (
    "pipeline ",  # the usage of a command
    "error: model net: the comparison failed",
    "error: model net: it remembers earlier calls",
)


@dataclass(frozen=True)
class Block:
    """A fenced block of code, and the line of its fence."""

    page: str
    line: int
    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The lines of the block. A line that ends with a backslash goes on in the next one."""
        lines = re.sub(r" *\\\n *", " ", self.text).splitlines()
        return [line for line in lines if line and not line.startswith("#")]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str) -> Iterator[Block]:
    """All fenced blocks of a page, also those without a language."""
    text = PAGES[page]
    for found in re.finditer(r"^( *)(```+)(.*)\n((?:.*\n)*?)\1\2 *$", text, re.MULTILINE):
        line = text.count("\n", 0, found.start()) + 1
        yield Block(page, line, found[3], found[4])


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
