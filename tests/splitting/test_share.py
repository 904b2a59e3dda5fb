"""A rank's part of a model: what is elsewhere is on the meta device, and comes back."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.errors import RuntimeStateError
from pipeloom.splitting import Share, Ties, split


class Table(nn.Module):
    """A layer with a buffer that is saved and one that is not."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("saved", torch.ones(2))
        self.register_buffer("unsaved", torch.zeros(2), persistent=False)


def model(is_tied=False):
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 4), Table(), nn.Linear(4, 4), nn.Linear(4, 4))
    if is_tied:
        made[3].weight = made[0].weight
    return made


def shares(is_tied=False, num_stages=4, stages_of=lambda rank: [rank]):
    """What each process has after it made the whole model and kept its stages."""
    found = []
    for rank in range(num_stages):
        own = split(model(is_tied), num_stages=num_stages)
        share = Share(own, Ties(own), stages_of(rank))
        share.release()
        found.append((own.root, share))
    return found


@pytest.mark.parametrize("is_tied", [False, True])
def test_parts_are_the_whole(is_tied):
    expected = model(is_tied).state_dict()
    parts = [share.state_dict() for _, share in shares(is_tied)]
    assert sorted(name for part in parts for name in part) == sorted(expected)
    assert all(torch.equal(value, expected[name]) for part in parts for name, value in part.items())
    assert [share.layout()[rank] for rank, (_, share) in enumerate(shares())] == [list(p) for p in parts_of(shares())]


def test_a_weight_tied_three_ways_comes_back():
    """A rank with the second copy had no value for the third."""

    def tied():
        made = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        made[1].weight = made[2].weight = made[0].weight
        return made

    torch.manual_seed(0)
    made = tied()
    models = [copy.deepcopy(made) for _ in range(3)]
    found = []
    for rank, each in enumerate(models):
        own = split(each, num_stages=3)
        found.append((own.root, Share(own, Ties(own), [rank])))
        found[-1][1].release()
    contents = {name: each.detach().clone() for _, share in found for name, each in share.contents().items()}
    for rank, (root, share) in enumerate(found):
        share.fill({name: each + 1 for name, each in contents.items()})
        share._ties.undo()
        assert root[0].weight is root[1].weight is root[2].weight
        assert torch.equal(root[2].weight, contents["0.weight"] + (rank > 0)), "the owner's value"


def parts_of(found):
    return [share.state_dict() for _, share in found]


def test_each_parameter_is_trained_by_one_rank():
    found = shares(is_tied=True)
    names = [name for _, share in found for name, _ in share.named_parameters()]
    assert names == [name for name, _ in model(is_tied=True).named_parameters()]
    assert all(share.parameter_names == names for _, share in found)


def test_what_is_elsewhere_takes_no_memory():
    root, _ = shares()[1]
    devices = {name: each.device.type for name, each in [*root.named_parameters(), *root.named_buffers()]}
    assert {name for name, device in devices.items() if device == "cpu"} == {
        "1.linear.weight",
        "1.linear.bias",
        "1.saved",
        "1.unsaved",
    }


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_model_comes_back_with_what_was_trained(is_tied):
    found = shares(is_tied)
    for _, share in found:
        for _, parameter in share.named_parameters():
            parameter.data += 1.0
    contents = {name: each for _, share in found for name, each in share.contents().items()}
    for root, share in found:
        share.fill({name: each.detach().clone() for name, each in contents.items()})
        share._ties.undo()
        assert all(
            torch.equal(each, model(is_tied).state_dict()[name] + ("weight" in name or "bias" in name))
            for name, each in root.state_dict().items()
        )
        assert (root[3].weight is root[0].weight) == is_tied
        assert root[1].unsaved.tolist() == [0.0, 0.0]


class Head(nn.Module):
    """Has the bias of its layer too, as the head of BERT."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4))
        self.layer = nn.Linear(4, 4)
        self.layer.bias = self.bias

    def forward(self, x):
        return self.layer(x)


class WithHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = Head()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def halves():
    """What each of two processes has of a model that was cut by running it."""
    found = []
    for rank in range(2):
        made = split(WithHead(), cuts=["layers.2"], inputs=((torch.zeros(2, 4),), {}))
        found.append((made.root, Share(made, Ties(made), [rank])))
        found[-1][1].release()
    return found


def test_a_weight_that_a_module_around_units_has_too_comes_back():
    """The bias of BERT's head: after `unwrap` rank 0 had an old one beside the trained one, and they were two."""
    found = halves()
    assert found[0][0].head.bias is found[0][0].head.layer.bias
    assert found[0][0].head.bias.is_meta
    contents = {name: each.detach() + 1 for _, share in found for name, each in share.contents().items()}
    for rank, (root, share) in enumerate(found):
        share.fill(contents)
        assert root.head.bias is root.head.layer.bias
        assert torch.equal(root.head.bias, torch.full((4,), float(rank == 0)))


