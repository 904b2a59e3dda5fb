"""Schedules that run two replicas of the model through the same ranks: sums of either, then of both (contract 1, 2)."""

import copy
import gc
import re
import weakref
from collections import Counter
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

import pipeloom as pl
from pipeloom.errors import NonFiniteLoss, RuntimeStateError, SplitError
from pipeloom.ir import Action, Kind, Placement, Schedule
from pipeloom.testing import sequential_step
from tests.numerics.asserts import assert_bit_equal, assert_same_gradients, assert_same_state
from tests.random_models import OPERATIONS, RandomModel, Recurs, random_inputs, score
from tests.random_schedules import runnable_schedules
from tests.runtime.test_every_schedule import OPPOSED, WIDTH, Gpt, square, token_loss, tokens

F, B = Kind.FORWARD, Kind.BACKWARD


def layers(num_layers=4):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)) for _ in range(num_layers)))


def rows(num_rows=19):
    return torch.randn(2, num_rows, WIDTH).unbind()


def assert_steps_equal_the_oracle(model, schedule, batch, loss_fn, num_steps=2, loss=None, **options):
    """Steps of a pipeline, with an optimizer between them, have the bits of the oracle's."""
    reference, other_loss = copy.deepcopy(model), copy.deepcopy(loss_fn)
    with pl.Pipeline(model, schedule=schedule, loss_fn=loss_fn, **options, **(loss or {})) as pipe:
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (pipe, reference)]
        for step_index in range(num_steps):
            x, target = batch()
            found = pipe.step(x, target=target)
            step = {"target": target, "schedule": pipe.schedule, "step_index": step_index, "loss_fn": other_loss}
            step |= {"num_microbatches": pipe.num_microbatches, "num_stages": pipe.num_stages} | (loss or {})
            assert_bit_equal(found, sequential_step(reference, x, **step), "loss")
            assert_same_gradients(pipe, reference)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_same_state(pipe, reference)


@given(
    name=st.sampled_from(OPPOSED),
    num_stages=st.sampled_from([2, 4, 6]),
    num_microbatches=st.integers(1, 9),
    num_rows=st.integers(9, 13),
    recompute=st.booleans(),
)
@settings(max_examples=12)
def test_any_shape_has_the_oracles_bits(name, num_stages, num_microbatches, num_rows, recompute):
    assert_steps_equal_the_oracle(
        layers(6), name, lambda: rows(num_rows), square,
        num_stages=num_stages, num_microbatches=num_microbatches, recompute=recompute,
    )  # fmt: skip


def test_both_halves_of_the_batch_are_summed_by_themselves():
    """The sum of the first half, plus the sum of the second: what two runs over the halves find by themselves."""
    model, (x, target) = layers(), rows(16)
    halves = [copy.deepcopy(model) for _ in range(2)]
    with pl.Pipeline(model, schedule="chimera", num_stages=4, num_microbatches=4, loss_fn=square) as pipe:
        pipe.eval()  # or the draws of the second half would be those of its micro-batches' numbers
        pipe.step(x, target=target)
        for half, part, wanted in zip(halves, x.chunk(2), target.chunk(2), strict=True):
            half.eval()
            sequential_step(half, part, target=wanted, num_microbatches=2, loss_fn=square, loss_scale=0.5)
        for (name, parameter), one, other in zip(
            pipe.named_parameters(), *(h.parameters() for h in halves), strict=True
        ):
            assert_bit_equal(parameter.grad, one.grad + other.grad, name)
        whole = copy.deepcopy(halves[0])
        whole.zero_grad()
        sequential_step(whole, x, target=target, num_microbatches=4, loss_fn=square)
        for parameter, expected in zip(pipe.parameters(), whole.parameters(), strict=True):
            assert (parameter.grad - expected.grad).norm() <= 1e-6 * expected.grad.norm()  # contract 2


