"""Stand-ins for the functions of ``random`` and ``numpy.random``."""

import pickle
import random
import threading

import numpy as np
import pytest
import torch

from pipeloom.chance import AROUND, Generators, are_keyed, entered, key_draws
from pipeloom.errors import DrawError
from pipeloom.runtime.draw_key import DrawKey
from pipeloom.runtime.draws import drawing

KEY = DrawKey(0, 0, 0, microbatch=2, unit="blocks.3")


@pytest.fixture(autouse=True)
def keyed():
    key_draws()
    yield
    key_draws(False)


def some():
    """A few numbers of both."""
    shuffled = [1, 2, 3, 4]
    random.shuffle(shuffled)
    return random.random(), random.randint(0, 99), shuffled, np.random.rand(), np.random.choice(99), np.random.sample()


def test_the_same_seed_gives_the_same_numbers():
    with entered(Generators(3)) as own:
        first = some()
        assert own.is_used
        assert some() != first
    with entered(Generators(3)):
        assert some() == first
    with entered(Generators(4)):
        assert some() != first


def test_outside_they_do_what_they_did():
    random.seed(7)
    np.random.seed(7)
    expected = random.Random(7).random(), np.random.RandomState(7).rand()
    with entered(Generators(3)):
        some()
        random.seed(1)
        np.random.seed(1)
    assert (random.random(), np.random.rand()) == expected


def test_contexts_nest_and_a_unit_comes_first():
    with drawing(KEY):
        of_unit = some()
    with entered(Generators(3)):
        first = random.random()
        with drawing(KEY):
            assert some() == of_unit
        second = random.random()
    with entered(Generators(3)):
        assert (random.random(), random.random()) == (first, second)


def test_other_threads_are_not_touched():
    found = []
    random.seed(7)
    with entered(Generators(3)):
        thread = threading.Thread(target=lambda: found.append(random.random()))
        thread.start()
        thread.join()
    assert found == [random.Random(7).random()]


def test_a_seed_within_a_unit_is_the_units():
    with drawing(KEY):
        np.random.seed(5)
        assert np.random.rand() == np.random.RandomState(5).rand()
        state = np.random.get_state()
        first = np.random.rand()
        np.random.set_state(state)
        assert np.random.rand() == first


@pytest.mark.parametrize("seed", [lambda: random.seed(), lambda: np.random.seed(), lambda: random.seed(a=None)])
@pytest.mark.parametrize("key", [KEY, KEY._replace(unit=AROUND)])
def test_a_seed_by_the_clock_is_refused(key, seed):
    """`random.seed()` in a layer took its seed from the system: no two runs were the same, and no recompute."""
    with drawing(key), pytest.raises(DrawError, match=r"seed\(\) was called without a number in a model's code"):
        seed()
    seed()


@pytest.mark.parametrize("where", [(random, "random"), (random, "gauss"), (np.random, "rand"), (np.random, "seed")])
def test_functions_can_still_be_pickled(where):
    function = getattr(*where)
    assert pickle.loads(pickle.dumps(function)) is function


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
def test_a_compiled_unit_draws_the_same():
    def drop(x):
        return x * 2 if random.random() < 0.5 else x + np.random.rand()

    torch._dynamo.reset()
    compiled = torch.compile(drop, backend="eager")
    for microbatch in range(8):
        key = DrawKey(0, 0, 0, microbatch, "drop")
        with drawing(key):
            expected = drop(torch.ones(2))
        with drawing(key):
            assert torch.equal(compiled(torch.ones(2)), expected)


def test_all_is_put_back():
    key_draws(False)
    assert not are_keyed()
    assert random.random.__self__ is random._inst
    plain = {name: getattr(module, name) for module in (random, np.random) for name in dir(module)}
    key_draws()
    key_draws()
    assert are_keyed()
    key_draws(False)
    assert plain == {name: getattr(module, name) for module in (random, np.random) for name in dir(module)}
