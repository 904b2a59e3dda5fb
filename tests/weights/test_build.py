"""Parameters cost nothing, buffers hold their values, and what can't be had is refused by name."""

import copy
import math
import threading
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from pipeloom.errors import SplitError
from pipeloom.weights.build import build
from tests.weights.models import Holds, Tied


def rotary(_):
    frequencies = 1.0 / 10_000 ** (torch.arange(0, 8, 2, dtype=torch.int64).float() / 8)
    return torch.outer(torch.arange(16.0), frequencies).cos()


def sinusoidal(_):
    table = torch.empty(16, 8)
    angles = torch.arange(16.0)[:, None] * torch.exp(torch.arange(0, 8, 2) * (-math.log(1e4) / 8))
    table[:, 0::2] = angles.sin()
    table[:, 1::2] = angles.cos()
    return table


def slopes_by_numpy(_):
    table = torch.empty(6)
    table.numpy()[:] = np.arange(6)
    return table


def overwritten(_):
    return torch.empty(4).normal_().copy_(torch.arange(4))


KNOWN = {
    "rotary": rotary,
    "sinusoidal": sinusoidal,
    "slopes by numpy": slopes_by_numpy,
    "overwritten": overwritten,
    "causal": lambda _: torch.tril(torch.ones(1200, 1200, dtype=torch.bool)),
    "large": lambda _: torch.full((700, 700), 3),
    "large, by numpy": lambda _: torch.from_numpy(torch.ones(600, 600).numpy() + 1),
    "written in place": lambda _: torch.zeros(600, 600).add_(torch.eye(600)),
    "like a parameter": lambda layer: torch.ones_like(layer.weight) * 2,
    "copied": lambda _: copy.deepcopy(torch.zeros(600, 600) + 1),
    "expanded": lambda _: torch.arange(5).expand((1, -1)),
    "from a list": lambda _: torch.tensor(torch.linspace(0, 0.1, 4).tolist()),
    "window": lambda _: torch.hann_window(8),
    "filter": lambda _: torch.nn.functional.pad(torch.ones(2, 2), (1, 1)).double(),
    "one number": lambda _: torch.tensor(3) * torch.ones(()),
    "nothing": lambda _: torch.empty(0),
}


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("make", KNOWN.values(), ids=KNOWN)
def test_known_buffer_has_its_values(make, persistent):
    expected = Holds(make).kept
    model = build(partial(Holds, make, persistent=persistent))
    assert model.layer.weight.is_meta
    assert (model.kept.device, model.kept.dtype) == (torch.device("cpu"), expected.dtype)
    assert torch.equal(model.kept, expected)


def in_context(_):
    with torch.no_grad(), torch.device("meta"):
        return nn.init.constant_(torch.empty(3), 0.5)


ELSEWHERE = {
    "context": (in_context, [0.5, 0.5, 0.5]),
    "tensor": (lambda _: torch.tensor([1.5, 2.5], device="meta"), [1.5, 2.5]),
    "moved": (lambda _: torch.linspace(0, 1, 3).to("meta").to(torch.float64), [0.0, 0.5, 1.0]),
    "positional": (lambda _: torch.arange(3.0).to("meta", torch.float16), [0.0, 1.0, 2.0]),
    "like": (lambda layer: torch.ones_like(layer.bias, device="meta") * 2, [2.0, 2.0, 2.0]),
}