def by_placement(placement, num_microbatches):
    """All forwards, then all backwards."""
    empty = Schedule(placement, ((),) * placement.num_ranks, num_microbatches)
    stages = range(placement.num_stages)

    def program(rank):
        for kind, order in ((F, stages), (B, reversed(stages))):
            for i in range(num_microbatches):
                yield from (Action(kind, s, i) for s in list(order) if empty.rank_of(s, i) == rank)
                order = stages if kind is F else stages[::-1]

    return empty.with_programs(program(rank) for rank in range(placement.num_ranks))


@pytest.mark.parametrize(
    "ranks", [(0, 1, 2), (0, 0, 1, 1), (0, 1, 1, 0), (0, 0)], ids=["odd", "blocks", "v", "all on one rank"]
)
def test_any_placement_of_two_replicas_runs(ranks):
    schedule = by_placement(Placement(ranks, tuple(max(ranks) - rank for rank in ranks)), 5)
    assert pl.verify(schedule) == []
    assert_steps_equal_the_oracle(Gpt(), schedule, tokens, token_loss, num_stages=len(ranks))


def test_a_rank_may_hold_a_stage_twice():
    """The oracle ran such a stage's micro-batches twice: once for each replica, in the program of one rank."""
    schedule = by_placement(Placement((0, 1), (0, 1)), 4)
    assert schedule.accumulation_order(0) == (0, 1, 2, 3)
    assert_steps_equal_the_oracle(layers(), schedule, rows, square, num_stages=2)


@given(runnable_schedules(has_replicas=True), st.booleans())
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_any_order_of_two_replicas_has_the_oracles_bits(schedule, has_counts):
    """Any placement, whole backwards and halves in any order, with recomputation; the first step is verified too."""
    kept = [[a for a in program if a.kind is not Kind.RECOMPUTE] for program in schedule.programs]
    model, (x, target) = layers(schedule.num_stages), rows(2 * schedule.num_microbatches)
    reference, loss_fn = copy.deepcopy(model), counted if has_counts else square
    options = {"num_stages": schedule.num_stages, "loss_fn": loss_fn}
    with pl.Pipeline(model, schedule=schedule.with_programs(kept), verify=True, **options) as pipe:
        for step_index in range(2):
            loss = pipe.step(x, target=target)
            options |= {"schedule": pipe.schedule, "num_microbatches": schedule.num_microbatches}
            expected = sequential_step(reference, x, target=target, step_index=step_index, **options)
            assert_bit_equal(loss, expected, "loss")
            assert_same_gradients(pipe, reference)
        assert pipe.first_step.comparison.is_bit_equal


@given(st.integers(0, 999))
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_random_models_run_right_or_are_refused(seed):
    """Models that are cut by running them, whose layers and code write buffers, or do not."""
    torch.manual_seed(seed)
    model = RandomModel(Random(seed), [name for name in OPERATIONS if name not in ("average", "count")])
    reference, inputs = copy.deepcopy(model), random_inputs(Random(seed), 8)
    options = {"num_stages": 2, "num_microbatches": 4, "loss_fn": score}
    with pl.Pipeline(model, schedule="dualpipe", **options) as pipe:
        try:
            loss = pipe.step(**inputs)
        except SplitError as error:
            if re.search(r"keeps running statistics|wrote the buffer", error.message):
                return
            raise
        assert_bit_equal(loss, sequential_step(reference, schedule=pipe.schedule, **inputs, **options), "loss")
        assert_same_gradients(pipe, reference)


def test_gradients_are_summed_by_an_action_of_each_rank():
    with pl.Pipeline(layers(), schedule="dualpipe", num_stages=4, num_microbatches=8, loss_fn=square) as pipe:
        x, target = rows()
        pipe.step(x, target=target)
        found = Counter(str(span.action) for span in pipe.timeline if span.action.kind is Kind.REDUCE_GRAD)
        assert found == {f"{stage}REDUCE_GRAD": 2 for stage in range(4)}
        assert pl.verify(pipe.schedule) == []
        assert [copy.grad for stage in range(4) for copy in pipe._assembled.replica.copies(stage)] == [None] * 8


