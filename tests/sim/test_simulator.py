"""The event loop against the definition: an action starts when its rank is free and what it needs is there."""

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.cost import Costs
from pipeloom.errors import CostError
from pipeloom.ir import Action, Kind, Links, Schedule, Timeline
from pipeloom.ir.notation import parse_csv
from pipeloom.ir.relations import waits_for
from pipeloom.passes import add_transfers
from pipeloom.schedules import gpipe, one_f_one_b
from pipeloom.sim import simulate
from tests.random_schedules import schedules_and_costs, shapes


def ends_by_definition(schedule: Schedule, costs: Costs) -> dict[Action, float]:
    """The longest path to each action, by recursion; latency only, no bandwidth."""
    before = {b: a for program in schedule.programs for a, b in pairwise(program)}

    def there(need: Action, action: Action) -> float:
        is_local = schedule.rank_of(need.stage) == schedule.rank_of(action.stage)
        return end(need) + (0.0 if is_local else costs.transfer_s)

    @cache
    def end(action: Action) -> float:
        times = [there(need, action) for need in waits_for(action, schedule)]
        times += [end(before[action])] if action in before else []
        return max(times, default=0.0) + costs.duration_s(action.kind, action.stage)

    return {action: end(action) for action in schedule}


def ends(timeline: Timeline) -> dict[Action, float]:
    return {span.action: span.end_s for span in timeline if span.action.kind.is_compute}


@given(schedules_and_costs())
def test_ends_are_longest_paths(made):
    schedule, costs = made
    no_bandwidth = Costs(costs.forward_s, costs.input_grad_s, costs.weight_grad_s, costs.transfer_s)
    assert ends(simulate(schedule, no_bandwidth)) == ends_by_definition(schedule, no_bandwidth)


@given(schedules_and_costs())
def test_actions_take_their_cost(made):
    schedule, costs = made
    for span in simulate(schedule, costs):
        assert span.duration_s == costs.duration_s(span.action.kind, span.action.stage)


@given(schedules_and_costs())
def test_transfers_change_nothing(made):
    schedule, costs = made
    assert ends(simulate(add_transfers(schedule), costs)) == ends(simulate(schedule, costs))


@pytest.mark.parametrize("generator", [gpipe, one_f_one_b])
@settings(max_examples=25)
@given(**shapes)
def test_transfers_change_no_figure(generator, num_ranks, num_microbatches):
    schedule = generator(num_ranks, num_microbatches)
    costs = Costs.uniform(num_ranks, forward_s=1.0, input_grad_s=1.25, weight_grad_s=0.75, transfer_s=0.5)
    plain, lowered = simulate(schedule, costs), simulate(add_transfers(schedule), costs)
    assert (lowered.makespan_s, lowered.busy_s) == (plain.makespan_s, plain.busy_s)
    assert lowered.longest_rank_span_s == plain.longest_rank_span_s


def test_receive_lasts_until_its_message_is_there():
    schedule = parse_csv("0F0,0SEND_F0\n1RECV_F0,1F0\n")
    costs = Costs.uniform(2, forward_s=2.0, input_grad_s=0.0, weight_grad_s=0.0, transfer_s=0.5)
    receive, forward = simulate(schedule, costs).spans(1)
    assert (receive.start_s, receive.end_s) == (0.0, 2.5)
    assert (forward.start_s, forward.end_s) == (2.5, 4.5)


def test_receive_of_a_message_that_is_there_already():
    """Rank 1 is busy until second 3; the message of micro-batch 1 came at 2, so its receive takes no time."""
    schedule = parse_csv("0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1\n")
    costs = Costs.uniform(2, forward_s=[1.0, 2.0], input_grad_s=0.0, weight_grad_s=0.0)
    receive = simulate(schedule, costs).spans(1)[2]
    assert (receive.start_s, receive.end_s) == (3.0, 3.0)


def test_receive_does_not_block_its_rank():
    """Rank 1 posts the receive of micro-batch 1 before it runs micro-batch 0."""
    schedule = parse_csv("0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1RECV_F1,1F0,1F1\n")
    costs = Costs.uniform(2, forward_s=2.0, input_grad_s=0.0, weight_grad_s=0.0)
    starts = [span.start_s for span in simulate(schedule, costs).spans(1)]
    assert starts == [0.0, 0.0, 2.0, 4.0]


def test_latency_occupies_nobody():
    """Four messages under way at once: the last arrives one latency after it was sent."""
    costs = Costs.uniform(2, forward_s=1.0, input_grad_s=0.0, weight_grad_s=0.0, transfer_s=10.0)
    timeline = simulate(parse_csv("0F0,0F1,0F2,0F3\n1F0,1F1,1F2,1F3\n"), costs)
    assert [span.start_s for span in timeline.spans(1)] == [11.0, 12.0, 13.0, 14.0]


