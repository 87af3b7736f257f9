"""Loads an artifact's engine and runs it: `load` returns an `Engine`.

It needs TensorRT, cuda-python (cuda-bindings and cuda-core) and numpy, but neither torch nor onnx.

    with pipeline.load("artifacts/raft") as engine:
        flow = engine(image1=a, image2=b)["flow"]
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pipeline.artifact.manifest import Manifest
from pipeline.errors import EngineError, InputError, OutOfMemory, TargetMissing
from pipeline.machine.gpu import find_gpu
from pipeline.runtime import bindings as _trt
from pipeline.runtime.arrays import named_inputs
from pipeline.runtime.choose import choose
from pipeline.runtime.metrics import Metrics, count_error, read_metrics
from pipeline.runtime.rtx import PLAIN, RtxSettings, RuntimeCache
from pipeline.runtime.sizes import EngineSizes
from pipeline.runtime.trust import (
    allowed_plugins,
    check_given,
    check_gpu,
    check_host_code,
    check_tensorrt,
    load_plugins,
    read_plan,
)
from pipeline.spec.profiles import sizes_to_time

if TYPE_CHECKING:
    from pipeline.runtime.state import EngineState
    from pipeline.spec.profiles import Profile
    from pipeline.spec.tensors import Input, Output, Precision


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How a plan is loaded; see `load`."""

    device: int = 0
    host_code: bool = False
    graphs: int = 8
    rtx: RtxSettings = PLAIN


AS_USUAL = Loading()


def settled(manifest: Manifest, host_code: bool = False) -> Loading:
    """How to load an engine to measure or to compare it; for `host_code` see `load`.

    For TensorRT-RTX, the kernels for a shape are compiled before its first call. So times and
    results are theirs. The kernels that a ``lazy`` engine begins with are not compared.
    """
    rtx = manifest.target.flavour == "tensorrt_rtx"
    kernels = RtxSettings(kernels="eager") if rtx else PLAIN
    return Loading(host_code=host_code, rtx=kernels)


def load(
    path: Path | str,
    *,
    device: int = 0,
    host_code: bool = False,
    graphs: int = 8,
    plugins: Sequence[str] = (),
    precision: Precision | None = None,
    **rtx: Any,
) -> Engine:
    """Loads an artifact's engine onto a GPU.

    If the artifact has several engines, it takes one that runs here: first one that was built for
    this kind of GPU, then one that runs on several kinds, and the artifact's own engine before
    others. It refuses a plan whose bytes, TensorRT or GPU differ from those in the manifest.

    Args:
        path: the artifact's folder.
        device: CUDA's number of the GPU.
        host_code: let the plan run its own code on the CPU, without any sandbox. Use it only if you
            trust the plan's origin. Only a version-compatible plan needs it.
        graphs: how many graphs `Engine.capture` keeps.
        plugins: the files of the plugins that the engine needs (``"libfoo.so"``, ``"foo.py"``).
            A plugin runs its code in this process without any sandbox. So a file is loaded only
            if you pass it here and its hash matches the file that the engine was built with.
            Files that a plugin loads itself are not checked. The pipeline's own plugins
            need not be passed.
        precision: take only an engine in this precision (``fp32``, ``tf32``, ``fp16``, ``bf16``).
        **rtx: for TensorRT-RTX only: ``kernels`` (``lazy``, ``eager`` or ``none``) and
            ``runtime_cache`` (a folder); see `pipeline.runtime.rtx`. With an empty cache, the
            engine runs once at min, opt and max of each profile, and its kernels are kept.

    Raises:
        ArtifactError: there is no artifact, it has no engine, or the engine was cut or changed.
        TargetMissing: the TensorRT that built the engine, cuda-python, or a GPU is missing.
        InputError: the engine was built for another kind of GPU, or none of several engines runs
            here; or a plugin's file was not passed, differs from the one in the build, or does not
            load; or a setting is unknown, or not one of this TensorRT.
        OutOfMemory: the weights do not fit.
    """
    how = Loading(device=device, host_code=host_code, graphs=graphs, rtx=RtxSettings(**rtx))
    found = choose(Path(path), find_gpu(device), precision, host_code=host_code)
    return load_own(found, plugins, how)


def load_own(path: Path, plugins: Sequence[str] = (), how: Loading = AS_USUAL) -> Engine:
    """Loads an artifact's own engine, also if another one would be better here; see `load`."""
    manifest, plan = read_plan(path)
    check_given(manifest, plugins, str(path))
    return open_plan(plan, manifest, where=str(path), plugins=plugins, how=how)


