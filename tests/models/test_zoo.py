"""The zoo's models: seeds, checked options, and fitting weights."""

from __future__ import annotations

import pytest
import torch

from pipeline.errors import InputError
from pipeline.models import MODELS
from pipeline.models.raft import raft, raft_small
from pipeline.source.zoo import find_spec


def test_every_name_leads_to_a_spec() -> None:
    for name in MODELS:
        spec = find_spec(name, {})
        assert spec.name == name
        assert spec.seed is not None
        assert spec.tolerance.why


@pytest.mark.parametrize("factory", [raft, raft_small])
def test_raft_is_as_the_issue_asks(factory) -> None:
    spec = factory()
    h, w = spec.dims["h"], spec.dims["w"]
    assert (h.min, h.max, h.multiple_of) == (135, 2160, 1)
    assert (w.min, w.max, w.multiple_of) == (135, 3840, 1)
    assert spec.options == {"updates": 12, "correlation": "volume", "update": "split"}
    assert factory(updates=3).options["updates"] == 3
    assert spec.padding is not None
    assert (spec.padding.mode, dict(spec.padding.multiples)) == ("replicate", {"h": 8, "w": 8})
    for bad in (0, -1, 1.5, True, "2", None):
        with pytest.raises(InputError, match=r"updates=.* must be a whole number, at least 1"):
            factory(updates=bad)
    with pytest.raises(InputError, match="no option 'update_count'; its options: updates"):
        find_spec(spec.name, {"update_count": 3})


def test_random_weights_are_seeded_and_leave_torchs_generator_alone() -> None:
    spec = raft_small(updates=1)
    torch.manual_seed(7)
    want = torch.rand(1)
    torch.manual_seed(7)
    one = spec.build(None)
    assert torch.equal(torch.rand(1), want)
    two = spec.build(None)
    assert not one.training
    for key, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[key]), key


def test_updates_are_done_and_the_last_flow_is_returned() -> None:
    images = [torch.rand(1, 3, 136, 144) * 2 - 1 for _ in range(2)]
    flows = []
    with torch.no_grad():
        for updates in (1, 2):
            # test_raft_update.py compares the other form of the update with this form
            module = raft_small(updates=updates, update="torchvision").build(None)
            flow = module(*images)
            assert flow.shape == (1, 2, 136, 144)
            assert torch.isfinite(flow).all()
            every = module.raft(*images, num_flow_updates=updates)
            assert len(every) == updates
            assert torch.equal(flow, every[-1])
            flows.append(flow)
    assert not torch.allclose(flows[0], flows[1])


def test_weights_of_one_raft_fit_another_and_not_raft_small(tmp_path) -> None:
    source = raft(updates=1).build(None)
    state = {k: torch.rand_like(v) if v.is_floating_point() else v
             for k, v in source.raft.state_dict().items()}  # fmt: skip
    torch.save(state, tmp_path / "raft.pth")
    loaded = raft(updates=2).build(tmp_path / "raft.pth").raft.state_dict()
    assert all(torch.equal(loaded[k], v) for k, v in state.items())
    with pytest.raises(InputError) as caught:
        raft_small(updates=1).build(tmp_path / "raft.pth")
    text = str(caught.value)
    assert "raft.pth are for another model" in text
    assert "unexpected keys: " in text
    assert "another shape: feature_encoder.convnormrelu.0.weight (64, 3, 7, 7) instead of" in text