class Head(nn.Module):
    """A loss with weights of its own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, output, target):
        return (self.linear(output) - target).square().mean()


def counted(output, target):
    return (output - target).square().sum(), float(target.numel())


def numel(target):
    return target.numel()


@pytest.mark.parametrize(
    ("loss_fn", "loss"),
    [(counted, {}), (square, {"loss_count": numel}), (square, {"loss_reduction": "sum"}), (Head(), {})],
    ids=["counts that come with the losses", "counts known before", "sums", "a loss with weights"],
)
def test_losses_of_both_replicas_make_one(loss_fn, loss):
    options = {"num_stages": 4, "num_microbatches": 7}
    assert_steps_equal_the_oracle(layers(), "dualpipe", rows, copy.deepcopy(loss_fn), loss=loss, **options)


def test_a_loss_that_holds_a_weight_of_the_model_shares_it():
    torch.manual_seed(0)
    model, head = layers(), Head()
    head.linear.weight = model[0][0].weight
    reference, other = copy.deepcopy((model, head))
    with pl.Pipeline(model, schedule="chimera", num_stages=4, num_microbatches=4, loss_fn=head) as pipe:
        x, target = rows()
        pipe.step(x, target=target)
        options = {"num_microbatches": 4, "num_stages": 4, "schedule": pipe.schedule}
        sequential_step(reference, x, target=target, loss_fn=other, **options)
        assert_same_gradients(pipe, reference)
        assert_bit_equal(head.linear.bias.grad, other.linear.bias.grad, "the loss's own bias")


class TiedEnds(nn.Module):
    """A sparse gradient and a dense one for one weight."""

    def __init__(self):
        super().__init__()
        self.tokens, self.middle = (
            nn.Embedding(16, WIDTH, sparse=True),
            nn.ModuleList(map(nn.Linear, [WIDTH] * 6, [WIDTH] * 6)),
        )
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens)
        for each in self.middle:
            x = each(x).tanh()
        return self.head(x)


def test_recurrent_layers_use_the_leaves_of_their_replica():
    model = nn.Sequential(*(Recurs(WIDTH) for _ in range(4)))
    assert_steps_equal_the_oracle(model, "dualpipe", rows, square, num_stages=4, num_microbatches=6)


def test_sparse_gradients_of_a_tied_weight():
    torch.manual_seed(0)
    model, (x, target) = TiedEnds(), tokens()
    reference = copy.deepcopy(model)
    with pl.Pipeline(model, schedule="dualpipe", num_stages=4, num_microbatches=4, loss_fn=token_loss) as pipe:
        pipe.step(x, target=target)
        options = {"num_microbatches": 4, "num_stages": 4, "schedule": pipe.schedule}
        sequential_step(reference, x, target=target, loss_fn=token_loss, **options)
        assert_same_gradients(pipe, reference)


@pytest.mark.parametrize("name", OPPOSED)
def test_the_first_step_is_verified(name):
    torch.manual_seed(0)
    options = {"num_stages": 4, "num_microbatches": 8, "loss_fn": token_loss}
    with pl.Pipeline(Gpt(), schedule=name, verify=True, **options) as pipe:
        x, target = tokens()
        pipe.step(x, target=target)
        assert pipe.first_step.comparison.wrong == pipe.first_step.comparison.inexact == []


def test_outputs_and_gradients_of_inputs_are_those_of_one_replica():
    results = []
    for name in ("1f1b", "dualpipe"):
        torch.manual_seed(1)
        x, target = rows()
        x.requires_grad_()
        with pl.Pipeline(layers(), schedule=name, num_stages=4, num_microbatches=6, loss_fn=square) as pipe:
            _, outputs = pipe.step(x, target=target, return_outputs=True)
            results.append((outputs, x.grad, pipe.eval()(x.detach())))
    for found, expected in zip(*results, strict=True):
        assert_bit_equal(found, expected, "result")


def test_the_model_is_one_model():
    """Names, state, norms and hooks are of the first replica; hooks fire for the micro-batches of both."""
    torch.manual_seed(0)
    model, calls = Gpt(), Counter()
    names, keys = [name for name, _ in model.named_parameters()], list(model.state_dict())
    with pl.Pipeline(model, schedule="dualpipe", num_stages=4, num_microbatches=8, loss_fn=token_loss) as pipe:
        x, target = tokens()
        for step in range(2):
            pipe.step(x, target=target)
            if not step:
                model.register_forward_hook(lambda *_: calls.update(["model"]))
                model.blocks[2].up.register_forward_hook(lambda *_: calls.update(["layer"]))
                model.blocks[1].register_forward_pre_hook(lambda *_: calls.update(["block"]))
        assert calls == {"model": 8, "layer": 8, "block": 8}
        assert [name for name, _ in pipe.named_parameters()] == names
        assert list(pipe.state_dict()) == keys
        norm = nn.utils.get_total_norm([each.grad for each in pipe.parameters()])
        assert torch.equal(pipe.clip_grad_norm_(1e9), norm)
        assert pipe.unwrap() is model
    assert [name for name, _ in model.named_parameters()] == names


def test_a_pipeline_that_nobody_has_is_gone():
    pipe = pl.Pipeline(layers(), schedule="dualpipe", num_stages=4, num_microbatches=4, loss_fn=square)
    x, target = rows()
    pipe.step(x, target=target)
    gone = weakref.ref(pipe._assembled.replica)
    pipe.close()
    del pipe
    gc.collect()
    assert gone() is None


def test_the_second_replica_follows_the_model():
    """Values, new parameters, frozen ones, hooks on them, and modes, as they are when a step begins."""
    torch.manual_seed(0)
    model, (x, target) = Gpt(), tokens()
    reference = copy.deepcopy(model)
    with pl.Pipeline(model, schedule="dualpipe", num_stages=4, num_microbatches=8, loss_fn=token_loss) as pipe:
        pipe.step(x, target=target)
        pipe.zero_grad()
        for each in (model, reference):
            each.eval()
            each.blocks[0].up.weight.data = each.blocks[0].up.weight.data * 2
            each.blocks[1].up.weight = nn.Parameter(torch.ones_like(each.blocks[1].up.weight))
            each.blocks[3].down.weight.requires_grad_(False)
            each.blocks[4].up.weight.register_hook(torch.sign)
        pipe.step(x, target=target)
        options = {"num_microbatches": 8, "num_stages": 4, "schedule": pipe.schedule, "step_index": 1}
        sequential_step(reference, x, target=target, loss_fn=token_loss, **options)
        assert_same_gradients(pipe, reference)
        model.blocks[6].up.bias = None
        with pytest.raises(RuntimeStateError, match=r"the weight 'bias' of a Linear is gone.*parametrized or pruned"):
            pipe.step(x, target=target)
        prune.random_unstructured(model.blocks[5].up, "weight", 0.5)
        with pytest.raises(
            RuntimeStateError, match=r"'blocks\.5\.up' was given parameters weight_orig after the model"
        ):
            pipe.step(x, target=target)


class Breaks(nn.Module):
    """Raises at its n-th call among all layers."""

    left = 0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        Breaks.left -= 1
        if not Breaks.left:
            raise ZeroDivisionError("the last one")
        return self.linear(x)


@pytest.mark.parametrize("position", [1, 5, 17, 30])
def test_a_failure_in_either_replica_leaves_gradients_as_they_were(position):
    Breaks.left = 0
    torch.manual_seed(0)
    model, (x, target) = nn.Sequential(*(Breaks() for _ in range(4))), rows()
    with pl.Pipeline(model, schedule="dualpipe", num_stages=4, num_microbatches=8, loss_fn=square) as pipe:
        pipe.step(x, target=target)
        before = [each.grad.clone() for each in pipe.parameters()]
        Breaks.left = position
        with pytest.raises(ZeroDivisionError, match="the last one"):
            pipe.step(x, target=target)
        assert all(torch.equal(grad, each.grad) for grad, each in zip(before, pipe.parameters(), strict=True))
        pipe.zero_grad()
        pipe.step(x, target=target)
        assert all(torch.equal(grad, each.grad) for grad, each in zip(before, pipe.parameters(), strict=True))


@pytest.mark.parametrize("row", [0, 18], ids=["the first replica", "the second"])
def test_a_loss_that_is_not_finite_drops_what_both_found(row):
    model, (x, target) = layers(), rows()
    options = {"num_stages": 4, "num_microbatches": 8, "loss_fn": square}
    with pl.Pipeline(model, schedule="chimera", **options) as pipe:
        pipe.step(x, target=target)
        before = [each.grad.clone() for each in pipe.parameters()]
        broken = target.clone()
        broken[row] = float("nan")
        with pytest.raises(NonFiniteLoss, match=f"the loss of micro-batch {7 if row else 0} is nan"):
            pipe.step(x, target=broken)
        assert all(torch.equal(grad, each.grad) for grad, each in zip(before, pipe.parameters(), strict=True))


def test_weights_that_are_computed():
    model = layers()
    for layer in (model[0][0], model[3][0]):
        weight_norm(layer)
    assert_steps_equal_the_oracle(model, "dualpipe", rows, square, num_stages=4, num_microbatches=5)


class Scaled(nn.Parameter):
    """A parameter of the user's own kind."""


