"""What `import pipeloom as pl` promises: a change here is a change for every user."""

from pathlib import Path

import pytest

import pipeloom

GOLDEN = Path(__file__).parent / "public_names.txt"


def test_public_names_are_those_of_the_golden_file() -> None:
    assert sorted(pipeloom.__all__) == GOLDEN.read_text().split()


def test_there_are_at_most_twenty_names() -> None:
    assert len(set(pipeloom.__all__)) == len(pipeloom.__all__) <= 20


@pytest.mark.parametrize("name", GOLDEN.read_text().split())
def test_every_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(pipeloom, name)
    assert name in dir(pipeloom)
    assert value.__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Pipelin'"):
        _ = pipeloom.Pipelin  # type: ignore[attr-defined]
