"""What the simulator compiles a schedule to, and how often it looks at it."""

from collections import deque

import pytest
from hypothesis import given

from pipeloom.cost import Costs
from pipeloom.ir import Kind
from pipeloom.ir.notation import parse_csv
from pipeloom.passes import add_transfers
from pipeloom.schedules import gpipe, one_f_one_b
from pipeloom.sim import simulator
from pipeloom.sim.tasks import UNFINISHED, Channel, Message, Tasks
from tests.random_schedules import runnable_schedules, schedules_and_costs


def compiled(schedule):
    return Tasks(schedule, Costs.unit(schedule.num_stages))


def needs_of(task):
    """Per need, its alternatives as texts of kind and stage."""
    return [[f"{source.stage}{source.kind.text}" for _, source in need] for need in task.needs]


def test_a_task_for_each_kind_and_stage():
    tasks = compiled(one_f_one_b(3, 50))
    assert [len(set(program)) for program in tasks.programs] == [2, 2, 2]
    assert tasks.programs[1][0].ends == dict.fromkeys(range(50), UNFINISHED)


@given(runnable_schedules())
def test_programs_are_kept(schedule):
    tasks = compiled(schedule)
    rows = zip(tasks.programs, tasks.microbatches, strict=True)
    actions = [[task.action(m) for task, m in zip(*row, strict=True)] for row in rows]
    assert actions == [list(program) for program in schedule.programs]


def test_only_alternatives_that_are_held():
    """Micro-batch 0 is whole and 1 is split downstream, so B of stage 0 may wait for either."""
    tasks = compiled(parse_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1I1,1W1\n"))
    backward = tasks.programs[0][2]
    assert needs_of(backward) == [["0F"], ["1B", "1I"]]
    assert [sorted(times) for times, _ in backward.needs[1]] == [[0], [1]]


def test_receive_waits_for_nothing_itself():
    """Its consumer waits for two things: that it was posted, and that its message is there."""
    tasks = compiled(add_transfers(gpipe(2, 1)))
    receive, forward = tasks.programs[1][:2]
    assert (receive.kind, needs_of(receive)) == (Kind.RECV_F, [])
    assert needs_of(forward) == [["1RECV_F"], ["0SEND_F"]]


def test_value_that_stays_on_its_rank_needs_no_message():
    tasks = compiled(parse_csv("0F0,1F0\n2F0\n"))
    assert [len(task.messages) for task in tasks.programs[0]] == [0, 1]


def test_messages_of_a_channel_queue():
    """The second waits for the channel, the third finds it free again."""
    channel = Channel()
    large, small = Message(channel, 0.5, 2.0), Message(channel, 0.5, 1.0)
    arrivals = [large.arrival_in_queue_s(10.0), small.arrival_in_queue_s(10.0), small.arrival_in_queue_s(20.0)]
    assert arrivals == [12.5, 13.5, 21.5]


def visits(monkeypatch, schedule) -> int:
    """How often the simulator takes up a rank."""
    seen = []

    class Counting(deque):
        def popleft(self):
            seen.append(1)
            return super().popleft()

    with monkeypatch.context() as patch:
        patch.setattr(simulator, "deque", Counting)
        simulator.simulate(schedule, Costs.unit(schedule.num_stages))
    return len(seen)


@pytest.mark.parametrize("generator", [gpipe, one_f_one_b])
def test_no_rank_is_looked_at_in_vain(monkeypatch, generator):
    """A rank is taken up at the start and once for each wait, and it waits at most once for each need.

    So the work is linear in the number of actions, whatever the clock of the machine says.
    """
    small, large = (generator(8, num_microbatches) for num_microbatches in (50, 500))
    assert visits(monkeypatch, large) <= 8 + 2 * len(large)
    assert visits(monkeypatch, large) <= 10.5 * visits(monkeypatch, small)


@given(schedules_and_costs())
def test_any_bandwidth_only_delays(made):
    schedule, costs = made
    free = Costs(costs.forward_s, costs.input_grad_s, costs.weight_grad_s, costs.transfer_s)
    bounded = simulator.simulate(schedule, costs).makespan_s
    assert bounded >= simulator.simulate(schedule, free).makespan_s
