"""Measures the host time that `Engine` adds to TensorRT's call, and whether its memory grows.

    python benchmarks/engines/engine_overhead.py [ARTIFACT] [--calls 10000] [--json FILE]

Without an artifact, the script converts a tiny model: y = relu(x) + x at 1..512 x 1..512. It needs
almost no time on the GPU. The script needs a GPU, but not torch. It uses the artifact's first
profile.

- overhead: the median host time of one call in microseconds. Two kinds of calls take turns, each
  on an empty stream. One is a bare ``execute_async_v3`` on a context with shapes and addresses.
  The other is Engine's whole call on GPU arrays with ``stream=`` (checks, addresses, new outputs).
  If the size changes between calls, the bare loop also sets shapes and addresses.
- counting: the host time of the code that counts a call (`Engine.metrics`), alone.
- memory: the memory in use after the first hundred calls of random sizes, and after all calls.
  It is measured by CUDA (cudaMemGetInfo, the whole GPU), by the engine, and by the system for the
  process (resident).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, save

import pipeline
from pipeline.artifact.artifact import Artifact
from pipeline.artifact.manifest import now
from pipeline.errors import EngineError, InputError, PipelineError
from pipeline.machine.gpu import why_not
from pipeline.machine.target import TARGETS, find_target, installed_version, use
from pipeline.spec.dims import kept_rules, shape_at, sizes_text
from pipeline.spec.file_names import PLAN

TURNS = 2000
GOAL = 20.0  # microseconds
FIRST = 100  # calls after which memory should not grow

Shapes = dict[str, tuple[int, ...]]


class Part:
    """The first elements of an array on the GPU, with another shape."""

    def __init__(self, whole: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._whole, self.shape, self.pointer = whole, shape, int(whole.pointer)
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": dtype.str, "data": (self.pointer, False),
            "strides": None, "version": 3,
        }  # fmt: skip


class Bare:
    """A plan that TensorRT's calls run, in its first profile."""

    def __init__(self, artifact: Artifact) -> None:
        from pipeline.runtime.bindings import Log

        trt = use(find_target(artifact.manifest.target.name))
        # TensorRT keeps the first logger for the process
        self._runtime = trt.Runtime(Log.of(trt).logger)
        self._engine = engine = self._runtime.deserialize_cuda_engine(artifact.read(PLAN))
        self.context = engine.create_execution_context()
        names = [engine.get_tensor_name(n) for n in range(engine.num_io_tensors)]
        if any(engine.get_tensor_location(n) != trt.TensorLocation.DEVICE for n in names):
            raise InputError(
                f"{artifact.path}: has inputs that are read on the host. Pass another artifact"
            )
        self.dtypes = {n: np.dtype(trt.nptype(engine.get_tensor_dtype(n))) for n in names}
        is_input = {n: engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT for n in names}
        self.inputs = [name for name in names if is_input[name]]
        self._outputs = [name for name in names if not is_input[name]]

    def make_outputs(self, most: Shapes) -> list[Any]:
        """Memory for the outputs at the largest shapes. The caller must keep it."""
        from pipeline.commands.bench.bench import OnGpu

        for name in self.inputs:
            self.context.set_input_shape(name, most[name])
        held = []
        for name in self._outputs:
            shape = tuple(self.context.get_tensor_shape(name))
            held.append(OnGpu(np.zeros(shape, self.dtypes[name])))
            self.context.set_tensor_address(name, held[-1].pointer)
        return held

    def set(self, inputs: Mapping[str, Part]) -> None:
        """Sets the shapes and addresses of the inputs."""
        for name in self.inputs:
            self.context.set_input_shape(name, inputs[name].shape)
            self.context.set_tensor_address(name, inputs[name].pointer)