@pytest.mark.parametrize(("make", "values"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_buffer_that_is_made_elsewhere_has_its_values(make, values):
    kept = build(partial(Holds, make)).kept
    assert kept.tolist() == values


UNKNOWN = {
    "drawn": lambda _: torch.randn(3),
    "permuted": lambda _: torch.randperm(3),
    "filled by drawing": lambda _: torch.empty(3).uniform_(),
    "drawn through a view": lambda _: drawn_through_view(),
    "drawn over zeros": lambda _: nn.init.trunc_normal_(torch.zeros(3)),
    "computed of drawn": lambda _: torch.arange(3) * torch.rand(3),
    "computed of a parameter": lambda layer: layer.weight.detach().sum(1),
    "written with drawn": lambda _: torch.zeros(3).copy_(torch.rand(3)),
    "copied": lambda _: copy.deepcopy(torch.zeros(3).normal_()),
    "orthogonal": lambda _: nn.init.orthogonal_(torch.empty(3, 3)),
    "dropped out": lambda _: torch.dropout(torch.ones(3), 0.5, True),
}


def drawn_through_view():
    table = torch.zeros(2, 3)
    table[1].normal_()
    return table


@pytest.mark.parametrize("make", UNKNOWN.values(), ids=UNKNOWN)
def test_random_buffer_is_expected_in_the_weights(make):
    plain = Holds(make, persistent=True).kept
    model = build(partial(Holds, make, persistent=True))
    assert model.kept.is_meta
    assert (model.kept.shape, model.kept.dtype) == (plain.shape, plain.dtype)


@pytest.mark.parametrize("make", UNKNOWN.values(), ids=UNKNOWN)
def test_random_buffer_that_is_not_saved_is_refused(make):
    with pytest.raises(SplitError, match=r"that no weights would have: 0\.kept\nhint: register them as persistent"):
        build(lambda: nn.Sequential(Holds(make)))


@pytest.mark.parametrize("hold", [lambda x: x, lambda x: [1, x], lambda x: {"x": (x,)}])
def test_random_attribute_is_refused(hold):
    def factory():
        layer = nn.Linear(2, 2)
        layer.noise = hold(torch.rand(2))
        return nn.Sequential(layer)

    with pytest.raises(SplitError, match=r"no weights would have: 0\.noise"):
        build(factory)


def test_random_memory_outside_of_modules_is_refused():
    held = []

    def factory():
        held.append(torch.zeros(2, 5).normal_())
        return nn.Linear(2, 2)

    with pytest.raises(SplitError, match=r"float32\[2, 5\] outside of all modules"):
        build(factory)


READS = {
    "item": lambda: torch.rand(1).item(),
    "truth": lambda: bool(nn.Linear(2, 2).weight.isnan().any()),
    "places": lambda: torch.rand(3).gt(0.5).nonzero(),
    "mask": lambda: torch.arange(3)[torch.rand(3) > 0.5],
    "equality": lambda: torch.equal(torch.rand(3), torch.ones(3)),
    "numpy": lambda: torch.zeros(3).normal_().numpy(),
    "list": lambda: torch.rand(3).tolist(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_structure_that_would_be_random_is_refused(read):
    with pytest.raises(SplitError, match=r"the factory reads values of a tensor that has none \(.*\): ") as caught:
        build(lambda: nn.Sequential(*[nn.Linear(2, 2)] * bool(read() is None)))
    assert caught.value.__notes__[0].startswith("(while the model was made without its parameters")


def test_ties_flags_and_attributes_stay():
    def factory():
        model = Tied()
        model.body[0].weight.requires_grad_(False)
        model.body[0].bias.group = "biases"
        return model.to(torch.bfloat16)

    model = build(factory)
    assert model.head.weight is model.embed.weight
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not model.body[0].weight.requires_grad
    assert model.body[0].bias.group == "biases"


def test_flag_and_tie_of_real_parameters_stay():
    def factory():
        shared = nn.Parameter(torch.ones(3), requires_grad=False)
        shared.group = "scales"
        return nn.ModuleList([nn.ParameterList([shared]), nn.ParameterList([shared, nn.Parameter(torch.zeros(2))])])

    first, second = build(factory)
    assert first[0] is second[0]
    assert (first[0].is_meta, first[0].requires_grad, first[0].group) == (True, False, "scales")
    assert second[1].is_meta


def test_parameter_that_is_held_weakly_stays_tied():
    held = torch.utils.weak.WeakTensorKeyDictionary()

    def factory():
        shared = nn.Parameter(torch.ones(3))
        held[shared] = 1
        return nn.ModuleList([nn.ParameterList([shared]), nn.ParameterList([shared])])

    first, second = build(factory)
    assert first[0] is second[0]
    assert first[0].is_meta


def with_content(layer):
    layer.weight.data = torch.ones(4, 3, dtype=torch.float64)
    layer.bias.data = nn.init.normal_(layer.bias.data)
    return layer


LAYERS = {
    "lstm": lambda: nn.LSTM(3, 4, 2, bidirectional=True),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "copied layers": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2),
    "batch norm": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    "old weight norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
    "old tensors": lambda: nn.ParameterList([torch.nn.Parameter(torch.Tensor(3, 4)), torch.FloatTensor(2)]),
    "sparse": lambda: nn.ParameterList([nn.init.sparse_(torch.empty(4, 4), 0.5)]),
    "without initialisation": lambda: nn.utils.skip_init(nn.Linear, 3, 4),
    "content is set": lambda: with_content(nn.Linear(3, 4)),
    "a class": partial(nn.Bilinear, 2, 3, 4, dtype=torch.float64),
}


def described(model):
    held = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return [(name, x.shape, x.dtype, x.stride(), x.requires_grad, type(x)) for name, x in held]


@pytest.mark.parametrize("factory", LAYERS.values(), ids=LAYERS)
def test_layers_are_as_the_factory_makes_them(factory):
    plain, model = factory(), build(factory)
    assert described(model) == described(plain)
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_default_device_of_the_caller_changes_nothing(device):
    torch.set_default_device(device)
    try:
        model = build(partial(Holds, rotary))
    finally:
        torch.set_default_device(None)
    assert torch.equal(model.kept, rotary(None))
    assert model.layer.weight.is_meta


def test_generator_is_where_it_was():
    before = torch.get_rng_state()
    build(lambda: nn.Sequential(nn.Linear(4, 4), Holds(lambda _: torch.rand(3), persistent=True)))
    assert torch.equal(torch.get_rng_state(), before)


def written_before(model):
    model[0].register_buffer("kept", torch.empty(3), persistent=False)
    model[0].kept.copy_(torch.arange(3.0))
    model[0].kept = torch.empty_like(model[0].kept)
    return model


LOSING = {
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "to_empty, then moved": lambda model: model.to_empty(device="cpu").to("cpu"),
    "assigned": lambda model: setattr(model[0], "kept", torch.empty_like(model[0].kept)) or model,
    "registered again": lambda model: model[0].register_buffer("kept", torch.empty(3), persistent=False) or model,
    "written before": written_before,
}


@pytest.mark.parametrize("lose", LOSING.values(), ids=LOSING)
def test_values_that_the_factory_has_lost_are_refused(lose):
    """Weights were read, the loss was a little off: `from_pretrained` as a factory had emptied rotary frequencies."""
    with pytest.raises(SplitError, match=r"lost them to uninitialised memory: 0\.kept; .*\nhint: let the"):
        build(lambda: lose(nn.Sequential(Holds(lambda _: torch.arange(3.0)))))


def test_cache_that_was_empty_before_stays():
    def factory():
        model = Holds(lambda _: torch.empty(0))
        model.kept = torch.empty(2, 3)
        return model

    assert build(factory).kept.shape == (2, 3)


def test_cache_that_nobody_has_written_stays():
    model = build(partial(Holds, lambda _: torch.empty(2, 3)))
    assert model.kept.shape == (2, 3)
    assert not model.kept.is_meta


def test_models_of_other_threads_are_real():
    made = []

    def factory():
        thread = threading.Thread(target=lambda: made.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
        return nn.Linear(2, 2)

    assert build(factory).weight.is_meta
    assert not made[0].weight.is_meta


def test_nothing_is_left_behind_when_the_factory_fails():
    def factory():
        raise ZeroDivisionError("of my own")

    with pytest.raises(ZeroDivisionError, match="of my own"):
        build(factory)
    assert not nn.Linear(2, 2).weight.is_meta
    assert not torch.rand(2).is_meta


REFUSED = {
    r"the factory returned a dict; an nn\.Module is needed": dict,
    r"have no shape before the model has run: 0\.weight, 0\.bias": lambda: nn.Sequential(nn.LazyLinear(3)),
    r"returned parameters that existed before: weight, bias; it has to make": lambda made=nn.Linear(2, 2): made,  # noqa: B008
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_new_model_is_refused(text):
    with pytest.raises(SplitError, match=text):
        build(REFUSED[text])


def test_existing_model_keeps_its_weights():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    with pytest.raises(SplitError, match=r"0\.weight, 0\.bias, 1\.weight, 1\.bias, 2\.weight and 3 more; it"):
        build(lambda: nn.Sequential(model[0], *model[1:]))
    assert not any(parameter.is_meta for parameter in model.parameters())
