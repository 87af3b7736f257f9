"""Attributes that are exchanged while somebody uses them."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo import config

from pipeline.export.exchange import Exchange
from pipeline.export.export import export
from pipeline.spec.dims import Dim
from pipeline.spec.model import Input, ModelSpec, Output


class Owner:
    plain = 1

    @classmethod
    def name(cls) -> str:
        return cls.__name__


def test_the_last_of_overlapping_users_puts_the_own_value_back() -> None:
    seen = []
    exchange = Exchange({(Owner, "plain"): 2}, changed=lambda: seen.append(Owner.plain))
    first, second = exchange.used(), exchange.used()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert Owner.plain == 2
    second.__exit__(None, None, None)
    assert Owner.plain == 1
    assert seen == [2, 2, 2, 1]


def test_a_value_that_changed_between_two_uses_is_kept(monkeypatch) -> None:
    exchange = Exchange({(Owner, "plain"): 2})
    with exchange.used():
        pass
    monkeypatch.setattr(Owner, "plain", 5)
    with exchange.used():
        assert Owner.plain == 2
    assert Owner.plain == 5


def test_a_class_method_stays_one_and_an_error_puts_it_back() -> None:
    class Child(Owner):
        pass

    exchange = Exchange({(Owner, "name"): classmethod(lambda _: "other")})
    with pytest.raises(ZeroDivisionError), exchange.used():
        assert Child.name() == "other"
        raise ZeroDivisionError
    assert Child.name() == "Child"


@pytest.mark.parametrize("before", [True, False])
def test_an_export_leaves_torch_s_cache_as_it_was(tmp_path, monkeypatch, before: bool) -> None:
    seen = []
    own = torch.export.export

    def spy(*args, **options):
        seen.append(config.fake_tensor_cache_enabled)
        return own(*args, **options)

    monkeypatch.setattr(torch.export, "export", spy)
    sizes = (Dim("b", 1, 2, 4), 3)
    spec = ModelSpec("net", lambda _: torch.nn.ReLU(), (Input("x", sizes),), (Output("y"),))
    with config.patch(fake_tensor_cache_enabled=before):
        export(spec, None, tmp_path / "m.onnx")
        assert config.fake_tensor_cache_enabled == before
    assert set(seen) == {False}