class Feeds:
    """Inputs on the GPU at any sizes of the first profile, in the same memory."""

    def __init__(self, artifact: Artifact, dtypes: Mapping[str, np.dtype[Any]]) -> None:
        from pipeline.commands.bench.bench import OnGpu

        manifest = artifact.manifest
        declared = manifest.interface
        self._inputs, self._dtypes = declared.inputs, dtypes
        self._dims, self._rules = declared.dims, declared.rules
        self.profile = declared.profiles[0]
        high = self.profile.sizes(2)
        self._whole = {
            i.name: OnGpu(i.sample(high, 0).astype(dtypes[i.name])) for i in self._inputs
        }

    def shapes(self, sizes: Mapping[str, int]) -> Shapes:
        return {i.name: shape_at(i.shape, sizes) for i in self._inputs}

    def at(self, sizes: Mapping[str, int]) -> dict[str, Part]:
        return {
            name: Part(self._whole[name], shape, self._dtypes[name])
            for name, shape in self.shapes(sizes).items()
        }

    def host(self, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
        return {i.name: i.sample(sizes, 0) for i in self._inputs}

    def random_sizes(self, rng: np.random.Generator) -> dict[str, int]:
        """Legal sizes of the profile that keep the rules."""
        for _ in range(1000):
            sizes = {}
            for name, dim in self._dims.items():
                low, _, high = self.profile.ranges[name]
                sizes[name] = min(max(dim.legal(int(rng.integers(low, high + 1))), low), high)
            if kept_rules(self._rules, sizes):
                return sizes
        raise InputError("no random sizes keep the artifact's rules")


def overhead(artifact: Artifact, turns: int) -> list[dict[str, Any]]:
    """Host microseconds of a call: TensorRT's call, Engine's call, and the difference."""
    from pipeline.commands.bench.bench import OnGpu
    from pipeline.runtime import cuda as _cuda
    from pipeline.runtime.cuda_graph import CapturedGraph

    rows = []
    with pipeline.load(artifact.path) as engine:
        bare = Bare(artifact)
        feeds = Feeds(artifact, bare.dtypes)
        held = bare.make_outputs(feeds.shapes(feeds.profile.sizes(2)))
        stream = _cuda.Stream(blocking=False)
        rng = np.random.default_rng(0)
        same = feeds.at(feeds.profile.sizes(1))
        several = [feeds.at(feeds.random_sizes(rng)) for _ in range(16)]

        def run() -> None:
            bare.context.execute_async_v3(stream.handle)

        def turn(label: str, own: Callable[[int], object], ours: Callable[[int], object]) -> None:
            times: tuple[list[int], list[int]] = ([], [])
            for n in range(turns + 100):
                for call, taken in zip((own, ours), times, strict=True):
                    start = time.perf_counter_ns()
                    call(n)
                    taken.append(time.perf_counter_ns() - start)
                    stream.synchronise()
            plain, whole = (statistics.median(t[100:]) / 1e3 for t in times)
            rows.append({"what": label, "bare_us": plain, "engine_us": whole})

        def other_size(n: int) -> None:
            bare.set(several[n % len(several)])
            run()

        bare.set(same)
        turn("same size", lambda _: run(), lambda _: engine(same, stream=stream.handle))
        turn(
            "sizes change",
            other_size,
            lambda n: engine(several[n % len(several)], stream=stream.handle),
        )
        bare.set(same)
        chained = _own_output(engine(same, stream=stream.handle), same)
        if chained:
            turn(
                "same size, an engine's output going in",
                lambda _: run(),
                lambda _: engine(chained, stream=stream.handle),
            )
        run()  # TensorRT needs one call between a new shape and a capture
        stream.synchronise()
        try:
            graph = CapturedGraph(
                stream, lambda: bool(bare.context.execute_async_v3(stream.handle))
            )
            engine.capture(feeds.profile.sizes(1))
        except EngineError as error:
            print(f"no CUDA graph: {error}", file=sys.stderr)
        else:
            turn(
                "CUDA graph, against launching one",
                lambda _: graph.launch(stream.handle),
                lambda _: engine(same, stream=stream.handle),
            )
        small = feeds.host(feeds.profile.sizes(0))
        on_gpu = {n: OnGpu(a.astype(bare.dtypes[n])) for n, a in small.items()}
        bare.set({n: Part(on_gpu[n], a.shape, bare.dtypes[n]) for n, a in small.items()})

        def whole(_: int) -> None:
            run()
            stream.synchronise()

        turn("numpy in and out at min, against a call waited for", whole, lambda _: engine(small))
        del held
    return rows


def counting_cost(engine: pipeline.Engine, *, graph: bool = False) -> float:
    """Seconds that a call of the engine spends on counting itself, and on asking for `timing`.

    It runs the code that each call runs, alone, at the sizes of an earlier call. These runs are
    not in the engine's counts.

    Args:
        graph: for a call that uses a graph.
    """
    state = engine._runs
    names = {"state": state, "sized": replace(next(iter(state._sized.values())))}
    code = "timer = None if state.timing is None else state\n"
    code += "if timer is not None: pass\n" * 2
    code += "sized.graph_calls += 1" if graph else "sized.calls += 1"
    return min(timeit.repeat(code, globals=names, repeat=7, number=20000)) / 20000


def counted(artifact: Artifact) -> float:
    """`counting_cost` of an artifact's engine, at opt of its first profile."""
    with pipeline.load(artifact.path) as engine:
        sizes = engine.profiles[0].sizes(1)
        engine({i.name: i.sample(sizes, 0) for i in engine.inputs})
        return counting_cost(engine, graph=True)


def _own_output(outputs: Mapping[str, Any], inputs: Mapping[str, Part]) -> dict[str, Any]:
    """The output as the input, if the engine has one of each with the same shape and dtype."""
    (output, *others), (part, *more) = outputs.values(), inputs.values()
    if others or more or output.shape != part.shape:
        return {}
    return dict.fromkeys(inputs, output)


def steady(artifact: Artifact, calls: int, *, numpy: bool) -> dict[str, Any]:
    """The bytes in use after the first hundred calls of random sizes, and after all calls."""
    from pipeline.runtime import cuda as _cuda
    from pipeline.runtime import engine as runtime

    with runtime.load_own(artifact.path) as engine:
        feeds = Feeds(artifact, Bare(artifact).dtypes)
        stream = _cuda.Stream(blocking=False)
        rng = np.random.default_rng(1)
        gc.collect()
        seen: list[dict[str, int]] = []

        def look() -> None:
            stream.synchronise()
            gc.collect()
            free, total = _cuda.memory()
            resident = int(Path("/proc/self/statm").read_text().split()[1])
            seen.append(
                {"gpu": total - free, "engine": engine.device_memory,
                 "process": resident * os.sysconf("SC_PAGE_SIZE")}
            )  # fmt: skip

        for n in range(1, calls + 1):
            sizes = feeds.random_sizes(rng)
            if numpy:
                engine(feeds.host(sizes))
            else:
                engine(feeds.at(sizes), stream=stream.handle)
            if n in (FIRST, calls):
                look()
    return {
        "what": "numpy" if numpy else "arrays on the GPU",
        "calls": calls,
        **{name: [at[name] for at in seen] for name in seen[0]},
    }


def tiny(folder: Path) -> Artifact:
    """A converted y = relu(x) + x, for the installed TensorRT."""
    from pipeline.convert.driver import run
    from pipeline.spec.config import Config

    target = next((t for t in TARGETS.values() if _covers(t)), None)
    if target is None:
        raise InputError("no TensorRT is installed here")
    why = why_not(target)
    if why:
        raise InputError(f"{target}: {why}")
    float_, shape = TensorProto.FLOAT, ["h", "w"]
    nodes = [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("Add", ["r", "x"], ["y"])]
    values = [helper.make_tensor_value_info(name, float_, shape) for name in "xy"]
    graph = helper.make_graph(nodes, "tiny", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    save(model, folder / "tiny.onnx")
    config = Config(
        str(folder / "tiny.onnx"), out=folder / "tiny", target=target.name,
        dims=("h=1:128:512", "w=1:128:512"),
    )  # fmt: skip
    return Artifact.open(run(config).path)


def _covers(target: Any) -> bool:
    version = installed_version(target)
    return version is not None and version.startswith(".".join(map(str, target.version)))


def tables(rows: Sequence[Mapping[str, Any]], memory: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| call | TensorRT alone, us | Engine, us | overhead, us |",
        "|---|---|---|---|",
        *(
            f"| {r['what']} | {r['bare_us']:.1f} | {r['engine_us']:.1f} "
            f"| **{r['engine_us'] - r['bare_us']:.1f}** |"
            for r in rows
        ),
        "",
        f"| inputs | calls | GPU after {FIRST} | grown since | engine's | grown "
        "| process's | grown |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for m in memory:
        cells = []
        for name in ("gpu", "engine", "process"):
            first, last = m[name][0], m[name][-1]
            cells += [f"{first / 2**20:.1f} MiB", f"**{last - first} bytes**"]
        lines.append(f"| {m['what']} | {m['calls']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("artifact", type=Path, nargs="?", metavar="ARTIFACT")
    parser.add_argument("--calls", type=int, default=10000, help="of random sizes")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.calls <= FIRST or arguments.turns < 1:
        parser.error(f"--calls must be more than {FIRST}, --turns 1 or more")
    try:
        with tempfile.TemporaryDirectory() as folder:
            artifact = (
                Artifact.open(arguments.artifact) if arguments.artifact else tiny(Path(folder))
            )
            rows = overhead(artifact, arguments.turns)
            counting = counted(artifact)
            memory = [
                steady(artifact, arguments.calls, numpy=False),
                steady(artifact, max(arguments.calls // 5, FIRST + 1), numpy=True),
            ]
            manifest = artifact.manifest
    except PipelineError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    if arguments.json:
        content = {
            "date": now(),
            "model": manifest.name,
            "target": manifest.target.name,
            "version": manifest.target.version,
            "profile": sizes_text(manifest.interface.profiles[0].sizes(1)),
            "overhead": rows,
            "memory": memory,
            "counting_ns": counting * 1e9,
        }
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    print(tables(rows, memory))
    worst = max(r["engine_us"] - r["bare_us"] for r in rows[:2])
    grown = memory[0]["gpu"][-1] - memory[0]["gpu"][0]
    share = counting * 1e6 / min(r["engine_us"] for r in rows)
    print(f"\ncounting a call: {counting * 1e9:.0f} ns, {share:.2%} of the fastest call")
    print(f"\ngoals: overhead {worst:.1f} us, wanted {GOAL:g}; grown {grown} bytes, wanted 0")
    return 0


if __name__ == "__main__":
    sys.exit(main())
