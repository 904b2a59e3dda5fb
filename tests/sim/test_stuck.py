"""A schedule that cannot run ends in a message, never in a hang."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.cost import Costs
from pipeloom.errors import InvalidSchedule
from pipeloom.ir import Action, Kind, Placement, Schedule
from pipeloom.ir.notation import parse_csv
from pipeloom.ir.progress import stuck_ranks
from pipeloom.sim import simulate
from tests.random_schedules import runnable_schedules

STUCK = {
    "needs-its-own-later": ("0F0,0B0\n1B0,1F0\n", r"rank 1 stands at 1B0 and waits for 1F0, which comes later"),
    "two-wait-for-each-other": (
        "0F0,0B0,0F1\n1F1,1F0,1B0\n",
        r"rank 0 stands at 0B0 and waits for 1B0; rank 1 stands at 1F1 and waits for 0F1, which comes later",
    ),
    "receive-after-its-use": (
        "0F0,0SEND_F0\n1F0,1RECV_F0\n",
        r"rank 1 stands at 1F0 and waits for 1RECV_F0, which comes later",
    ),
    "send-before-its-value": (
        "0SEND_F0,0F0\n1RECV_F0,1F0\n",
        r"rank 0 stands at 0SEND_F0 and waits for 0F0, which comes later",
    ),
    "led-into-a-ring": (
        "0F0\n1F0,1B0\n2F0,2B0\n3B0,3F0\n",
        r"cannot run: rank 3 stands at 3B0 and waits for 3F0, which comes later",
    ),
}

BROKEN = {
    "missing-forward": ("0F0\n1F0,1F1\n", "1F1 on rank 1 waits for 1RECV_F1 or 0F1, which no rank does"),
    "missing-backward": ("0F0,0B0\n1F0\n", "0B0 on rank 0 waits for 0RECV_B0 or 1B0 or 1I0, which no rank does"),
    "missing-send": ("0F0\n1RECV_F0,1F0\n", "1RECV_F0 on rank 1 waits for 0SEND_F0, which no rank does"),
    "weight-without-input": ("0F0,0W0\n", "0W0 on rank 0 waits for 0I0, which no rank does"),
    "doubled": ("0F0,0F0,0B0\n", "schedule 'custom' does 0F0 twice"),
}


@pytest.mark.parametrize("case", [*STUCK, *BROKEN])
def test_message_names_what_waits_for_what(case):
    text, message = {**STUCK, **BROKEN}[case]
    made = parse_csv(text)
    with pytest.raises(InvalidSchedule, match=message):
        simulate(made, Costs.unit(made.num_stages))


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (Action(Kind.FORWARD, 2, 0), "2F0 is of stage 2; there are 2"),
        (Action(Kind.FORWARD, -1, 0), "cannot run: -1F0 is of stage -1; there are 2"),
        (Action(Kind.FORWARD, 1, 0), "1F0 stands on rank 0; stage 1 is on rank 1"),
    ],
    ids=["no-such-stage", "negative-stage", "wrong-rank"],
)
def test_action_at_a_wrong_place(action, message):
    made = Schedule(Placement.single(2), ((action,), ()), num_microbatches=1)
    with pytest.raises(InvalidSchedule, match=message):
        simulate(made, Costs.unit(2))


@given(runnable_schedules(), st.randoms(use_true_random=False))
def test_refused_exactly_when_stuck(schedule, random):
    """Shuffled programs: the simulator and the run without times agree on which of them can run."""
    shuffled = schedule.with_programs(random.sample(program, len(program)) for program in schedule.programs)
    costs = Costs.unit(schedule.num_stages)
    if stuck_ranks(shuffled):
        with pytest.raises(InvalidSchedule, match="which comes later"):
            simulate(shuffled, costs)
    else:
        assert sum(1 for _ in simulate(shuffled, costs)) == len(schedule)
