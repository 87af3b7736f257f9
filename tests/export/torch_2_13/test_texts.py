"""Texts of symbolic sizes: a table's key bakes the size in, a message does not."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch

from pipeline.export.torch_2_13 import mended

LOG = logging.getLogger(__name__)


class Messages(torch.nn.Module):
    """Makes texts of sizes that only a person reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[1]
        print(f"{size} columns")
        print(
            "shape",
            str(x.shape),
        )
        LOG.warning(f"{size} columns")
        LOG.info("%s columns", size)
        warnings.warn(f"{size} columns", stacklevel=1)
        assert x.ndim == 2, f"{size} columns"
        torch._assert(size > 1, f"{size} columns")
        if x.ndim == 2: print(f"{size} columns")  # noqa: E701  # fmt: skip
        if x.ndim != 2:
            raise ValueError(f"{size} columns")
        return x + size


class Named(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        name = f"w{x.shape[1]}"
        return x + (name == "w40")


TABLE: set[str] = set()


class Catalogued(torch.nn.Module):
    """The name of the call has the letters of "log"."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        catalog(f"w{x.shape[1]}")
        return x + ("w40" in TABLE)


def catalog(name: str) -> None:
    TABLE.add(name)


def exported(module: torch.nn.Module) -> torch.export.ExportedProgram:
    shapes = ({1: torch.export.Dim("w", min=20, max=60)},)
    with mended(module, {}):
        return torch.export.export(module, (torch.zeros(3, 31),), dynamic_shapes=shapes)


def test_messages_leave_the_size_dynamic() -> None:
    run = exported(Messages()).module()
    for size in (20, 40, 60):
        assert torch.equal(run(torch.zeros(3, size)), torch.full((3, size), float(size)))


@pytest.mark.parametrize("module", [Named(), Catalogued()], ids=["compared", "stored"])
def test_any_other_text_bakes_the_size_in(module: torch.nn.Module) -> None:
    with pytest.raises(Exception, match=r"specialized it to be a constant|Constraints violated"):
        exported(module)