def test_what_is_elsewhere_of_a_model_that_was_cut_by_running_it_takes_no_memory():
    """Each rank had all of the model for as long as the pipeline lived: what looks at `requires_grad` held it."""
    model = WithHead()
    weights = [weakref.ref(each) for each in model.parameters()]
    made = split(model, cuts=["layers.2"], inputs=((torch.zeros(2, 4),), {}))
    Share(made, Ties(made), [0]).release()
    gc.collect()
    assert [each() is None for each in weights] == [False] * 4 + [True] * 4


def test_weights_that_are_elsewhere_may_be_frozen_later():
    """The ranks did not make the same plan: "another schedule, seed or step"."""
    digests = []
    for root, share in halves():
        cut, inputs = share._made.cut, ((torch.zeros(2, 4),), {})
        digests.append(cut.plan(inputs).digest)
        root.layers[:2].requires_grad_(False)
        digests.append(cut.plan(inputs).digest)
    assert digests[:2] == digests[2:]
    assert digests[0] != digests[1]


def test_a_model_of_which_a_part_is_elsewhere_says_so_when_it_is_called():
    """`model.generate()` between steps: "Tensor on device cpu is not on the expected device meta!"."""
    found = halves()
    contents = {name: each.detach() for _, share in found for name, each in share.contents().items()}
    for root, share in found:
        said = r"the WithHead was called itself, and 1 of its 2 stages are in other processes\nhint: call the pipeline"
        with pytest.raises(RuntimeStateError, match=said):
            root(torch.zeros(2, 4))
        with pytest.raises(RuntimeStateError, match=r"given to a pipeline, and 1 of its 2 stages are in other"):
            pl.Pipeline(root, num_stages=2)
        share.fill(contents)
        assert root(torch.zeros(2, 4)).shape == (2, 4)


def test_a_part_loads_from_the_whole():
    root, share = shares()[2]
    whole = {name: value + 1 for name, value in model().state_dict().items()}
    share.load_state_dict(whole, strict=True)
    assert torch.equal(root[2].weight, whole["2.weight"])
    with pytest.raises(RuntimeError, match=r"missing keys in state_dict: \['2.bias'\]; unexpected keys: \['other'\]"):
        share.load_state_dict({"2.weight": whole["2.weight"], "other": torch.ones(1)}, strict=True)
    assert share.load_state_dict({}, strict=False).missing_keys == ["2.weight", "2.bias"]


def test_a_whole_share_is_the_model():
    own = split(model(), num_stages=2)
    share = Share(own, Ties(own), range(2))
    share.release()
    before = copy.deepcopy(own.root.state_dict())
    assert share.is_whole
    assert all(torch.equal(value, before[name]) for name, value in share.state_dict().items())


class Versioned(nn.Linear):
    """Its saved form has changed once; torch tells the loader by the version beside the state."""

    _version = 2

    def _load_from_state_dict(self, state, prefix, metadata, *rest):
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = -state[f"{prefix}weight"]
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def test_versions_beside_a_state_reach_their_modules():
    """A part of a state was loaded as if it were of the oldest version, and migrated twice."""
    made = split(nn.Sequential(nn.Linear(2, 2), nn.Sequential(Versioned(2, 2))), num_stages=2)
    share = Share(made, Ties(made), [1])
    state, before = made.root.state_dict(), made.root[1][0].weight.detach().clone()
    share.load_state_dict(state, strict=True)
    assert torch.equal(made.root[1][0].weight, before)
    share.load_state_dict(dict(state), strict=True)
    assert torch.equal(made.root[1][0].weight, -before)


def test_a_tied_weight_is_saved_as_it_is_now():
    """Its second name had the value from before ``weight.data`` was assigned."""
    root, share = shares(is_tied=True)[0]
    root[0].weight.data = torch.full((4, 4), 5.0)
    assert share.state_dict()["3.weight"].tolist() == [[5.0] * 4] * 4


def test_a_tied_weight_of_others_takes_no_memory_either():
    """The ties went on holding it."""
    made = split(model(is_tied=True), num_stages=4)
    share, weight = Share(made, ties := Ties(made), [1]), weakref.ref(made.root[0].weight)
    share.release()
    gc.collect()
    assert weight() is None
    assert not ties.crossing([1])
