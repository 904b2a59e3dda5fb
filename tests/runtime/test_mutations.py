"""Programs that were changed at random: what breaks a rule is found before anything runs, the rest runs right."""

import copy

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import pipeloom as pl
from pipeloom.ir.verify import verify
from pipeloom.schedules.registry import ENTRIES
from pipeloom.testing import sequential_step
from tests.numerics.asserts import assert_bit_equal, assert_same_gradients

WIDTH, NUM_MICROBATCHES = 32, 4  # narrower products are not worth a W
NAMES = [name for name, entry in ENTRIES.items() if not entry.is_asynchronous]


def square(output, target):
    return (output - target).square().mean()


def model(num_stages):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_stages)])


def changed(schedule, how, rank, first, second):
    """One action of a rank swapped with another, dropped or doubled."""
    programs = [list(program) for program in schedule.programs]
    row = programs[rank % len(programs)]
    first, second = first % len(row), second % len(row)
    if how == "swap":
        row[first], row[second] = row[second], row[first]
    elif how == "drop":
        del row[first]
    else:
        row.insert(second, row[first])
    return schedule.with_programs(programs)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    st.sampled_from(NAMES),
    st.lists(
        st.tuples(st.sampled_from(["swap", "drop", "double"]), *[st.integers(0, 999)] * 3), min_size=1, max_size=2
    ),
)
def test_a_changed_program_is_refused_or_runs_right(name, changes):
    schedule = pl.schedule(name, num_ranks=2, num_microbatches=NUM_MICROBATCHES)
    for each in changes:
        schedule = changed(schedule, *each)
    if verify(schedule):
        try:
            pl.Pipeline(model(schedule.num_stages), num_stages=schedule.num_stages, schedule=schedule, loss_fn=square)
        except pl.errors.ScheduleError:
            return
        raise AssertionError("a wrong schedule was taken")
    made, (x, target) = model(schedule.num_stages), torch.randn(2, 8, WIDTH)
    reference = copy.deepcopy(made)
    with pl.Pipeline(made, num_stages=schedule.num_stages, schedule=schedule, loss_fn=square) as pipe:
        loss = pipe.step(x, target=target)
        options = {"num_microbatches": NUM_MICROBATCHES, "loss_fn": square}
        expected = sequential_step(reference, x, target=target, schedule=schedule, **options)
        assert_bit_equal(loss, expected, "loss")
        assert_same_gradients(pipe, reference)
