"""Trees: whatever holds tensors is walked in one order and made again as it was."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from phalanx.task import Batch
from phalanx.trees import branches, ends, leaves, mapped, reachable


class Pair(NamedTuple):
    first: Any
    second: Any


class Odd(Pair):
    """Whose constructor takes something else than its fields."""

    def __new__(cls, both: Any) -> Odd:
        return super().__new__(cls, both, both)


class Labelled(list[Any]):
    """Likewise."""

    def __init__(self, label: str, *items: Any) -> None:
        super().__init__(items)
        self.label = label


@dataclass
class Box:
    value: Any
    more: list[Any] = field(default_factory=list)
    derived: Any = field(init=False)
    unset: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.derived = self.value


@dataclass(frozen=True, slots=True)
class Sealed:
    value: Any


@dataclass
class Guarded:
    """Whose field raises where it is read, and not because it is missing."""

    shown: Any
    guarded: Any = None

    def __getattribute__(self, name: str) -> Any:
        if name == "guarded":
            raise RuntimeError("which of them?")
        return super().__getattribute__(name)


def test_a_field_that_raises_is_left_alone() -> None:
    tree = Guarded(torch.ones(2))
    assert [*leaves(tree)] == [tree.shown]
    assert len(reachable(tree)) == 1
    assert torch.equal(mapped(lambda x: x + 1, tree).shown, torch.full((2,), 2.0))


END = st.integers() | st.text(max_size=2) | st.none() | st.floats(allow_nan=False)
KINDS = (
    lambda items: list(items),
    lambda items: tuple(items),
    lambda items: {str(n): item for n, item in enumerate(items)},
    lambda items: OrderedDict(enumerate(items)),
    lambda items: defaultdict(list, enumerate(items)),
    lambda items: Batch({str(n): item for n, item in enumerate(items)}),
    lambda items: UserDict(enumerate(items)),
    lambda items: MappingProxyType(dict(enumerate(items))),
    lambda items: Labelled("label", *items),
    lambda items: Pair(items[0] if items else None, items),
    lambda items: Odd(items),
    lambda items: Box(items, items),
    lambda items: Sealed(items),
)


def trees() -> st.SearchStrategy[Any]:
    return st.recursive(
        END,
        lambda inner: st.tuples(st.sampled_from(KINDS), st.lists(inner, max_size=3)).map(lambda t: t[0](t[1])),
        max_leaves=12,
    )


def same(one: Any, two: Any) -> bool:
    """Of the same classes, with the same ends, all the way down."""
    if type(one) is not type(two):
        return False
    inside, other = branches(one), branches(two)
    if inside is None or other is None:
        return bool(one == two)
    keys = list(one) == list(two) if isinstance(one, Mapping) else True
    return keys and len(inside) == len(other) and all(map(same, inside, other))


@given(trees())
def test_nothing_changed_is_the_same(tree: Any) -> None:
    assert same(mapped(lambda end: end, tree, int), tree)
    assert same(mapped(lambda end: end, tree, (int, str)), tree)


@given(trees())
def test_what_is_changed_is_in_its_place(tree: Any) -> None:
    before = list(leaves(tree, int))
    made = mapped(lambda number: number + 1, tree, int)
    assert list(leaves(made, int)) == [number + 1 for number in before]
    assert list(leaves(tree, int)) == before, "the tree itself was changed"
    assert same(mapped(lambda number: number - 1, made, int), tree)


@given(trees())
def test_every_end_is_found_once(tree: Any) -> None:
    kinds = (int, str, float, type(None))
    assert list(leaves(tree, kinds)) == list(ends(tree))
    assert list(leaves(tree, int)) == [end for end in ends(tree) if isinstance(end, int)]


@given(trees())
def test_changing_twice_is_changing_by_both(tree: Any) -> None:
    once = mapped(lambda number: 3 * (number + 1), tree, int)
    assert same(mapped(lambda n: 3 * n, mapped(lambda n: n + 1, tree, int), int), once)


@given(trees())
def test_what_holds_none_is_kept(tree: Any) -> None:
    kept = mapped(lambda tensor: pytest.fail("there is none"), Sealed(tree))
    assert kept.value is tree
    shared = Box([tree])
    assert mapped(lambda tensor: tensor, {"a": shared, "b": shared})["a"] is shared


def test_ends_of_no_kind_are_left_alone() -> None:
    thing = object()
    assert mapped(lambda tensor: 2 * tensor, [thing, "text", {1, 2}, range(3)]) == [thing, "text", {1, 2}, range(3)]
    assert list(leaves("text")) == []
    assert list(ends([])) == []
    assert branches(Box) is None  # the class itself


def test_a_container_of_the_kind_is_an_end() -> None:
    assert mapped(len, [Pair(1, 2), (1, 2, 3)], Pair) == [2, (1, 2, 3)]
    assert list(leaves([Pair(1, Pair(2, 3))], Pair)) == [Pair(1, Pair(2, 3))]


def test_tensors_in_what_torch_and_hugging_face_return() -> None:
    x = torch.tensor([[1.0, 3.0], [4.0, 2.0]])
    most = mapped(lambda tensor: tensor + 1, torch.max(x, dim=1))
    assert type(most) is torch.return_types.max
    assert most.values.tolist() == [4, 5]
    assert mapped(lambda tensor: tensor, x.shape) == torch.Size([2, 2])
    output = BaseModelOutput(last_hidden_state=x, hidden_states=(x, x))
    double = mapped(lambda tensor: 2 * tensor, output)
    assert type(double) is BaseModelOutput
    assert double.last_hidden_state is double["last_hidden_state"]
    assert torch.equal(double.hidden_states[1], 2 * x)
    assert torch.equal(output[0], x)
    assert len(list(leaves(output))) == 3


def test_what_else_a_container_has_is_kept() -> None:
    x = torch.ones(1)
    batch = Batch(x=x)
    batch.turn = "generator"
    assert mapped(Tensor.double, batch).turn == "generator"
    assert mapped(Tensor.double, Labelled("name", x)).label == "name"
    assert mapped(Tensor.double, defaultdict(list, x=x)).default_factory is list
    box = mapped(Tensor.double, Box(x))
    assert box.derived.dtype == box.value.dtype == torch.float64
    sealed = mapped(Tensor.double, Sealed(x))
    assert sealed.value.dtype == torch.float64
    with pytest.raises(dataclasses.FrozenInstanceError):
        sealed.value = x
    assert mapped(Tensor.double, Odd(x)).second.dtype == torch.float64


def test_what_encloses_itself_is_not_followed_again() -> None:
    x = torch.ones(1)
    ring: list[Any] = [x]
    ring.append(ring)
    assert len(list(leaves(ring))) == 1
    made = mapped(lambda tensor: 2 * tensor, ring)
    assert made[0].item() == 2
    assert made[1] is ring
    box = Box(x)
    box.more.append(box)
    assert mapped(lambda tensor: 2 * tensor, box).value.item() == 2


def test_the_same_twice_is_two() -> None:
    inner = [torch.ones(1)]
    assert len(list(leaves([inner, inner]))) == 2


class Slotted:
    __slots__ = ("slot",)


class Holder(Slotted):
    def __init__(self, slot: Any, attribute: Any) -> None:
        self.slot, self.attribute = slot, attribute


def test_tensors_are_reached_in_objects_too() -> None:
    x, y = torch.ones(1), torch.zeros(1)
    found = list(reachable({"a": [Holder(x, (y,))], "b": UserDict(c=x), "d": Box(y)}))
    assert len(found) == 5  # a dataclass' field and what was derived from it
    module = nn.Linear(1, 1)
    assert list(reachable([module, Holder, module.weight])) == [module.weight]
    ring = Holder(None, x)
    ring.slot = ring
    assert {id(tensor) for tensor in reachable(ring)} == {id(x)}
