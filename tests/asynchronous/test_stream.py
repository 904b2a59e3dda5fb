"""Streams against the update rules of their papers, written as plain loops: losses and weights, to the bit."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from torch import nn

import pipeloom as pl
from pipeloom.ir.verify import verify
from pipeloom.ir.versions import used_versions
from pipeloom.runtime.gradients import set_grad_dtype
from pipeloom.testing import asynchronous_steps
from tests.asynchronous.models import MODELS, OPTIMIZERS, RULES, WIDTH, batches, chain, plain, seeded, square
from tests.numerics.asserts import assert_bit_equal, assert_same_state


def assert_stream_equals_its_rule(
    make, given, optimizer, name, *, num_stages=4, num_microbatches=1, rule=None, schedule=None, **options
):
    model, reference = seeded(make), seeded(make)
    common = {"num_stages": num_stages, "loss_fn": square, "seed": 2}
    in_parts = {} if schedule else {"num_microbatches": num_microbatches}
    with pl.Pipeline(model, schedule=schedule or name, **common, **in_parts, **options) as pipe:
        found = pipe.stream(optimizer).train(given)
        expected = asynchronous_steps(
            reference, given, optimizer, rule=rule or RULES[name], num_microbatches=num_microbatches, **common
        )
        assert_bit_equal(found, expected, "losses")
        assert_same_state(pipe, reference)
        assert all(parameter.grad is None for parameter in pipe.parameters())


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", RULES)
def test_every_model_has_the_bits_of_the_rule(name, kind, recompute):
    parts = 4 if name == "pipedream-2bw" else 1
    assert_stream_equals_its_rule(
        MODELS[kind], batches(9), OPTIMIZERS["momentum"], name, num_microbatches=parts, recompute=recompute
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(sorted(RULES)),
    st.integers(1, 5),
    st.integers(1, 12),
    st.integers(0, 3),
    st.sampled_from(sorted(OPTIMIZERS)),
)
def test_any_ranks_any_batches_any_optimizer(name, num_stages, num_batches, more_parts, optimizer):
    """Several micro-batches of a mini-batch too, which PipeDream does not have."""
    parts = more_parts + (num_stages if name == "pipedream-2bw" else 1)
    assert_stream_equals_its_rule(
        lambda: chain(5),
        batches(num_batches, num_rows=2 * parts),  # of one row alone BatchNorm knows no variance
        OPTIMIZERS[optimizer],
        name,
        num_stages=num_stages,
        num_microbatches=parts,
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(["pipedream", "pipedream-vertical-sync"]),
    st.lists(st.tuples(*[st.integers(0, 999)] * 2), min_size=1, max_size=3),
)
def test_a_changed_program_runs_as_its_versions_say(name, swaps):
    """Neighbours swapped: an update before or after a forward changes which weights it uses, and nothing else."""
    made = pl.schedule(name, num_ranks=3, num_microbatches=7)
    programs = [list(program) for program in made.programs]
    for rank, position in swaps:
        row = programs[rank % 3]
        at = position % (len(row) - 1)
        row[at], row[at + 1] = row[at + 1], row[at]
    changed = made.with_programs(programs)
    note(str(changed))
    if verify(changed):
        return
    used = used_versions(changed)
    assert_stream_equals_its_rule(
        plain,  # without buffers, which are as the order of forwards leaves them
        batches(7),
        OPTIMIZERS["momentum"],
        name,
        num_stages=3,
        rule=lambda stage, microbatch: used[stage, microbatch],
        schedule=changed,
    )


def test_a_backward_in_two_halves_updates_too():
    """Of each B its I and its W, and the update after both."""
    made = pl.schedule("pipedream", num_ranks=3, num_microbatches=6)
    halves = (pl.Kind.INPUT_GRAD, pl.Kind.WEIGHT_GRAD)
    halved = made.with_programs(
        [
            replace(action, kind=kind)
            for action in program
            for kind in (halves if action.kind is pl.Kind.BACKWARD else [action.kind])
        ]
        for program in made.programs
    )
    assert_stream_equals_its_rule(chain, batches(6), OPTIMIZERS["adamw"], "pipedream", num_stages=3, schedule=halved)


def test_what_is_frozen_stays_and_a_stage_without_weights_has_no_optimizer():
    def make():
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)], nn.Tanh())
        model[1].weight.requires_grad_(False)
        return model

    assert_stream_equals_its_rule(make, batches(6), OPTIMIZERS["adamw"], "pipedream")
    with pl.Pipeline(seeded(make), num_stages=4, schedule="pipedream", loss_fn=square) as pipe:
        stream = pipe.stream(OPTIMIZERS["sgd"])
        assert sorted(stream.optimizers) == [0, 1, 2]
        assert [len(each.param_groups[0]["params"]) for each in stream.optimizers.values()] == [2, 1, 2]


@pytest.mark.parametrize("name", RULES)
def test_autocast_of_the_caller_reaches_the_ranks(name):
    parts = 4 if name == "pipedream-2bw" else 1
    with torch.autocast("cpu", torch.bfloat16):
        assert_stream_equals_its_rule(chain, batches(7), OPTIMIZERS["sgd"], name, num_microbatches=parts)


class Scaled(nn.Parameter):
    """A parameter of the user's own kind."""


