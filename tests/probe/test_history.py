"""A model that remembers earlier calls is refused; a cache is not."""

from __future__ import annotations

import linecache
import re
from collections import ChainMap, OrderedDict, UserDict, UserList
from collections.abc import Callable

import pytest
import stateful
import torch
from torch import nn

from pipeline.errors import ExportError
from pipeline.probe.held_values import content
from pipeline.probe.history import kept_values
from pipeline.probe.state import ModuleState
from pipeline.spec.dims import Dim
from pipeline.spec.model import Input, ModelSpec

WHERE = re.compile(r" \(\S+stateful\.py:(\d+) in \w+: ")


def _spec(module: torch.nn.Module, state: tuple[str, ...] = ()) -> ModelSpec:
    shape = (Dim("b", 1, 2, 5), 4, Dim("w", 16, 64, 400))
    return ModelSpec("m", lambda _: module, (Input("x", shape),), state=state)


def _kept(name: str, state: tuple[str, ...] = ()) -> list[str]:
    module = getattr(stateful, name)().eval()
    before = ModuleState(module)
    kept = kept_values(_spec(module, state), module, module, 0)
    assert before.changes() == {}
    return kept


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


class FirstLength(nn.Module):
    """Keeps what it makes of its first size, so that another size fails."""

    scale = None

    def forward(self, x):
        if self.scale is None:
            self.scale = torch.linspace(0, 1, x.shape[2])
        return x + self.scale


def test_a_call_that_fails_after_another_is_memory_too() -> None:
    module = FirstLength().eval()
    with pytest.raises(ExportError, match=r"fails \(.*must match.* after a call.*changes scale"):
        kept_values(_spec(module), module, module, 0)
    assert module.scale is None


@pytest.mark.parametrize("name", stateful.ELSEWHERE)
def test_state_out_of_sight_is_found_by_its_outputs(name: str) -> None:
    with pytest.raises(ExportError, match=r"it remembers earlier calls.*No attribute"):
        _kept(name)


@pytest.mark.parametrize(("name", "attribute"), stateful.ITERATORS.items())
def test_an_iterator_that_moves_is_named(name: str, attribute: str) -> None:
    with pytest.raises(ExportError, match=f"moves {attribute}, an iterator or a generator"):
        _kept(name)


def test_a_tensor_that_is_written_and_stays_the_same_is_noted() -> None:
    (note,) = _kept("LargestValue")
    assert note.startswith("calls of the model write largest, and no call that was tried changed")
    assert _kept("LargestValue", ("largest",)) == []


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


class Holder(nn.Module):
    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value = value


def expanded() -> torch.Tensor:
    return torch.zeros(3, 1).expand(3, 4)


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.strided)


@pytest.mark.parametrize(
    ("make", "write"),
    [
        (expanded, lambda t: t[:, :1].add_(1)),
        (lambda: torch.zeros(4, dtype=torch.complex64).conj(), lambda t: t.fill_(1j)),
        (lambda: torch.arange(12.0).view(3, 4), lambda t: t.t_()),
        (lambda: torch.zeros(1, 3), lambda t: t.squeeze_()),
        (lambda: torch.zeros(3), lambda t: t.resize_(2)),
        (lambda: torch.zeros(3), lambda t: t.resize_(3000)),
    ],
    ids=["expanded", "conj", "transposed", "squeezed", "shorter", "longer"],
)
def test_any_tensor_is_put_back(
    make: Callable[[], torch.Tensor], write: Callable[[torch.Tensor], object]
) -> None:
    module = Holder(make())
    state = ModuleState(module)
    write(module.value)
    assert list(state.changes()) == ["value"]
    state.restore()
    assert module.value.stride() == make().stride()
    assert torch.equal(module.value, make())


def test_a_nested_tensor_is_left_alone() -> None:
    module = Holder(nested())
    with ModuleState(module).restored() as state:
        assert state.changes() == {}
    assert content(module.value) == ("torch.float32", ())


