"""``verify=True``: finds what is wrong, lets pass what is right, and leaves no trace."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.errors import ParityError, PipeloomWarning
from pipeloom.parity import FirstStep
from pipeloom.parity.expected import expected_of
from tests.parity.models import Drifting, Net, Tied, Twice, batch, chain, made

cross_entropy = nn.functional.cross_entropy


def by_word(output, target):
    return cross_entropy(output.flatten(0, 1), target.flatten())


def pipeline(model, **options):
    options = {"num_stages": 2, "num_microbatches": 4, "loss_fn": cross_entropy, "verify": True} | options
    return pl.Pipeline(model, **options)


def compared(pipe, *args, **kwargs):
    """The comparison after one step."""
    with pipe:
        pipe.step(*args, **kwargs)
    return pipe.first_step.comparison


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("model", [Net, chain])
def test_right_models_are_equal_to_the_bit(model, recompute, schedule, num_stages):
    value, target = batch()
    pipe = pipeline(made(model), num_stages=num_stages, schedule=schedule, recompute=recompute)
    comparison = compared(pipe, value, target=target)
    names = {each.name for each in comparison.differences}
    assert comparison.is_bit_equal
    assert names == {"loss", *dict(made(model).named_parameters())}


def test_a_tied_weight_is_equal_to_the_bit():
    words = torch.randint(11, (8, 5), generator=torch.Generator().manual_seed(0))
    comparison = compared(pipeline(made(Tied), loss_fn=by_word), words, target=words)
    assert comparison.is_bit_equal
    assert [each.name for each in comparison.differences].count("embedding.weight") == 1


def test_a_layer_called_in_every_stage_is_right_but_not_to_the_bit():
    value, _ = batch()
    pipe = pipeline(made(Twice), num_stages=3, loss_fn=lambda output: output.square().mean())
    comparison = compared(pipe, value)
    assert {each.name for each in comparison.inexact} <= {"layer.weight", "layer.bias"}
    assert not comparison.wrong
    assert all(each.is_regrouped and each.relative < 1e-6 for each in comparison.inexact)


def test_a_list_of_stages_is_compared():
    value, target = batch()
    comparison = compared(pipeline([*made(chain)], num_stages=None), value, target=target)
    assert comparison.is_bit_equal
    assert len(comparison.differences) == 11


def test_a_step_that_is_wrong_names_the_parameters_and_undoes_itself():
    value, target = batch()
    model = nn.Sequential(nn.Linear(8, 8), Drifting(), nn.Linear(8, 3))
    pipe = pipeline(model)
    message = r"un-pipelined model computes: loss: off by .*weight: off by .*7 of 7 differ, the loss among them"
    with pipe, pytest.raises(ParityError, match=message) as raised:
        pipe.step(value, target=target)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert raised.value.comparison is pipe.first_step.comparison
    assert len(raised.value.comparison.wrong) == 7


def test_a_wrong_gradient_alone_is_found(monkeypatch):
    """A loss that is right says nothing of gradients."""
    value, target = batch()
    model = made(Net)
    pipe = pipeline(model)

    def off_by_a_little(*given):
        found = expected_of(*given)
        found.grads[id(model.head.weight)].mul_(1 + 1e-4)
        return found

    monkeypatch.setattr("pipeloom.parity.first_step.expected_of", off_by_a_little)
    with pipe, pytest.raises(ParityError, match=r"head.weight: off by 1.0e-04, relative \(1 of 19 .* loss does not"):
        pipe.step(value, target=target)


def trained(verify, model, *, num_steps=3, **options):
    """What three steps leave: losses, the state, plain attributes and random states."""
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    value, target = batch()
    with pipeline(model, verify=verify, **options) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        losses = []
        for _ in range(num_steps):
            losses.append(pipe.step(value, target=target))
            optimizer.step()
            optimizer.zero_grad()
        state = {name: each.clone() for name, each in pipe.state_dict().items()}
    return losses, state, (torch.rand(2), random.random(), np.random.rand())


@pytest.mark.parametrize("batch_norm", ["per-microbatch", "deferred"])
@pytest.mark.parametrize("model", [Net, chain])
def test_training_goes_on_as_without_it(model, batch_norm):
    losses, state, drawn = trained(True, made(model), batch_norm=batch_norm)
    other_losses, other_state, other_drawn = trained(False, made(model), batch_norm=batch_norm)
    assert torch.equal(torch.stack(losses), torch.stack(other_losses))
    assert all(torch.equal(state[name], other_state[name]) for name in other_state)
    assert torch.equal(drawn[0], other_drawn[0])
    assert drawn[1:] == other_drawn[1:]


def test_only_the_first_step_is_compared(monkeypatch):
    calls = []
    monkeypatch.setattr("pipeloom.parity.first_step.expected_of", lambda *given: calls.append(1) or expected_of(*given))
    losses, _, _ = trained(True, made(Net))
    assert (len(losses), len(calls)) == (3, 1)


def test_gradients_that_were_there_are_added_to():
    value, target = batch()
    model = made(chain)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    comparison = compared(pipeline(model), value, target=target)
    assert comparison.is_bit_equal
    assert float(model[2].bias.grad.sum()) == pytest.approx(1.5, abs=1e-5)  # those of a softmax add up to nothing


def test_frozen_weights_have_no_gradient_and_stay_frozen():
    value, target = batch()
    model = made(Net)
    model.blocks[1].requires_grad_(False)
    comparison = compared(pipeline(model), value, target=target)
    assert comparison.is_bit_equal
    assert [p.requires_grad for p in model.blocks[1].parameters()] == [False] * 4


def test_gradients_of_inputs_are_compared_and_come_once():
    value, target = batch()
    with_check, without = value.clone().requires_grad_(), value.clone().requires_grad_()
    comparison = compared(pipeline(made(Net)), with_check, target=target)
    compared(pipeline(made(Net), verify=False), without, target=target)
    assert [each.name for each in comparison.differences][-1] == "input 0 of micro-batch 3"
    assert torch.equal(with_check.grad, without.grad)


@pytest.mark.parametrize(
    "loss_fn",
    [lambda out, target: (cross_entropy(out, target, reduction="sum"), len(target)), nn.CrossEntropyLoss()],
)
def test_counts_of_a_loss_are_those_of_the_step(loss_fn):
    value, target = batch(rows=11)
    comparison = compared(pipeline(made(Net), loss_fn=loss_fn), value, target=target, loss_scale=8.0)
    assert comparison.is_bit_equal
    assert comparison.loss == comparison.expected_loss


def test_a_loss_with_weights_of_its_own_is_compared():
    value, _ = batch()

    class Learned(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output):
            return (self.scale * output).square().mean()

    comparison = compared(pipeline(made(Net), loss_fn=Learned()), value)
    assert comparison.is_bit_equal
    assert comparison.differences[-1].name == "parameter 0 of the loss function"


def test_autocast_is_around_both():
    value, target = batch()
    with torch.autocast("cpu", torch.bfloat16):
        comparison = compared(pipeline(made(Net)), value, target=target)
    assert comparison.is_bit_equal
    assert comparison.loss > 0


def test_checkpointing_inside_a_unit_draws_the_same_again():
    value, target = batch()

    class Saved(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))

        def forward(self, value):
            return torch.utils.checkpoint.checkpoint(self.inner, value, use_reentrant=False)

    comparison = compared(pipeline(nn.Sequential(Saved(), Saved(), nn.Linear(8, 3))), value, target=target)
    assert comparison.is_bit_equal
    assert len(comparison.differences) == 7


def test_a_step_without_a_finite_loss_is_not_the_first():
    value, target = batch()
    with pipeline(made(chain), on_nan="skip") as pipe:
        pipe.step(value * torch.nan, target=target)
        assert pipe.first_step.comparison is None
        pipe.step(value, target=target)
    assert len(pipe.first_step.comparison.differences) == 11


def test_what_the_model_raises_is_raised_with_a_note():
    value, target = batch()
    pipe = pipeline(nn.Sequential(nn.Linear(8, 8), nn.Linear(9, 3)))
    with pipe, pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        pipe.step(value, target=target)
    assert "in the un-pipelined run of verify=True, micro-batch 0" in raised.value.__notes__


def test_a_model_that_does_not_fit_is_trained_with_a_warning(monkeypatch):
    value, target = batch()

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate much")

    monkeypatch.setattr("pipeloom.parity.first_step.expected_of", full)
    with (
        pipeline(made(chain)) as pipe,
        pytest.warns(PipeloomWarning, match="does not fit: CUDA out of memory.*not ver"),
    ):
        pipe.step(value, target=target)
    assert pipe.first_step.comparison is None
    assert next(pipe.parameters()).grad is not None


def test_a_model_on_several_devices_is_trained_with_a_warning(monkeypatch):
    value, target = batch()
    devices = {torch.device("cuda:0"), torch.device("cuda:1")}
    monkeypatch.setattr("pipeloom.parity.first_step._devices", lambda _: devices)
    with pipeline(made(chain)) as pipe, pytest.warns(PipeloomWarning, match="here it is on cuda:0, cuda:1, so the fir"):
        pipe.step(value, target=target)
    assert pipe.first_step.comparison is None


def test_a_kernel_without_an_order_is_warned_of(monkeypatch):
    value, target = batch()
    model = made(chain)

    def rounded_otherwise(*given):
        found = expected_of(*given)
        found.grads[id(model[0].linear.weight)].mul_(1 + 2e-7)
        return found

    monkeypatch.setattr("pipeloom.parity.first_step.expected_of", rounded_otherwise)
    with pipeline(model) as pipe, pytest.warns(PipeloomWarning, match="not to the bit: 0.linear.weight: off by"):
        pipe.step(value, target=target)
    assert not pipe.first_step.comparison.wrong


def test_without_it_nothing_is_kept():
    first = FirstStep(False)
    with first.checking(None, None, None):
        first.compare([], None, torch.zeros(()))
    assert first.comparison is None


def test_a_rank_among_processes_trains_with_a_warning():
    """Its stages are here, the others' weights are not."""
    whole = pipeline(made(chain))._assembled
    here = SimpleNamespace(split=whole.split, ties=whole.ties, ranks=SimpleNamespace(stages=frozenset({1})))
    first = FirstStep(True)
    context = SimpleNamespace(loss=object())
    with (
        pytest.warns(PipeloomWarning, match="here ranks are processes, and none has it all, so the first step was not"),
        first.checking(here, context, None),
    ):
        first.compare([], context, torch.zeros(()))
    assert first.comparison is None
    with first.checking(here, context, None):  # and says so once
        assert first.comparison is None