class Marked(nn.Module):
    """Its forward looks at what its weight is and has."""

    def __init__(self):
        super().__init__()
        self.weight = Scaled(torch.eye(WIDTH))
        self.weight.scale = 0.5

    def forward(self, x):
        return x @ self.weight * (getattr(self.weight, "scale", 1.0) if isinstance(self.weight, Scaled) else 3.0)


@pytest.mark.parametrize("name", RULES)
def test_a_version_of_a_weight_has_its_class_and_attributes(name):
    """Leaves were plain parameters, and the forward took another way."""
    parts = 4 if name == "pipedream-2bw" else 1
    assert_stream_equals_its_rule(
        lambda: nn.Sequential(*(Marked() for _ in range(4))), batches(7), OPTIMIZERS["sgd"], name,
        num_microbatches=parts,
    )  # fmt: skip


def test_a_hook_of_a_weight_sees_its_gradients():
    """A mask for some rows, as people put it on embeddings."""

    def make():
        model = plain()
        for layer in model:
            layer.weight.register_hook(lambda grad: grad * torch.arange(WIDTH)[:, None])
        return model

    assert_stream_equals_its_rule(make, batches(6), OPTIMIZERS["sgd"], "pipedream")


def test_optimizers_and_learning_rates_go_on_from_call_to_call():
    """A call drains the pipeline: its first batches use the weights that are there, as at the very start."""
    model, given = seeded(chain), batches(10)
    reference = copy.deepcopy(model)

    def halves(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

    with pl.Pipeline(model, num_stages=4, schedule="pipedream", loss_fn=square) as pipe:
        stream = pipe.stream(OPTIMIZERS["momentum"], scheduler=halves)
        found = [stream.train(given[:4]), stream.train(given[4:])]
        assert (pipe.step_index, [each.last_epoch for each in stream.schedulers.values()]) == (2, [10] * 4)
        made = []

        class Scheduled:
            """An optimizer with its scheduler, kept from one call of the oracle to the next."""

            def __init__(self, weights):
                self.optimizer = OPTIMIZERS["momentum"](weights)
                self.scheduler = halves(self.optimizer)

            def step(self):
                self.optimizer.step()
                self.scheduler.step()

            def zero_grad(self):
                self.optimizer.zero_grad()

        def optimizer(weights):
            known = [each for each in made if each.optimizer.param_groups[0]["params"][0] is weights[0]]
            if not known:
                made.append(Scheduled(weights))
            return (known or made)[-1]

        for i, part in enumerate((given[:4], given[4:])):
            expected = asynchronous_steps(
                reference, part, optimizer, rule="weight-stashing", num_stages=4, loss_fn=square, step_index=i
            )
            assert_bit_equal(found[i], expected, f"losses of call {i}")
        assert_same_state(pipe, reference)


def test_the_first_losses_are_those_of_the_weights_at_the_start():
    """So far the pipeline had no update to show: n mini-batches with weight stashing, on the first stage."""
    model, given = seeded(plain), batches(4)
    expected = [square(model(x), target).detach() for x, target in given]
    with pl.Pipeline(model, num_stages=4, schedule="pipedream-vertical-sync", loss_fn=square) as pipe:
        losses = pipe.stream(OPTIMIZERS["sgd"]).train(given)
    for found, loss in zip(losses, expected, strict=True):
        assert_bit_equal(found, loss, "loss")


@pytest.mark.parametrize("in_dict", [False, True])
def test_inputs_are_given_as_to_the_model(in_dict):
    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x, y):
            return self.other(torch.tanh(self.one(x)) + y)

    given = batches(3)
    inputs = [{"x": x, "y": 2 * x} if in_dict else (x, 2 * x) for x, _ in given]
    with pl.Pipeline(seeded(Adds), num_stages=2, schedule="pipedream", loss_fn=square) as pipe:
        losses = pipe.stream(OPTIMIZERS["sgd"]).train(
            [(each, target) for each, (_, target) in zip(inputs, given, strict=True)]
        )
    assert losses.shape == (3,)
    assert not losses.requires_grad


