"""Small real specs for the tests. As a script, it is the command line with these specs.

torch is imported where a module is made. So a test can show that nothing else imports torch.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from pipeline.spec.dims import Dim
from pipeline.spec.model import Input, ModelSpec, Output, Tolerance
from pipeline.spec.padding import Padding
from pipeline.spec.profiles import Profile

TOLERANCE = Tolerance(1e-4, 1e-5, "float32 rounding of one convolution")
ZOO = {"tiny": "tiny:conv", "loose": "tiny:loose", "skewed": "tiny:skewed"}


def dims(high: int = 40) -> tuple[Dim, Dim]:
    return Dim("h", 5, 18, high), Dim("w", 5, 22, high)


def conv(
    *, channels: int = 4, tolerance: Tolerance = TOLERANCE, profiles: tuple[Profile, ...] = ()
) -> ModelSpec:
    """A padded convolution. The inner model needs multiples of 4; every size is legal."""

    def build(weights: Path | None) -> Any:
        import torch

        from pipeline.spec.weights import load_weights

        class Net(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv = torch.nn.Conv2d(3, channels, 3, padding=1)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                small = torch.nn.functional.avg_pool2d(torch.relu(self.conv(x)), 4)
                return torch.nn.functional.interpolate(small, scale_factor=4.0)

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net = Net()
        if weights is not None:
            load_weights(net, weights)
        return net

    h, w = dims()
    return ModelSpec(
        name="tiny",
        build=build,
        inputs=(Input("x", (1, 3, h, w)),),
        outputs=(Output("y", (1, channels, h, w)),),
        tolerance=tolerance,
        profiles=profiles,
        padding=Padding({"h": 4, "w": 4}),
        libraries=("torch",),
        seed=0,
        options={"channels": channels},
    )


def loose() -> ModelSpec:
    """`conv` with another, wider tolerance."""
    return conv(tolerance=Tolerance(1e-3, 1e-4, "wider"))


def of(
    forward: Callable[[Any], Any],
    *,
    name: str = "case",
    shape: tuple[Any, ...] | None = None,
    outputs: tuple[Output, ...] = (Output("y"),),
    tolerance: Tolerance = TOLERANCE,
    high: int = 40,
) -> ModelSpec:
    """A spec for one function of an image x [1, 3, h, w]."""
    h, w = dims(high)

    def build(_: Path | None) -> Any:
        import torch

        class Net(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> Any:
                return forward(x)

        return Net()

    return ModelSpec(
        name=name,
        build=build,
        inputs=(Input("x", shape or (1, 3, h, w)),),
        outputs=outputs,
        tolerance=tolerance,
    )


def skewed() -> ModelSpec:
    """A model whose export differs from its run."""

    def forward(x: Any) -> Any:
        import torch

        return x * 2 if torch.compiler.is_exporting() else x * 2 + 0.01

    return of(forward, name="skewed")


def main() -> NoReturn:
    from pipeline.__main__ import run
    from pipeline.models import MODELS

    MODELS.update(ZOO)
    atexit.register(_say_if_torch_was_imported)
    run()


def _say_if_torch_was_imported() -> None:
    if "torch" in sys.modules:
        print("torch was imported", file=sys.stderr)


if __name__ == "__main__":
    main()
