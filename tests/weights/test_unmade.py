"""What is said to have values has those that it always has, whatever was drawn, viewed and written on the way."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.weights import unmade as module
from pipeloom.weights.ledger import State
from pipeloom.weights.unmade import Home, Unmade

MADE = {
    "zeros": lambda: torch.zeros(3, 4),
    "ones": lambda: torch.ones(3, 4),
    "drawn": lambda: torch.rand(3, 4),
    "numbers": lambda: torch.arange(12.0).reshape(3, 4),
}
STEPS = {
    "sum": lambda x, y: x + y,
    "view": lambda x, y: x.view(4, 3).view(3, 4),
    "copy": lambda x, y: x.clone(),
    "like": lambda x, y: torch.ones_like(x),
    "new": lambda x, y: x.new_full((3, 4), 2.0),
    "of another": lambda x, y: torch.where(y > 1, x, y),
    "add in place": lambda x, y: x.add_(y),
    "draw in place": lambda x, y: x.uniform_(),
    "draw a row": lambda x, y: (x[1].normal_(), x)[1],
    "overwrite": lambda x, y: x.copy_(y),
    "overwrite a row": lambda x, y: (x[0].copy_(y[1]), x)[1],
    "fill": lambda x, y: x.fill_(3),
    "fill a column": lambda x, y: (x[:, 2].fill_(5), x)[1],
    "set by index": lambda x, y: x.index_fill_(1, torch.tensor([1, 3]), 7.0),
    "into": lambda x, y: torch.mul(y, 2, out=x),
    "empty and written": lambda x, y: torch.empty(3, 4).copy_(y),
}
PROGRAMS = st.lists(st.tuples(st.sampled_from([*STEPS]), st.integers(0, 7), st.integers(0, 7)), max_size=8)


def run(made, program):
    """Make tensors, and let each step work on two of those that there are."""
    held = [MADE[name]() for name in made]
    for name, first, second in program:
        held.append(STEPS[name](held[first % len(held)], held[second % len(held)]))
    return held


@pytest.mark.parametrize("eager_bytes", [0, 1 << 20])
@given(made=st.lists(st.sampled_from([*MADE]), min_size=1, max_size=4), program=PROGRAMS)
def test_known_values_do_not_depend_on_what_is_drawn(eager_bytes, made, program):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "EAGER_BYTES", eager_bytes)
        unmade = Unmade()
        with Home(unmade), unmade:
            ours = run(made, program)
        unmade.ledger.settle_all()
    for theirs in (run(made, program), run(made, program)):
        for tensor, expected in zip(ours, theirs, strict=True):
            assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype)
            assert unmade.ledger.is_unknown(tensor) or torch.equal(tensor, expected)


@given(program=PROGRAMS)
def test_nothing_is_unknown_where_nothing_is_drawn(program):
    program = [step for step in program if not step[0].startswith("draw")]
    unmade = Unmade()
    with Home(unmade), unmade:
        held = run(["zeros", "numbers"], program)
    assert [unmade.ledger.state(tensor) for tensor in held] == [None] * len(held)


@pytest.mark.parametrize(("make", "fill"), [(torch.zeros, 0.0), (torch.ones, 1.0), (torch.empty, None)])
def test_large_constant_waits_until_it_is_read(make, fill):
    unmade = Unmade()
    with Home(unmade), unmade:
        table = make(1 << 19)
        assert unmade.ledger.state(table) is (State.UNWRITTEN if fill is None else State.PENDING)
        view = table[3:5].add(1 if fill is None else 0)
    assert view.is_meta if fill is None else view.tolist() == [fill, fill]
    assert unmade.ledger.state(table) is (State.UNWRITTEN if fill is None else None)


LARGE = """
import resource, torch
from torch import nn
from pipeloom.weights.build import build

def factory():
    made = [make(20_000, 20_000) for make in (torch.zeros, torch.ones, torch.empty, torch.rand)]
    made += [torch.full((1 << 31,), 2.0), torch.ones(30_000, 10_000).normal_(), torch.zeros(1 << 28).uniform_()]
    return nn.ParameterList([nn.Parameter(tensor) for tensor in made])

build(lambda: nn.Linear(2, 2))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = build(factory)
print(sum(p.numel() for p in model), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no resource module")
def test_large_parameters_cost_nothing():
    ran = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    num_parameters, grown_kib = map(int, ran.stdout.split())
    assert num_parameters == 4 * 20_000**2 + (1 << 31) + 30_000 * 10_000 + (1 << 28)
    assert grown_kib < 50_000
