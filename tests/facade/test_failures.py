"""A step that fails, ends on all ranks, tells where, and leaves the pipeline as it was."""

import contextlib
import gc
import signal
import threading
import traceback
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.errors import RuntimeStateError
from pipeloom.runtime import threads
from tests.facade.models import (
    WIDTH,
    Calls,
    FailsInBackward,
    assert_same,
    chain,
    gradients,
    linears,
    mean_square,
    plain_loop,
    rows,
)

LIMIT_S = 30


def waits(event):
    """Wait for an event; a test that would hang fails instead."""
    assert event.wait(LIMIT_S), "nobody set the event"


class Trips(nn.Module):
    """A linear layer that can be told to raise in its forward, in its backward or when it runs again."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.where = None
        self.seen = SimpleNamespace(forwards=[])  # a recompute finds counters and lists as its forward did
        self.num_before = 0

    def forward(self, value):
        self.seen.forwards.append(len(value))
        if self.where == "F" or (self.where == "R" and len(self.seen.forwards) > self.num_before):
            self.trip_over()
        value = self.linear(value)
        return FailsInBackward.apply(value) if self.where == "B" else value

    def trip_over(self):
        raise ZeroDivisionError("the forward went wrong")


def tripping(stage, where, num_stages=3):
    model = linears(num_stages)
    trips = Trips()
    trips.linear.load_state_dict(model[stage].state_dict())
    model[stage] = trips
    return model, trips


def first_recompute(schedule, stage):
    """How many forwards the stage runs before its first R."""
    kinds = [action.kind for action in schedule.program(stage)]
    return kinds[: kinds.index(pl.Kind.RECOMPUTE)].count(pl.Kind.FORWARD) if pl.Kind.RECOMPUTE in kinds else 0


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("where", ["F", "B", "R"])
def test_exception_of_a_stage_reaches_the_caller(schedule, stage, where):
    model, trips = tripping(stage, where)
    options = {"schedule": schedule, "num_microbatches": 3, "recompute": where == "R", "loss_fn": mean_square}
    with pl.Pipeline(model, num_stages=3, **options) as pipe:
        pipe.step(rows(6)) if where == "F" else None
        trips.where, before = where, gradients(pipe)
        trips.seen.forwards, trips.num_before = [], first_recompute(pipe.schedule, stage)
        with pytest.raises(ZeroDivisionError, match="went wrong") as caught:
            pipe.step(rows(6))
        where_in_code = "backward" if where == "B" else "trip_over"
        assert traceback.extract_tb(caught.value.__traceback__)[-1].name == where_in_code
        assert (
            f"raised on rank {stage}, stage {stage}, micro-batch 0, action {stage}{where}0"
            == caught.value.__notes__[-1]
        )
        assert_same(gradients(pipe), before)


@pytest.mark.parametrize("where", ["F", "B"])
def test_pipeline_is_usable_after_an_exception(where):
    model, trips = tripping(1, where)
    trips.where = where
    with pl.Pipeline(model, num_stages=3, num_microbatches=3, loss_fn=mean_square) as pipe:
        with pytest.raises(ZeroDivisionError, match="went wrong"):
            pipe.step(rows(6))
        trips.where = None
        loss, found = pipe.step(rows(6)), gradients(pipe)
    plain = linears(3)
    assert torch.equal(loss, plain_loop(plain, [rows(6)], 3))
    assert list(map(torch.Tensor.tolist, found.values())) == [p.grad.tolist() for p in plain.parameters()]


def test_exception_in_the_loss_function():
    def loss_fn(output):
        raise KeyError("no such class")

    with pl.Pipeline(linears(2), num_stages=2, num_microbatches=2, loss_fn=loss_fn) as pipe:
        with pytest.raises(KeyError, match="no such class") as caught:
            pipe.step(rows(4))
        assert caught.value.__notes__ == ["raised on rank 1, stage 1, micro-batch 0, action 1F0"]


@pytest.mark.parametrize("kind", [StopIteration, SystemExit, GeneratorExit, KeyboardInterrupt, MemoryError])
def test_exceptions_with_a_meaning_of_their_own(kind):
    """Contexts written as generators turn StopIteration into something else, if one lets them."""

    def raises(value):
        raise kind("odd")

    with (
        pl.Pipeline(chain(nn.Linear(WIDTH, 2), Calls(raises)), num_stages=2, num_microbatches=2) as pipe,
        pytest.raises(kind, match="odd") as caught,
    ):
        pipe.step(rows(4))
    assert any("rank 1, stage 1" in note for note in caught.value.__notes__)


def test_exception_in_evaluation():
    model, trips = tripping(1, "F")
    trips.where = "F"
    with pl.Pipeline(model, num_stages=3, num_microbatches=3) as pipe:
        with pytest.raises(ZeroDivisionError, match="went wrong") as caught:
            pipe(rows(6))
        assert "rank 1, stage 1, micro-batch 0, action 1F0" in caught.value.__notes__[-1]
        trips.where = None
        assert pipe(rows(6)).shape == (6, WIDTH)


@pytest.mark.parametrize(
    ("placement", "rank"), [(None, 1), (pl.Placement.of([0, 0, 0]), 0)], ids=["a rank each", "one rank"]
)
def test_outputs_that_do_not_fit_the_next_stage(placement, rank):
    """Torch's message says which shapes, the note says which stage got what; with a transfer before it or not."""
    model = nn.Sequential(nn.Linear(WIDTH, 5), nn.Linear(3, 3), nn.Linear(3, 3))
    schedule = "gpipe" if placement is None else one_rank(3, 2)
    with pl.Pipeline(model, num_stages=3, num_microbatches=2, schedule=schedule) as pipe:
        with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
            pipe.step(rows(4))
        notes = "\n".join(caught.value.__notes__)
    assert f"raised on rank {rank}, stage 1, micro-batch 0" in notes
    assert "stage 1 was given: float32(2, 5)" in notes