def test_a_deleted_submodule_is_put_back_in_its_place() -> None:
    module = nn.Sequential(nn.ReLU(), nn.Tanh())
    with ModuleState(module).restored():
        first = module._modules.pop("0")
    assert list(module._modules) == ["0", "1"]
    with ModuleState(module).restored():
        module._modules["0"] = module._modules.pop("0")
    assert list(module._modules) == ["0", "1"] and module[0] is first


class Sealing(type):
    def __setattr__(cls, name: str, value: object) -> None:
        raise TypeError("sealed")


class Sealed(metaclass=Sealing):
    count = 1


def test_one_object_that_cannot_be_written_does_not_keep_the_others_from_being_put_back() -> None:
    module = nn.Module()
    module.sealed, module.sizes = Sealed(), [1]
    state = ModuleState(module)
    type.__setattr__(Sealed, "count", 2)
    module.sizes.append(2)
    with pytest.raises(TypeError, match="sealed"):
        state.restore()
    assert module.sizes == [1]


class Table(dict[str, type]):
    """Makes an object at each look."""

    def __getitem__(self, name: str) -> object:
        return super().__getitem__(name)()


class OrderedTable(OrderedDict[str, type]):
    """The same, as transformers' table of activations is."""

    def __getitem__(self, name: str) -> object:
        return super().__getitem__(name)()


class Doubling(list[int]):
    """Gives and takes other items than it holds."""

    def __iter__(self):
        return (2 * item for item in super().__iter__())

    def extend(self, items) -> None:
        super().extend(item // 2 for item in items)

    def clear(self) -> None:
        raise TypeError("never")


@pytest.mark.parametrize("kind", [Table, OrderedTable])
def test_what_a_container_holds_is_put_back_whatever_its_methods_do(kind) -> None:
    module = nn.Module()
    module.table, module.numbers = kind(relu=nn.ReLU, tanh=nn.Tanh), Doubling([1, 3])
    module.user = UserList([1]), UserDict(a=1), ChainMap({"a": 1})
    state = ModuleState(module)
    assert not state.changes()
    dict.__setitem__(module.table, "relu", nn.SiLU)
    module.table["more"] = nn.ELU
    module.numbers.append(5)
    module.user[0].append(2)
    module.user[1]["b"] = module.user[2]["b"] = 2
    assert {path.partition("[")[0].partition(".")[0] for path in state.changes()} == {
        "table", "numbers", "user",
    }  # fmt: skip
    state.restore()
    assert not state.changes()
    assert isinstance(module.table["relu"], nn.ReLU) and list(module.table) == ["relu", "tanh"]
    assert list(module.numbers) == [2, 6]
    assert module.user == ([1], {"a": 1}, {"a": 1})


def test_every_tensor_of_a_large_model_is_watched() -> None:
    module = nn.Sequential(*(nn.Sequential(nn.BatchNorm1d(1)) for _ in range(4000)))
    state = ModuleState(module)
    module[-1][0].running_mean.fill_(2)
    assert list(state.changes()) == ["3999.0.running_mean"]


value = [0]  # has the name of an attribute below


class Reads(nn.Module):
    def forward(self, x: Holder) -> torch.Tensor:
        return x.value


def test_a_global_with_the_name_of_an_attribute_is_not_the_models() -> None:
    with ModuleState(Reads()).restored():
        value.append(1)
    assert value.pop() == 1


def test_a_state_that_shows_only_at_large_images() -> None:
    """The sizes of common images are called too."""
    h, w = Dim("h", 200, 256, 512, multiple_of=8), Dim("w", 200, 256, 512, multiple_of=8)
    module = stateful.GrowingGrid()
    spec = ModelSpec("m", lambda _: module, (Input("x", (1, 3, h, w)),))
    with pytest.raises(ExportError, match="it remembers earlier calls"):
        kept_values(spec, module, module, 0)
