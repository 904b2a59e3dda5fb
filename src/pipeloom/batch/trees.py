"""A value of nested containers as a flat list of leaves, and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipeloom.batch.containers import Container, opened


@dataclass(frozen=True, slots=True)
class Structure:
    """A container without its leaves; ``container`` is None for a leaf."""

    container: Container | None
    children: tuple[Structure, ...] = ()


LEAF = Structure(None)
"""The structure of a value that is no container."""


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """The leaves of ``value``, in order, and what `unflatten` needs to build it again."""
    container = opened(value)
    if container is None:
        return [value], LEAF
    leaves: list[Any] = []
    children = []
    for child in container.children.values():
        inner, structure = flatten(child)
        leaves += inner
        children.append(structure)
    return leaves, Structure(container, tuple(children))


def unflatten(leaves: list[Any], structure: Structure) -> Any:
    """A value of that structure with other leaves."""
    return _build(iter(leaves), structure)


def _build(leaves: Iterator[Any], structure: Structure) -> Any:
    if structure.container is None:
        return next(leaves)
    return structure.container.made_of([_build(leaves, child) for child in structure.children])
