"""All ranks in one process: one run of a plan."""

import threading

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.batch.losses import LossRule
from pipeloom.batch.microbatches import split_batch
from pipeloom.programs import Programs
from pipeloom.runtime.ambient import Ambient
from pipeloom.runtime.context import StepContext
from pipeloom.runtime.foreign_draws import ForeignDraws
from pipeloom.runtime.local import LocalRuntime
from pipeloom.runtime.stage import Stage
from pipeloom.splitting import split


class Run:
    """Three linear layers on three ranks, six rows in three micro-batches."""

    def __init__(self, last=None):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), last or nn.Linear(2, 2))
        stages = [Stage(i, units) for i, units in enumerate(split(self.model, num_stages=3).stages)]
        self.programs = Programs("1f1b", 3, False)
        self.runtime = LocalRuntime(stages, self.programs.placement)
        self.rows = torch.ones(6, 2)

    def context(self, loss_fn):
        inputs = split_batch((self.rows,), {}, None, 3)
        loss = LossRule(loss_fn).for_step([2, 2, 2], [None] * 3, 1.0) if loss_fn else None
        return StepContext(inputs, loss, Ambient.capture(), 0, 0, ForeignDraws(), has_outputs=True)

    def train(self, loss_fn=lambda output: output.sum(), has_trace=False):
        context = self.context(loss_fn)
        changes = self.runtime.run(self.programs.training(3), context, has_trace=has_trace)
        return context, self.runtime.trace, changes

    def evaluate(self):
        context = self.context(None)
        self.runtime.run(self.programs.evaluation(3), context, has_trace=False)
        return context

    def gradients(self):
        return [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]


@pytest.fixture
def run():
    made = Run()
    yield made
    made.runtime.close()


def test_training_leaves_losses_outputs_and_gradients(run):
    context, trace, _ = run.train()
    assert trace is None
    assert sorted(context.outputs) == sorted(context.loss.values) == [0, 1, 2]
    assert all(gradient is not None for gradient in run.gradients())


def test_evaluation_leaves_outputs_only(run):
    context = run.evaluate()
    assert torch.equal(torch.cat([context.outputs[i] for i in range(3)]), run.model(run.rows))
    assert run.gradients() == [None] * 6


def test_trace_is_made_if_asked_for(run):
    timeline = run.train(has_trace=True)[1].timeline()
    assert timeline.schedule == run.programs.training(3).schedule
    assert {span.rank for span in timeline} == {0, 1, 2}


def test_changes_can_be_undone(run):
    run.train()
    before = run.gradients()
    _, _, changes = run.train()
    assert not torch.equal(run.gradients()[0], before[0])
    changes.undo()
    assert all(map(torch.equal, run.gradients(), before))


def test_changes_are_undone_if_what_follows_fails(run):
    _, _, changes = run.train()
    with pytest.raises(ValueError, match="afterwards"), changes:
        raise ValueError("afterwards")
    assert run.gradients() == [None] * 6


def test_slots_are_counted_anew_each_time(run):
    run.train()
    trained = run.runtime.peak_live_slots
    run.evaluate()
    assert run.runtime.peak_live_slots[0] == 0
    run.train()
    assert run.runtime.peak_live_slots == trained


def test_error_undoes_the_step(run):
    def fails(output):
        raise ValueError("no loss")

    run.train()
    before = run.gradients()
    with pytest.raises(ValueError, match="no loss"):
        run.train(fails)
    assert all(map(torch.equal, run.gradients(), before))


def test_ranks_see_the_callers_switches():
    seen = []
    run = Run(last=nn.Softplus())
    run.model[2].register_forward_pre_hook(
        lambda *_: seen.append((torch.is_autocast_enabled("cpu"), torch.get_default_device().type))
    )
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        run.evaluate()
    assert seen == [(True, "meta")] * 3
    run.runtime.close()


def test_ranks_run_at_the_same_time(run):
    """The first rank's second micro-batch and the second rank's first one wait for each other."""
    barrier, calls = threading.Barrier(2, timeout=30), {0: 0, 1: 0}

    def meets_at(stage, call):
        def meet(*_):
            calls[stage] += 1
            if calls[stage] == call:
                barrier.wait()

        return meet

    run.model[0].register_forward_pre_hook(meets_at(0, call=2))
    run.model[1].register_forward_pre_hook(meets_at(1, call=1))
    run.evaluate()
    assert calls == {0: 3, 1: 3}
    assert not barrier.broken


def test_close_ends_the_threads():
    others = set(threading.enumerate())  # of pipelines that earlier tests have not closed
    run = Run()
    run.evaluate()
    run.runtime.close()
    assert not any(each.name.startswith("pipeloom-rank-") for each in set(threading.enumerate()) - others)
    assert isinstance(pl.Pipeline(run.model), pl.Pipeline)
