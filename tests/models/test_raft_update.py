"""RAFT with split update convolutions computes the same function as torchvision's RAFT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

from pipeline.artifact.artifact import Artifact
from pipeline.errors import InputError
from pipeline.machine.libraries import import_torchvision
from pipeline.models.raft import raft, raft_small
from pipeline.spec.model import ModelSpec

Factory = Callable[..., ModelSpec]
FACTORIES: list[Factory] = [raft, raft_small]
# a part of the flow's largest value; the differences after 12 updates are 1.2e-6 and 4e-15
FLOAT, DOUBLE = 1e-5, 1e-12
CASES = [(1, (1, 128, 128)), (2, (2, 136, 168)), (12, (1, 128, 200))]


def pair(factory: Factory, updates: int, correlation: str = "volume") -> tuple[Any, Any]:
    """torchvision's model and the split form. No bias and no statistic is still 0 or 1."""
    spec = factory(updates=updates, correlation=correlation, update="torchvision")
    plain: Any = spec.build(None)
    generator = torch.Generator().manual_seed(3)
    for name, value in sorted(plain.state_dict().items()):
        if name.endswith("running_var") or (value.dim() == 1 and name.endswith("weight")):
            value.uniform_(0.5, 1.5, generator=generator)
        elif name.endswith(("bias", "running_mean")):
            value.uniform_(-0.2, 0.2, generator=generator)
    from pipeline.models._raft_update import SplitRaft

    return plain, SplitRaft(plain.raft, updates).eval()


