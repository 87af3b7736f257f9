"""Times a model in torch, eager and compiled: what a user runs without an engine.

    python3 benchmarks/engines/torch_baselines.py raft --option updates=12 --shape h=440,w=1024
        [--variant compile-tf32 ...] [--time-limit 240] [--out FILE] [--reference DIR]
        [--device cpu]

The model is one of the zoo. Any other needs ``--module FILE.py:NAME``, where NAME() returns the
module, and ``--artifact DIR``, which has its inputs and dims.

Use a Python that has torch with CUDA, with this repository on PYTHONPATH. Each variant runs in a
child process. After --time-limit seconds it is killed with its children: compiling can take
minutes. If a variant fails, the others still run. Each size is compiled separately
(``dynamic=False``: torch's best), and printed as one line of JSON as soon as it is measured.

| variant | |
|---|---|
| eager-fp32, eager-tf32 | the plain model; cuDNN may choose its algorithms (``cudnn.benchmark``) |
| eager-fp16 | under ``torch.autocast`` to float16; tf32 is allowed for float32 parts |
| compile-... | ``torch.compile(dynamic=False)`` of the same: without CUDA graphs |
| graphs-... | ``torch.compile(mode="reduce-overhead")``: with CUDA graphs |
| autotune-... | ``torch.compile(mode="max-autotune")``: with CUDA graphs and Triton's products |
| half-...-fp16 | the same four after ``.half()``, without autocast: weights and inputs in half |

Under autocast, the weights of matrix products and convolutions are stored in float16 beforehand
(see `torch_module.store_half`). This gives the same numbers, and no call casts a weight.

Inputs, repeats and timing are those of `pipeline.commands.bench.measure`, as for the engine. For a
padded model (RAFT), torch pads the inputs and crops the outputs. With --reference, the folder gets
the outputs of eager-fp32 for the first inputs. ``error`` is the distance to these outputs:
||out - ref|| / ||ref||.

Memory is the peak of torch's allocator on the GPU, without the inputs. The free memory of the GPU
would also change with other processes. On a CPU, to try the script, half precision is bfloat16.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from children import lines
from references import held_against, keep, reference_file
from torch_module import flat, half_type, module_of, store_half

from pipeline.commands.bench.measure import Method, WallClock, input_sets, timed
from pipeline.errors import InputError, PipelineError
from pipeline.spec.dims import Dim, sizes_text
from pipeline.spec.profiles import Profile, sizes_to_time


@dataclass(frozen=True)
class Variant:
    """One way to run a model in torch.

    Args:
        precision: The precision of the engines that it is compared with.
        compiled: Whether torch.compile compiles it.
        mode: The mode of torch.compile.
        pure: Whether all is float16 (``.half()``). Otherwise autocast chooses.
    """

    precision: str
    compiled: bool = False
    mode: str | None = None
    pure: bool = False


KINDS: dict[str, tuple[bool, str | None]] = {
    "eager": (False, None),
    "compile": (True, None),
    "graphs": (True, "reduce-overhead"),
    "autotune": (True, "max-autotune"),
}
VARIANTS: dict[str, Variant] = {
    **{
        f"{kind}-{precision}": Variant(precision, *how)
        for kind, how in KINDS.items()
        for precision in ("fp32", "tf32", "fp16")
    },
    **{f"half-{kind}-fp16": Variant("fp16", *how, pure=True) for kind, how in KINDS.items()},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_model(parser)
    parser.add_argument("--shape", action="append", default=[], metavar="DIM=SIZE,...")
    parser.add_argument("--variant", action="append", default=[], choices=VARIANTS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--repeat", type=int, default=Method.repeat)
    parser.add_argument("--seconds", type=float, default=Method.seconds)
    parser.add_argument("--time-limit", type=float, default=300.0, metavar="SECONDS")
    parser.add_argument("--out", type=Path, help="also append the lines to this file")
    parser.add_argument("--reference", type=Path, metavar="DIR")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return _child(arguments)

    def tell(record: dict[str, Any]) -> None:
        line = json.dumps(record)
        print(line, flush=True)
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(f"{line}\n")

    try:
        points = _points(spec_of(arguments), arguments.shape)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for variant in arguments.variant or VARIANTS:
        run_variant(arguments, variant, points, tell)
    return 0


def run_variant(
    arguments: argparse.Namespace,
    variant: str,
    points: Sequence[Mapping[str, int]],
    tell: Callable[[dict[str, Any]], None],
) -> None:
    """Passes on one record for each size as it comes. A size without a result has the reason."""
    shapes = [sizes_text(sizes) for sizes in points if sizes]
    command = [sys.executable, __file__, arguments.model, "--child", "--variant", variant]
    command += ["--device", arguments.device, "--repeat", str(arguments.repeat)]
    command += ["--seconds", str(arguments.seconds)]
    for flag, values in (("--option", arguments.option), ("--shape", shapes)):
        command += [word for value in values for word in (flag, value)]
    for name in ("weights", "reference", "module", "artifact"):
        value = getattr(arguments, name)
        command += [f"--{name}", str(value)] if value else []
    left = [dict(sizes) for sizes in points]

    def pass_on(record: dict[str, Any]) -> None:
        left.remove(record["sizes"])
        tell(record)

    why = lines(command, pass_on, limit=arguments.time_limit)
    for n, sizes in enumerate(left):
        reason = why or "no word"
        told = {"why": reason if n == 0 else f"not reached: {reason}"}
        tell({**_record(arguments, variant, sizes), **told})


def add_model(parser: argparse.ArgumentParser) -> None:
    """The arguments that `spec_of` reads."""
    parser.add_argument("model", help="a model of the zoo, or any name with --module")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--module", metavar="FILE.py:NAME", help="a function that makes the model")
    parser.add_argument("--artifact", type=Path, help="with --module: its inputs and dims")


def spec_of(arguments: argparse.Namespace) -> Any:
    """The spec of a model of the zoo, or of --module with the inputs and dims of --artifact."""
    from pipeline.source.zoo import find_spec

    if arguments.module:
        return _own_spec(arguments)
    options: dict[str, Any] = {}
    for text in arguments.option:
        name, _, value = text.partition("=")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return find_spec(arguments.model, options, arguments.weights)


def _own_spec(arguments: argparse.Namespace) -> Any:
    from pipeline.artifact.artifact import Artifact
    from pipeline.source.factory import find_factory
    from pipeline.spec.model import ModelSpec

    if arguments.artifact is None:
        raise InputError("--module needs --artifact DIR")
    factory = find_factory(arguments.module)
    declared = Artifact.open(arguments.artifact, check=False).manifest.interface
    return ModelSpec(
        name=arguments.model, build=lambda _: factory.make(), inputs=declared.inputs,
        outputs=declared.outputs, rules=declared.rules, profiles=declared.profiles,
    )  # fmt: skip


def _points(spec: Any, shapes: Sequence[str]) -> list[Mapping[str, int]]:
    dims: dict[str, Dim] = spec.dims
    profiles = [p.resolve(dims) for p in spec.profiles or (Profile("default"),)]
    return [p.sizes for p in sizes_to_time(dims, profiles, spec.rules, shapes)]


def _record(
    arguments: argparse.Namespace, variant: str, sizes: Mapping[str, int]
) -> dict[str, Any]:
    return {
        "model": arguments.model,
        "options": sorted(arguments.option),
        "sizes": dict(sizes),
        "runner": f"torch {variant}",
        "precision": VARIANTS[variant].precision,
        "device": arguments.device,
    }


def _child(arguments: argparse.Namespace) -> int:
    """Runs one variant at all sizes, in this process."""
    import torch

    (name,) = arguments.variant
    variant = VARIANTS[name]
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no GPU. Use a machine with a GPU, or --device cpu", file=sys.stderr)
        return 1
    # The older switches: up to torch 2.11 Inductor reads them, and fails if the newer
    # fp32_precision was set (pytorch/pytorch#166387).
    torch.backends.cuda.matmul.allow_tf32 = variant.precision != "fp32"
    torch.backends.cudnn.allow_tf32 = variant.precision != "fp32"
    torch.backends.cudnn.benchmark = True
    spec = spec_of(arguments)
    module = module_of(spec, arguments.weights)
    half = half_type(arguments.device)
    if variant.pure:
        module = module.to(half)
    elif variant.precision == "fp16":
        store_half(module, half)
    for sizes in _points(spec, arguments.shape):
        record = _record(arguments, name, sizes)
        try:
            record |= _measured(arguments, spec, module, variant, sizes)
        except Exception as error:  # the failure is the result of this size
            record["why"] = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        print(json.dumps(record), flush=True)
        torch._dynamo.reset()
        gc.collect()
    return 0


def _measured(
    arguments: argparse.Namespace,
    spec: Any,
    module: Any,
    variant: Variant,
    sizes: Mapping[str, int],
) -> dict[str, Any]:
    import torch

    on_gpu = arguments.device == "cuda"
    half = half_type(arguments.device)
    sets = [
        [torch.from_numpy(one[i.name]).to(arguments.device) for i in spec.inputs]
        for one in input_sets(spec.inputs, sizes)
    ]
    if variant.pure:
        sets = [[t.to(half) if t.is_floating_point() else t for t in one] for one in sets]
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved() if on_gpu else 0
    module = module.to(arguments.device)
    run: Callable[..., Any] = module
    if variant.compiled:
        run = torch.compile(module, dynamic=False, mode=variant.mode)
    graphs = variant.mode is not None and on_gpu

    def call(n: int) -> Any:
        if graphs:
            torch.compiler.cudagraph_mark_step_begin()
        return run(*sets[n % len(sets)])

    clock = StreamClock() if on_gpu else WallClock()
    with contextlib.ExitStack() as stack:
        stack.callback(module.to, "cpu")  # the allocator keeps its memory until the next size
        stack.enter_context(torch.no_grad())
        if on_gpu:
            stack.enter_context(torch.cuda.stream(clock.stream))
        if variant.precision == "fp16" and not variant.pure:
            stack.enter_context(torch.autocast(arguments.device, half))
        start = time.perf_counter()
        outputs = [t.float().cpu().numpy() for t in flat(call(0))]
        first = time.perf_counter() - start
        timing = timed(call, clock, Method(arguments.repeat, arguments.seconds))
    found = {
        **asdict(timing),
        "first_call_s": first,
        **_error(arguments, sizes, variant, outputs),
        "versions": {"torch": torch.__version__},
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
    }
    if on_gpu:
        found["memory_bytes"] = torch.cuda.max_memory_reserved() - before
    return found


class StreamClock:
    """CUDA events on a stream of its own."""

    def __init__(self) -> None:
        import torch

        self.stream = torch.cuda.Stream()
        self._ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def one(self, call: Callable[[], object]) -> float:
        return self.many(lambda _: call(), 1)

    def many(self, call: Callable[[int], object], count: int) -> float:
        start, end = self._ends
        start.record(self.stream)
        for n in range(count):
            call(n)
        end.record(self.stream)
        end.synchronize()
        return float(start.elapsed_time(end))


def _error(
    arguments: argparse.Namespace,
    sizes: Mapping[str, int],
    variant: Variant,
    outputs: Sequence[np.ndarray],
) -> dict[str, float | str | None]:
    if arguments.reference is None:
        return {"error": None}
    place = reference_file(arguments.reference, arguments.model, arguments.option, sizes)
    if variant == VARIANTS["eager-fp32"]:
        keep(outputs, place)
    return held_against(outputs, place)


if __name__ == "__main__":
    sys.exit(main())