def one_rank(num_stages, num_microbatches):
    """All stages on rank 0: forwards of a micro-batch, then its backwards."""
    microbatches = range(num_microbatches)
    program = [
        pl.Action(kind, stage, i)
        for i in microbatches
        for kind, stages in ((pl.Kind.FORWARD, range(num_stages)), (pl.Kind.BACKWARD, range(num_stages)[::-1]))
        for stage in stages
    ]
    return pl.Schedule(pl.Placement.of([0] * num_stages), (tuple(program),), num_microbatches)


def test_first_stage_that_does_not_fit_the_input():
    with pl.Pipeline(linears(2), num_stages=2, num_microbatches=2, loss_fn=mean_square) as pipe:
        with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
            pipe.step(torch.ones(4, 7))
        assert any("stage 0 was given: float32(2, 7)" in note for note in caught.value.__notes__)


def test_arguments_that_do_not_fit_the_next_stage():
    model = [Calls(lambda x: (x, x, x)), nn.Bilinear(WIDTH, WIDTH, 3)]
    with pl.Pipeline(model, num_microbatches=2, loss_fn=mean_square) as pipe:
        with pytest.raises(TypeError, match="takes 3 positional arguments but 4 were given") as caught:
            pipe.step(rows(2))
        note = "stage 1 was given: float32(1, 4), float32(1, 4), float32(1, 4)"
        assert any(note in each for each in caught.value.__notes__)


