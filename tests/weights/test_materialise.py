"""What a stage owns gets the stored values, ties and flags stay, and the rest stays unmade."""

import subprocess
import sys
import weakref

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pipeloom.errors import CheckpointError
from pipeloom.weights.build import build
from pipeloom.weights.match import match, places_of
from pipeloom.weights.materialise import materialise
from pipeloom.weights.stored import Weights
from tests.weights.models import Tied, drawn_anew


def stored(folder, model):
    """The model's weights in a file; a tied one once."""
    seen, tensors = set(), {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            tensors[name] = tensor.contiguous()
        seen.add(tensor.data_ptr())
    save_file(tensors, folder / "model.safetensors")
    return Weights(folder)


def loaded(factory, folder, dtype=None):
    """A plain model with other values, and one that was never whole with the same."""
    plain = drawn_anew(factory())
    model = build(factory)
    matched = match(model, stored(folder, plain))
    materialise(places_of(model), matched, "cpu", dtype)
    return plain, model


FACTORIES = {
    "tied": Tied,
    "lstm": lambda: nn.LSTM(3, 4, 2),
    "batch norm": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    "transposed": lambda: nn.ParameterList([nn.Parameter(torch.zeros(3, 4).t())]),
    "half": lambda: nn.Linear(4, 4, dtype=torch.float16),
}


@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
def test_values_are_those_of_load_state_dict(factory, tmp_path):
    plain, model = loaded(factory, tmp_path)
    ours, theirs = model.state_dict(), plain.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in theirs)


def test_materialised_model_runs_as_the_plain_one(tmp_path):
    plain, model = loaded(Tied, tmp_path)
    tokens = torch.randint(10, (6,))
    results = []
    for each in (plain, model):
        each(tokens).square().sum().backward()
        results.append([parameter.grad for parameter in each.parameters()])
    assert all(map(torch.equal, *results))
    assert model.head.weight is model.embed.weight


def test_recurrent_network_runs_with_what_it_got(tmp_path):
    plain, model = loaded(FACTORIES["lstm"], tmp_path)
    x = torch.rand(5, 2, 3)
    assert torch.equal(model(x)[0], plain(x)[0])


def test_only_owned_places_are_made(tmp_path):
    plain = drawn_anew(Tied())
    model = build(Tied)
    matched = match(model, stored(tmp_path, plain))
    materialise([place for place in places_of(model) if place[0].startswith("head")], matched, "cpu")
    assert torch.equal(model.head.weight, plain.embed.weight)
    assert model.embed.weight is model.head.weight
    assert model.body[0].weight.is_meta


def test_second_call_leaves_what_is_there(tmp_path):
    _, model = loaded(Tied, tmp_path)
    matched = match(model, Weights(tmp_path))
    before = model.body[0].weight.data_ptr()
    with torch.no_grad():
        model.body[0].weight.fill_(3)
    materialise(places_of(model), matched, "cpu")
    assert model.body[0].weight.data_ptr() == before
    assert model.body[0].weight.unique().tolist() == [3]


def test_flags_and_attributes_stay(tmp_path):
    def factory():
        model = Tied()
        model.body[0].weight.requires_grad_(False)
        model.embed.weight.group = "shared"
        return model

    _, model = loaded(factory, tmp_path)
    assert not model.body[0].weight.requires_grad
    assert model.head.weight.group == "shared"
    assert type(model.head.weight) is nn.Parameter


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype_is_of_floating_point_parameters(tmp_path, dtype):
    def factory():
        model = Tied()
        model.steps = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
        return model

    plain, model = loaded(factory, tmp_path, dtype)
    assert torch.equal(model.embed.weight, plain.embed.weight.to(dtype))
    assert (model.steps.dtype, model.body[1].running_mean.dtype) == (torch.int64, torch.float32)


def test_buffer_that_is_not_stored_keeps_its_values(tmp_path):
    model = build(Tied)
    tensors = {name: tensor for name, tensor in Tied().state_dict().items() if "running" not in name}
    save_file(
        {name: tensor for name, tensor in tensors.items() if name != "head.weight"}, tmp_path / "model.safetensors"
    )
    materialise(places_of(model), match(model, Weights(tmp_path)), "cpu")
    assert model.body[1].running_var.tolist() == [1, 1, 1, 1]
    assert model.scale.tolist() == [0, 1, 2, 3]


def test_parameter_that_is_held_weakly_is_made_in_its_places(tmp_path):
    plain = drawn_anew(Tied())
    model = build(Tied)
    held = weakref.ref(model.embed.weight)
    materialise(places_of(model), match(model, stored(tmp_path, plain)), "cpu")
    assert held() is not model.embed.weight
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, plain.embed.weight)


@pytest.mark.parametrize("is_equal", [True, False])
def test_copies_of_a_tied_weight_must_be_equal(tmp_path, is_equal):
    tensors = {name: tensor.clone() for name, tensor in Tied().state_dict().items()}
    tensors["head.weight"][3, 3] += not is_equal
    save_file(tensors, tmp_path / "model.safetensors")
    model = build(Tied)
    matched = match(model, Weights(tmp_path))
    if is_equal:
        materialise(places_of(model), matched, "cpu")
        assert torch.equal(model.head.weight, tensors["embed.weight"])
    else:
        with pytest.raises(
            CheckpointError, match=r"different values for 'embed\.weight' and 'head\.weight', which the model ties"
        ):
            materialise(places_of(model), matched, "cpu")


HALF = """
import sys, torch
from torch import nn
from pipeloom.weights.build import build
from pipeloom.weights.match import match, places_of
from pipeloom.weights.materialise import materialise
from pipeloom.weights.stored import Weights

def peak_bytes():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024

factory = lambda: nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(12)))
build(lambda: nn.Linear(2, 2))
before = peak_bytes()
model = build(factory)
matched = match(model, Weights(sys.argv[1]))
built = peak_bytes()
materialise([place for place in places_of(model) if int(place[0].split(".")[0]) < 6], matched, "cpu", torch.float32)
print(built - before, peak_bytes() - built)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_memory_at_its_peak_is_what_is_owned_and_one_tensor(tmp_path, dtype):
    tensor_bytes = 2048 * 2048 * dtype.itemsize
    save_file({f"{i}.weight": torch.ones(2048, 2048, dtype=dtype) for i in range(12)}, tmp_path / "model.safetensors")
    ran = subprocess.run([sys.executable, "-c", HALF, str(tmp_path)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    built_bytes, loaded_bytes = map(int, ran.stdout.split())
    assert built_bytes < 4 << 20
    assert loaded_bytes <= 6 * 2048 * 2048 * 4 + tensor_bytes + (8 << 20)
