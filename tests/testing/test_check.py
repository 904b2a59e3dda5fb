"""`pipeloom check` without its command: what is compared, measured, and advised."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from pipeloom.errors import BatchError, LossError, NonFiniteLoss, SplitError
from pipeloom.testing.advice import advice
from pipeloom.testing.boundaries import bytes_at
from pipeloom.testing.check import check, costs_of, mean_of_squares
from tests.parity.models import Drifting, Net, Tied, Twice, batch, chain, made


class WithLoss(nn.Module):
    """Computes its own loss, as models with labels do."""

    def __init__(self):
        super().__init__()
        self.net = made(chain)

    def forward(self, value, labels):
        return {"loss": nn.functional.cross_entropy(self.net(value), labels)}


@pytest.mark.parametrize(
    ("model", "args", "num_stages"),
    [
        (Net, batch()[:1], 3),
        (chain, batch()[:1], 2),
        (lambda: [*made(chain)], batch()[:1], None),
        (Tied, (torch.arange(10).reshape(5, 2),), 2),
        (WithLoss, batch(), 2),
    ],
)
def test_right_models_are_right(model, args, num_stages):
    checked = check(made(model), args, num_stages=num_stages, schedule="gpipe")
    assert checked.is_right
    assert checked.comparison.is_bit_equal
    assert checked.outline.num_stages == checked.timeline.schedule.num_ranks == len(checked.stage_s)
    assert checked.timeline.schedule.name == checked.predicted.schedule.name == "gpipe"


def test_a_wrong_model_is_wrong_and_measured_all_the_same():
    model = nn.Sequential(nn.Linear(8, 8), Drifting(), nn.Linear(8, 3))
    checked = check(model, batch()[:1], num_stages=2)
    assert not checked.is_right
    assert checked.comparison.wrong[0].name == "loss"
    assert min(checked.stage_s) > 0


def test_a_loss_of_its_own_is_taken():
    own, other = check(WithLoss(), batch(), num_stages=2), check(made(chain), batch()[:1], num_stages=2)
    assert (own.has_own_loss, other.has_own_loss) == (True, False)
    assert own.comparison.loss != other.comparison.loss


@pytest.mark.parametrize(("rows", "asked", "num_microbatches"), [(8, None, 4), (3, None, 3), (8, 2, 2), (1, None, 1)])
def test_there_are_four_micro_batches_or_as_many_as_rows(rows, asked, num_microbatches):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    checked = check(model, batch(rows)[:1], num_stages=2, num_microbatches=asked)
    assert checked.num_microbatches == num_microbatches == checked.timeline.schedule.num_microbatches
    assert checked.rows == rows


def test_the_model_is_as_it_was_afterwards():
    model = made(Tied)
    names, owner = list(model.state_dict()), model.embedding.weight
    check(model, (torch.arange(10).reshape(5, 2),), num_stages=2)
    assert model.head.weight is owner is model.embedding.weight
    assert list(model.state_dict()) == names


@pytest.mark.parametrize(
    ("error", "match", "model", "value"),
    [
        (BatchError, "no tensor with a dimension", chain, torch.ones(())),
        (SplitError, "but the model has 3 layers", chain, batch()[0]),
        (NonFiniteLoss, "step 0: the loss of micro-batch 0 is nan", lambda: made(chain)[1:], batch()[0] * torch.nan),
        (LossError, "no output of the model depends on a parameter", nn.Sequential, None),
    ],
)
def test_what_cannot_be_checked_is_an_error(error, match, model, value):
    if value is None:
        model, value = (lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()).requires_grad_(False)), batch()[0]
    num_stages = 9 if error is SplitError else 2
    with pytest.raises(error, match=match):
        check(made(model), (value,), num_stages=num_stages)


def test_warnings_of_pipeloom_are_told_and_others_pass():
    class Draws(nn.Linear):
        def forward(self, value):
            return super().forward(value) + torch.rand(value.shape, generator=torch.Generator().manual_seed(0))

    model = nn.Sequential(Draws(8, 8), nn.Linear(8, 3))
    checked = check(model, batch()[:1], num_stages=2)
    assert any("draws from a torch.Generator of its own" in each for each in checked.warnings)
    assert checked.warnings[-1] in advice(checked, model)


@pytest.mark.parametrize("schedule", ["zb-v", "zb-h1", "dualpipe-v"])
def test_halves_count_and_devices_are_those_of_ranks(schedule):
    """With two stages on each rank `--device` named too many devices, and a backward in two halves took no time."""
    model, (value, _) = linear(*[32] * 9), batch(8, 32)
    checked = check(model, [value], num_stages=4, schedule=schedule, num_microbatches=8, device=torch.device("cpu"))
    assert checked.is_right
    costs = costs_of(checked.timeline)
    assert min(costs.input_grad_s) > 0
    assert min(costs.weight_grad_s) > 0
    assert checked.stage_s[1] > costs.forward_s[1] + costs.input_grad_s[1]


def test_the_stand_in_takes_every_output():
    one, other = torch.ones(2, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)
    loss = mean_of_squares({"a": one, "b": [other, torch.ones(4), "text"]})
    assert loss.item() == 5.0
    assert torch.equal(torch.autograd.grad(loss, one)[0], torch.ones(2))


def found(model, args, word, **options):
    """The advice with a word in it."""
    said = advice(check(model, args, **({"num_stages": 2} | options)), model)
    return [each for each in said if word in each]


def linear(*widths):
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


def test_a_better_cut_is_named_with_its_share():
    model, (value, _) = linear(*[32] * 9), batch(8, 32)
    (said,) = found(model, (value,), "FLOPs", num_stages=None, cuts=[7])
    assert said.startswith("stage 0 has 88% of the FLOPs, 50% would be even, and the others wait for it")
    assert said.endswith("with --cuts 4 it would be 50% at most")


def test_one_unit_with_most_of_the_work_is_named():
    (said,) = found(linear(8, 256, 256, 8), batch()[:1], "FLOPs")
    assert "most of it is call 1 (1); if that has parts, name them with --cuts" in said


def test_the_call_that_is_named_is_one_of_the_stage_that_is_named():
    """The largest of all calls was named: of two of one size the first, which was another stage's."""
    (said,) = found(linear(8, 8, 256, 256, 256, 8), batch()[:1], "FLOPs", num_stages=None, cuts=[1, 2, 3])
    assert said.startswith("stage 3 has")
    assert "most of it is call 3 (3)" in said
    assert "stage" in said


