"""A model that remembers earlier calls is refused; a cache is not."""

from __future__ import annotations

import linecache
import re

import pytest
import stateful
import torch

from pipeline.errors import ExportError
from pipeline.probe.history import kept_values
from pipeline.probe.state import ModuleState, content
from pipeline.spec.dims import Dim
from pipeline.spec.model import Input, ModelSpec

WHERE = re.compile(r" \(\S+stateful\.py:(\d+) in \w+: ")


def _spec(module: torch.nn.Module, state: tuple[str, ...] = ()) -> ModelSpec:
    shape = (Dim("b", 1, 2, 5), 4, Dim("w", 16, 64, 400))
    return ModelSpec("m", lambda _: module, (Input("x", shape),), state=state)


def _kept(name: str, state: tuple[str, ...] = ()) -> list[str]:
    module = getattr(stateful, name)().eval()
    return kept_values(_spec(module, state), module, module, 0)


@pytest.mark.parametrize(("name", "attribute"), stateful.REMEMBERS.items())
def test_what_a_model_remembers_is_named_with_its_line(name: str, attribute: str) -> None:
    with pytest.raises(ExportError) as raised:
        _kept(name)
    said = str(raised.value)
    assert attribute in said
    assert "--state" in said
    where = WHERE.search(said)
    assert where is not None, said
    written = "forward_hook" if "hook" in attribute else attribute.rpartition(".")[2]
    assert written in linecache.getline(stateful.__file__, int(where[1]))


@pytest.mark.parametrize("name", stateful.ELSEWHERE)
def test_state_out_of_sight_is_found_by_its_outputs(name: str) -> None:
    with pytest.raises(ExportError, match=r"it remembers earlier calls.*No attribute"):
        _kept(name)


def test_random_numbers_are_not_called_memory() -> None:
    with pytest.raises(ExportError, match="draws random numbers"):
        _kept("Random")


@pytest.mark.parametrize(("name", "attribute"), stateful.CACHES.items())
def test_a_cache_passes_with_a_note(name: str, attribute: str) -> None:
    assert [note.split()[3] for note in _kept(name)] == [attribute]


@pytest.mark.parametrize("name", stateful.NOTHING)
def test_a_model_that_keeps_nothing_passes(name: str) -> None:
    assert _kept(name) == []


def test_named_state_passes() -> None:
    assert _kept("HundredCalls", ("calls",)) == [
        "converted as a first call: calls of the model write calls"
    ]
    with pytest.raises(ExportError, match="changes scale"):
        _kept("LargestSize", ("seen",))


@pytest.mark.parametrize(
    "name", sorted({*stateful.REMEMBERS, *stateful.CACHES, *stateful.NOTHING} - {"GrowingWeight"})
)
def test_a_module_is_put_back(name: str) -> None:
    module = getattr(stateful, name)().eval()
    x = torch.rand(2, 4, 300)
    with torch.no_grad():
        state = ModuleState(module)
        with state.restored():
            first = module(x)
            kept = state.changes()
        assert bool(kept) == (name not in stateful.NOTHING)
        assert state.changes() == {}
        again = ModuleState(module)
        assert torch.equal(module(x), first)
        assert {p: content(c.value) for p, c in again.changes().items()}.keys() == kept.keys()
        again.restore()
