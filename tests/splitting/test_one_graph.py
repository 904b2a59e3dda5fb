"""What only one stage can do, because it reaches past what stages hand to each other.

The story: forces are the gradient of an energy. A model of atoms ran in two stages, its last line called
`torch.autograd.grad(energy, positions)`, and training went on without a word: the last stage's graph begins where its
stage begins, so the gradient lacked all that the first stage computes. Such calls now stay in one stage, and so do
modules of which one leaves a tensor in a global that another one reads: with several stages that is another
micro-batch's.
"""

import threading

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.errors import SplitError, UncuttableCode
from pipeloom.standins.placeholder import Placeholder
from tests.splitting.test_strange_glue import assert_like_plain, square

KEPT: dict[str, torch.Tensor] = {}


class Chain(nn.Module):
    """Layers, and what is made of what they return."""

    def __init__(self, after, num_layers=6, last=None):
        super().__init__()
        self.layers, self.after, self.last = nn.ModuleList(nn.Linear(8, 8) for _ in range(num_layers)), after, last

    def forward(self, x):
        x, made = x.detach(), []
        if self.after is of_the_input:
            x.requires_grad_()
        made.append(x)
        for layer in self.layers:
            made.append(layer(made[-1]).tanh())
        return self.after(self, made)


def grad(of, by, **options):
    with torch.enable_grad():
        return torch.autograd.grad(of.sum(), by, create_graph=True, **options)[0]


def of_the_input(model, made):
    return grad(made[-1] + made[0] ** 3, made[0])


def of_a_value(model, made):
    return grad(made[-1] * made[2], made[2]) + made[-1]


def of_an_unused_one(model, made):
    found = grad(made[-1], made[2], allow_unused=True)
    return made[-1] if found is None else found + made[-1]


def of_a_weight(model, made):
    return made[-1] + grad(made[-1], model.layers[2].weight).sum()


class Force(nn.Module):
    def forward(self, energy, x):
        return grad(energy, x)


def in_a_module(model, made):
    return model.last(made[-1] + made[2] ** 2, made[2]) + made[-1]


def model_of(after):
    return Chain(after, last=Force() if after is in_a_module else None)


def without_evaluation(model, x):
    """A step of a plain loop."""
    losses = [square(model(each)) / 4 for each in x.chunk(4)]
    for each in losses:
        each.backward()
    return sum(losses).detach()


@pytest.mark.parametrize("after", [of_a_value, of_an_unused_one, in_a_module])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("recompute", [False, True])
def test_what_differentiates_another_call_is_in_its_stage(after, schedule, recompute):
    torch.manual_seed(0)
    model, whole, x = model_of(after), model_of(after), torch.randn(8, 8)
    whole.load_state_dict(model.state_dict())
    options = {"schedule": schedule, "num_microbatches": 4, "loss_fn": square, "recompute": recompute}
    with pl.Pipeline(model, num_stages=3, **options) as pipe:
        found, expected = pipe.step(x), without_evaluation(whole, x)
        assert torch.equal(found, expected)
        theirs = dict(whole.named_parameters())
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, theirs[name].grad)
        stages = pipe.layout["stages"]
    assert len(stages) == 3


@pytest.mark.parametrize("after", [of_the_input, of_a_weight])
def test_what_differentiates_all_calls_cannot_be_cut(after):
    wanted = r"(?s)from 'layers\.[02]' to 'layers\.5'.*one stage: .*differentiates.*autograd.*test_one_graph\.py:\d+: "
    with (
        pytest.raises(UncuttableCode, match=wanted),
        pl.Pipeline(model_of(after), num_stages=5, num_microbatches=4, loss_fn=square) as pipe,
    ):
        pipe.step(torch.randn(8, 8))


def test_cuts_of_the_users_own_may_not_separate_what_is_differentiated():
    with (
        pytest.raises(SplitError, match=r"a cut before call 4 .*differentiates"),
        pl.Pipeline(model_of(of_a_value), cuts=[1, 4], num_microbatches=4, loss_fn=square) as pipe,
    ):
        pipe.step(torch.randn(8, 8))