def images(size: tuple[int, int, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    batch, height, width = size
    return [torch.rand(batch, 3, height, width, generator=generator) * 2 - 1 for _ in range(2)]


@torch.no_grad()
def apart(one: nn.Module | Tensor, other: nn.Module, inputs: list[Tensor]) -> float:
    """The largest difference of the flows, divided by the largest flow of `one` (or this flow)."""
    wanted, got = one if isinstance(one, Tensor) else one(*inputs), other(*inputs)
    assert wanted.shape == got.shape == (len(inputs[0]), 2, *inputs[0].shape[2:])
    assert wanted.dtype == got.dtype == inputs[0].dtype
    return float((wanted - got).abs().max() / wanted.abs().max())


@pytest.fixture
def double_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision's coordinates are float32 even in a float64 model, which then refuses them."""
    import_torchvision()
    from torchvision.models.optical_flow import raft as module

    grid = module.make_coords_grid
    monkeypatch.setattr(module, "make_coords_grid", lambda *sizes: grid(*sizes).double())


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize(("updates", "size"), [*CASES, (2, (1, 264, 128))], ids=str)
def test_same_in_float32(factory: Factory, updates: int, size: tuple[int, int, int]) -> None:
    assert apart(*pair(factory, updates), images(size)) <= FLOAT


@pytest.mark.usefixtures("double_grid")
@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize(("updates", "size"), CASES, ids=str)
def test_same_function(factory: Factory, updates: int, size: tuple[int, int, int]) -> None:
    plain, split = pair(factory, updates)
    inputs = [image.double() for image in images(size)]
    assert apart(plain.double(), split.double(), inputs) <= DOUBLE


@pytest.mark.parametrize("factory", FACTORIES)
def test_same_with_the_correlation_on_demand(factory: Factory) -> None:
    assert apart(*pair(factory, 2, "on_demand"), images((1, 136, 168))) <= FLOAT


def zero(tensor: Tensor) -> None:
    tensor.zero_()


def shift_inputs(tensor: Tensor) -> None:
    """A fault: a slice of the input channels starts one too late."""
    tensor.copy_(tensor.roll(-1, dims=1))


def swap_gates(tensor: Tensor) -> None:
    """A fault: exchanges the weights of z and r."""
    half = len(tensor) // 2
    tensor.copy_(torch.cat([tensor[half:], tensor[:half]]))


FAULTS: dict[str, tuple[str, Callable[[Tensor], None]]] = {
    "context left out": ("context.weight", zero),
    "bias left out": ("context.bias", zero),
    "context added, not subtracted": ("context.weight", torch.Tensor.neg_),
    "context from the wrong channel on": ("context.weight", shift_inputs),
    "h and motion from the wrong channel on": ("gates.weight", shift_inputs),
    "r * h and motion from the wrong channel on": ("candidate.weight", shift_inputs),
    "z and r exchanged": ("gates.weight", swap_gates),
}


@pytest.fixture(scope="module", params=FACTORIES)
def right(request: pytest.FixtureRequest) -> tuple[Tensor, Any]:
    """torchvision's flow after one update, and the equal split form."""
    plain, split = pair(request.param, 1)
    with torch.no_grad():
        return plain(*images((1, 128, 128))), split


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(right: tuple[Tensor, Any], fault: str) -> None:
    wanted, split = right
    name, edit = FAULTS[fault]
    for gru in split.grus:
        weight = gru.get_parameter(name)
        kept = weight.detach().clone()
        with torch.no_grad():
            edit(weight)
            far = apart(wanted, split, images((1, 128, 128)))
            weight.copy_(kept)
        assert far > 100 * FLOAT


def test_one_update_less_is_noticed() -> None:
    plain, split = pair(raft_small, 3)
    split.updates = 2
    assert apart(plain, split, images((1, 128, 136))) > 100 * FLOAT


@pytest.mark.parametrize("factory", FACTORIES)
def test_it_is_what_is_built_and_from_the_weights_given(factory: Factory, tmp_path: Path) -> None:
    plain, _ = pair(factory, 1)
    torch.save(plain.raft.state_dict(), tmp_path / "weights.pth")
    plain_built, built, seeded = (
        factory(updates=1, **options).build(weights)
        for options, weights in (
            ({"update": "torchvision"}, tmp_path / "weights.pth"),
            ({}, tmp_path / "weights.pth"),
            ({}, None),
        )
    )
    assert hasattr(built, "grus") and not hasattr(plain_built, "grus")
    inputs = images((1, 128, 136))
    assert apart(plain, plain_built, inputs) == 0
    assert apart(plain, built, inputs) <= FLOAT
    assert apart(plain, seeded, inputs) > 100 * FLOAT


def test_option_is_checked() -> None:
    with pytest.raises(InputError, match="update='fast' must be split or torchvision"):
        raft(update="fast")


def test_sizes_that_it_does_not_take_are_refused() -> None:
    _, split = pair(raft_small, 1)
    for sizes in ([(128, 128), (128, 136)], [(132, 128)] * 2):
        with pytest.raises(ValueError, match="must be equal, with H and W multiples of 8"):
            split(*(torch.zeros(1, 3, *size) for size in sizes))


@pytest.mark.slow
def test_graph_has_each_convolution_as_often_as_it_should(
    raft_artifact: Callable[[], Artifact],
) -> None:
    """Counts the convolutions in the ONNX of 12 updates.

    The context's convolutions occur once, and the others once in each update. No addition follows
    them that TensorRT could fuse.
    """
    graph = onnx.load(raft_artifact().model).graph
    users: dict[str, list[str]] = {}
    for node in graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node.op_type)
    found: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        if node.op_type == "Conv" and "grus." in node.input[1]:
            found.setdefault(node.input[1].split("grus.")[1], []).append(node)
    assert {name: len(nodes) for name, nodes in found.items()} == {
        f"{half}.{part}.weight": count
        for half in (0, 1)
        for part, count in (("context", 1), ("gates", 12), ("candidate", 12))
    }
    for name, nodes in found.items():
        if "context" not in name:
            assert {op for node in nodes for op in users[node.output[0]]} == {"Sub"}, name
    assert not any("convgru" in tensor.name for tensor in graph.initializer)
