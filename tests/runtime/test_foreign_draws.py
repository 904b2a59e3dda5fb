"""Draws by Python's ``random`` and by numpy inside a unit are refused by name, and only those."""

import random
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from random import random as bound_random

import numpy as np
import pytest
import torch
from torch import nn

from pipeloom.errors import DrawError
from pipeloom.runtime.draw_key import DrawKey
from pipeloom.runtime.draws import drawing
from pipeloom.runtime.foreign_draws import ForeignDraws

KEY = DrawKey(0, 0, 0, microbatch=2, unit="blocks.3")

PYTHON = {
    "random": random.random,
    "imported by name": bound_random,
    "uniform": lambda: random.uniform(0, 1),
    "randint": lambda: random.randint(0, 9),
    "shuffle": lambda: random.shuffle([1, 2, 3]),
    "seed": lambda: random.seed(3),
}
NUMPY = {
    "rand": lambda: np.random.rand(),
    "choice": lambda: np.random.choice(5),
    "seed": lambda: np.random.seed(3),
}


class Layer(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * 2


class LayerDrop(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs if random.random() < 0.5 else inputs * 2


def call(foreign: ForeignDraws, draw: Callable[[], object], key: DrawKey = KEY) -> None:
    with drawing(key, foreign=foreign):
        draw()


def elsewhere(draw: Callable[[], object]) -> None:
    """Draw in another thread, and wait for it."""
    thread = threading.Thread(target=draw)
    thread.start()
    thread.join()


@pytest.mark.parametrize("name", PYTHON)
def test_a_draw_by_pythons_random_is_refused(name: str) -> None:
    with pytest.raises(
        DrawError, match=r"unit 'blocks\.3' drew from Python's `random` \(micro-batch 2\)[^$]*hint: dra"
    ):
        call(ForeignDraws(), PYTHON[name])
    assert sys.getprofile() is None


@pytest.mark.parametrize("name", NUMPY)
def test_a_draw_by_numpy_is_refused(name: str) -> None:
    with pytest.raises(DrawError, match=r"unit 'blocks\.3' drew from numpy's global generator \(micro-batch 2\)"):
        call(ForeignDraws(), NUMPY[name])
    assert np.random.mtrand._rand._bit_generator.lock.acquire(blocking=False)
    np.random.mtrand._rand._bit_generator.lock.release()


def test_generators_of_their_own_are_nobodys_business() -> None:
    foreign = ForeignDraws()
    call(foreign, lambda: random.Random(3).random())
    call(foreign, lambda: np.random.default_rng(3).random(), DrawKey(0, 0, 0, 0, "other"))
    call(foreign, random.getstate, DrawKey(0, 0, 0, 0, "third"))
    assert foreign._watched == {"blocks.3", "other", "third"}


def test_what_another_thread_draws_is_not_the_units() -> None:
    foreign = ForeignDraws()
    call(foreign, lambda: elsewhere(random.random))
    assert foreign._watched == {"blocks.3"}


def test_another_threads_numpy_waits_until_the_unit_is_done() -> None:
    loader = threading.Thread(target=np.random.rand)
    before = np.random.get_state()[2]
    call(ForeignDraws(), loader.start)
    loader.join()
    assert np.random.get_state()[2] != before


@pytest.mark.parametrize("wait", ["join", "queue", "event", "sleep"])
def test_a_unit_may_wait_for_a_thread_that_draws_by_numpy(wait: str) -> None:
    """A layer that reads from a prefetcher hung for ever: it held the lock for which its own thread was waiting."""
    queue: SimpleQueue[float] = SimpleQueue()
    is_drawn = threading.Event()

    def draw() -> None:
        queue.put(np.random.rand())
        is_drawn.set()

    def waits() -> None:
        thread = threading.Thread(target=draw, daemon=True)
        thread.start()
        {
            "join": lambda: thread.join(10),
            "queue": lambda: queue.get(timeout=10),
            "event": lambda: is_drawn.wait(10),
            "sleep": lambda: any(is_drawn.is_set() or time.sleep(0.001) for _ in range(9999)),
        }[wait]()
        assert is_drawn.wait(10)

    foreign = ForeignDraws()
    call(foreign, waits)
    assert foreign._watched == {"blocks.3"}


def test_a_unit_that_draws_before_it_waits_is_refused() -> None:
    with pytest.raises(DrawError, match="numpy's global generator"):
        call(ForeignDraws(), lambda: (np.random.rand(), elsewhere(np.random.rand)))


def test_a_unit_is_not_watched_while_another_thread_holds_numpys_lock() -> None:
    foreign, is_held, is_done = ForeignDraws(), threading.Event(), threading.Event()

    def hold() -> None:
        with np.random.mtrand._rand._bit_generator.lock:
            is_held.set()
            is_done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    is_held.wait()
    call(foreign, lambda: None)
    is_done.set()
    holder.join()
    # Not seen, so not settled: its next call is watched.
    with pytest.raises(DrawError, match="numpy's global generator"):
        call(foreign, np.random.rand)


def test_a_profiler_goes_first() -> None:
    foreign = ForeignDraws()

    def profiler(*_: object) -> None:
        pass

    sys.setprofile(profiler)
    try:
        call(foreign, random.random)
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    with pytest.raises(DrawError, match="Python's `random`"):
        call(foreign, random.random)


def test_a_unit_is_watched_after_it_was_compiled() -> None:
    torch._dynamo.reset()
    unit, inputs, foreign = torch.compile(Layer(), backend="eager"), torch.ones(2), ForeignDraws()
    call(foreign, lambda: unit(inputs))
    assert not foreign._watched
    assert sys.getprofile() is None
    call(foreign, lambda: unit(inputs))
    assert foreign._watched == {"blocks.3"}


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
def test_a_compiled_unit_that_draws_is_refused() -> None:
    torch._dynamo.reset()
    unit, inputs, foreign = torch.compile(LayerDrop(), backend="eager"), torch.ones(2), ForeignDraws()
    call(foreign, lambda: unit(inputs))
    with pytest.raises(DrawError, match="Python's `random`"):
        call(foreign, lambda: unit(inputs))


def test_a_unit_is_watched_once() -> None:
    foreign = ForeignDraws()
    call(foreign, lambda: None)
    call(foreign, random.random)
    with pytest.raises(DrawError, match=r"'late'"):
        call(foreign, random.random, DrawKey(0, 0, 0, 0, "late"))


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_a_unit_that_starts_to_draw_is_found_a_step_later(draw: Callable[[], object]) -> None:
    foreign = ForeignDraws()
    with foreign.step():
        call(foreign, lambda: None)
    with foreign.step():
        call(foreign, draw)
    with pytest.raises(DrawError, match=r"unit 'blocks\.3'"), foreign.step():
        call(foreign, draw)


def test_a_loader_that_draws_in_every_step_has_units_watched_once_more_only() -> None:
    foreign = ForeignDraws()
    for _ in range(2):
        with foreign.step():
            call(foreign, lambda: None)
            random.random()
    assert foreign._watched == {"blocks.3"}


def test_the_units_own_exception_comes_first() -> None:
    def fail() -> None:
        random.random()
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        call(ForeignDraws(), fail)
    assert sys.getprofile() is None