def test_a_gradient_within_what_one_stage_makes_is_no_bond():
    def between(model, made):
        return grad(made[-1] ** 3, made[-1]) + made[-1]

    model, x = Chain(between), torch.randn(8, 8)
    with pl.Pipeline(model, num_stages=6, num_microbatches=4, loss_fn=square) as pipe:
        found = pipe.step(x)
    torch.testing.assert_close(found, without_evaluation(model, x))


def test_a_graph_that_begins_at_a_detached_value_is_no_bond():
    def between(model, made):
        y = made[-1].detach().requires_grad_()
        (y**3).sum().backward()
        return made[-1] * y.grad

    model, x = Chain(between), torch.randn(8, 8)
    with pl.Pipeline(model, num_stages=6, num_microbatches=4, loss_fn=square) as pipe:
        found = pipe.step(x)
    torch.testing.assert_close(found, without_evaluation(model, x))


class Keeps(nn.Module):
    """Leaves what it made in a global, and uses what is there."""

    def __init__(self, writes=None, reads=None):
        super().__init__()
        self.linear, self.writes, self.reads = nn.Linear(8, 8), writes, reads

    def forward(self, x):
        x = self.linear(x).tanh()
        if self.writes is not None:
            KEPT[self.writes] = x.detach()
        return x if self.reads is None else x * KEPT[self.reads]


