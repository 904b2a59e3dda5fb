"""Pairs that run as one by a function of the user's: the bits of one after the other, however the function does it."""

import contextlib
import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.errors import InvalidSchedule, RuntimeStateError, ScheduleError
from pipeloom.ir.notation import parse_csv
from pipeloom.ir.slots import peak_receive_slots
from pipeloom.testing import sequential_step
from tests.facade.models import Calls, mean_square
from tests.numerics.asserts import assert_bit_equal, assert_same_gradients

WIDTH, NUM_MICROBATCHES = 8, 6


def one_after_the_other(forward, backward):
    forward()
    backward()


def the_other_way_round(forward, backward):
    backward()
    forward()


def at_the_same_time(forward, backward):
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(forward)
        backward()
        other.result()


def both_elsewhere(forward, backward):
    with ThreadPoolExecutor(2) as threads:
        for other in [threads.submit(backward), threads.submit(forward)]:
            other.result()


FUNCTIONS = [one_after_the_other, the_other_way_round, at_the_same_time, both_elsewhere]


def model_of(num_stages=4):
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), nn.GELU()]
    return nn.Sequential(*[nn.Sequential(*map(copy.deepcopy, layers)) for _ in range(num_stages)])


def pipeline(model, overlap, **options):
    given = {"num_stages": 4, "schedule": "dualpipe-v", "num_microbatches": NUM_MICROBATCHES, "loss_fn": mean_square}
    return pl.Pipeline(model, overlap=overlap, **given | options)


def rows():
    return torch.linspace(-1, 1, 13 * WIDTH).reshape(13, WIDTH)


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"receive_slots": 3}], ids=["", "recompute", "slots"])
@pytest.mark.parametrize("overlap", FUNCTIONS)
def test_any_function_has_the_oracles_bits(overlap, options):
    model, plain, num_pairs = model_of(), model_of(), []

    def counted(forward, backward):
        num_pairs.append(1)
        overlap(forward, backward)

    with pipeline(model, counted, **options) as pipe:
        for step in range(2):
            loss = pipe.step(rows())
            given = {"num_microbatches": NUM_MICROBATCHES, "loss_fn": mean_square, "step_index": step}
            assert_bit_equal(loss, sequential_step(plain, rows(), **given), "loss")
            assert_same_gradients(pipe, plain)
        assert len(num_pairs) == 2 * len(pipe.schedule.overlaps) > 0
        assert pipe.peak_live_slots == peak_receive_slots(pipe.schedule)
        assert all(torch.equal(one, other) for one, other in zip(model.buffers(), plain.buffers(), strict=True))
        assert pipe(rows()).shape == (13, WIDTH)


def test_a_thread_of_the_functions_own_has_the_callers_autocast():
    """A thread begins without any of torch's switches: its forward ran in float32."""
    losses = []
    for overlap in (None, at_the_same_time):
        model = model_of()
        with pipeline(model, overlap) as pipe, torch.autocast("cpu", torch.bfloat16):
            losses.append((pipe.step(rows()), [each.grad for each in model.parameters()]))
    assert_bit_equal(losses[0][0], losses[1][0], "loss")
    assert all(torch.equal(one, other) for one, other in zip(losses[0][1], losses[1][1], strict=True))


class Meet(torch.autograd.Function):
    """In the backward: says that it is there, and waits for a forward in another thread."""

    @staticmethod
    def forward(ctx, value, here, there):
        ctx.events = here, there
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        here, there = ctx.events
        here.set()
        assert there.wait(30)
        return grad, None, None


PAIRED = "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"


def test_spans_of_a_pair_are_measured_apart_and_idle_time_counts_once():
    """Forward and backward of the pair meet inside, so their spans share some time."""
    in_backward, in_forward, calls = threading.Event(), threading.Event(), []

    def first(value):
        calls.append(1)
        if len(calls) == 3:  # 0F2
            in_forward.set()
            assert in_backward.wait(30)
        return Meet.apply(value, in_backward, in_forward)

    model = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), Calls(first)), nn.Linear(WIDTH, WIDTH))
    with pipeline(model, at_the_same_time, num_stages=2, schedule=parse_csv(PAIRED), num_microbatches=3) as pipe:
        pipe.step(rows())
        spans = {str(span.action): span for span in pipe.timeline}
        assert spans["0F2"].start_s < spans["0B0"].end_s
        assert spans["0B0"].start_s < spans["0F2"].end_s
        assert spans["0SEND_F2"].start_s >= max(spans["0F2"].end_s, spans["0B0"].end_s)
        assert all(busy_s <= pipe.timeline.makespan_s for busy_s in pipe.timeline.busy_s)


