"""The builder's configuration: profiles, precision, effort, and the timing cache.

What a build costs is its timing of kernels and its compiling of fused regions (docs/gpu.md). The
timings are kept in a cache that travels with the artifact, so a second build, also on another
machine with the same GPU, repeats none of them; the compiling is not cached by TensorRT.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import _mixed
from pipeline._folder import write_whole
from pipeline.dims import Size
from pipeline.errors import BuildError, InputError
from pipeline.profiles import Profile
from pipeline.target import Target
from pipeline.tensors import Precision

LEVELS = range(6)


@dataclass(frozen=True)
class Effort:
    """How hard the builder tries, and what it remembers.

    Args:
        level: TensorRT's builder optimisation level, 0 (fast to build) to 5; None leaves it to
            TensorRT (3).
        timing_cache: a file to read timings from and to write them to; None for none.
    """

    level: int | None = None
    timing_cache: Path | None = None

    def __post_init__(self) -> None:
        if self.level is not None and self.level not in LEVELS:
            raise InputError(
                f"optimisation level {self.level}: must be {LEVELS[0]} to {LEVELS[-1]}"
            )


DEFAULT_EFFORT = Effort()


def check_effort(effort: Effort, target: Target) -> None:
    """Raises `InputError` if the target times nothing when it builds."""
    if target.flavour == "tensorrt_rtx" and effort.timing_cache is not None:
        raise InputError(f"target {target}: times no kernels when it builds; leave the cache out")


def configure(
    trt: Any,
    target: Target,
    builder: Any,
    network: Any,
    inputs: Mapping[str, Sequence[Size]],
    profiles: Sequence[Profile],
    precision: Precision,
    effort: Effort,
    timings: str | None = None,
    obey: bool = True,
) -> Any:
    """A builder config for the network, whose layers it may tell their precision.

    Args:
        timings: a file of kernel timings; see `TimingCache.loaded`.
        obey: fail where a layer can't compute in the precision that fp16 gives it (`_mixed`).

    Raises:
        BuildError: TensorRT takes a profile for invalid.
    """
    from polygraphy.backend.trt import CreateConfig
    from polygraphy.backend.trt import Profile as PolygraphyProfile

    ranges = []
    for profile in profiles:
        made = PolygraphyProfile()
        for name, (low, opt, high) in profile.shapes(inputs).items():
            made.add(name, low, opt, high)
        ranges.append(made)
    if target.flavour == "tensorrt_rtx":
        from polygraphy.backend.tensorrt_rtx import CreateConfigRTX

        config = CreateConfigRTX(profiles=ranges)(builder, network)
    else:
        half = precision == "fp16"
        # no tactic sources: those of other libraries are gone from 8.6 on or need them installed,
        # and JIT and edge-mask convolutions cost a large part of the build (docs/gpu.md)
        config = CreateConfig(
            profiles=ranges,
            fp16=half,
            precision_constraints=("obey" if obey else "prefer") if half else None,
            tactic_sources=[],
            load_timing_cache=timings,
        )(builder, network)
        if target.version < (9,):  # later ones always do: every captured graph has a context
            config.set_preview_feature(trt.PreviewFeature.PROFILE_SHARING_0806, True)
        if half:
            _mixed.apply(trt, network)
    # add_optimization_profile gives -1 for a profile that contradicts the network, without an
    # error, and Polygraphy does not look at it
    if config.num_optimization_profiles != len(profiles):
        raise BuildError(f"target {target}: TensorRT takes a profile for invalid")
    # CreateConfig clears TF32 by default, CreateConfigRTX leaves it on: say it either way
    (config.clear_flag if precision == "fp32" else config.set_flag)(trt.BuilderFlag.TF32)
    if effort.level is not None:
        config.builder_optimization_level = effort.level
    return config


class TimingCache:
    """The timings of one build: those read, and afterwards those and the new ones.

    Args:
        file: read if it is there, and written by `save`; None keeps nothing.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._before = file.read_bytes() if file is not None and file.is_file() else b""
        self.note = ""

    @contextmanager
    def loaded(self) -> Iterator[str | None]:
        """A file that Polygraphy reads the timings from; it locks files, so this is a copy.

        TensorRT 8.6.0 aborts in the build if a config is given two caches one after the other, and
        Polygraphy gives it one in any case: so the cache goes in through Polygraphy.
        """
        if not self._before:
            yield None
            return
        with tempfile.TemporaryDirectory(prefix="pipeline-") as folder:
            copy = Path(folder) / "timing.cache"
            copy.write_bytes(self._before)
            yield str(copy)

    def save(self, config: Any) -> str:
        """Writes the file from the config of a build that is done; what was kept, in words."""
        if self._file is None:
            return "none"
        cache = config.get_timing_cache()
        if cache is None and self._before:
            # another version or GPU: TensorRT refuses it, and times without one
            self._before = b""
            self.note = f"{self._file.name} is of another TensorRT or GPU, or damaged: not used"
            self._file.unlink(missing_ok=True)
            return f"none: {self.note}"
        data = b"" if cache is None else bytes(memoryview(cache.serialize()))
        if not data:
            return "none: TensorRT gave no timings"
        write_whole(self._file, data)
        return f"{self._file.name}: {len(self._before)} bytes before, {len(data)} after"