def open_plan(
    plan: bytes,
    manifest: Manifest,
    *,
    where: str = "",
    plugins: Sequence[str] = (),
    how: Loading = AS_USUAL,
) -> Engine:
    """Loads a plan that is already in memory; see `load`.

    Check first that the plan belongs to the manifest.

    Args:
        where: the plan's name in error messages; the model's name by default.
    """
    where = where or manifest.name
    target = check_tensorrt(manifest, where)
    check_host_code(manifest, how.host_code, where)
    how.rtx.check(target.flavour, where)
    names = allowed_plugins(manifest, plugins, where)
    gpu = find_gpu()
    if isinstance(gpu, str):
        raise TargetMissing(f"{where}: an engine needs a GPU, but {gpu}")
    try:
        cuda = importlib.import_module("pipeline.runtime.cuda")
        importlib.import_module("cuda.core")
    except ImportError as error:
        raise TargetMissing(
            f"{where}: cuda-python is missing ({error}); pip install 'trt-pipeline[runtime]'"
        ) from error
    from pipeline.runtime.state import EngineState

    found = cuda.Device(how.device)
    check_gpu(manifest, where, found.gpu)
    try:
        trt = importlib.import_module(target.flavour)
    except (ImportError, OSError) as error:
        raise TargetMissing(f"{where}: {target.flavour} can't be imported: {error}") from error
    with found.current():
        load_plugins(trt, names, target, where)
        made = _trt.deserialise(trt, plan, manifest, where, how.host_code)
        cache = how.rtx.apply(made, plan, found.gpu, str(manifest.target.version))
        state = EngineState(made, EngineSizes(manifest.interface), found, how.graphs)
        engine = Engine(manifest, state, cache)
    if cache is not None and not cache.loaded:
        warm(engine)
        cache.save(cache.kernels())
    return engine


def warm(engine: Engine) -> None:
    """Runs an engine once at min, opt and max of each profile, with random inputs."""
    interface, before = engine.manifest.interface, engine.profile
    for number, profile in enumerate(interface.profiles):
        engine.profile = number
        for point in sizes_to_time(interface.dims, (profile,), interface.rules, ()):
            with suppress(OutOfMemory):  # a size that does not fit has no kernels to keep
                engine({i.name: i.sample(point.sizes, 0) for i in interface.inputs})
    engine.profile = before