def test_without_a_function_the_first_half_is_sent_at_once():
    with pipeline(model_of(2), None, num_stages=2, schedule=parse_csv(PAIRED), num_microbatches=3) as pipe:
        texts = [str(action) for action in pipe.schedule.program(0)]
        assert texts[texts.index("0F2") + 1] == "0SEND_F2"
    with pipeline(model_of(2), at_the_same_time, num_stages=2, schedule=parse_csv(PAIRED), num_microbatches=3) as pipe:
        texts = [str(action) for action in pipe.schedule.program(0)]
        assert texts[texts.index("0F2") + 1 :][:2] == ["0B0", "0SEND_F2"]


def never(forward, backward):
    forward()


def twice(forward, backward):
    forward()
    forward()


@pytest.mark.parametrize(
    ("overlap", "message"),
    [
        (never, r"got a call that runs \dB\d, and did not call it; each half of a pair runs once"),
        (twice, r"got a call that runs \dF\d, and called it twice; each half of a pair runs once"),
    ],
)
def test_each_half_runs_once(overlap, message):
    with pipeline(model_of(), overlap) as pipe, pytest.raises(RuntimeStateError, match=message):
        pipe.step(rows())


def test_what_still_runs_has_to_be_waited_for():
    is_over = threading.Event()

    def slow(value):
        calls.append(1)
        if len(calls) == 3:  # 0F2
            is_over.wait(30)
        return value * 1

    def leave(forward, backward):
        thread = threading.Thread(target=forward)
        thread.start()
        backward()
        while len(calls) < 3:
            pass
        threads.append(thread)

    calls, threads = [], []
    model = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), Calls(slow)), nn.Linear(WIDTH, WIDTH))
    with pipeline(model, leave, num_stages=2, schedule=parse_csv(PAIRED), num_microbatches=3) as pipe:
        with pytest.raises(RuntimeStateError, match="runs 0F2, and came back while it still ran"):
            pipe.step(rows())
        is_over.set()
        threads[0].join()


class Broken(Exception):
    pass


@pytest.mark.parametrize("overlap", FUNCTIONS)
def test_what_a_half_raises_says_where(overlap):
    calls = []

    def third(value):
        calls.append(1)
        if len(calls) == 3:
            raise Broken
        return value * 1

    model = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), Calls(third)), nn.Linear(WIDTH, WIDTH))
    with pipeline(model, overlap, num_stages=2, schedule=parse_csv(PAIRED), num_microbatches=3) as pipe:
        with pytest.raises(Broken) as caught:
            pipe.step(rows())
        assert "raised on rank 0, stage 0, micro-batch 2, action 0F2" in caught.value.__notes__
        assert not any("overlap function" in note for note in caught.value.__notes__)
        assert all(each.grad is None for each in model.parameters())
        pipe.step(rows())  # it is usable again


def test_an_error_that_the_function_keeps_to_itself_is_raised_all_the_same():
    def fail(value):
        raise Broken

    def quiet(forward, backward):
        for half in (forward, backward):
            with contextlib.suppress(Broken):
                half()

    calls = []
    model = nn.Sequential(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), Calls(lambda x: fail(x) if calls.append(1) or len(calls) == 3 else x)),
        nn.Linear(WIDTH, WIDTH),
    )
    with (
        pipeline(model, quiet, num_stages=2, schedule=parse_csv(PAIRED), num_microbatches=3) as pipe,
        pytest.raises(Broken),
    ):
        pipe.step(rows())


def test_what_the_function_itself_raises_names_the_pair():
    def broken(forward, backward):
        raise Broken

    with pipeline(model_of(2), broken, num_stages=2, schedule=parse_csv(PAIRED), num_microbatches=3) as pipe:
        with pytest.raises(Broken) as caught:
            pipe.step(rows())
        assert "raised by the overlap function around 0F2 and 0B0" in caught.value.__notes__


def test_functions_and_schedules_that_do_not_fit():
    with pytest.raises(ScheduleError, match="overlap=3 was given; a function of two calls is needed"):
        pipeline(model_of(), 3)
    one_after_another = parse_csv("0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2\n")
    with pytest.raises(InvalidSchedule, match="deadlock"):
        pipeline(model_of(2), at_the_same_time, num_stages=2, schedule=one_after_another, num_microbatches=3)
