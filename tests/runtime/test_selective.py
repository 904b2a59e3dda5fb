"""Recomputation of named modules: the bits of none at all, one forward more of each, and less memory."""

import copy
import weakref
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.flop_counter import FlopCounterMode

import pipeloom as pl
from pipeloom.errors import BatchError, SplitError
from pipeloom.testing import sequential_step
from tests.facade.models import Calls, mean_square
from tests.numerics.asserts import assert_bit_equal, assert_same_gradients
from tests.runtime.test_every_schedule import Gpt, token_loss, tokens

WIDTH = 8


class Part(nn.Module):
    """Draws, counts, normalises by batch and by the power iteration of a buffer."""

    def __init__(self):
        super().__init__()
        self.up, self.down = spectral_norm(nn.Linear(WIDTH, 2 * WIDTH)), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.drop = nn.BatchNorm1d(2 * WIDTH), nn.Dropout(0.3)
        self.num_calls = 0

    def forward(self, x, *, scale=1.0):
        self.num_calls += 1
        return x + scale * self.down(self.drop(torch.relu(self.norm(self.up(x)))) + 0.01 * self.num_calls)


class Block(nn.Module):
    """A part, called with a keyword, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.part, self.out = Part(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.out(self.part(x, scale=0.5)))


def chain(num_blocks=4):
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(num_blocks)])


def rows(num=11):
    return torch.linspace(-1, 1, num * WIDTH).reshape(num, WIDTH)


NAMES = ["1", "*.part", ["0.part", "2", "3.part.up"], "*"]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "gpipe-recompute"])
@pytest.mark.parametrize("names", NAMES, ids=str)
def test_bits_and_buffers_are_those_of_none(names, schedule):
    model, plain = chain(), chain()
    given = {"num_microbatches": 4, "loss_fn": mean_square}
    with pl.Pipeline(model, num_stages=2, schedule=schedule, recompute=names, **given) as pipe:
        for step in range(2):
            loss = pipe.step(rows())
            assert_bit_equal(loss, sequential_step(plain, rows(), step_index=step, **given), "loss")
            assert_same_gradients(pipe, plain)
        evaluated = pipe.eval()(rows())
    assert torch.equal(evaluated, torch.cat([plain.eval()(part) for part in rows().split([3, 3, 3, 2])]))
    assert [each.part.num_calls for each in plain] == [12] * 4
    assert [each.part.num_calls for each in model] == [12] * 4
    assert all(torch.equal(*pair) for pair in zip(model.buffers(), plain.buffers(), strict=True))
    assert not any("forward" in vars(each) for each in model.modules())


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("names", ["blocks.3", ["blocks.0", "blocks.5"], "blocks"], ids=str)
def test_a_model_that_is_cut_by_running_it(names, schedule):
    torch.manual_seed(0)
    model = Gpt()
    reference = copy.deepcopy(model)
    given = {"num_stages": 4, "num_microbatches": 8, "loss_fn": token_loss}
    x, target = tokens()
    with pl.Pipeline(model, schedule=schedule, recompute=names, **given) as pipe:
        loss = pipe.step(x, target=target)
        assert_bit_equal(loss, sequential_step(reference, x, target=target, **given), "loss")
        assert_same_gradients(pipe, reference)


def test_autocast_is_that_of_the_forward():
    grads = []
    for names in (False, "*.part"):
        model = chain()
        with (
            pl.Pipeline(model, num_stages=2, num_microbatches=2, loss_fn=mean_square, recompute=names) as pipe,
            torch.autocast("cpu", torch.bfloat16),
        ):
            pipe.step(rows(8))
        grads.append([each.grad for each in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


def calls_of(names, schedule="1f1b"):
    """How often each module of a model ran in a step of 3 micro-batches."""
    model, calls = chain(2), Counter()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Part):
            module.register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
    given = {"num_stages": 2, "num_microbatches": 3, "loss_fn": mean_square, "recompute": names}
    with pl.Pipeline(model, schedule=schedule, **given) as pipe:
        pipe.step(rows(6))
    return calls


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_only_what_is_named_runs_again_and_once(schedule):
    """Also where a backward comes in two halves; hooks of the module itself fire once, those inside it twice."""
    calls = calls_of("0.part", schedule)
    assert calls["0.part"] == calls["0.out"] == calls["1.part"] == calls["1.part.up"] == 3
    assert calls["0.part.up"] == 6
    assert calls_of(["0", "0.part", "0.part.up"], schedule)["0.part.up"] == 6


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_one_forward_more_is_paid(schedule):
    """By torch's count of multiplications: no more than F of what is named, for I and W together."""

    def flops(names):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(4)])
        given = {"num_stages": 2, "num_microbatches": 4, "loss_fn": mean_square}
        with pl.Pipeline(model, schedule=schedule, recompute=names, **given) as pipe:
            x = torch.ones(32, 64)
            with FlopCounterMode(display=False) as counter:
                pipe.step(x)
        return counter.get_total_flops()

    forward = 2 * 32 * 64 * 64 * 8
    none, named, whole = flops(False), flops("*"), flops(True)
    assert none < named <= none + forward
    assert named <= whole == none + forward