class Marked(nn.Module):
    """Its forward looks at what its weight is and has."""

    def __init__(self):
        super().__init__()
        self.weight = Scaled(torch.eye(WIDTH))

    def forward(self, x):
        return x @ self.weight * (getattr(self.weight, "scale", 1.0) if isinstance(self.weight, Scaled) else 3.0)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_leaves_have_the_class_and_the_attributes_of_their_weight(name, is_tied):
    """They were plain parameters, in the second replica and in later stages, and the forward took another way."""
    models = [nn.Sequential(*(Marked() for _ in range(4))) for _ in range(2)]
    x, target = rows(16)
    for model in models if is_tied else ():
        model[3].weight = model[0].weight
    with pl.Pipeline(models[0], schedule=name, num_stages=4, num_microbatches=4, loss_fn=square) as pipe:
        for step_index, scale in enumerate((0.5, 0.25)):
            for each in (layer for model in models for layer in model):
                each.weight.scale = scale
            for each in models[0].parameters():
                each.scale = scale
            loss = pipe.step(x, target=target)
            step = {"target": target, "step_index": step_index, "loss_fn": square, "schedule": pipe.schedule}
            assert_bit_equal(loss, sequential_step(models[1], x, num_microbatches=4, num_stages=4, **step), "loss")
            assert_same_gradients(pipe, models[1])


def test_a_hook_that_waits_for_the_sum_is_refused():
    model, (x, target) = layers(), rows()
    handle = model[1][0].weight.register_post_accumulate_grad_hook(lambda weight: None)
    with pl.Pipeline(model, schedule="chimera", num_stages=4, num_microbatches=4, loss_fn=square) as pipe:
        with pytest.raises(RuntimeStateError, match="the weight 'weight' of a Linear has a hook that runs after"):
            pipe.step(x, target=target)
        handle.remove()
        pipe.step(x, target=target)


def test_low_precision_and_sums_of_another_dtype():
    model, (x, target) = layers().bfloat16(), rows()
    options = {"num_stages": 4, "num_microbatches": 4, "loss_fn": square, "grad_dtype": torch.float32}
    with pl.Pipeline(model, schedule="dualpipe", **options) as pipe:
        pipe.step(x.bfloat16(), target=target.bfloat16())
        assert {each.grad.dtype for each in pipe.parameters()} == {torch.float32}