def test_gradient_of_another_shape():
    """A custom backward that returns nonsense is found by autograd, on the rank that ran it."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value * 2

        @staticmethod
        def backward(ctx, grad):
            return grad[:, :1].sum(0)

    model = chain(nn.Linear(WIDTH, WIDTH), Calls(Wrong.apply), nn.Linear(WIDTH, 1))
    with pl.Pipeline(model, num_stages=3, num_microbatches=2, loss_fn=mean_square) as pipe:
        with pytest.raises(RuntimeError, match="returned an invalid gradient") as caught:
            pipe.step(rows(4))
        assert any("rank 1, stage 1, micro-batch 0, action 1B0" in note for note in caught.value.__notes__)


class Slow:
    """Stage 0 is busy with micro-batch 1 while stage 1 fails in micro-batch 0."""

    def __init__(self):
        self.is_busy, self.may_end = threading.Event(), threading.Event()
        self.has_failed = False
        self.log = []
        self.model = chain(nn.Linear(WIDTH, WIDTH), Calls(self.first), nn.Linear(WIDTH, WIDTH), Calls(self.second))

    def first(self, value):
        if len(self.log) == 1 and not self.has_failed:
            self.is_busy.set()
            waits(self.may_end)
        self.log.append("first")
        return value

    def second(self, value):
        if not self.has_failed:
            waits(self.is_busy)
            self.has_failed = True
            raise ZeroDivisionError("while the other is busy")
        self.log.append("second")
        return value


@pytest.fixture
def slow(monkeypatch):
    assert threads.GRACE_S < 2, "the caller has to hear within two seconds"
    monkeypatch.setattr(threads, "GRACE_S", 0.02)
    made = Slow()
    yield made
    made.may_end.set()


def test_caller_hears_while_another_rank_is_busy(slow):
    with pl.Pipeline(slow.model, cuts=[2], schedule="gpipe", num_microbatches=2, loss_fn=mean_square) as pipe:
        with pytest.raises(ZeroDivisionError, match="while the other is busy") as caught:
            pipe.step(rows(4))
        assert slow.log == ["first"]
        assert "ranks [0] were still busy; the pipeline waits for them before its next step" in caught.value.__notes__
        slow.may_end.set()
        pipe.step(rows(4))
        assert slow.log[:2] == ["first", "first"]
        assert sorted(slow.log[2:]) == ["first", "first", "second", "second"]


def test_next_step_waits_for_the_busy_rank(slow):
    with pl.Pipeline(slow.model, cuts=[2], schedule="gpipe", num_microbatches=2, loss_fn=mean_square) as pipe:
        with pytest.raises(ZeroDivisionError, match="busy"):
            pipe.step(rows(4))
        stepping = threading.Thread(target=pipe.step, args=(rows(4),))
        stepping.start()
        assert slow.log == ["first"]
        slow.may_end.set()
        stepping.join(LIMIT_S)
        found = gradients(pipe)
    plain = chain(nn.Linear(WIDTH, WIDTH), nn.Identity(), nn.Linear(WIDTH, WIDTH))
    plain_loop(plain, [rows(4)], 2)
    assert_same(found, gradients(plain))


CHANGES = {
    "nothing": lambda parameter: None,
    "dropped": lambda parameter: setattr(parameter, "grad", None),
    "zeroed": lambda parameter: parameter.grad.zero_(),
    "replaced": lambda parameter: setattr(parameter, "grad", torch.ones_like(parameter)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_gradients_are_the_callers_while_a_forward_is_late(slow, change):
    slow.has_failed = True
    with pl.Pipeline(slow.model, cuts=[2], schedule="gpipe", num_microbatches=2, loss_fn=mean_square) as pipe:
        pipe.step(rows(4))
        slow.has_failed = False
        slow.log.clear()
        with pytest.raises(ZeroDivisionError, match="busy"):
            pipe.step(rows(4))
        for parameter in pipe.parameters():
            CHANGES[change](parameter)
        expected = gradients(pipe)
        slow.may_end.set()
        pipe(rows(4))
        assert_same(gradients(pipe), expected)


class BusyInBackward(torch.autograd.Function):
    """The identity, whose first backward waits for the test."""

    @staticmethod
    def forward(ctx, value, slow):
        ctx.slow = slow
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        if not ctx.slow.has_failed:
            ctx.slow.is_busy.set()
            waits(ctx.slow.may_end)
        return grad, None


@pytest.mark.parametrize("change", ["nothing", "dropped"])
def test_what_a_late_backward_adds_is_dropped(slow, change):
    """It ends after the caller heard, who may have dropped all gradients since."""
    seen = []

    def second(value):
        seen.append(value)
        if len(seen) == 4:  # the second step's second micro-batch, while the first one's backward is busy
            waits(slow.is_busy)
            raise ZeroDivisionError("late")
        return value

    is_armed = []
    first = Calls(lambda value: BusyInBackward.apply(value, slow) if is_armed else value)
    model = chain(nn.Linear(WIDTH, WIDTH), first, nn.Linear(WIDTH, WIDTH), Calls(second))
    with pl.Pipeline(model, cuts=[2], schedule="1f1b", num_microbatches=2, loss_fn=mean_square) as pipe:
        pipe.step(rows(4))
        earlier = gradients(pipe)
        is_armed.append(True)
        with pytest.raises(ZeroDivisionError, match="late"):
            pipe.step(rows(4))
        assert_same(gradients(pipe), earlier)
        for parameter in pipe.parameters():
            CHANGES[change](parameter)
        expected = gradients(pipe)
        slow.may_end.set()
        slow.has_failed = True
        pipe(rows(4))
        assert_same(gradients(pipe), expected)


def test_model_comes_back_when_nobody_runs_it(slow):
    pipe = pl.Pipeline(slow.model, cuts=[2], schedule="gpipe", num_microbatches=2, loss_fn=mean_square)
    with pytest.raises(ZeroDivisionError, match="busy"):
        pipe.step(rows(4))
    threading.Timer(0.3, slow.may_end.set).start()
    model = pipe.unwrap()
    assert slow.log == ["first", "first"]
    assert all(gradient is None for gradient in gradients(model).values())


def test_interrupt_ends_a_step():
    """Ctrl-C in a notebook: the caller's thread waits for the ranks, and that is where the signal arrives."""
    may_end = threading.Event()
    main = threading.main_thread().ident

    def interrupts(value):
        if not may_end.is_set():
            signal.pthread_kill(main, signal.SIGINT)
            waits(may_end)
        return value

    with pl.Pipeline(
        chain(nn.Linear(WIDTH, WIDTH), Calls(interrupts)), num_stages=2, num_microbatches=2, loss_fn=mean_square
    ) as pipe:
        with releasing(may_end), pytest.raises(KeyboardInterrupt, match=r"^$"):
            pipe.step(rows(4))
        assert all(gradient is None for gradient in gradients(pipe).values())
        assert torch.isfinite(pipe.step(rows(4)))


