"""What the user changes in attributes of the model between two steps, stages have in the next one."""

import copy

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.errors import RuntimeStateError, SplitError
from pipeloom.testing import sequential_step
from tests.numerics.asserts import assert_bit_equal, assert_same_gradients
from tests.runtime.test_every_schedule import OPPOSED, WIDTH, square


class Layer(nn.Module):
    """Its forward looks at a tensor, containers and a function that are plain attributes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.mask, self.settings, self.scales, self.activation = (
            torch.ones(WIDTH),
            {"inner": {"by": 1.0}},
            [1.0],
            torch.tanh,
        )
        self.inner = (self.linear, [])

    def forward(self, x):
        run = self.inner[0] if not self.inner[1] else self.inner[1][0]
        return self.activation(run(x)) * self.mask * self.settings["inner"]["by"] * self.scales[0]


class Model(nn.Module):
    """Cut by running it: the attributes are looked at around the units as well."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.mask, self.settings, self.scales, self.activation = (
            torch.ones(WIDTH),
            {"inner": {"by": 1.0}},
            [1.0],
            torch.tanh,
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.activation(x) * self.mask * self.settings["inner"]["by"] * self.scales[0]


def new_mask(module):
    module.mask = module.mask / 2


def inner_entry(module):
    module.settings["inner"]["by"] *= 0.5


def item(module):
    module.scales[0] *= 0.5


def another_function(module):
    module.activation = torch.sin


CHANGES = [new_mask, inner_entry, item, another_function]
MODELS = {"chain": lambda: nn.Sequential(*(Layer() for _ in range(4))), "cut by running": Model}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", ["1f1b", *OPPOSED])
def test_a_change_between_steps_is_in_the_next_one(name, kind, change):
    """Parents around units, and all modules of a second replica, went on with what there was when they were cloned."""
    torch.manual_seed(0)
    model, (x, target) = MODELS[kind](), torch.randn(2, 16, WIDTH)
    reference, options = copy.deepcopy(model), {"num_stages": 4, "num_microbatches": 4, "loss_fn": square}
    losses = []
    with pl.Pipeline(model, schedule=name, **options) as pipe:
        for step_index in range(3):
            found = pipe.step(x, target=target)
            step = {"target": target, "schedule": pipe.schedule, "step_index": step_index}
            assert_bit_equal(found, sequential_step(reference, x, **step, **options), "loss")
            assert_same_gradients(pipe, reference)
            losses.append(found.item())
            for each in (model, reference):
                for module in each.modules():
                    if hasattr(module, "mask"):
                        change(module)
    assert losses[0] != losses[1]


@pytest.mark.parametrize("name", OPPOSED)
def test_layers_in_a_list_that_changed_are_those_of_the_replica(name):
    torch.manual_seed(0)
    model, (x, target) = MODELS["chain"](), torch.randn(2, 16, WIDTH)
    reference, options = copy.deepcopy(model), {"num_stages": 4, "num_microbatches": 4, "loss_fn": square}
    with pl.Pipeline(model, schedule=name, **options) as pipe:
        pipe.step(x, target=target)
        pipe.zero_grad()
        for each in (model, reference):
            each[1].inner[1].append(each[1].linear)
        found = pipe.step(x, target=target)
        step = {"target": target, "schedule": pipe.schedule, "step_index": 1}
        assert_bit_equal(found, sequential_step(reference, x, **step, **options), "loss")
        assert_same_gradients(pipe, reference)


class Quiet(Layer):
    """Another kind of layer."""


def replaced(model):
    model[1].linear = nn.Linear(WIDTH, WIDTH)


def added(model):
    model[1].more = nn.ReLU()


def removed(model):
    del model[1].another


def another_class(model):
    model[1].__class__ = Quiet


def a_new_parameter(model):
    model[1].linear.scale = nn.Parameter(torch.ones(WIDTH))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replaced, r"layers 1\.linear of the model were replaced, added or removed"),
        (added, r"layers 1\.more of the model were replaced, added or removed"),
        (removed, r"layers 1\.another of the model were replaced, added or removed"),
        (another_class, "'1' was given the class Quiet after the model was cut"),
        (a_new_parameter, r"'1\.linear' was given parameters scale after the model was cut"),
    ],
)
def test_modules_that_a_second_replica_would_not_have_are_refused(change, message):
    """The first replica ran what was new inside of a layer, and the second what was there before: nothing said so."""
    model, (x, target) = MODELS["chain"](), torch.randn(2, 16, WIDTH)
    model[1].another = nn.ReLU()
    with pl.Pipeline(model, schedule="dualpipe", num_stages=4, num_microbatches=4, loss_fn=square) as pipe:
        pipe.step(x, target=target)
        change(model)
        with pytest.raises(RuntimeStateError, match=message):
            pipe.step(x, target=target)


def test_modules_around_units_that_stages_would_not_have_are_refused():
    model, (x, target) = Model(), torch.randn(2, 16, WIDTH)
    with pl.Pipeline(model, num_stages=4, num_microbatches=4, loss_fn=square) as pipe:
        pipe.step(x, target=target)
        model.layers[1].more = nn.ReLU()
        pipe.step(x, target=target)  # what is inside of a unit is the stage's own
        model.more = nn.ReLU()
        with pytest.raises(RuntimeStateError, match="layers more of the model were replaced, added or removed"):
            pipe.step(x, target=target)


class Shares(nn.Module):
    """Layers that were all given one activation: later stages run clones of them."""

    def __init__(self):
        super().__init__()
        activation = nn.Tanh()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), activation) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("index", [0, 3])
def test_modules_that_clones_of_later_stages_would_not_have_are_refused(index):
    """A later stage went on with the layer of before, and what was put in its place, as an adapter, never learned."""
    model, (x, target) = Shares(), torch.randn(2, 16, WIDTH)
    with pl.Pipeline(model, num_stages=2, num_microbatches=4, loss_fn=square) as pipe:
        pipe.step(x, target=target)
        model.layers[index][0] = nn.Linear(WIDTH, WIDTH)
        if index == 0:
            pipe.step(x, target=target)
            assert model.layers[0][0].weight.grad is not None
        else:
            with pytest.raises(RuntimeStateError, match=r"layers layers\.3\.0 of the model were replaced, added or"):
                pipe.step(x, target=target)


class Box:
    """No module."""

    def __init__(self, inner):
        self.inner = inner


def test_what_both_replicas_would_use_is_refused_later_too():
    model, (x, target) = MODELS["chain"](), torch.randn(2, 16, WIDTH)
    with pl.Pipeline(model, schedule="chimera", num_stages=4, num_microbatches=4, loss_fn=square) as pipe:
        pipe.step(x, target=target)
        model[1].box = Box(model[1].linear)
        with pytest.raises(SplitError, match=r"'1' has '1\.linear' in its attribute 'box', inside of a Box"):
            pipe.step(x, target=target)
        del model[1].box
        pipe.step(x, target=target)