class Big(nn.Module):
    """Notes the tensors that its inside saves, while they live."""

    def __init__(self, alive):
        super().__init__()
        self.linear, self.alive = nn.Linear(WIDTH, WIDTH), alive

    def forward(self, x):
        inside = torch.tanh(self.linear(x))
        self.alive.append(weakref.ref(inside.untyped_storage()))
        return inside.exp().sin()


@pytest.mark.parametrize("names", [False, "0"])
def test_activations_of_what_is_named_are_dropped(names):
    """GPipe holds four micro-batches of stage 0 when its last forward has run; of the named module, none."""
    alive, seen = [], []

    def look(x):
        seen.append(sum(each() is not None for each in alive))
        return x

    model = nn.Sequential(Big(alive), Calls(look), nn.Linear(WIDTH, WIDTH))
    given = {"cuts": [2], "num_microbatches": 4, "loss_fn": mean_square, "schedule": "gpipe"}
    with pl.Pipeline(model, recompute=names, **given) as pipe:
        pipe.step(rows(8))
    assert seen == ([0] * 4 if names else [1, 2, 3, 4])


def test_a_module_that_writes_into_its_input_is_refused():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, 3)))
    with (
        pl.Pipeline(model, num_microbatches=2, loss_fn=mean_square, recompute="1") as pipe,
        pytest.raises(BatchError, match=r"'1' was asked to run again in the backward, and wrote into its input in"),
    ):
        pipe.step(rows(4))


class Late(nn.Module):
    """Writes, in place, what another module was given: into a keyword's tensor."""

    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Linear(WIDTH, WIDTH), Part()

    def forward(self, x):
        x = self.first(x)
        y = self.inner(x=x)
        return y + x.mul_(2.0)


def test_a_write_into_the_input_later_is_found_by_torch():
    """Also in a keyword, where torch's checkpoint does not look, and would compute from other numbers."""
    with (
        pl.Pipeline([Late()], num_microbatches=2, loss_fn=mean_square, recompute="0.inner") as pipe,
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
    ):
        pipe.step(rows(4))


def test_a_compiled_module_is_refused():
    model = chain(2)
    model[1].part.up.compile(backend="eager")
    with pytest.raises(
        SplitError, match=r"(?s)recompute names '1', which is compiled.*hint: leave it out, or recompute"
    ):
        pl.Pipeline(model, num_stages=2, loss_fn=mean_square, recompute="1")
    with pl.Pipeline(model, num_stages=2, loss_fn=mean_square, recompute="0"):
        pass


def test_a_forward_of_the_modules_own_comes_back():
    """accelerate's hooks, and others, put one on an instance."""
    model, seen = chain(2), []
    inner = model[0].part.forward
    model[0].part.forward = own = lambda x, **given: seen.append(1) or inner(x, **given)
    with pl.Pipeline(model, num_stages=2, num_microbatches=2, loss_fn=mean_square, recompute="0.part") as pipe:
        pipe.step(rows(4))
        assert vars(model[0].part)["forward"] is own
    assert len(seen) == 4


