"""Containers filled again with what they held."""

import threading
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import pytest

from pipeloom.batch.contents import copy_of, entries, fill


class Stubborn(list):  # type: ignore[type-arg]
    """Its constructor takes something else, and it can't be changed by its own methods."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__([first, second])

    def clear(self) -> None:
        raise TypeError

    def extend(self, _: object) -> None:
        raise TypeError


MADE = {
    "list": lambda: [1, [2]],
    "dict": lambda: {"a": 1, "b": [2]},
    "OrderedDict": lambda: OrderedDict(a=1, b=2),
    "defaultdict": lambda: defaultdict(list, a=[1]),
    "Counter": lambda: Counter("abca"),
    "set": lambda: {1, 2},
    "deque": lambda: deque([1, 2], maxlen=2),
    "own": lambda: Stubborn(1, 2),
}


def change(container: object) -> None:
    if isinstance(container, dict):
        container.pop("a")
        container["c"] = container["a"] = 1
    elif isinstance(container, set):
        container.add(3)
    else:
        container.append(3)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", MADE)
def test_it_is_the_same_container_with_what_it_held(kind: str) -> None:
    container, before = MADE[kind](), MADE[kind]()
    content, inner = copy_of(container), list(entries(container))
    change(container)
    assert container != before
    fill(container, content, {})
    assert container == before
    assert list(container) == list(before)
    assert all(now is then for now, then in zip(entries(container), inner, strict=True))


def test_an_ordered_dict_has_its_order_again() -> None:
    container = OrderedDict(a=1, b=2)
    content = copy_of(container)
    container.move_to_end("a")
    fill(container, content, {})
    assert list(container.items()) == [("a", 1), ("b", 2)]


@pytest.mark.parametrize("container", [[0, "old"], {"a": 0, "b": "old"}, deque([0, "old"])])
def test_something_else_may_take_the_place_of_an_entry(container: object) -> None:
    old = list(entries(container))[1]
    fill(container, copy_of(container), {id(old): "new"})
    assert list(entries(container)) == [0, "new"]


@pytest.mark.parametrize("container", [deque([[1], [2]]), OrderedDict(a=[1], b=[2])])
def test_what_has_its_content_is_left_alone(container: Any) -> None:
    """Another thread may be going through it: one that is written meanwhile ends that with an error."""
    content, seen = copy_of(container), []
    for each in container:
        fill(container, content, {})
        seen.append(each)
    assert seen == list(content)


def test_a_container_is_copied_in_one_go() -> None:
    """Another stage's thread may add to it meanwhile: its keys must be those of its values."""
    stop, shared = threading.Event(), dict[int, int]()

    def write() -> None:
        while not stop.is_set():
            shared.clear()
            for i in range(50):
                shared[i] = i

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(2000):
            assert all(key == value for key, value in copy_of(shared).items())
            assert entries(shared) is not None
    finally:
        stop.set()
        thread.join()