def test_bandwidth_makes_messages_queue():
    """A forward takes 1 s and its message 3 s of the channel, so message i leaves at 1 + 3i."""
    costs = Costs.uniform(
        2,
        forward_s=1.0,
        input_grad_s=0.0,
        weight_grad_s=0.0,
        transfer_s=0.5,
        transfer_bytes_per_s=10.0,
        boundary_bytes=30,
    )
    timeline = simulate(parse_csv("0F0,0F1,0F2\n1F0,1F1,1F2\n"), costs)
    assert [span.start_s for span in timeline.spans(1)] == [4.5, 7.5, 10.5]
    assert [span.start_s for span in timeline.spans(0)] == [0.0, 1.0, 2.0]


def test_stages_of_a_rank_hand_over_at_once():
    costs = Costs.uniform(4, forward_s=1.0, input_grad_s=0.0, weight_grad_s=0.0, transfer_s=5.0)
    timeline = simulate(parse_csv("0F0,3F0\n1F0,2F0\n"), costs)
    assert [span.start_s for span in timeline.spans(1)] == [6.0, 7.0]
    assert timeline.makespan_s == 14.0


def test_skips_take_as_long_as_other_transfers():
    """Each way the skip is there one stage and one transfer before the neighbour's value, which is waited for."""
    costs = Costs.uniform(3, forward_s=1.0, input_grad_s=1.0, weight_grad_s=0.0, transfer_s=5.0)
    links = Links(forward=((0, 2),), backward=((2, 0),))
    timeline = simulate(add_transfers(gpipe(3, 1).with_links(links)), costs)
    ends_s = {str(span.action): span.end_s for span in timeline}
    assert (ends_s["2RECV_F0<0"], ends_s["2RECV_F0"], ends_s["2F0"]) == (6.0, 12.0, 13.0)
    assert (ends_s["2B0"], ends_s["0RECV_B0<2"], ends_s["0RECV_B0"]) == (14.0, 19.0, 25.0)


def test_skip_queues_behind_the_value_of_the_neighbour():
    """Stages 1 and 2 share a rank: both values of stage 0 go over one channel, the skip second, and late."""
    costs = Costs.uniform(
        3, forward_s=1.0, input_grad_s=0.0, weight_grad_s=0.0, transfer_bytes_per_s=1.0, boundary_bytes=4
    )
    plain = parse_csv("0F0\n1F0,2F0\n")
    linked = plain.with_links(Links(forward=((0, 2),)))
    last = Action(Kind.FORWARD, 2, 0)
    assert ends(simulate(plain, costs))[last] == 7.0
    assert ends(simulate(linked, costs))[last] == ends(simulate(add_transfers(linked), costs))[last] == 14.0


def test_recompute_runs_before_the_gradient_arrives():
    costs = Costs.uniform(2, forward_s=1.0, input_grad_s=2.0, weight_grad_s=1.0)
    timeline = simulate(parse_csv("0F0,0R0,0B0\n1F0,1B0\n"), costs)
    assert [span.start_s for span in timeline.spans(0)] == [0.0, 1.0, 5.0]


def test_costs_of_other_stages_are_refused():
    with pytest.raises(CostError, match="costs of 3 stages were given for a schedule of 2"):
        simulate(gpipe(2, 4), Costs.unit(3))


@given(st.integers(1, 5), st.integers(1, 8))
def test_bytes_follow_counts(num_ranks, num_microbatches):
    """Every micro-batch holds 3 bytes: the peak in bytes is three times the peak in micro-batches."""
    costs = Costs.uniform(num_ranks, forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0, bytes_held_to_input_grad=3)
    timeline = simulate(one_f_one_b(num_ranks, num_microbatches), costs)
    assert timeline.peak_activation_bytes == tuple(3 * n for n in timeline.peak_held_to_input_grad)


def test_bytes_of_split_backwards():
    """I frees 10 of 14 bytes, W the rest: F0 F1 I0 holds 18 with one W due, and F2 makes it 32."""
    costs = Costs.uniform(
        1,
        forward_s=1.0,
        input_grad_s=1.0,
        weight_grad_s=1.0,
        bytes_held_to_input_grad=14,
        bytes_held_to_weight_grad=4,
    )
    timeline = simulate(parse_csv("0F0,0F1,0I0,0F2,0I1,0W0,0I2,0W1,0W2\n"), costs)
    assert timeline.peak_activation_bytes == (32,)
    assert (timeline.peak_held_to_input_grad, timeline.peak_held_to_weight_grad) == ((2,), (3,))


def test_bytes_of_recomputation():
    """GPipe that recomputes holds its inputs, and one micro-batch of activations: 4 × 2 − 2 + 10."""
    costs = Costs.uniform(
        1,
        forward_s=1.0,
        input_grad_s=1.0,
        weight_grad_s=1.0,
        bytes_held_to_input_grad=10,
        bytes_held_to_recompute=2,
    )
    timeline = simulate(parse_csv("0F0,0F1,0F2,0F3,0R0,0B0,0R1,0B1,0R2,0B2,0R3,0B3\n"), costs)
    assert timeline.peak_activation_bytes == (16,)


def test_transfers_take_no_time_on_their_rank():
    timeline = simulate(add_transfers(one_f_one_b(4, 8)), Costs.unit(4))
    sends = [span.duration_s for span in timeline if span.action.kind in (Kind.SEND_F, Kind.SEND_B)]
    assert len(sends) == 2 * 3 * 8
    assert set(sends) == {0.0}
