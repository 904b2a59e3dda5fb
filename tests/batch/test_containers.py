import time
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from pipeloom.batch.containers import leaves, opened, rebuilt
from pipeloom.batch.trees import flatten, unflatten

Pair = namedtuple("Pair", ["left", "right"])


class OwnDict(dict):  # type: ignore[type-arg]
    pass


class OwnList(list):  # type: ignore[type-arg]
    pass


class OwnTuple(tuple):  # type: ignore[type-arg]
    """Its constructor takes something else than tuple's."""

    def __new__(cls, name: str, *items: Any) -> "OwnTuple":
        made = super().__new__(cls, items)
        made.name = name
        return made


@dataclass(frozen=True, slots=True)
class Frozen:
    left: Any
    right: Any = None


@dataclass
class Counted:
    left: Any
    num_inits: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.num_inits += 1


@dataclass
class Registered:
    left: Any
    right: Any


class Unnamed:
    def __init__(self, items: list[Any]) -> None:
        self.items = items


pytree.register_dataclass(Registered)
pytree.register_pytree_node(Unnamed, lambda each: (each.items, None), lambda items, _: Unnamed(list(items)))

ONE, TWO = torch.zeros(2), torch.ones(2)
CONTAINERS = [
    ([ONE], ["[0]"]),
    ((ONE, TWO), ["[0]", "[1]"]),
    ({"a": ONE, 1: TWO}, ["['a']", "[1]"]),
    (OrderedDict(a=ONE), ["['a']"]),
    (defaultdict(list, a=ONE), ["['a']"]),
    (deque([ONE], maxlen=3), ["[0]"]),
    (Pair(ONE, TWO), [".left", ".right"]),
    (torch.max(ONE.reshape(1, 2), 0), ["[0]", "[1]"]),
    (UserDict(a=ONE), ["['a']"]),
    (OwnDict(a=ONE), ["['a']"]),
    (OwnList([ONE]), ["[0]"]),
    (OwnTuple("name", ONE), ["[0]"]),
    (Frozen(ONE, TWO), [".left", ".right"]),
    (Counted(ONE), [".left", ".num_inits"]),
    (Registered(ONE, TWO), [".left", ".right"]),
    (Unnamed([ONE]), ["[0]"]),
]
LEAVES = [
    ONE,
    None,
    3,
    "text",
    {1, 2},
    range(3),
    torch.Size((1, 2)),
    time.gmtime(0),
    MappingProxyType({"a": ONE}),
    Frozen,
    object(),
]
IDS = [type(value).__name__ for value, _ in CONTAINERS]


@pytest.mark.parametrize(("value", "names"), CONTAINERS, ids=IDS)
def test_containers_name_what_they_hold(value: Any, names: list[str]) -> None:
    container = opened(value)
    assert container is not None
    assert list(container.children) == names


@pytest.mark.parametrize("value", [value for value, _ in CONTAINERS], ids=IDS)
def test_containers_are_made_again_of_other_children(value: Any) -> None:
    container = opened(value)
    assert container is not None
    children = [torch.full((2,), float(place)) for place in range(len(container.children))]
    made = container.made_of(children)
    again = opened(made)
    assert again is not None
    assert type(made) is type(value)
    assert all(one is other for one, other in zip(again.children.values(), children, strict=True))


@pytest.mark.parametrize("value", [value for value, _ in CONTAINERS], ids=IDS)
def test_what_has_not_changed_is_not_made_again(value: Any) -> None:
    container = opened(value)
    assert container is not None
    assert rebuilt(value, container, list(container.children.values())) is value


@pytest.mark.parametrize("value", LEAVES, ids=[type(value).__name__ for value in LEAVES])
def test_leaves_are_not_opened(value: Any) -> None:
    assert opened(value) is None


def test_original_is_left_alone() -> None:
    value = UserDict(a=ONE)
    opened(value).made_of([TWO])
    assert value["a"] is ONE


def test_tuple_keeps_its_attributes() -> None:
    assert opened(OwnTuple("name", ONE)).made_of([TWO]).name == "name"


def test_dataclass_is_not_initialised_again() -> None:
    assert opened(Counted(ONE)).made_of([TWO, 1]).num_inits == 1


def test_unset_field_of_a_dataclass_is_passed_over() -> None:
    value = Counted(ONE)
    del value.left
    assert list(opened(value).children) == [".num_inits"]


def test_leaves_have_their_paths() -> None:
    value = {"a": [ONE, Frozen((1,), None)], "b": ()}
    assert [path for path, _ in leaves("args", value)] == [
        "args['a'][0]",
        "args['a'][1].left[0]",
        "args['a'][1].right",
    ]


def test_atoms_are_leaves() -> None:
    value = [Frozen(ONE), (ONE,)]
    assert [path for path, _ in leaves("x", value, atoms=Frozen)] == ["x[0]", "x[1][0]"]


@pytest.mark.parametrize("value", [value for value, _ in CONTAINERS] + [torch.Size((1, 2)), None, {"a": [(), ONE]}])
def test_flatten_and_unflatten_are_inverse(value: Any) -> None:
    flat, structure = flatten(value)
    again, _ = flatten(unflatten(flat, structure))
    assert type(unflatten(flat, structure)) is type(value)
    assert all(one is other for one, other in zip(flat, again, strict=True))
