"""Each of the model's names is found among the stored ones, or said to be missing, before anything is read."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pipeloom.errors import CheckpointError
from pipeloom.weights.build import build
from pipeloom.weights.match import match, places_of
from pipeloom.weights.stored import Weights
from tests.weights.models import Holds, Tied


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(2, 2)
        self.block = nn.Linear(2, 3)


class Headed(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = Base()
        self.head = nn.Linear(3, 1)


def stored(folder, tensors):
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return Weights(folder)


def state_of(factory, prefix="", without=()):
    return {prefix + name: tensor for name, tensor in factory().state_dict().items() if name not in without}


def test_places_are_all_names_of_all_tensors():
    model = Tied()
    places = {name: (module, attribute) for name, module, attribute in places_of(model)}
    assert places["head.weight"] == (model.head, "weight")
    assert {"embed.weight", "body.1.running_mean", "scale"} < set(places)
    assert len(places) == 10


@pytest.mark.parametrize("kept", [["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"]])
def test_tied_weight_is_found_under_any_of_its_names(tmp_path, kept):
    without = {"embed.weight", "head.weight"} - {*kept}
    matched = match(build(Tied), stored(tmp_path, state_of(Tied, without=without)))
    assert matched.names["embed.weight"] == matched.names["head.weight"] == tuple(kept)
    assert matched.names["scale"] == ()


def test_buffer_with_values_need_not_be_stored(tmp_path):
    without = ["body.1.running_mean", "body.1.num_batches_tracked"]
    matched = match(build(Tied), stored(tmp_path, state_of(Tied, without=without)))
    assert [matched.names[name] for name in without] == [(), ()]
    assert matched.names["body.1.running_var"] == ("body.1.running_var",)


PREFIXES = {
    "more in the file": (Base, lambda: state_of(Headed), "embed.weight", "base.embed.weight"),
    "less in the file": (
        Headed,
        lambda: state_of(Base) | {"head.weight": torch.ones(1, 3), "head.bias": torch.ones(1)},
        "base.embed.weight",
        "embed.weight",
    ),
}


@pytest.mark.parametrize(("factory", "tensors", "name", "expected"), PREFIXES.values(), ids=PREFIXES)
def test_one_prefix_is_resolved(tmp_path, factory, tensors, name, expected):
    matched = match(build(factory), stored(tmp_path, tensors()))
    assert matched.names[name] == (expected,)
    assert all(len(names) == 1 for names in matched.names.values())


def test_two_prefixes_are_refused(tmp_path):
    weights = stored(tmp_path, state_of(Base, "student.") | state_of(Base, "teacher."))
    with pytest.raises(
        CheckpointError, match=r"'embed\.weight', and more than one prefix .*: 'student\.' or 'teacher\.'\n"
    ):
        match(build(Base), weights)


def test_prefix_that_explains_only_a_part_is_not_taken(tmp_path):
    weights = stored(tmp_path, state_of(Base, "base.", without=["block.bias"]))
    with pytest.raises(CheckpointError, match=r"no tensor for 4 of the model's .*: 'embed\.weight', 'embed\.bias'"):
        match(build(Base), weights)


def test_prefix_is_not_mixed_with_plain_names(tmp_path):
    weights = stored(tmp_path, state_of(Base, without=["block.bias"]) | state_of(Base, "other."))
    with pytest.raises(
        CheckpointError, match=r"no tensor for 1 of the model's parameters and buffers: 'block\.bias'\n"
    ):
        match(build(Base), weights)


def test_missing_head_is_named_with_what_is_near(tmp_path):
    tensors = state_of(Headed, without=["head.weight"]) | {"heads.weight": torch.ones(1, 3)}
    with pytest.raises(CheckpointError, match=r": 'head\.weight'\nhint: did you mean 'heads\.weight'"):
        match(build(Headed), stored(tmp_path, tensors))


def test_a_head_that_is_to_be_learned_anew_is_no_misspelt_name(tmp_path):
    """The hint was: did you mean 'base.embed.weight', which the model has and the file too?"""
    with pytest.raises(
        CheckpointError, match=r"for 2 of .*: 'head\.weight', 'head\.bias'\nhint: give .* a new head needs"
    ):
        match(build(Headed), stored(tmp_path, state_of(Base, "base.")))


def test_first_few_of_many_are_named(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"for 6 of .*: 'base\.embed\.weight', .*'head\.weight' and 1 more\nhint: give"
    ):
        match(build(Headed), stored(tmp_path, {"zzz": torch.ones(1)}))


def test_buffer_without_values_must_be_stored(tmp_path):
    model = build(lambda: Holds(lambda _: torch.rand(3), persistent=True))
    tensors = {name: tensor for name, tensor in state_of(lambda: nn.Linear(4, 3), "layer.").items()}
    with pytest.raises(CheckpointError, match="no tensor for 1 of the model's parameters and buffers: 'kept'"):
        match(model, stored(tmp_path, tensors))
    assert match(model, stored(tmp_path, tensors | {"kept": torch.ones(3)})).names["kept"] == ("kept",)


def test_other_shape_is_refused(tmp_path):
    tensors = state_of(Base) | {"block.bias": torch.ones(4), "embed.bias": torch.ones(2, 1)}
    text = r"is of another model: 'embed\.bias' has shape \[2\] in the model, \[2, 1\] as stored; 'block\.bias' has "
    with pytest.raises(CheckpointError, match=text):
        match(build(Base), stored(tmp_path, tensors))
