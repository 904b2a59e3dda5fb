"""What each kind of action does, one action at a time and without threads."""

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.batch.losses import LossRule
from pipeloom.batch.microbatches import split_batch
from pipeloom.ir import Action, Kind
from pipeloom.runtime.ambient import Ambient
from pipeloom.runtime.boundary import Gradients, Message
from pipeloom.runtime.context import StepContext
from pipeloom.runtime.foreign_draws import ForeignDraws
from pipeloom.runtime.gradients import GradientScope
from pipeloom.runtime.handlers import RankHandlers
from pipeloom.runtime.stage import Stage
from pipeloom.splitting import split


class Outbox:
    """A transport that keeps what is sent and posted."""

    def __init__(self):
        self.sent, self.posted = {}, []

    def send(self, action, message):
        self.sent[str(action)] = message

    def post(self, action):
        self.posted.append(str(action))


class Rank:
    """The handlers of a rank that holds some stages of a chain of linear layers, 2 rows in 2 micro-batches."""

    def __init__(self, stages, *, num_stages=3, recompute=False, is_training=True, loss_fn=lambda output: output.sum()):
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(num_stages)))
        units = split(self.model, num_stages=num_stages).stages
        self.inputs = torch.ones(2, 2)
        inputs = split_batch((self.inputs,), {}, None, 2)
        loss = LossRule(loss_fn).for_step([1, 1], [None, None], 1.0) if is_training else None
        self.context = StepContext(inputs, loss, Ambient.capture(), 0, 0, ForeignDraws(), not is_training)
        made = {s: Stage(s, units[s]) for s in stages}
        recomputed = {(s, i) for s in stages for i in range(2)} if recompute else set()
        scopes = {s: GradientScope(stage.module.parameters()) for s, stage in made.items()}
        self.outbox = Outbox()
        self.table = RankHandlers(made, num_stages, scopes, self.outbox, self.context, recomputed=recomputed).table

    def run(self, kind, stage, microbatch=0, *given):
        return self.table[kind](Action(kind, stage, microbatch), given)

    def gradient(self, stage):
        return self.model[stage].weight.grad


def gradients_of(*values):
    return Gradients(tuple(torch.tensor([value]) for value in values), is_apart=False)


def test_forward_makes_the_message_for_the_next_stage():
    rank = Rank([0])
    message = rank.run(Kind.FORWARD, 0)
    assert torch.equal(message.value(), rank.model[0](rank.inputs[:1]).detach())
    assert not message.value().requires_grad


def test_what_is_given_is_sent():
    rank = Rank([0])
    assert rank.run(Kind.SEND_F, 0, 0, "message") is None
    assert rank.outbox.sent == {"0SEND_F0": "message"}


def test_receives_are_posted():
    rank = Rank([1])
    rank.run(Kind.RECV_F, 1)
    rank.run(Kind.RECV_B, 1, 1)
    assert rank.outbox.posted == ["1RECV_F0", "1RECV_B1"]


@pytest.mark.parametrize("recompute", [False, True])
def test_backward_of_a_stage_in_the_middle(recompute):
    rank = Rank([1], recompute=recompute)
    message, _ = Message.of(torch.ones(1, 2, requires_grad=True) * 1)
    rank.run(Kind.FORWARD, 1, 0, message)
    if recompute:
        rank.run(Kind.RECOMPUTE, 1)
    passed_on = rank.run(Kind.BACKWARD, 1, 0, gradients_of([1.0, 2.0])).leaves[0]
    assert torch.equal(passed_on, torch.tensor([[1.0, 2.0]]) @ rank.model[1].weight.detach())
    assert rank.gradient(1).tolist() == [[1.0, 1.0], [2.0, 2.0]]


def test_last_stage_seeds_its_own_backward():
    rank = Rank([2])
    message, _ = Message.of(torch.ones(1, 2, requires_grad=True) * 1)
    assert rank.run(Kind.FORWARD, 2, 0, message) is None
    rank.run(Kind.BACKWARD, 2)
    assert rank.gradient(2).tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert rank.context.loss.values[0].shape == ()


def test_first_stage_keeps_the_gradients_of_inputs():
    rank = Rank([0])
    rank.run(Kind.FORWARD, 0)
    assert rank.run(Kind.BACKWARD, 0, 0, gradients_of([1.0, 1.0])) is None
    assert rank.context.input_grads == {0: (None,)}