def test_blocks_that_do_not_divide_are_said_to():
    (said,) = found(linear(*[32] * 5), batch(8, 32)[:1], "FLOPs", num_stages=3)
    assert "50% of the FLOPs, 33% would be even" in said
    assert said.endswith("another number of stages may divide its blocks more evenly")


def test_even_stages_are_not_mentioned():
    assert not found(linear(*[32] * 5), batch(8, 32)[:1], "FLOPs")
    assert not found(linear(*[32] * 5), batch(8, 32)[:1], "carries")


class Wide(nn.Module):
    """Run to be cut; narrow once between wide places."""

    def __init__(self):
        super().__init__()
        self.layers = linear(64, 512, 512, 512, 8, 512, 512)

    def forward(self, value):
        for layer in self.layers:
            value = torch.relu(layer(value))
        return value


@pytest.mark.parametrize("model", [Wide, lambda: linear(64, 512, 512, 512, 8, 512, 512)])
def test_a_thinner_cut_nearby_is_named(model):
    (said,) = found(model(), batch(64, 64)[:1], "carries", cuts=[3], num_stages=None)
    assert said.startswith("the cut before call 3 (")
    assert "carries 32.0 KiB a micro-batch; one before call 4 (" in said
    assert said.endswith("would carry 512 B")


def test_what_each_cut_would_carry():
    (value, _) = batch(2, 64)
    by_running, of_a_chain = bytes_at(Wide(), ((value,), {}), 2), bytes_at(Wide().layers, ((value,), {}), 2)
    assert by_running == of_a_chain == tuple(2 * 4 * width for width in (0, 512, 512, 512, 8, 512))
    assert bytes_at([nn.Linear(8, 8), nn.Linear(8, 8)], ((value,), {}), 2) == ()


@pytest.mark.parametrize(
    ("model", "word", "said"),
    [
        (made(Net), "BatchNorm", "4 BatchNorm layers normalise by micro-batch, of 2 rows here"),
        (made(chain).eval(), "eval mode", "so dropout and BatchNorm were not checked as in training"),
        (
            made(Twice),
            "stood for",
            "the model returns no loss, so the mean of the squares of its outputs stood for one",
        ),
        (made(Twice), "idle", "with 4 micro-batches the ranks idle "),
    ],
)
def test_what_else_is_said(model, word, said):
    (only,) = found(model, batch()[:1], word, num_stages=3)
    assert said in only
    assert not found(model.eval(), batch()[:1], "normalise")


def test_enough_micro_batches_are_not_mentioned():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    assert not found(model, batch(16)[:1], "idle", num_microbatches=16)
    assert not found(WithLoss(), batch(), "stood for")
