from array import array

import pytest

from pipeloom.ir import Action, Kind, Placement, Schedule, Span, Timeline
from pipeloom.ir.notation import parse_csv


def timeline(text: str, *rows: list[tuple[float, float]]) -> Timeline:
    """A timeline from a table and, per rank, the (start, end) of each action."""
    starts = tuple(array("d", [start for start, _ in row]) for row in rows)
    ends = tuple(array("d", [end for _, end in row]) for row in rows)
    return Timeline(parse_csv(text), starts, ends)


@pytest.fixture
def skewed():
    """Rank 1 begins 2 s late and idles for 1 s: makespan 8 s, longest rank span 6 s."""
    return timeline("0F0,0F1\n1F0,1F1\n", [(0, 2), (2, 5)], [(2, 4), (5, 8)])


def test_spans_are_the_program_with_times(skewed):
    first = skewed.spans(1)[0]
    assert first == Span(1, Action(Kind.FORWARD, 1, 0), 2.0, 4.0)
    assert [str(span.action) for span in skewed] == ["0F0", "0F1", "1F0", "1F1"]
    assert sum(span.duration_s for span in skewed) == 10.0


def test_lengths(skewed):
    assert (skewed.makespan_s, skewed.longest_rank_span_s) == (8.0, 6.0)
    assert skewed.busy_s == (5.0, 5.0)


def test_notebook_shows_figures_and_not_every_action(skewed):
    """The schedule's own repr has a hundred characters for each action."""
    assert repr(skewed) == "Timeline('custom', num_ranks=2, makespan_s=8, bubble_fraction=0.375)"


def test_two_bubbles(skewed):
    """10 s of work in 2 × 8 s, or in 2 × 6 s where no barrier holds the ranks together."""
    assert skewed.bubble_fraction == pytest.approx(6 / 16)
    assert skewed.bubble_fraction_unsynchronised == pytest.approx(2 / 12)


def test_transfers_are_neither_busy_nor_part_of_the_length():
    lowered = timeline(
        "0F0,0SEND_F0\n1RECV_F0,1F0\n",
        [(0, 2), (2, 2)],
        [(0, 2.5), (2.5, 4)],
    )
    assert lowered.busy_s == (2.0, 1.5)
    assert (lowered.makespan_s, lowered.longest_rank_span_s) == (4.0, 2.0)


def test_start_is_that_of_the_first_computation():
    posted_early = timeline("0F0,0SEND_F0\n1RECV_F0,1F0\n", [(1, 2), (2, 2)], [(0, 2.5), (2.5, 4)])
    assert (posted_early.start_s, posted_early.makespan_s) == (1.0, 3.0)


def test_rank_that_only_moves_values():
    """A receive that is never used: rank 1 has no computation, so it counts as idle throughout."""
    programs = ((Action(Kind.FORWARD, 0, 0),), (Action(Kind.RECV_F, 1, 0),))
    schedule = Schedule(Placement.single(2), programs, num_microbatches=1, is_forward_only=True)
    made = Timeline(schedule, (array("d", [0]), array("d", [0])), (array("d", [2]), array("d", [3])))
    assert (made.makespan_s, made.busy_s) == (2.0, (2.0, 0.0))
    assert made.bubble_fraction == 0.5


def test_nothing_happened():
    schedule = Schedule(Placement.single(1), ((),), num_microbatches=1)
    made = Timeline(schedule, (array("d"),), (array("d"),))
    assert (made.makespan_s, made.longest_rank_span_s, made.bubble_fraction) == (0.0, 0.0, 0.0)
    assert list(made) == []


def test_rounding_does_not_make_idle_time_negative():
    """(0.4 − 0.2) + (0.8 − 0.4) + (0.9 − 0.8) is a hair more than 0.9 − 0.2."""
    made = timeline("0F0,0F1,0F2\n", [(0.2, 0.4), (0.4, 0.8), (0.8, 0.9)])
    assert sum(made.busy_s) > made.makespan_s
    assert made.bubble_fraction == made.bubble_fraction_unsynchronised == 0.0


def test_times_for_every_action():
    short = Timeline(parse_csv("0F0,0F1\n"), (array("d", [0]),), (array("d", [1]),))
    with pytest.raises(ValueError, match="zip"):
        short.spans(0)


def test_peaks_are_those_of_the_schedule(skewed):
    assert skewed.peak_held_to_input_grad == skewed.peak_held_to_weight_grad == (0, 0)
    assert skewed.peak_activation_bytes is None