@contextlib.contextmanager
def releasing(event):
    """Set the event as soon as the caller is interrupted, also where tests run in the background and ignore Ctrl-C."""
    before = signal.getsignal(signal.SIGINT)

    def handler(number, frame):
        event.set()
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_interrupt_of_the_wait_for_other_ranks(slow):
    """Twice Ctrl-C: the second one ends the wait, and the next step still waits for who is busy."""
    threads.GRACE_S = LIMIT_S
    main = threading.main_thread().ident
    pipe = pl.Pipeline(slow.model, cuts=[2], schedule="gpipe", num_microbatches=2, loss_fn=mean_square)
    handled = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            pipe.step(rows(4))
    finally:
        signal.signal(signal.SIGINT, handled)
    threading.Timer(0.01, slow.may_end.set).start()
    pipe.step(rows(4))
    assert slow.log[:2] == ["first", "first"]
    assert len(slow.log) == 6
    pipe.close()


def test_steps_of_two_threads():
    is_running, may_end = threading.Event(), threading.Event()

    def holds(value):
        is_running.set()
        waits(may_end)
        return value

    with pl.Pipeline(chain(nn.Linear(WIDTH, 2), Calls(holds)), num_microbatches=1, loss_fn=mean_square) as pipe:
        other = threading.Thread(target=pipe.step, args=(rows(4),))
        other.start()
        waits(is_running)
        with pytest.raises(RuntimeStateError, match="running a step already, in this or another thread"):
            pipe.step(rows(4))
        may_end.set()
        other.join(LIMIT_S)
        assert pipe.step_index == 1
        assert torch.isfinite(pipe.step(rows(4)))


class Residual(nn.Module):
    """No chain, so it is cut by running it; notes each run of its own code, also one without numbers."""

    runs: list[int] = []  # noqa: RUF012  (of the class: each stage has an instance of its own)

    def __init__(self):
        super().__init__()
        self.first, self.second = linears(2)

    def forward(self, value):
        self.runs.append(len(value))
        return value + self.second(value + self.first(value))


def test_refused_step_of_another_thread_runs_nothing():
    is_running, may_end = threading.Event(), threading.Event()
    model = Residual()
    with pl.Pipeline(model, num_stages=2, num_microbatches=1, loss_fn=mean_square, example_args=(rows(4),)) as pipe:
        model.first.register_forward_hook(lambda *_: is_running.set() or waits(may_end))
        other = threading.Thread(target=pipe.step, args=(rows(4),))
        other.start()
        waits(is_running)
        before = [*Residual.runs]
        with pytest.raises(RuntimeStateError, match="running a step already, in this or another thread"):
            pipe.step(rows(6))
        assert Residual.runs == before
        may_end.set()
        other.join(LIMIT_S)
        assert torch.isfinite(pipe.step(rows(6)))


@pytest.mark.parametrize("call", ["step", "__call__"])
def test_pipeline_that_was_closed_before_its_model_was_cut(call):
    pipe = pl.Pipeline(Residual(), num_stages=2, loss_fn=mean_square)
    pipe.close()
    with pytest.raises(RuntimeStateError, match=r"the pipeline is closed\nhint: make a new one from the model"):
        getattr(pipe, call)(rows(4))


def test_step_inside_a_step():
    """A layer that calls its own pipeline must not wait for itself."""
    inputs = rows(4)
    model = chain(nn.Linear(WIDTH, 2), Calls(lambda value: pipe(inputs)))
    pipe = pl.Pipeline(model, num_stages=2, num_microbatches=2)
    with pytest.raises(RuntimeStateError, match="running a step already"):
        pipe.step(rows(4))
    pipe.close()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_step_without_gradients(mode):
    with pl.Pipeline(linears(2), num_stages=2, loss_fn=mean_square) as pipe:
        with mode(), pytest.raises(RuntimeStateError, match=r"gradients switched off\nhint: call the pipeline to eval"):
            pipe.step(rows(4))
        assert torch.isfinite(pipe.step(rows(4)))


def test_failed_step_lets_its_activations_go():
    """An exception that refers to the frames which it came through keeps all of them alive: a cycle would be a leak."""
    kept = []

    def fails(value):
        kept.append(weakref.ref(value))
        raise ValueError("with its activations")

    with pl.Pipeline(chain(nn.Linear(WIDTH, WIDTH), Calls(fails)), num_stages=2, num_microbatches=2) as pipe:
        gc.disable()
        try:
            with contextlib.suppress(ValueError):
                pipe.step(rows(4))
            assert [reference() for reference in kept] == [None]
        finally:
            gc.enable()
