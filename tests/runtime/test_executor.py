"""The loop: the order is the program's, what is waited for is the relation's, what is done is the table's."""

import weakref

import pytest

import pipeloom as pl
from pipeloom.ir import Action, Kind, Links
from pipeloom.passes import add_recompute, add_transfers
from pipeloom.runtime.control import Control
from pipeloom.runtime.executor import Plan, execute
from pipeloom.runtime.trace import Trace
from pipeloom.runtime.transport import Aborted
from tests.texts import schedule_of


def lowered(num_ranks=3, num_microbatches=2, recomputed=()):
    made = pl.schedule("1f1b", num_ranks=num_ranks, num_microbatches=num_microbatches)
    return add_transfers(add_recompute(made, recomputed))


class Recorded:
    """A transport and handlers that only write down what they are asked for."""

    def __init__(self, fail_at=None, error=None):
        self.log = []
        self.fail_at, self.error = fail_at, error

    def take(self, receive):
        self.log.append(f"take {receive}")
        return f"message of {receive}"

    def handle(self, action, arrived):
        self.log.append((str(action), *arrived))
        if str(action) == self.fail_at:
            raise self.error
        return f"made by {action}"

    @property
    def handlers(self):
        return dict.fromkeys(Kind, self.handle)

    def run(self, schedule, rank, control=None, trace=None):
        execute(Plan(schedule), rank, self.handlers, self, control or Control(schedule.num_ranks), trace)
        return self.log


def test_program_runs_in_order():
    schedule = lowered()
    log = Recorded().run(schedule, 1)
    handled = [entry[0] for entry in log if isinstance(entry, tuple)]
    assert handled == [str(action) for action in schedule.program(1)]


def test_consumers_get_what_was_received_for_them():
    log = Recorded().run(lowered(), 1)
    assert ("1F0", "message of 1RECV_F0") in log
    assert ("1B0", "message of 1RECV_B0") in log
    assert ("1SEND_F0", "made by 1F0") in log
    assert ("1RECV_F0",) in log
    assert log[log.index(("1F0", "message of 1RECV_F0")) - 1] == "take 1RECV_F0"


def test_rank_that_waits_keeps_no_value_that_it_has_used():
    """A value is activations: while the rank waits for the next one, nobody but its handler may hold it."""
    taken, alive = [], []

    class Value:
        pass

    class Waiting:
        def take(self, receive):
            alive.append([each() for each in taken if each()])
            value = Value()
            taken.append(weakref.ref(value))
            return value

    text = "0F0 0SEND_F0 0F1 0SEND_F1\n1RECV_F0 1RECV_F1 1F0 1F1"
    plan = Plan(schedule_of(text, num_microbatches=2, is_forward_only=True))
    execute(plan, 1, dict.fromkeys(Kind, lambda action, given: None), Waiting(), Control(2), None)
    assert alive == [[], []]


def test_stages_of_one_rank_hand_over_without_the_transport():
    log = Recorded().run(schedule_of("0F0 1F0 1R0 1B0 0B0", ranks=(0, 0)), 0)
    assert log == [("0F0",), ("1F0", "made by 0F0"), ("1R0",), ("1B0",), ("0B0", "made by 1B0")]


SKIPS = Links(forward=((0, 2),), backward=((2, 0),))


def test_every_taker_gets_the_value_that_it_takes():
    """To the neighbour, to where it skips, and to a stage of the same rank; sources in the order of the relation."""
    linked = add_transfers(pl.schedule("gpipe", num_ranks=3, num_microbatches=1).with_links(SKIPS))
    assert Recorded().run(linked, 0)[1:3] == [("0SEND_F0", "made by 0F0"), ("0SEND_F0>2", "made by 0F0")]
    forward = next(entry for entry in Recorded().run(linked, 2) if entry[0] == "2F0")
    assert forward == ("2F0", "message of 2RECV_F0", "message of 2RECV_F0<0")


def test_skip_on_one_rank_is_handed_over():
    schedule = schedule_of("0F0 1F0 2F0 2B0 1B0 0B0", ranks=(0, 0, 0), links=SKIPS)
    log = Recorded().run(schedule, 0)
    assert log[2] == ("2F0", "made by 1F0", "made by 0F0")
    assert log[5] == ("0B0", "made by 1B0", "made by 2B0")


def test_value_is_dropped_when_its_last_taker_has_it():
    """Stage 0's value goes to another rank and to stage 2 of this one, and is activations until then."""

    class Value:
        pass

    made, alive = {}, {}

    def handle(action, given):
        alive[str(action)] = [name for name, value in made.items() if value()]
        value = Value()
        made[str(action)] = weakref.ref(value)
        return value

    text = "0F0 0SEND_F0 2RECV_F0 2F0 2F1\n1RECV_F0 1F0 1SEND_F0"
    schedule = schedule_of(text, ranks=(0, 1, 0), is_forward_only=True, links=SKIPS)
    execute(Plan(schedule), 0, dict.fromkeys(Kind, handle), Recorded(), Control(2), None)
    assert "0F0" in alive["2F0"]
    assert "0F0" not in alive["2F1"]


@pytest.mark.parametrize("rank", [0, 2])
def test_ends_of_the_pipeline_wait_on_one_side(rank):
    log = Recorded().run(lowered(), rank)
    taken = [entry for entry in log if isinstance(entry, str)]
    assert len(taken) == 2
    assert all(("RECV_B" if rank == 0 else "RECV_F") in entry for entry in taken)


def test_recomputation_waits_for_nothing_from_outside():
    log = Recorded().run(lowered(recomputed={1}), 1)
    assert ("1R0",) in log
    assert ("1B0", "message of 1RECV_B0") in log


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_error_says_where(kind):
    recorded = Recorded("1B1", kind("odd"))
    with pytest.raises(kind, match="odd") as caught:
        recorded.run(lowered(), 1)
    assert caught.value.__notes__ == ["raised on rank 1, stage 1, micro-batch 1, action 1B1"]
    assert recorded.log[-1][0] == "1B1"


def test_being_told_to_stop_is_no_error_of_this_rank():
    recorded = Recorded("1B1", Aborted())
    with pytest.raises(Aborted, match=r"^$") as caught:
        recorded.run(lowered(), 1)
    assert not hasattr(caught.value, "__notes__")


def test_stopped_rank_ends_before_its_next_action():
    control, recorded = Control(3), Recorded()
    control.stop()
    with pytest.raises(Aborted, match=r"^$"):
        recorded.run(lowered(), 1, control)
    assert recorded.log == []
    assert control.last_seen == [None, None, None]


def test_control_knows_the_last_action():
    control = Control(3)
    with pytest.raises(ValueError, match="odd"):
        Recorded("1F1", ValueError("odd")).run(lowered(), 1, control)
    assert control.last_seen == [None, Action(Kind.FORWARD, 1, 1), None]


def test_trace_holds_every_action():
    schedule = lowered()
    trace = Trace(schedule)
    for rank in range(3):
        Recorded().run(schedule, rank, trace=trace)
    spans = list(trace.timeline())
    assert {span.action for span in spans} == set(schedule)
    assert all(span.start_s <= span.end_s for span in spans)


def test_plan_knows_the_channels():
    assert Plan(lowered()).channels == {(0, 1), (1, 2), (2, 1), (1, 0)}
    assert Plan(lowered(num_ranks=1)).channels == frozenset()