class Layers(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def keeping(writer, reader):
    return Layers(*(Keeps("a" if i == writer else None, "a" if i == reader else None) for i in range(6)))


def test_modules_that_leave_a_tensor_for_each_other_are_in_one_stage():
    assert_like_plain(lambda: keeping(1, 3), num_stages=3)


def test_modules_that_leave_a_tensor_for_each_other_over_the_whole_model_cannot_be_cut():
    with (
        pytest.raises(SplitError, match=r"(?s)from 'layers\.0' to 'layers\.5'.*one stage: .*a global"),
        pl.Pipeline(keeping(0, 5), num_stages=2, num_microbatches=4, loss_fn=square) as pipe,
    ):
        pipe.step(torch.randn(8, 8))


def test_a_module_that_is_called_twice_keeps_its_own_tensor_for_itself():
    """``self.last = x`` in one call, used in the next: on two stages the second would not find it."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.last = nn.Linear(8, 8), None

        def forward(self, x, is_first):
            made = self.linear(x).tanh() if is_first else self.linear(x).tanh() + self.last
            self.last = None if not is_first else made
            return made

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.again, self.after = nn.Linear(8, 8), Recurrent(), nn.Linear(8, 8)
            self.between = nn.Linear(8, 8)

        def forward(self, x):
            x = self.between(self.again(self.before(x), True))
            return self.after(self.again(x, False))

    assert_like_plain(Model, num_stages=3)


def test_a_later_way_of_the_model_that_would_separate_what_is_differentiated_is_refused():
    def sometimes(model, made):
        return grad(made[-1] * made[2], made[2]) if len(made[0]) == 1 else made[-1]

    with pl.Pipeline(Chain(sometimes), num_stages=3, num_microbatches=4, loss_fn=square) as pipe:
        pipe.step(torch.randn(8, 8))
        with pytest.raises(UncuttableCode, match="differentiates"):
            pipe.step(torch.randn(4, 8))


LAST: torch.Tensor | None = None


class State:
    mask: torch.Tensor | None = None


def in_a_dict(x):
    KEPT["mask"] = x


def in_a_variable(x):
    global LAST
    LAST = x


def in_a_class(x):
    State.mask = x


class Around(nn.Module):
    """Its own code keeps something of the batch in a global."""

    def __init__(self, keep, what):
        super().__init__()
        self.layers, self.keep, self.what = nn.ModuleList(nn.Linear(8, 8) for _ in range(6)), keep, what

    def forward(self, x):
        if self.what == "an input":
            self.keep(x.sum(-1, keepdim=True))
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 0 and self.what == "a value":
                self.keep(x)
        return x


@pytest.mark.parametrize("keep", [in_a_dict, in_a_variable, in_a_class])
@pytest.mark.parametrize("what", ["an input", "a value"])
def test_a_global_in_which_the_code_of_every_stage_keeps_a_tensor_is_refused(keep, what):
    """A mask for all layers in a global: which micro-batch's it was when a layer read it, was chance."""
    with (
        pytest.raises(UncuttableCode, match=r"in a global, (KEPT|LAST|State) of .*test_one_graph") as caught,
        pl.Pipeline(Around(keep, what), num_stages=2, num_microbatches=4, loss_fn=square) as pipe,
    ):
        pipe.step(torch.randn(8, 8))
    assert "self.x" in caught.value.hint
    assert "mask" not in KEPT
    assert LAST is State.mask is None


def test_a_constant_may_be_kept_in_a_global():
    assert_like_plain(lambda: Around(lambda x: KEPT.setdefault("constant", torch.ones(8)), "an input"))


class Each(nn.Module):
    """Layers, and what is done with each."""

    def __init__(self, layers, call=lambda layer, x: layer(x)):
        super().__init__()
        self.layers, self.call = nn.ModuleList(layers), call

    def forward(self, x):
        for layer in self.layers:
            x = self.call(layer, x)
        return x


class Recent:
    """Where layers leave what they make."""

    output: torch.Tensor | None = None


class Remembers(nn.Module):
    """Leaves something in an attribute of a class, as code does that shows attention maps."""

    def __init__(self, what):
        super().__init__()
        self.linear, self.what = nn.Linear(8, 8), what

    def forward(self, x):
        made = self.linear(x).tanh()
        Recent.output = self.what(x, made)
        return made


@pytest.mark.parametrize("what", [lambda x, made: made, lambda x, made: x, lambda x, made: made.detach()])
def test_a_unit_may_leave_what_it_is_given_or_returns_in_a_global_that_nobody_reads(what):
    """It was refused, with words on the code around units, whose code that isn't."""
    assert_like_plain(lambda: Each(Remembers(what) for _ in range(6)))
    assert not isinstance(Recent.output, Placeholder)


class Recalls(Remembers):
    """Leaves it, or uses what another one has left, or neither."""

    def forward(self, x):
        if self.what == "leaves":
            Recent.output = x = self.linear(x).tanh()
            return x
        return self.linear(x) + (Recent.output if self.what == "uses" else 0)


def test_a_unit_that_reads_what_another_one_returned_from_a_global_is_in_one_stage_with_it():
    def make():
        return Each(Recalls(what) for what in ("", "", "leaves", "", "uses", ""))

    assert_like_plain(make)
    with (
        pytest.raises(SplitError, match=r"would separate .*a global"),
        pl.Pipeline(make(), num_stages=2, cuts=["layers.4"], loss_fn=square) as pipe,
    ):
        pipe.step(torch.randn(4, 8))


def test_code_around_units_may_not_read_what_a_unit_returned_from_a_global():
    """Its stage would find that of another micro-batch there."""
    model = Each((Remembers(lambda x, made: made) for _ in range(6)), lambda layer, x: layer(x) + Recent.output)
    with (
        pytest.raises(UncuttableCode, match="left the unit that made it otherwise than by return"),
        pl.Pipeline(model, num_stages=3, loss_fn=square) as pipe,
    ):
        pipe.step(torch.randn(4, 8))


def test_what_another_thread_puts_into_a_global_stays():
    """A thread that loads data keeps its newest batch in a global, and lost some to dry runs."""

    threads = [threading.Thread(target=KEPT.__setitem__, args=(key, torch.ones(3))) for key in ("one", "two")]

    class Meanwhile(nn.Linear):
        def forward(self, x):
            if threads:
                threads[0].start()
                threads.pop(0).join()
            return super().forward(x)

    with pl.Pipeline(Each(Meanwhile(8, 8) for _ in range(6)), num_stages=2, loss_fn=square) as pipe:
        pipe.step(torch.randn(4, 8))
    assert [KEPT.pop(key, None) is None for key in ("one", "two")] == [False, False]
