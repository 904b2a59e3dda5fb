from dataclasses import dataclass

import pytest
from hypothesis import given

from pipeloom.ir import Kind, Schedule
from pipeloom.ir.notation import parse_csv
from pipeloom.ir.peaks import peak_activation_bytes, peak_held_to_input_grad, peak_held_to_weight_grad
from tests.random_schedules import runnable_schedules


@dataclass(frozen=True)
class Held:
    """What a micro-batch holds, in the simplest form that the peaks accept."""

    bytes_held_to_input_grad: tuple[int, ...]
    bytes_held_to_weight_grad: tuple[int, ...]
    bytes_held_to_recompute: tuple[int, ...]


def held_at_most(schedule: Schedule, rank: int, ends: tuple[Kind, ...]) -> int:
    """By definition: at each place, the micro-batches whose F is done and whose end is not."""
    program = schedule.program(rank)
    counts = [0]
    for length in range(1, len(program) + 1):
        done = {(a.kind, a.stage, a.microbatch) for a in program[:length]}
        begun = [(s, m) for kind, s, m in done if kind is Kind.FORWARD]
        counts.append(sum(all((end, *key) not in done for end in ends) for key in begun))
    return max(counts)


@given(runnable_schedules(has_links=True))
def test_peaks_by_their_definition(schedule):
    ranks = range(schedule.num_ranks)
    to_input_grad = tuple(held_at_most(schedule, rank, (Kind.BACKWARD, Kind.INPUT_GRAD)) for rank in ranks)
    to_weight_grad = tuple(held_at_most(schedule, rank, (Kind.BACKWARD, Kind.WEIGHT_GRAD)) for rank in ranks)
    assert peak_held_to_input_grad(schedule) == to_input_grad
    assert peak_held_to_weight_grad(schedule) == to_weight_grad


@given(runnable_schedules(has_links=True))
def test_bytes_count_micro_batches(schedule):
    """One byte from F until W, kept from I on, is a micro-batch held until W."""
    ones = (1,) * schedule.num_stages
    assert peak_activation_bytes(schedule, Held(ones, ones, ones)) == peak_held_to_weight_grad(schedule)
    nothing = (0,) * schedule.num_stages
    assert peak_activation_bytes(schedule, Held(ones, nothing, ones)) == peak_held_to_input_grad(schedule)


@pytest.mark.parametrize(
    ("text", "to_input_grad", "to_weight_grad"),
    [
        ("0F0,0F1,0B0,0B1", 2, 2),
        ("0F0,0B0,0F1,0B1", 1, 1),
        ("0F0,0I0,0F1,0I1,0W0,0W1", 1, 2),
        ("0F0,0F1,0I0,0I1,0W0,0W1", 2, 2),
        ("0F0,0F1", 0, 0),
    ],
)
def test_two_peaks(text, to_input_grad, to_weight_grad):
    schedule = parse_csv(text)
    assert peak_held_to_input_grad(schedule) == (to_input_grad,)
    assert peak_held_to_weight_grad(schedule) == (to_weight_grad,)


def test_stages_of_a_rank_add_up():
    schedule = parse_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n")
    held = Held((1, 10, 100, 1000), (0,) * 4, (0,) * 4)
    assert peak_held_to_input_grad(schedule) == (2, 2)
    assert peak_activation_bytes(schedule, held) == (1001, 110)


def test_recomputation_holds_the_input_until_it_runs():
    """Only micro-batch 0 is recomputed: its 3 bytes, then with micro-batch 1 33, then 60."""
    schedule = parse_csv("0F0,0F1,0R0,0B0,0B1")
    assert peak_activation_bytes(schedule, Held((30,), (0,), (3,))) == (60,)
    assert peak_activation_bytes(parse_csv("0F0,0F1,0B1,0R0,0B0"), Held((30,), (0,), (3,))) == (33,)


def test_transfers_hold_nothing():
    schedule = parse_csv("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    assert peak_held_to_input_grad(schedule) == (1, 1)
    assert peak_activation_bytes(schedule, Held((5, 7), (0, 0), (0, 0))) == (5, 7)
