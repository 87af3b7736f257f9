"""Where a plan runs besides the machine that built it, and whether its weights can be replaced.

Source: NvInfer.h of TensorRT 8.6, 10 and 11 (``BuilderFlag``, ``HardwareCompatibilityLevel``).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from pipeline.errors import InputError
from pipeline.machine.gpu import AMPERE, find_gpu
from pipeline.machine.target import Target


@dataclass(frozen=True)
class PlanFlags:
    """Flags of TensorRT's builder. NVIDIA says that compatible plans can be slower.

    Args:
        version_compatible: Whether newer versions of the same major version load the plan. The plan
            then holds TensorRT's lean runtime, which is code that runs on the CPU.
        hardware_compatible: Whether all GPUs of compute capability 8.0 and later load the plan.
        refit: Whether `pipeline refit` can replace the weights.
    """

    version_compatible: bool = False
    hardware_compatible: bool = False
    refit: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the flags that are set: ``version-compatible``."""
        return tuple(name.replace("_", "-") for name, value in asdict(self).items() if value)


NO_FLAGS = PlanFlags()


def check_flags(flags: PlanFlags, target: Target) -> None:
    """Raises `InputError` for flags that the target lacks, or that don't go together here."""
    if target.flavour == "tensorrt_rtx":
        if flags.version_compatible:
            raise InputError(
                f"target {target}: builds no version-compatible plans. Leave out "
                "--version-compatible, and build again for each version of TensorRT-RTX"
            )
        if flags.hardware_compatible:
            raise InputError(
                f"target {target}: a plan runs on many kinds of GPU already. Leave out "
                "--hardware-compatible, or choose the GPUs with --gpu"
            )
        if flags.refit:
            raise InputError(
                f"target {target}: builds no refittable plans without a GPU. Leave out --refit, "
                "and convert again for new weights"
            )
    if flags.version_compatible and flags.refit:
        raise InputError(
            "the lean runtime of a version-compatible plan can't refit it. Leave out --refit or "
            "--version-compatible"
        )
    gpu = find_gpu()
    if flags.hardware_compatible and not isinstance(gpu, str) and gpu.capability < AMPERE:
        raise InputError(
            f"--hardware-compatible needs a GPU of compute capability 8.0 or later, and here is "
            f"the {gpu.text}. Leave it out"
        )
