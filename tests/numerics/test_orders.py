"""Contract 1: each stage adds up in the order of its own program, and the oracle takes that order from the schedule."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import pipeloom as pl
from pipeloom.errors import InvalidSchedule, UnsupportedShape
from pipeloom.ir import Kind, Placement, Schedule
from pipeloom.ir.notation import parse_action
from pipeloom.ir.verify import verify
from pipeloom.testing import sequential_step
from tests.numerics.asserts import assert_bit_equal, assert_same_gradients
from tests.random_schedules import runnable_schedules

WIDTH = 32  # narrower products are not worth a W
settled = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow], deadline=None)


def layers(num_stages):
    """Per stage a norm, whose gradients come in I, a product, whose gradients come in W, and a bias."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_stages)]


def square(output, target):
    return (output - target).square().mean()


def rows(num_microbatches):
    return torch.randn(2, 2 * num_microbatches, WIDTH, generator=torch.Generator().manual_seed(1)).unbind()


def gradients_by_microbatch(modules, num_microbatches):
    """``[microbatch][stage]``: what a plain loop finds of each by itself."""
    x, target = rows(num_microbatches)
    model, found = nn.Sequential(*modules), []
    for one, other in zip(x.chunk(num_microbatches), target.chunk(num_microbatches), strict=True):
        model.zero_grad()
        (square(model(one), other) / num_microbatches).backward()
        found.append([[each.grad for each in module.parameters()] for module in modules])
    return found


def summed(schedule, stage, found):
    """Per parameter, in the order of the stage's program; each of two replicas by itself."""
    totals = []
    for rank in schedule.placement.ranks_of(stage):
        program = [a for a in schedule.program(rank) if a.stage == stage]
        order = [a.microbatch for a in program if a.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD)]
        sums = [each.clone() for each in found[order[0]][stage]]
        for microbatch in order[1:]:
            sums = [one + other for one, other in zip(sums, found[microbatch][stage], strict=True)]
        totals.append(sums)
    return [one + two[0] if two else one for one, *two in zip(*totals, strict=True)]


def check_oracle(schedule):
    modules = layers(schedule.num_stages)
    found = gradients_by_microbatch(copy.deepcopy(modules), schedule.num_microbatches)
    x, target = rows(schedule.num_microbatches)
    options = {"num_microbatches": schedule.num_microbatches, "loss_fn": square, "schedule": schedule}
    sequential_step(modules, x, target=target, **options)
    for stage, module in enumerate(modules):
        for parameter, expected in zip(module.parameters(), summed(schedule, stage, found), strict=True):
            assert_bit_equal(parameter.grad, expected, f"stage {stage}")


@settled
@given(runnable_schedules())
def test_the_oracle_adds_up_stage_by_stage(schedule):
    check_oracle(schedule)


@pytest.mark.parametrize("name", ["dualpipe", "chimera"])
def test_the_oracle_adds_up_replicas_apart(name):
    check_oracle(pl.schedule(name, num_ranks=2, num_microbatches=8))


@pytest.mark.in_one_process
@settled
@given(runnable_schedules(), st.booleans())
def test_any_order_runs_with_the_oracles_bits(schedule, has_counts):
    """Where Ws stood in another order than Is, norms and biases had added up in the order of Is: 2e-7 off."""

    def counted(output, target):
        return (output - target).square().sum(), output.numel()

    modules, (x, target) = layers(schedule.num_stages), rows(schedule.num_microbatches)
    reference, loss_fn = copy.deepcopy(modules), counted if has_counts else square
    options = {"loss_fn": loss_fn, "num_microbatches": schedule.num_microbatches}
    # Recomputations are the pipeline's own to place.
    kept = [[a for a in program if a.kind is not Kind.RECOMPUTE] for program in schedule.programs]
    schedule = schedule.with_programs(kept)
    with pl.Pipeline(modules, schedule=schedule, verify=True, **options) as pipe:
        for step_index in range(2):
            loss = pipe.step(x, target=target)
            step = {"target": target, "schedule": schedule, "step_index": step_index}
            assert_bit_equal(loss, sequential_step(reference, x, **step, **options), "loss")
            assert_same_gradients(pipe, nn.ModuleList(reference))
        assert pipe.first_step.comparison.is_bit_equal


def by_hand(*texts):
    return Schedule(Placement.single(len(texts)), tuple(tuple(map(parse_action, text.split())) for text in texts), 3)


W_BACKWARDS = by_hand("0F0 0F1 0F2 0I0 0I1 0I2 0W2 0W1 0W0", "1F0 1B0 1F1 1B1 1F2 1B2")