def test_stages_of_a_rank_take_what_the_others_made():
    rank = Rank([0, 1, 2])
    first = rank.run(Kind.FORWARD, 0)
    rank.run(Kind.FORWARD, 2, 0, rank.run(Kind.FORWARD, 1, 0, first))
    last = rank.run(Kind.BACKWARD, 2)
    rank.run(Kind.BACKWARD, 0, 0, rank.run(Kind.BACKWARD, 1, 0, last))
    plain = Rank([0, 1, 2])
    (plain.model(plain.inputs[:1]).sum() / 2).backward()
    assert all(torch.equal(rank.gradient(stage), plain.gradient(stage)) for stage in range(3))
    assert rank.outbox.sent == {}


def test_recompute_keeps_no_second_copy_of_its_input():
    """Another address may round differently, and a copy is needed only where the forward wrote into its input."""
    addresses = []
    rank = Rank([1], recompute=True)
    rank.model[1].register_forward_pre_hook(lambda _, args: addresses.append(args[0].data_ptr()))
    message, _ = Message.of(torch.ones(1, 2, requires_grad=True) * 1)
    rank.run(Kind.FORWARD, 1, 0, message)
    rank.run(Kind.RECOMPUTE, 1)
    assert addresses == [message.leaves[0].data_ptr()] * 2


def test_recompute_uses_the_draws_of_the_forward():
    seen = []
    rank = Rank([2], recompute=True, loss_fn=lambda output: seen.append(torch.rand(3)) or output.sum())
    message, _ = Message.of(torch.ones(1, 2, requires_grad=True) * 1)
    rank.run(Kind.FORWARD, 2, 0, message)
    rank.run(Kind.RECOMPUTE, 2)
    assert torch.equal(seen[0], seen[1])
    assert len(seen) == 2


def test_evaluation_keeps_outputs_without_a_graph():
    rank = Rank([0, 1, 2], is_training=False)
    with torch.no_grad():
        middle = rank.run(Kind.FORWARD, 1, 1, rank.run(Kind.FORWARD, 0, 1))
        assert rank.run(Kind.FORWARD, 2, 1, middle) is None
    assert torch.equal(rank.context.outputs[1], rank.model(rank.inputs[1:]).detach())
    assert not rank.context.outputs[1].requires_grad


def test_evaluation_hands_its_input_out_without_a_graph():
    """What a layer hands on requires a gradient even where gradients are off."""
    given = torch.ones(2, 3, requires_grad=True)
    with pl.Pipeline(nn.Identity(), num_microbatches=1) as pipe:
        assert not pipe(given).requires_grad
        pipe.num_microbatches = 2
        assert not pipe(given).requires_grad


def test_every_kind_has_a_handler():
    """But U's: what it does is put around the others by who lets weights change (`pipeloom.asynchronous`)."""
    assert Rank([0]).table.keys() == set(Kind) - {Kind.UPDATE}


@pytest.mark.parametrize("writes", [False, True])
def test_a_hook_that_writes_into_a_seed_spoils_no_other_micro_batch(writes):
    """Micro-batches that weigh the same start from one tensor, as long as nobody wrote into it."""
    seeds = []

    def loss_fn(output):
        loss = output.sum()
        loss.register_hook(lambda grad: seeds.append(grad) or (grad.mul_(10) and None if writes else None))
        return loss

    rank = Rank([2], loss_fn=loss_fn)
    for microbatch in range(2):
        message, _ = Message.of(torch.ones(1, 2, requires_grad=True) * 1)
        rank.run(Kind.FORWARD, 2, microbatch, message)
        rank.run(Kind.BACKWARD, 2, microbatch)
    assert [seed.item() for seed in seeds] == [5.0 if writes else 0.5] * 2
    assert (seeds[0].data_ptr() == seeds[1].data_ptr()) is not writes


def test_micro_batches_that_weigh_differently_have_seeds_of_their_own():
    rank = Rank([2])
    rank.context.loss.num_samples = [1, 3]
    for microbatch in range(2):
        message, _ = Message.of(torch.ones(1, 2, requires_grad=True) * 1)
        rank.run(Kind.FORWARD, 2, microbatch, message)
        rank.run(Kind.BACKWARD, 2, microbatch)
    assert rank.gradient(2).tolist() == [[1.0, 1.0], [1.0, 1.0]]
