"""Loading an artifact's engine and running it: `load`, and the `Engine` that it gives.

Needs TensorRT, cuda-python (cuda-bindings and cuda-core) and numpy; no torch, no onnx.

    with pipeline.load("artifacts/raft") as engine:
        flow = engine(image1=a, image2=b)["flow"]
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pipeline.artifact.manifest import Manifest
from pipeline.errors import EngineError, InputError, TargetMissing
from pipeline.machine.gpu import find_gpu

if TYPE_CHECKING:
    from pipeline.runtime.state import Runs
    from pipeline.spec.profiles import Profile
    from pipeline.spec.tensors import Input, Output


def load(
    path: Path | str,
    *,
    device: int = 0,
    host_code: bool = False,
    graphs: int = 8,
    plugins: Sequence[str] = (),
) -> Engine:
    """Loads an artifact's engine onto a GPU.

    Only a plan is loaded whose bytes, TensorRT and GPU are those of its manifest.

    Args:
        path: the artifact's folder.
        device: CUDA's number of the GPU.
        host_code: let the plan run code of its own on the CPU. Only for plans whose origin you
            know: it is not confined in any way. No plan of this pipeline needs it.
        graphs: how many graphs `Engine.capture` keeps.
        plugins: the files of the plugins that the engine needs (``"libfoo.so"``, ``"foo.py"``).
            They run code of their own in this process, not confined in any way, so none is
            loaded that is not given here, and none but the very file that the engine was built
            with, by its hash; what that file loads in turn is not looked at. The pipeline's own
            plugins need not be given.

    Raises:
        ArtifactError: no artifact, no engine in it, or one that was cut or changed.
        TargetMissing: the TensorRT that built it is not installed, or cuda-python, or a GPU.
        InputError: the GPU is another kind than it was built for; a plugin's file is not given,
            is another one, or does not load.
        OutOfMemory: the weights do not fit.
    """
    from pipeline.runtime.trust import check_given, read_plan

    manifest, plan = read_plan(Path(path))
    check_given(manifest, plugins, str(path))
    return open_plan(
        plan, manifest, where=str(path), device=device, host_code=host_code, graphs=graphs,
        plugins=plugins,
    )  # fmt: skip


def open_plan(
    plan: bytes,
    manifest: Manifest,
    *,
    where: str = "",
    device: int = 0,
    host_code: bool = False,
    graphs: int = 8,
    plugins: Sequence[str] = (),
) -> Engine:
    """`load`, of a plan that is already read: that it is the manifest's is the caller's business.

    Args:
        where: what the plan is called in errors; the model's name by default.
    """
    from pipeline.runtime.trust import allowed_plugins, check_gpu, check_tensorrt, load_plugins

    where = where or manifest.name
    target = check_tensorrt(manifest, where)
    names = allowed_plugins(manifest, plugins, where)
    gpu = find_gpu()
    if isinstance(gpu, str):
        raise TargetMissing(f"{where}: an engine runs on a GPU, but {gpu}")
    try:
        cuda = importlib.import_module("pipeline.runtime.cuda")
        importlib.import_module("cuda.core")
    except ImportError as error:
        raise TargetMissing(
            f"{where}: cuda-python is missing ({error}); pip install 'trt-pipeline[runtime]'"
        ) from error
    from pipeline.runtime import bindings as _trt
    from pipeline.runtime.sizes import Sizes
    from pipeline.runtime.state import Runs

    found = cuda.Device(device)
    check_gpu(manifest, where, found.gpu)
    try:
        trt = importlib.import_module(target.flavour)
    except (ImportError, OSError) as error:
        raise TargetMissing(f"{where}: {target.flavour} does not import: {error}") from error
    with found.current():
        load_plugins(trt, names, target, where)
        made = _trt.deserialise(trt, plan, manifest, where, host_code)
        return Engine(manifest, Runs(made, Sizes(manifest.interface), found, graphs))


class Engine:
    """An engine on a GPU; made by `load`.

    ``engine(image1=a, image2=b)`` gives the outputs by name. Inputs whose names are no Python
    identifiers (or ``stream``, ``out``) go into one dict: ``engine({"image.1": a})``.

    Numpy arrays in, numpy arrays out: the call returns when they are there, and they are the
    caller's. Arrays on the GPU (DLPack or ``__cuda_array_interface__``: torch, cupy, jax, ...)
    are read where they are, and `DeviceArray`s come out, without waiting for the GPU:

    - ``stream=`` (a handle, or torch's, cupy's or cuda.core's object): the run is enqueued there.
      It waits for the producers of the inputs. The caller keeps the inputs' memory, and the
      stream, until it is through, as for any kernel on it.
    - without it, on a stream of the engine's own, which is ordered with the calls of other engines
      that name none, and with the legacy default stream
      (torch's, unless told otherwise) both ways: what was enqueued there before is done before,
      and what is enqueued there afterwards sees the outputs and may overwrite the inputs. The
      engine holds the inputs until it is through. Who overwrites an input on another stream has
      to make that wait for an output first.

    ``out={"flow": array}`` writes an output into the caller's memory on the GPU.

    Outputs have the very shape that the inputs ask for, in any order of sizes. Several threads may
    use an engine; their calls are enqueued one after the other, and run so.

    Raises:
        InputError: a name, dtype, rank or size that is not legal, in the dims' names.
        OutOfMemory: the engine works on, with smaller sizes.
        EngineError: TensorRT or CUDA failed, or the engine is closed.

    Attributes:
        manifest: the artifact's.
        poison: for checks: fill outputs with 0xFF bytes before each run, so that what a run does
            not write shows.
        profile: for checks: the profile's place to run all sizes in; None for the best one.
    """

    def __init__(self, manifest: Manifest, runs: Runs) -> None:
        from pipeline.runtime.arrays import named_inputs
        from pipeline.runtime.call import call

        self.manifest = manifest
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
        """Runs the engine; see the class."""
        runs = self._runs
        given = self._named(inputs, named, runs.names)
        if runs.device.alone:
            return self._run(runs, given, stream, out)
        with runs.device.current():
            return self._run(runs, given, stream, out)

    def capture(self, sizes: Mapping[str, int]) -> None:
        """Keeps a CUDA graph for these sizes, which later calls with them use.

        A graph spares the CPU the launch of every kernel; the inputs are copied into memory of its
        own, and the outputs out of it. Beyond `graphs` (see `load`), the least recently used one
        goes.

        Args:
            sizes: of every dim: ``{"h": 440, "w": 1024}``.

        Raises:
            InputError: sizes that are not legal.
            EngineError: the network can't be captured (sizes that depend on data, loops); the
                engine works on without.
            OutOfMemory: there is no room for it.
        """
        with self._runs.device.current():
            self._runs.capture(sizes)

    @property
    def captured(self) -> tuple[Mapping[str, int], ...]:
        """The sizes with graphs, least recently used first."""
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
            raise InputError(f"profile={value!r}: there are {len(self.profiles)}, from 0")
        self._runs.forced = value

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """The profiles, in the engine's order; of those that allow a call's sizes the nearest one
        is taken."""
        return self.manifest.interface.profiles

    @property
    def inputs(self) -> tuple[Input, ...]:
        """What goes in, as the manifest has it."""
        return self.manifest.interface.inputs

    @property
    def outputs(self) -> tuple[Output, ...]:
        """What comes out, as the manifest has it."""
        return self.manifest.interface.outputs

    @property
    def gpu(self) -> str:
        """The GPU's name."""
        return self._runs.device.gpu.name

    @property
    def device_memory(self) -> int:
        """Bytes of GPU memory that the engine holds: buffers (outputs that are alive included),
        activation memory, graphs' buffers, and weights (the plan's size where TensorRT can't tell
        theirs). What CUDA and TensorRT take for themselves is not known."""
        weights = 0 if self._runs.closed else self._runs.plan.weights
        return self._runs.pool.nbytes + weights

    def close(self) -> None:
        """Frees all GPU memory but that of outputs that are still alive, which free themselves."""
        self._runs.close()

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
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_runs"):
            self._runs.close()

    def __repr__(self) -> str:
        state = "closed" if self._runs.closed else self.gpu
        return f"Engine({self.manifest.name!r}, {state})"
