"""TensorRT-RTX's settings of a run: the kernels for dynamic shapes, and the runtime cache.

TensorRT-RTX compiles kernels when an engine runs. For a new shape it first uses kernels that take
any shape, and compiles better ones for that shape beside the run (``lazy``). It can also wait for
these (``eager``), or never make them (``none``). The runtime cache keeps compiled kernels in a
file, so that another process does not compile them again.

Sources: `IRuntimeConfig` and `IRuntimeCache` of TensorRT-RTX's Python API, and
https://docs.nvidia.com/deeplearning/tensorrt-rtx/latest/inference-library/work-with-runtime-cache.html
"""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pipeline.errors import InputError
from pipeline.machine.files import write_whole
from pipeline.machine.gpu import Gpu
from pipeline.machine.lock import Taken, free, take
from pipeline.machine.target import Flavour
from pipeline.spec.given import named_fields

if TYPE_CHECKING:
    from pipeline.runtime.bindings import LoadedPlan

Kernels = Literal["lazy", "eager", "none"]


@named_fields
@dataclass(frozen=True, kw_only=True)
class RtxSettings:
    """The settings of a run that only TensorRT-RTX has.

    Args:
        kernels: Which kernels run at a shape that is new; see the module. By default TensorRT's
            own choice, ``lazy``.
        runtime_cache: The folder of the runtime cache; None for no cache. It gets one file for
            each plan, kind of GPU and version of TensorRT-RTX.

    Raises:
        InputError: A field is unknown, or `kernels` is.
    """

    kernels: Kernels | None = None
    runtime_cache: Path | str | None = None

    def __post_init__(self) -> None:
        if self.kernels is not None and self.kernels not in get_args(Kernels):
            known = ", ".join(get_args(Kernels))
            raise InputError(f"kernels {self.kernels!r} is unknown; known: {known}")

    def check(self, flavour: Flavour, where: str) -> None:
        """Raises `InputError` if a setting is given for another TensorRT."""
        for name in ("kernels", "runtime_cache"):
            if flavour != "tensorrt_rtx" and getattr(self, name) is not None:
                raise InputError(
                    f"{where}: its engine is for {flavour}, and only TensorRT-RTX has {name}. "
                    "Leave it out"
                )

    def apply(self, plan: LoadedPlan, data: bytes, gpu: Gpu, version: str) -> RuntimeCache | None:
        """Sets how the plan's contexts run. The GPU's context must be current.

        Args:
            plan: The plan. Its `config` is set.
            data: The plan's bytes, which name the cache's file.
            gpu: The GPU, whose name is in the file's name.
            version: The version of TensorRT-RTX, which is too.

        Returns:
            The cache, if there is one.
        """
        if self.kernels is None and self.runtime_cache is None:
            return None
        config = plan.config = plan.engine.create_runtime_config()
        if self.kernels is not None:
            ways = plan.trt.DynamicShapesKernelSpecializationStrategy
            config.dynamic_shapes_kernel_specialization_strategy = getattr(
                ways, self.kernels.upper()
            )
        if self.runtime_cache is None:
            return None
        slug = re.sub(r"[^A-Za-z0-9]+", "-", gpu.name)
        name = f"{hashlib.sha256(data).hexdigest()[:16]}-{slug}-{version}.cache"
        return RuntimeCache(Path(self.runtime_cache) / name, config)


PLAIN = RtxSettings()  # TensorRT's own choices


class RuntimeCache:
    """The compiled kernels of an engine, read from a file and written back.

    Several processes may use the file: it is replaced as a whole, and never by fewer bytes, unless
    TensorRT-RTX refused what was in it. TensorRT-RTX refuses a file that is damaged, or from
    another GPU, driver or version.

    Attributes:
        file: the file.
        loaded: True if the file's kernels are used.
    """

    def __init__(self, file: Path, config: Any) -> None:
        self.file, self.loaded = file, False
        self._cache = config.create_runtime_cache()
        self._refused = False
        with suppress(OSError):
            self.loaded = bool(self._cache.deserialize(file.read_bytes()))
            self._refused = not self.loaded
        config.set_runtime_cache(self._cache)

    def kernels(self) -> bytes:
        """The kernels that were compiled so far, as `save` writes them. The engine must be open."""
        return bytes(memoryview(self._cache.serialize()))

    def save(self, data: bytes) -> None:
        """Writes kernels to the file.

        Nothing is written while another process writes, or if the file has more already.

        Raises:
            InputError: The file can't be written.
        """
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            lock = take(self.file.with_suffix(".lock"))
            try:
                has = self.file.stat().st_size if self.file.is_file() else 0
                if self._refused or len(data) > has:
                    write_whole(self.file, data)
                    self._refused = False
            finally:
                free(lock)
        except Taken:
            return
        except OSError as error:
            raise InputError(
                f"runtime cache {self.file}: can't be written: {error.strerror}. Pass another "
                "folder"
            ) from error
