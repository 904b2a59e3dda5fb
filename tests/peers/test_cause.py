"""What went wrong, as text and on the wire; and which of several claims holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.peers import Cause
from pipeloom.peers.cause import Claim

kinds = st.sampled_from(["exception", "lost", "stalled", "ended"])
causes = st.builds(Cause, st.integers(0, 9), kinds, st.text(), st.text(), st.text())
calls = st.tuples(st.integers(-1, 9), st.integers(-1, 9))
claims = st.builds(Claim, causes, st.integers(0, 9), st.integers(0, 99), calls, st.booleans())


def claim(kind, rank, teller):
    return Claim(Cause(rank, kind, "here", "it"), teller, 0)


@given(claims)
def test_a_claim_survives_the_wire(given_claim):
    assert Claim.decode(memoryview(given_claim.encode())) == given_claim


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (claim("lost", 3, 3), claim("exception", 0, 0)),
        (claim("lost", 1, 3), claim("lost", 2, 0)),
        (claim("lost", 1, 0), claim("lost", 1, 2)),
        (claim("exception", 2, 0), claim("stalled", 0, 1)),
    ],
)
def test_a_death_comes_first_and_then_the_lowest_teller(first, second):
    assert first.order < second.order
    assert not second.order < first.order


@pytest.mark.parametrize("trace", ["", "Traceback:\n  line 7\n\n"])
def test_the_last_line_says_who_where_and_what(trace):
    text = str(Cause(1, "exception", "action 1F3", "ValueError: bad", trace))
    assert text == ("Traceback:\n  line 7\n" if trace else "") + "rank 1, action 1F3: ValueError: bad"


class Own(Exception):
    """An exception of a module of its own."""


def caused_by(error):
    try:
        raise error
    except type(error) as caught:
        return Cause.of(2, "here", caught)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("bad"), "ValueError: bad"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (Own("a\nb"), f"{Own.__module__}.Own: a\nb"),
    ],
)
def test_an_exception_is_a_cause(error, message):
    error.add_note("a note")
    cause = caused_by(error)
    assert (cause.line, cause.kind) == (f"rank 2, here: {message}", "exception")
    assert cause.traceback.startswith("Traceback (most recent call last):\n")
    assert str(cause).endswith(f"a note\nrank 2, here: {message}")
