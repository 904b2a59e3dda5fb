"""What was measured becomes a timeline of the same type as the simulated one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipeloom as pl
from pipeloom.runtime.trace import Trace, clock

SCHEDULE = pl.schedule("1f1b", num_ranks=2, num_microbatches=2)


def recorded(starts, durations):
    trace = Trace(SCHEDULE)
    for rank, program in enumerate(SCHEDULE.programs):
        starts_s, ends_s = trace.spans(rank)
        for position in range(len(program)):
            starts_s[position] = starts[rank] + 10 * position
            ends_s[position] = starts_s[position] + durations[rank]
    return trace.timeline()


def test_times_count_from_the_first_start():
    timeline = recorded((1000.0, 1003.0), (2.0, 4.0))
    spans = list(timeline)
    assert min(span.start_s for span in spans) == 0
    assert timeline.makespan_s == 3 + 30 + 4
    assert [span.action for span in spans if span.rank == 0] == list(SCHEDULE.program(0))


@given(st.tuples(st.floats(0, 1e5), st.floats(0, 1e5)), st.tuples(st.floats(0, 9), st.floats(0, 9)))
def test_durations_are_kept(starts, durations):
    for span in recorded(starts, durations):
        assert span.end_s - span.start_s == pytest.approx(durations[span.rank], abs=1e-6)
        assert span.start_s >= 0


def test_each_step_has_its_own_trace():
    first, second = Trace(SCHEDULE), Trace(SCHEDULE)
    starts_s, ends_s = first.spans(0)
    starts_s[0], ends_s[0] = 1.0, 2.0
    assert next(iter(first.timeline())).end_s == 2.0
    assert next(iter(second.timeline())).end_s == 0.0


def test_clock_does_not_go_back():
    readings = [clock() for _ in range(100)]
    assert readings == sorted(readings)
    assert readings[-1] > readings[0]
