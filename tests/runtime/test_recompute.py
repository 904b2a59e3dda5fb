"""R where a schedule has it: for some micro-batches and stages, wherever it stands, with the bits of a plain loop."""

import copy
from collections import Counter
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

import pipeloom as pl
from pipeloom.ir.notation import format_csv, parse_csv
from pipeloom.ir.verify import verify
from pipeloom.passes import add_recompute, early_recompute, without_transfers
from pipeloom.testing import sequential_step
from tests.facade.models import mean_square
from tests.numerics.asserts import assert_bit_equal, assert_same_gradients
from tests.random_schedules import runnable_schedules
from tests.texts import schedule_of

WIDTH = 6
R = pl.Kind.RECOMPUTE


class Remembers(nn.Module):
    """Reads a buffer and a counter that every forward changes, and draws: a recompute has to find them as they were."""

    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        x = self.drop(torch.tanh(self.linear(x))) - self.mean + 0.1 * self.num_calls
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x


def model_of(num_stages):
    torch.manual_seed(0)
    return nn.Sequential(*[Remembers() for _ in range(num_stages)])


def assert_runs_right(schedule, num_rows=11, **options):
    """Against the oracle, which runs forwards in the order of its backwards: buffers see them in that order too."""
    model = model_of(schedule.num_stages)
    reference = copy.deepcopy(model)
    given = {"num_microbatches": schedule.num_microbatches, "loss_fn": mean_square}
    rows = torch.linspace(-1, 1, num_rows * WIDTH).reshape(num_rows, WIDTH)
    with pl.Pipeline(model, num_stages=schedule.num_stages, schedule=schedule, **given, **options) as pipe:
        loss = pipe.step(rows)
        assert_bit_equal(loss, sequential_step(reference, rows, **given), "loss")
        assert_same_gradients(pipe, reference)
    assert [each.num_calls for each in model] == [schedule.num_microbatches] * schedule.num_stages
    assert all(torch.equal(*pair) for pair in zip(model.buffers(), reference.buffers(), strict=True))


MIXED = {
    "one of three": "0F0 0F1 0F2 0B0 0R1 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2",
    "early": "0F0 0F1 0R0 0F2 0R2 0B0 0B1 0B2\n1F0 1R0 1B0 1F1 1F2 1R2 1R1 1B1 1B2",
    "halves": "0F0 0F1 0R0 0F2 0R1 0I0 0I1 0W0 0I2 0W1 0W2\n1F0 1R0 1I0 1W0 1F1 1I1 1F2 1R2 1I2 1W1 1W2",
}


@pytest.mark.parametrize("recompute", [False, [False, True]])
@pytest.mark.parametrize("name", MIXED)
def test_a_schedule_says_which_micro_batches_run_again(name, recompute):
    """The flag of the stage decided alone: R of a micro-batch whose activations were kept ended in a KeyError."""
    assert_runs_right(schedule_of(MIXED[name], num_microbatches=3), recompute=recompute)


def test_a_csv_with_recomputation_runs():
    made = parse_csv(format_csv(schedule_of(MIXED["early"], num_microbatches=3)))
    assert Counter(action.stage for action in made if action.kind is R) == {0: 2, 1: 3}
    assert_runs_right(made)


def test_gpipe_of_the_paper_needs_no_flag():
    made = pl.schedule("gpipe-recompute", num_ranks=3, num_microbatches=4)
    assert_runs_right(made)
    model = model_of(3)
    with pl.Pipeline(model, num_stages=3, schedule="gpipe-recompute", num_microbatches=4, loss_fn=mean_square) as pipe:
        pipe.step(torch.ones(8, WIDTH))
        assert Counter(action.kind for action in pipe.schedule)[R] == 12


def is_ascending(schedule):
    """Whether each stage runs its forwards, and adds gradients up, in the order of the plain loop."""
    kinds = (pl.Kind.FORWARD, pl.Kind.INPUT_GRAD, pl.Kind.WEIGHT_GRAD, pl.Kind.BACKWARD)
    rows = [
        [a.microbatch for a in program if a.kind is kind and a.stage == stage]
        for program in schedule.programs
        for stage in range(schedule.num_stages)
        for kind in kinds
    ]
    backwards = [list(schedule.accumulation_order(stage)) for stage in range(schedule.num_stages)]
    inputs = [
        [a.microbatch for a in p if a.stage == s and a.kind in (pl.Kind.INPUT_GRAD, pl.Kind.BACKWARD)]
        for p in schedule.programs
        for s in range(schedule.num_stages)
    ]
    return all(row == sorted(row) for row in (*rows, *backwards, *inputs))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(runnable_schedules().filter(is_ascending))
def test_recomputation_stands_anywhere(schedule):
    assert verify(schedule) == []
    assert_runs_right(schedule)


@pytest.mark.parametrize("name", ["hanayo", "v-min", "gis", "zb-v"])
def test_recomputation_in_waits_runs(name):
    made = pl.schedule(name, num_ranks=4, num_microbatches=8)
    costs = pl.Costs.uniform(8, forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0, transfer_s=1.0)
    late = add_recompute(made, range(8))
    early = early_recompute(late, partial(pl.simulate, costs=costs))
    assert early != late
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh()) for _ in range(8)])
    reference, rows = copy.deepcopy(model), torch.linspace(-1, 1, 11 * WIDTH).reshape(11, WIDTH)
    with pl.Pipeline(model, num_stages=8, schedule=early, loss_fn=mean_square) as pipe:
        loss = pipe.step(rows)
        expected = sequential_step(reference, rows, num_microbatches=8, loss_fn=mean_square, schedule=pipe.schedule)
        assert_bit_equal(loss, expected, "loss")
        assert_same_gradients(pipe, reference)
        assert without_transfers(pipe.schedule) == early
