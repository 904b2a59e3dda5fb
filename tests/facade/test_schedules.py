"""Any schedule runs: by name, or a value of the user's own; with no more buffers and activations than it says."""

import itertools
import threading
import time
import weakref
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pipeloom as pl
from pipeloom.errors import InvalidSchedule, SplitError, UnknownSchedule, UnsupportedShape
from pipeloom.ir.peaks import peak_held_to_input_grad
from pipeloom.ir.slots import peak_receive_slots
from tests.facade.models import WIDTH, Calls, assert_same, chain, gradients, linears, mean_square, plain_loop, rows

F, B = pl.Kind.FORWARD, pl.Kind.BACKWARD


def looped(num_ranks, stages_per_rank, num_microbatches):
    """All forwards of a stage, then of the rank's next one; the backwards in the opposite order of stages."""
    placement = pl.Placement.loop(num_ranks, stages_per_rank)
    programs = tuple(
        tuple(pl.Action(F, stage, i) for stage in placement.stages_of(rank) for i in range(num_microbatches))
        + tuple(pl.Action(B, stage, i) for stage in placement.stages_of(rank)[::-1] for i in range(num_microbatches))
        for rank in range(num_ranks)
    )
    return pl.Schedule(placement, programs, num_microbatches, name="looped")


def two_by_hand(text_by_rank, ranks, num_microbatches):
    kinds = {"F": F, "B": B}
    programs = tuple(
        tuple(pl.Action(kinds[word[1]], int(word[0]), int(word[2])) for word in text.split()) for text in text_by_rank
    )
    return pl.Schedule(pl.Placement.of(ranks), programs, num_microbatches)


OWN = {
    "looped": looped(2, 2, 3),
    "looped on one rank": looped(1, 4, 3),
    "v": two_by_hand(
        ["0F0 0F1 3F0 3B0 3F1 3B1 0F2 3F2 3B2 0B0 0B1 0B2", "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1 1F2 2F2 2B2 1B2"],
        [0, 1, 1, 0],
        3,
    ),
    "descending": two_by_hand(
        ["0F2 0F1 0F0 1F2 1F1 1F0 1B0 1B1 1B2 0B0 0B1 0B2", "2F2 2F1 2F0 3F2 3F1 3F0 3B0 2B0 3B1 2B1 3B2 2B2"],
        [0, 0, 1, 1],
        3,
    ),
    "backwards against the forwards": two_by_hand(
        ["0F0 0F1 0F2 1F0 1F1 1F2 1B2 0B2 1B1 0B1 1B0 0B0", "2F0 3F0 2F1 3F1 2F2 3F2 3B2 2B2 3B1 2B1 3B0 2B0"],
        [0, 0, 1, 1],
        3,
    ),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", OWN)
def test_schedules_of_the_users_own(name, recompute):
    schedule, model, plain = OWN[name], linears(4), linears(4)
    with pl.Pipeline(model, num_stages=4, schedule=schedule, loss_fn=mean_square, recompute=recompute) as pipe:
        loss = pipe.step(rows(7))
        assert (pipe.num_ranks, pipe.num_microbatches) == (schedule.num_ranks, 3)
        assert pipe(rows(5)).allclose(plain(rows(5)))
    expected = pl.testing.sequential_step(plain, rows(7), num_microbatches=3, loss_fn=mean_square, schedule=schedule)
    assert torch.equal(loss, expected)
    assert_same(gradients(model), gradients(plain))


@given(
    num_ranks=st.integers(1, 4),
    stages_per_rank=st.integers(1, 3),
    num_microbatches=st.integers(1, 5),
    recompute=st.booleans(),
)
def test_loops_of_any_shape(num_ranks, stages_per_rank, num_microbatches, recompute):
    schedule = looped(num_ranks, stages_per_rank, num_microbatches)
    model, plain = linears(schedule.num_stages), linears(schedule.num_stages)
    options = {"num_stages": schedule.num_stages, "schedule": schedule, "recompute": recompute}
    with pl.Pipeline(model, loss_fn=mean_square, **options) as pipe:
        pipe.step(rows(num_microbatches + 2))
        assert pipe.peak_live_slots == peak_receive_slots(pipe.schedule)
    plain_loop(plain, [rows(num_microbatches + 2)], num_microbatches)
    assert_same(gradients(model), gradients(plain))


def test_stages_of_a_rank_run_on_its_thread():
    seen = {stage: set() for stage in range(4)}

    def noted(stage):
        def note(value):
            seen[stage].add(threading.current_thread().name)
            return value

        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Calls(note))

    with pl.Pipeline([noted(s) for s in range(4)], schedule=looped(2, 2, 3), loss_fn=mean_square) as pipe:
        pipe.step(rows(6))
    assert seen[0] == seen[2] == {"pipeloom-rank-0"}
    assert seen[1] == seen[3] == {"pipeloom-rank-1"}


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_1f1b_needs_a_buffer_or_two(num_stages):
    """torch keeps one per micro-batch and direction: 128 here."""
    with pl.Pipeline(linears(num_stages), num_stages=num_stages, num_microbatches=64, loss_fn=mean_square) as pipe:
        pipe.step(rows(64))
        assert pipe.peak_live_slots == peak_receive_slots(pipe.schedule)
        assert max(pipe.peak_live_slots) <= 2