class Engine:
    """An engine on a GPU, made by `load`.

    ``engine(image1=a, image2=b)`` returns the outputs by name. If an input's name is not a Python
    identifier (or is ``stream`` or ``out``), pass one dict: ``engine({"image.1": a})``.

    If you pass numpy arrays, you get numpy arrays: the call returns when they are computed, and
    they are yours. If you pass arrays on the GPU, the engine reads them without a copy and returns
    `DeviceArray`s without waiting for the GPU. It accepts DLPack or ``__cuda_array_interface__``
    (torch, cupy, jax, ...). The stream decides what else you have to do:

    - With ``stream=`` (a handle, or torch's, cupy's or cuda.core's object), the run is enqueued on
      that stream. It waits for the producers of the inputs. Keep the inputs' memory and the stream
      until the run is done, as for any kernel.
    - Without it, the run is on the engine's own stream. That stream is ordered with the calls of
      other engines without ``stream=``, and with the legacy default stream (torch's default).
      Work that you enqueued on the legacy stream before runs first. Work that you enqueue there
      later sees the outputs and may overwrite the inputs. The engine keeps the inputs alive until
      the run is done. To overwrite an input on another stream, make that stream wait for an output
      first.

    ``out={"flow": array}`` writes an output into your own memory on the GPU.

    Outputs have exactly the shape that belongs to the inputs' sizes, whatever the order of sizes in
    earlier calls. Several threads may use an engine; their calls run one after the other.

    Raises:
        InputError: a name, dtype, rank or size is not legal; the message names the dim.
        OutOfMemory: memory is short; the engine still works at smaller sizes.
        EngineError: TensorRT or CUDA failed, or the engine is closed.

    Attributes:
        manifest: the artifact's manifest.
        timing: whether calls are timed on the GPU (see `metrics`); False at first. It records three
            events in each call.
        poison: for checks: fill outputs with 0xFF bytes before each run, so that bytes that a run
            does not write show up.
        profile: for checks: the index of the profile that all sizes run in; None for the best one.
    """

    def __init__(
        self, manifest: Manifest, runs: EngineState, cache: RuntimeCache | None = None
    ) -> None:
        from pipeline.runtime.call import call

        self.manifest, self._cache = manifest, cache
        self._runs = runs
        self._named, self._run = named_inputs, call

    def __call__(
        self,
        inputs: Mapping[str, Any] | None = None,
        /,
        *,
        stream: Any = None,
        out: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> dict[str, Any]:
        """Runs the engine; see the class.

        Args:
            inputs: the inputs by name; or pass them as keywords.
            stream: the stream to run on, for inputs on the GPU.
            out: arrays on the GPU to write outputs into, by output name.
            named: the inputs as keywords.

        Returns:
            Every output by name: numpy arrays for numpy inputs, else `DeviceArray`s.
        """
        runs = self._runs
        try:
            given = self._named(inputs, named, runs.names)
            if runs.device.alone:
                return self._run(runs, given, stream, out)
            with runs.device.current():
                return self._run(runs, given, stream, out)
        except Exception as error:
            count_error(runs, error)
            raise

    def capture(self, sizes: Mapping[str, int]) -> None:
        """Captures a CUDA graph for these sizes; later calls with these sizes use it.

        A graph saves the CPU the launch of every kernel. It copies the inputs into its own memory
        and the outputs out of it. If there are more than `graphs` (see `load`), the least recently
        used one is freed.

        Args:
            sizes: the size of every dim: ``{"h": 440, "w": 1024}``.

        Raises:
            InputError: the sizes are not legal.
            EngineError: the network can't be captured (sizes that depend on data, loops). The
                engine still works without the graph.
            OutOfMemory: GPU memory is too short for the graph.
        """
        try:
            with self._runs.device.current():
                self._runs.capture(sizes)
        except Exception as error:
            count_error(self._runs, error)
            raise

    def metrics(self) -> Metrics:
        """The engine's numbers since it was loaded: calls, errors, sizes, memory and times.

        A call is counted when its run is enqueued. The counts are exact with any number of threads.
        Reading waits while another thread enqueues a call or captures a graph.

        Returns:
            A dict of numbers, which `json` can write; see `pipeline.runtime.metrics.Metrics`.
        """
        return read_metrics(self._runs)

    @property
    def timing(self) -> bool:
        return self._runs.timing is not None

    @timing.setter
    def timing(self, value: bool) -> None:
        with self._runs.device.current():
            self._runs.time(bool(value))

    @property
    def captured(self) -> tuple[Mapping[str, int], ...]:
        """The sizes that have a graph, least recently used first."""
        return self._runs.graphs.sizes

    @property
    def poison(self) -> bool:
        return self._runs.poison

    @poison.setter
    def poison(self, value: bool) -> None:
        self._runs.poison = bool(value)

    @property
    def profile(self) -> int | None:
        return self._runs.forced

    @profile.setter
    def profile(self, value: int | None) -> None:
        if value is not None and value not in range(len(self.profiles)):
            raise InputError(f"profile={value!r}: there are {len(self.profiles)}, counted from 0")
        self._runs.forced = value

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """The profiles, in the engine's order.

        A call uses the nearest one of those that allow its sizes.
        """
        return self.manifest.interface.profiles

    @property
    def inputs(self) -> tuple[Input, ...]:
        """The inputs, as in the manifest."""
        return self.manifest.interface.inputs

    @property
    def outputs(self) -> tuple[Output, ...]:
        """The outputs, as in the manifest."""
        return self.manifest.interface.outputs

    @property
    def gpu(self) -> str:
        """The GPU's name."""
        return self._runs.device.gpu.name

    @property
    def device_memory(self) -> int:
        """Bytes of GPU memory that the engine holds.

        This counts buffers (with outputs that are alive), activation memory, graphs' buffers and
        weights. If TensorRT doesn't report the weights' size, the plan's size counts instead. The
        memory that CUDA and TensorRT use themselves is not known.
        """
        weights = 0 if self._runs.closed else self._runs.plan.weights
        return self._runs.pool.nbytes + weights

    def close(self) -> None:
        """Frees all GPU memory except outputs that are still alive; those free themselves.

        The kernels that were compiled go to the runtime cache, if `load` got one.
        """
        cache = None if self._runs.closed else self._cache
        kernels = b"" if cache is None else cache.kernels()
        self._runs.close()
        if cache is not None:
            cache.save(kernels)

    def __enter__(self) -> Engine:
        if self._runs.closed:
            raise EngineError("the engine is closed; load it again")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except InputError:  # of the runtime cache; it must not hide the error of the block
            if error is None:
                raise

    def __del__(self) -> None:
        if hasattr(self, "_runs"):
            self._runs.close()

    def __repr__(self) -> str:
        state = "closed" if self._runs.closed else self.gpu
        return f"Engine({self.manifest.name!r}, {state})"
