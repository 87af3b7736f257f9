"""The builder's configuration: profiles, precision, effort, and the timing cache.

A build spends its time on timing kernels and on compiling fused regions
(docs/results/build-cost.md). The timings are kept in a cache that travels with the artifact. So a
second build repeats none of them, also on another machine with the same GPU. TensorRT does not
cache what it compiled.
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
from pipeline.machine.target import Target
from pipeline.spec.effort import DEFAULT_EFFORT, Effort
from pipeline.spec.interface import Interface
from pipeline.spec.tensors import Precision

_CUDNN = "libcudnn_ops_infer.so.8"


@dataclass(frozen=True)
class BuildOptions:
    """What changes an engine beside its model and its profiles, which the interface has.

    Args:
        target: the TensorRT that builds.
        precision: ``fp32`` forbids TF32, ``tf32`` allows it, ``fp16`` also has convolutions,
            matrix products and what follows them compute in half precision
            (`pipeline.rewrite.half_rules`).
        effort: how hard the builder tries, and where it keeps its timings.
        plugins: libraries, Python files, or names out of `pipeline.plugins.PLUGINS`.
    """

    target: Target
    precision: Precision = "fp32"
    effort: Effort = DEFAULT_EFFORT
    plugins: tuple[str, ...] = ()


def configure(
    trt: Any,
    builder: Any,
    network: Any,
    interface: Interface,
    options: BuildOptions,
) -> Any:
    """A builder config for the network; it may also set the precision of the network's layers.

    Args:
        trt: the target's TensorRT.
        builder, network: what the config is for.
        interface: the shapes of the inputs, and the profiles.
        options: the target, the precision and the effort.

    Raises:
        BuildError: TensorRT takes a profile for invalid.
    """
    from polygraphy.backend.trt import Profile as PolygraphyProfile

    target, precision = options.target, options.precision
    ranges = []
    for profile in interface.profiles:
        made = PolygraphyProfile()
        for name, (low, opt, high) in profile.shapes(interface.input_shapes).items():
            made.add(name, low, opt, high)
        ranges.append(made)
    if target.flavour == "tensorrt_rtx":
        from polygraphy.backend.tensorrt_rtx import CreateConfigRTX

        config = CreateConfigRTX(profiles=ranges)(builder, network)
    else:
        config = _classic_config(trt, target, builder, network, ranges, precision)
    # add_optimization_profile gives -1 for a profile that contradicts the network, without an
    # error, and Polygraphy does not look at it
    if config.num_optimization_profiles != len(interface.profiles):
        raise BuildError(f"target {target}: TensorRT takes a profile for invalid")
    # CreateConfig clears TF32 by default, CreateConfigRTX leaves it on: say it either way
    (config.clear_flag if precision == "fp32" else config.set_flag)(trt.BuilderFlag.TF32)
    if options.effort.level is not None:
        config.builder_optimization_level = options.effort.level
    return config


def _classic_config(
    trt: Any, target: Target, builder: Any, network: Any, ranges: Sequence[Any], precision: str
) -> Any:
    """The config of a TensorRT that is not RTX, made without Polygraphy's CreateConfig.

    That one gives every config a timing cache of its own; 8.6.0 aborted in the build when it was
    given ours on top (seen on an H200 without cuDNN; see `TimingCache`).
    """
    config = builder.create_builder_config()
    for made in ranges:
        config.add_optimization_profile(made.fill_defaults(network).to_trt(builder, network))
    if precision == "fp16":
        layer_types.apply(trt, config, network)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if target.version < (9,):
        # Tactics of cuBLAS and cuDNN need these installed, and convolutions that are compiled at
        # build time cost a large part of it (docs/results/build-cost.md). Later versions were not
        # measured.
        config.set_tactic_sources(0)
        # every captured graph has a context of its own; later versions always allow that
        config.set_preview_feature(trt.PreviewFeature.PROFILE_SHARING_0806, True)
    return config


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


class TimingCache:
    """The timings of one build: those read, and afterwards those and the new ones.

    TensorRT 8.6 asks cuDNN when it writes a cache, and ends the process where cuDNN's libraries are
    missing ("Could not load library libcudnn_ops_infer.so.8", seen on an H200); there, nothing is
    kept.

    Args:
        file: read if it is there, and written by `save`; None keeps nothing.
    """

    def __init__(self, file: Path | None, target: Target) -> None:
        self._file = file
        self._cache: Any = None  # TensorRT does not keep what it is given alive
        self._before, self.note = b"", ""
        if file is not None and target.version < (9,) and not _loads(_CUDNN):
            self._file = None
            self.note = f"timings not kept: TensorRT 8.6 needs cuDNN's {_CUDNN} for that"
        elif file is not None and file.is_file():
            self._before = file.read_bytes()

    def attach(self, config: Any) -> None:
        """Puts the cache into a build's config; this object has to outlive the build."""
        if self._file is None:
            return
        self._cache = config.create_timing_cache(self._before)
        if self._cache is not None and config.set_timing_cache(self._cache, False):
            return
        # another version or GPU, or damaged: TensorRT refuses it, and times without one
        self.note = f"{self._file.name} is of another TensorRT or GPU, or damaged: not used"
        self._cache = None
        self._file.unlink(missing_ok=True)

    def save(self) -> str:
        """Writes the file after the build; what was kept, in words."""
        if self._file is None or self._cache is None:
            return f"none: {self.note}" if self.note else "none"
        data = bytes(memoryview(self._cache.serialize()))
        write_whole(self._file, data)
        return f"{self._file.name}: {len(self._before)} bytes before, {len(data)} after"