class Token:
    """Lives as long as the graph that refers to it."""


class Hold(torch.autograd.Function):
    """The identity, with something of ours in its node of the graph."""

    @staticmethod
    def forward(ctx, value, token):
        ctx.token = token
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Watched(nn.Module):
    """Counts the micro-batches whose graph is alive, now and at most."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.num_held = 0
        self.peak = 0

    def forward(self, value):
        token = Token()
        weakref.finalize(token, self.let_go)
        self.num_held += 1
        self.peak = max(self.peak, self.num_held)
        return Hold.apply(self.linear(value), token)

    def let_go(self):
        self.num_held -= 1


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(4, 8), (3, 2), (2, 16)])
def test_held_micro_batches_are_those_of_the_schedule(schedule, num_stages, num_microbatches):
    model = nn.Sequential(*(Watched() for _ in range(num_stages)))
    options = {"schedule": schedule, "num_microbatches": num_microbatches, "loss_fn": mean_square}
    with pl.Pipeline(model, num_stages=num_stages, **options) as pipe:
        pipe.step(rows(num_microbatches))
        assert tuple(layer.peak for layer in model) == peak_held_to_input_grad(pipe.schedule)
        assert [layer.num_held for layer in model] == [0] * num_stages


def test_recompute_holds_one_micro_batch():
    model = nn.Sequential(*(Watched() for _ in range(3)))
    options = {"schedule": "gpipe", "num_microbatches": 6, "loss_fn": mean_square, "recompute": [True, False, True]}
    with pl.Pipeline(model, num_stages=3, **options) as pipe:
        pipe.step(rows(6))
        assert [layer.peak for layer in model] == [1, 6, 1]
        assert Counter(a.stage for a in pipe.schedule if a.kind is pl.Kind.RECOMPUTE) == {0: 6, 2: 6}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("has_outputs", [False, True])
def test_nothing_is_kept_after_a_step(recompute, has_outputs):
    references = []

    def noted(value):
        references.append(weakref.ref(value))
        return value * 1

    model = chain(nn.Linear(WIDTH, WIDTH), Calls(noted), nn.Linear(WIDTH, WIDTH), Calls(noted), nn.Linear(WIDTH, 3))
    with pl.Pipeline(model, cuts=[2, 4], num_microbatches=3, loss_fn=mean_square, recompute=recompute) as pipe:
        kept = pipe.step(rows(6), return_outputs=has_outputs)
        pipe(rows(6))
        assert len(references) == (18 if recompute else 12)
        assert [reference() for reference in references if reference() is not None] == []
        assert kept is not None


def test_rank_that_waits_holds_no_earlier_message():
    """The first rank's second micro-batch begins to end when the second rank has let go of the first one's input."""
    references, has_arrived, num_calls = [], threading.Event(), itertools.count()

    def first(value):
        if next(num_calls) == 1:
            assert has_arrived.wait(30)
            deadline_s = time.monotonic() + 30
            while references[0]() is not None:
                assert time.monotonic() < deadline_s, "the waiting rank holds a message that it has used"
                time.sleep(0.001)
        return value + 1

    def second(value):
        references.append(weakref.ref(value))
        has_arrived.set()
        return value.sum(1)

    with pl.Pipeline(chain(Calls(first), Calls(second)), num_stages=2, num_microbatches=2) as pipe:
        pipe.num_microbatches = 2
        assert pipe(rows(2)).shape == (2,)


UNKNOWN = {"1f1": "did you mean '1f1b'", "GPipes": "did you mean 'gpipe'", "zb-h9": "did you mean 'zb-h2'"}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_schedules_offer_near_names(name):
    with pytest.raises(UnknownSchedule, match=f"schedule '{name}' is unknown(.|\n)*{UNKNOWN[name]}"):
        pl.Pipeline(linears(2), num_stages=2, schedule=name)


def replaced(schedule, old, new):
    return schedule.with_programs([new if a == old else a for a in program] for program in schedule.programs)


GPIPE = pl.schedule("gpipe", num_ranks=2, num_microbatches=2)
REFUSED = {
    "for other stages": (pl.schedule("gpipe", num_ranks=3, num_microbatches=2), "is for 3 stages; the model has 2"),
    "forwards only": (pl.schedule("gpipe", num_ranks=2, num_microbatches=2, forward_only=True), "has forwards only"),
    "has transfers": (
        replaced(GPIPE, pl.Action(B, 0, 0), pl.Action(pl.Kind.RECV_B, 0, 0)),
        "holds 0RECV_B0; a training",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_schedules_that_cannot_be_run(name):
    schedule, message = REFUSED[name]
    with pytest.raises(UnsupportedShape, match=message):
        pl.Pipeline(linears(2), num_stages=2, schedule=schedule)


WRONG = [
    ((F, 1, 1), (F, 1, 0)),
    ((B, 0, 0), (B, 0, 7)),
    ((F, 0, 0), (B, 1, 0)),
    ((B, 0, 0), (pl.Kind.INPUT_GRAD, 0, 0)),
]


@pytest.mark.parametrize(("old", "new"), WRONG)
def test_schedules_that_are_wrong(old, new):
    wrong = replaced(GPIPE, pl.Action(*old), pl.Action(*new))
    with pytest.raises(InvalidSchedule, match="rank"):
        pl.Pipeline(linears(2), num_stages=2, schedule=wrong)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"num_microbatches": 3, "schedule": GPIPE},
            UnsupportedShape,
            "num_microbatches=3 was given with a schedule of 2",
        ),
        ({"num_microbatches": 0}, UnsupportedShape, "num_microbatches=0 was given; a whole number of at least 1"),
        ({"num_ranks": 3}, UnsupportedShape, "num_ranks=3 was given, but the schedule puts the stages on 2 ranks"),
        ({"devices": ["cpu"]}, UnsupportedShape, "1 devices were given for 2 ranks; each needs one"),
        ({"devices": ["cpu"] * 3}, UnsupportedShape, "3 devices were given for 2 ranks; each needs one"),
        ({"devices": "cpu"}, UnsupportedShape, "devices='cpu' was given; a list with one device for each rank"),
        ({"devices": 2}, UnsupportedShape, "devices=2 was given; a list with one device for each rank is needed"),
        (
            {"devices": ["cpu", "gpu"]},
            UnsupportedShape,
            r"devices=\['cpu', 'gpu'\] were given; each must be a torch.dev",
        ),
        (
            {"devices": [None, None]},
            UnsupportedShape,
            r"devices=\[None, None\] were given; each must be a torch.device",
        ),
        ({"recompute": ["no", "no"]}, SplitError, "recompute='no' was given; the model has no module of that name"),
        ({"recompute": [True, "0"]}, SplitError, r"recompute=\[True, '0'\] was given; True, False, or one of them"),
        ({"recompute": [True]}, SplitError, r"recompute=\[True\] has 1 values for 2 stages; give one for each"),
        ({"recompute": 1}, SplitError, "recompute=1 was given; True, False, or one of them for each stage, or names"),
        ({"recompute": "all"}, SplitError, "recompute='all' was given; the model has no module of that name"),
        (
            {"batch_norm": "sync"},
            SplitError,
            "batch_norm='sync' was given; one of 'per-microbatch', 'deferred'",
        ),
        ({"schedule": 3}, UnknownSchedule, "schedule=3 was given; a name or a Schedule is needed"),
    ],
)
def test_options_that_do_not_fit(options, error, message):
    with pytest.raises(error, match=message):
        pl.Pipeline(linears(2), num_stages=2, **options)


def test_micro_batches_are_fixed_by_a_schedule_of_ones_own():
    with pl.Pipeline(linears(2), num_stages=2, schedule=GPIPE) as pipe:
        with pytest.raises(
            UnsupportedShape, match=r"num_microbatches=5 was given with .*\nhint: .*give the schedule by"
        ):
            pipe.num_microbatches = 5
        pipe.num_microbatches = 2
        assert pipe.num_microbatches == 2


def test_one_micro_batch_per_stage_by_default():
    with pl.Pipeline(linears(3), num_stages=3) as pipe:
        assert pipe.num_microbatches == 3
        assert pipe.schedule.name == "1f1b"
        assert pipe.num_stages == pipe.num_ranks == 3


def test_counts_may_be_those_of_numpy():
    """They came back as "num_stages=np.int64(2) was given; a whole number is needed"."""
    options = {"num_microbatches": np.int64(3), "num_stages": np.int32(2), "cuts": np.array([1])}
    with pl.Pipeline(linears(3), loss_fn=mean_square, **options) as pipe:
        assert type(pipe.num_microbatches) is int
        assert torch.isfinite(pipe.step(rows(6)))