@pytest.mark.parametrize("names", ["*.out", ["0", "1.part.down"]])
def test_single_layers_are_refused(names):
    with pytest.raises(SplitError, match="names single layers, or what is cut into such between stages; to run one of"):
        pl.Pipeline(chain(2), num_stages=2, recompute=names)


def test_near_names_are_offered():
    with pytest.raises(SplitError, match=r"(?s)recompute='0.parts' was given.*hint: did you mean '0.part'"):
        pl.Pipeline(chain(2), num_stages=2, recompute=["1", "0.parts"])


class Forces(nn.Module):
    """Differentiates by its input in its forward, as potentials do whose forces are trained."""

    def __init__(self):
        super().__init__()
        self.energy, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)

    def forward(self, x):
        here = x.detach().requires_grad_()
        energy = torch.tanh(self.drop(self.energy(here)))
        (force,) = torch.autograd.grad(energy.sum(), here, create_graph=True)
        (second,) = torch.autograd.grad(energy.square().sum(), here, create_graph=True)
        return self.energy(x) + force + second


class Hooked(nn.Module):
    """Scales the gradient of its input by a hook, and looks at it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, *, other=None):
        for each in (x, other):
            if each is not None and each.requires_grad:
                each.register_hook(lambda grad: 2 * grad)
        return torch.tanh(self.inner(x)) + (0 if other is None else other)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.hooked = nn.Linear(WIDTH, WIDTH), Hooked()

    def forward(self, x):
        return self.hooked(x, other=self.before(x))


@pytest.mark.parametrize(("kind", "names"), [(Forces, "[123]"), (Hooked, "[123]"), (Twice, ["[123]", "*.hooked"])])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_what_a_forward_does_to_the_graph_is_done_once(kind, names, schedule):
    """A module that differentiates in its forward runs again then and there, and once more in the backward: that
    ended in AttributeError, a context was entered twice. And the second forward put a second hook on the very input,
    whose gradient was scaled twice, silently; torch's own checkpoint does the same.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*[kind() for _ in range(4)])
    plain = copy.deepcopy(model)
    given = {"num_microbatches": 3, "loss_fn": mean_square}
    with pl.Pipeline(model, num_stages=2, schedule=schedule, recompute=names, **given) as pipe:
        for step in range(2):
            loss = pipe.step(rows())
            assert_bit_equal(loss, sequential_step(plain, rows(), step_index=step, **given), "loss")
            assert_same_gradients(pipe, plain)


class Counts(nn.Module):
    """Writes a buffer before or after it differentiates, and uses it."""

    def __init__(self, is_early):
        super().__init__()
        self.energy, self.is_early = nn.Linear(WIDTH, WIDTH), is_early
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x):
        if self.is_early:
            self.num_calls += 1
        here = x.detach().requires_grad_()
        energy = torch.tanh(self.energy(here)) * (1 + self.num_calls).clone()
        (force,) = torch.autograd.grad(energy.sum(), here, create_graph=True)
        if not self.is_early:
            self.num_calls += 1
        return self.energy(x) + force


@pytest.mark.parametrize("is_early", [False, True])
def test_a_buffer_that_is_written_before_the_forward_differentiates(is_early):
    """The second forward, in the middle of the first one, found the buffer as that had written it, and said nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Counts(is_early) for _ in range(4)])
    plain = copy.deepcopy(model)
    given = {"num_microbatches": 3, "loss_fn": mean_square}
    with pl.Pipeline(model, num_stages=2, recompute=["1", "2"], **given) as pipe:
        if is_early:
            with pytest.raises(BatchError, match=r"'[12]' was asked to run again .* writes a buffer"):
                pipe.step(rows())
            return
        loss = pipe.step(rows())
        assert_bit_equal(loss, sequential_step(plain, rows(), **given), "loss")
        assert_same_gradients(pipe, plain)