def test_the_timeline_has_the_updates():
    with pl.Pipeline(seeded(chain), num_stages=2, schedule="pipedream", loss_fn=square) as pipe:
        pipe.stream(OPTIMIZERS["sgd"]).train(batches(3))
        updates = [span for span in pipe.timeline if span.action.kind is pl.Kind.UPDATE]
    assert [str(span.action) for span in updates] == ["0U0", "0U1", "0U2", "1U0", "1U1", "1U2"]
    assert all(span.duration_s > 0 for span in updates)


def test_a_batch_counts_its_own_targets():
    """``(sum, count)``: known at once where a mini-batch is one micro-batch, and by ``loss_count`` where it is more."""

    def counted(output, target):
        kept = target > 0
        return ((output - target).square() * kept).sum(), kept.sum()

    given = batches(6)
    for parts, name in ((1, "pipedream"), (4, "pipedream-2bw")):
        model = seeded(plain)
        reference = copy.deepcopy(model)
        options = {
            "num_stages": 4,
            "num_microbatches": parts,
            "loss_fn": counted,
            "loss_count": None if parts == 1 else lambda target: (target > 0).sum(),
        }
        with pl.Pipeline(model, schedule=name, **options) as pipe:
            found = pipe.stream(OPTIMIZERS["sgd"]).train(given)
            expected = asynchronous_steps(reference, given, OPTIMIZERS["sgd"], rule=RULES[name], **options)
            assert_bit_equal(found, expected, "losses")
            assert_same_state(pipe, reference)


def test_gradients_add_up_in_the_dtype_that_was_asked_for():
    def half():
        return plain().to(torch.bfloat16)

    model, reference = seeded(half), seeded(half)
    given = [tuple(each.to(torch.bfloat16) for each in pair) for pair in batches(6)]
    seen = []

    def optimizer(weights):
        made = OPTIMIZERS["sgd"](weights)
        made.register_step_pre_hook(lambda *_: seen.extend(weight.grad.dtype for weight in weights))
        return made

    set_grad_dtype(reference.parameters(), torch.float32)
    options = {"num_stages": 4, "num_microbatches": 4, "loss_fn": square}
    with pl.Pipeline(model, schedule="pipedream-2bw", grad_dtype=torch.float32, **options) as pipe:
        found = pipe.stream(optimizer).train(given)
        assert set(seen) == {torch.float32}
        expected = asynchronous_steps(reference, given, OPTIMIZERS["sgd"], rule="2bw", **options)
        assert_bit_equal(found, expected, "losses")
        assert_same_state(pipe, reference)
