"""The builder's configuration: profiles, precision, effort, and the timing cache.

A build times kernels and compiles fused regions (docs/results/build-cost.md). The artifact keeps
the timings in a cache. A second build reuses them, also on another machine with the same GPU.
TensorRT does not cache compiled regions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.build import layer_types
from pipeline.errors import BuildError
from pipeline.machine.files import write_whole
from pipeline.machine.gpu import Capability
from pipeline.machine.target import Target
from pipeline.spec.effort import DEFAULT_EFFORT, Effort
from pipeline.spec.interface import Interface
from pipeline.spec.plan_flags import NO_FLAGS, PlanFlags
from pipeline.spec.precision import HALVES
from pipeline.spec.recipe import Recipe
from pipeline.spec.tensors import Precision

_CUDNN = "libcudnn_ops_infer.so.8"


@dataclass(frozen=True)
class BuildOptions:
    """The options of a build. Shapes and profiles come from the interface.

    Args:
        target: The TensorRT that builds.
        precision: ``fp32`` forbids TF32. ``tf32`` allows TF32. ``fp16`` and ``bf16`` allow TF32,
            and compute convolutions, matrix products and what follows them in half precision
            (`pipeline.rewrite.half_rules`).
        effort: The builder's effort, and the file of its timings.
        plugins: Libraries, Python files, or names in `pipeline.plugins.PLUGINS`.
        recipe: For fp16 and bf16: which nodes compute in half precision, in place of the rules.
        auto: Whether to search for the recipe first (`pipeline.convert.recipe`).
        libraries: Whether TensorRT 8.6 may use tactics of cuBLAS and cuDNN. An engine with such a
            tactic needs the library where it runs.
        gpus: The compute capabilities of the GPUs that the plan is for. Only TensorRT-RTX can
            choose. Empty for its portable plan, or for the GPU here.
        plain: Whether to build as TensorRT does by default. In fp16 and bf16, TensorRT then chooses
            the type of each layer by its speed; half.onnx and `recipe` are not used.
        time_limit: The longest time of the build in seconds; None for no limit.
        flags: Where the plan runs, and whether its weights can be replaced.
        detailed: Whether the plan tells the formats and tactics of its layers. NVIDIA: this
            "will generally increase latency in enqueueV3()". Without it, it tells the names.
    """

    target: Target
    precision: Precision = "fp32"
    effort: Effort = DEFAULT_EFFORT
    plugins: tuple[str, ...] = ()
    recipe: Recipe | None = None
    auto: bool = False
    libraries: bool = False
    gpus: tuple[Capability, ...] = ()
    plain: bool = False
    time_limit: float | None = None
    flags: PlanFlags = NO_FLAGS
    detailed: bool = False

    @property
    def in_half(self) -> bool:
        """True if the graph is written in half precision before the build."""
        return self.precision in HALVES and not self.plain


def configure(
    trt: Any,
    builder: Any,
    network: Any,
    interface: Interface,
    options: BuildOptions,
) -> Any:
    """Makes a builder config for the network. May also set the precision of the layers.

    Args:
        trt: The target's TensorRT.
        builder, network: TensorRT's builder and network.
        interface: The shapes of the inputs, and the profiles.
        options: The target, the precision and the effort.

    Raises:
        BuildError: TensorRT refuses a profile.
    """
    from polygraphy.backend.trt import Profile as PolygraphyProfile

    target = options.target
    ranges = []
    for profile in interface.profiles:
        made = PolygraphyProfile()
        for name, (low, opt, high) in profile.shapes(interface.input_shapes).items():
            made.add(name, low, opt, high)
        ranges.append(made)
    if target.flavour == "tensorrt_rtx":
        from polygraphy.backend.tensorrt_rtx import CreateConfigRTX

        gpus = list(options.gpus) or None
        config = CreateConfigRTX(profiles=ranges, compute_capabilities=gpus)(builder, network)
    else:
        config = _classic_config(trt, builder, network, ranges, options)
    # For a profile that contradicts the network, add_optimization_profile returns -1 and raises
    # nothing. Polygraphy does not check the result.
    if config.num_optimization_profiles != len(interface.profiles):
        raise BuildError(
            f"target {target}: TensorRT refuses a profile. Give the profile other ranges"
        )
    # CreateConfig clears TF32 by default, and CreateConfigRTX does not: set or clear it always
    (config.clear_flag if options.precision == "fp32" else config.set_flag)(trt.BuilderFlag.TF32)
    if options.effort.level is not None:
        config.builder_optimization_level = options.effort.level
    return config


def _classic_config(
    trt: Any, builder: Any, network: Any, ranges: Sequence[Any], options: BuildOptions
) -> Any:
    """Makes the config for a TensorRT that is not RTX, without Polygraphy's CreateConfig.

    CreateConfig sets its own timing cache. With a second cache, TensorRT 8.6.0 aborted the build
    (seen on an H200 without cuDNN; see `TimingCache`).
    """
    config = builder.create_builder_config()
    for made in ranges:
        config.add_optimization_profile(made.fill_defaults(network).to_trt(builder, network))
    target, precision = options.target, options.precision
    if options.in_half:
        layer_types.apply(trt, config, network, precision)
    elif precision in HALVES:
        config.set_flag(getattr(trt.BuilderFlag, precision.upper()))
    if options.detailed:
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if options.flags.version_compatible:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    if options.flags.hardware_compatible:
        config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.AMPERE_PLUS
    if options.flags.refit:
        config.set_flag(trt.BuilderFlag.REFIT)
    if target.version < (9,):
        # Tactics of cuBLAS and cuDNN need these libraries. Convolutions that are compiled in the
        # build take much of its time (docs/results/build-cost.md). Not measured after 8.6.
        if not (options.libraries or options.plain):
            config.set_tactic_sources(0)
        # every captured graph has its own context; later versions always allow this
        config.set_preview_feature(trt.PreviewFeature.PROFILE_SHARING_0806, True)
    return config


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


class TimingCache:
    """The kernel timings of one build, read from a file and written back with the new timings.

    TensorRT 8.6 needs cuDNN to write a cache. Without cuDNN it ends the process ("Could not load
    library libcudnn_ops_infer.so.8", seen on an H200). So no cache is kept there.

    Args:
        file: Read if it exists, and written by `save`. None keeps no timings.
        target: The TensorRT that builds.
    """

    def __init__(self, file: Path | None, target: Target) -> None:
        self._file = file
        self._cache: Any = None  # TensorRT does not keep a reference to the cache
        self._before, self.note = b"", ""
        if file is not None and target.version < (9,) and not _loads(_CUDNN):
            self._file = None
            self.note = f"timings were not kept: TensorRT 8.6 needs cuDNN's {_CUDNN} to write them"
        elif file is not None and file.is_file():
            self._before = file.read_bytes()

    def attach(self, config: Any) -> None:
        """Adds the cache to a build's config. This object must live longer than the build."""
        if self._file is None:
            return
        self._cache = config.create_timing_cache(self._before)
        if self._cache is not None and config.set_timing_cache(self._cache, False):
            return
        # a damaged cache, or one of another version or GPU: TensorRT builds without a cache
        self.note = f"{self._file.name} was not used: it is damaged, or of another TensorRT or GPU"
        self._cache = None
        self._file.unlink(missing_ok=True)

    def save(self) -> str:
        """Writes the file after the build. Returns what was kept, as text."""
        if self._file is None or self._cache is None:
            return f"none: {self.note}" if self.note else "none"
        data = bytes(memoryview(self._cache.serialize()))
        write_whole(self._file, data)
        return f"{self._file.name}: {len(self._before)} bytes before, {len(data)} after"