def test_a_stage_may_add_up_in_another_order_than_the_next():
    assert verify(W_BACKWARDS) == []
    assert [W_BACKWARDS.accumulation_order(stage) for stage in (0, 1)] == [(2, 1, 0), (0, 1, 2)]
    check_oracle(W_BACKWARDS)


@pytest.mark.parametrize("is_tied", [False, True])
def test_tied_and_sparse_weights_in_two_orders(is_tied):
    def model():
        torch.manual_seed(0)
        made = nn.Sequential(nn.Embedding(11, WIDTH, sparse=not is_tied), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 11))
        if is_tied:
            made[2].weight = made[0].weight
        return made

    found, reference, (x, target) = model(), model(), torch.randint(11, (2, 9)).unbind()
    options = {"loss_fn": nn.functional.cross_entropy, "num_microbatches": 3, "cuts": [2]}
    with pl.Pipeline(found, schedule=W_BACKWARDS, **options) as pipe:
        for step_index in range(2):
            pipe.step(x, target=target)
            sequential_step(reference, x, target=target, schedule=W_BACKWARDS, step_index=step_index, **options)
        for name, one in pipe.named_parameters():
            assert_bit_equal(one.grad.to_dense(), reference.get_parameter(name).grad.to_dense(), name)


def test_a_schedule_that_does_not_fit_is_refused():
    (x, target), options = rows(4), {"num_microbatches": 4, "loss_fn": square}
    with pytest.raises(UnsupportedShape, match=r"2 stages and 3 micro-batches.*2 stages, the batch into 4"):
        sequential_step(layers(2), x, target=target, schedule=W_BACKWARDS, **options)
    evaluation = pl.schedule("gpipe", num_ranks=2, num_microbatches=4, forward_only=True)
    with pytest.raises(UnsupportedShape, match="forwards only"):
        sequential_step(layers(2), x, target=target, schedule=evaluation, **options)
    wrong = pl.schedule("gpipe", num_ranks=2, num_microbatches=4)
    wrong = wrong.with_programs([program[:-1] for program in wrong.programs])
    with pytest.raises(InvalidSchedule, match="breaks"):
        sequential_step(layers(2), x, target=target, schedule=wrong, **options)


class Undecided(nn.Module):
    """Multiplies by its weight, or scales by its sum, as the numbers say."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    def forward(self, x):
        return nn.functional.linear(x, self.weight) if x[0, 0] > 0 else x * (self.weight * x.mean()).sum()


@pytest.mark.parametrize("signs", [(1, -1, 1), (-1, 1, -1), (1, 1, -1)], ids=str)
@pytest.mark.parametrize("order", ["012", "210", "102"])
def test_a_weight_that_is_split_for_some_microbatches_only(signs, order):
    """Those that were not split added their gradients in I, before the Ws of earlier ones."""
    torch.manual_seed(0)
    modules = [nn.Linear(WIDTH, WIDTH), Undecided()]
    with torch.no_grad():
        modules[0].weight.copy_(torch.eye(WIDTH))
        modules[0].bias.zero_()
    x, target = rows(3)
    x[::2, 0] = torch.tensor(signs)
    program = " ".join(f"1{kind}{microbatch}" for kind in "FIW" for microbatch in order)
    schedule = by_hand("0F0 0F1 0F2 0B0 0B1 0B2" if order == "012" else "0F2 0F1 0F0 0B0 0B1 0B2", program)
    reference, options = copy.deepcopy(modules), {"loss_fn": square, "num_microbatches": 3}
    with pl.Pipeline(modules, schedule=schedule, **options) as pipe:
        pipe.step(x, target=target)
        sequential_step(reference, x, target=target, schedule=schedule, **options)
        assert_same_gradients(pipe, nn.ModuleList(reference))


def test_microbatches_of_two_sizes_of_which_one_is_worth_splitting(monkeypatch):
    monkeypatch.setattr("pipeloom.halves.functions.MIN_MULTIPLICATIONS", 3 * WIDTH * WIDTH)
    modules, (x, target) = layers(2), torch.randn(2, 11, WIDTH).unbind()  # of 3, 3, 3 and 2 rows
    reference, options = copy.deepcopy(modules), {"loss_fn": square, "num_microbatches": 4}
    with pl.Pipeline(modules, schedule="zb-h2", **options) as pipe:
        pipe.step(x, target=target)
        sequential_step(reference, x, target=target, **options)
        assert_same_gradients(pipe, nn.ModuleList(reference))
