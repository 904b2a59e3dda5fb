"""What a stage's code sees of devices, without having any: placeholders report the stage's own."""

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.splitting.cut import Cut
from pipeloom.standins.placeholder import Placeholder
from pipeloom.testing import sequential_step
from tests.numerics.asserts import assert_bit_equal, assert_same_gradients


class LooksAtDevices(nn.Module):
    """Makes a mask where a unit's output is, and positions where its first parameter is."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("steps", torch.arange(8.0))
        self.seen = []

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).tanh() * self.steps
            self.seen.append((x.device, next(self.parameters()).device))
            x = x * torch.ones(8, device=x.device)
        return x


def test_a_placeholder_is_one_object_on_each_device():
    made = Placeholder(torch.empty(2, device="meta"), torch.device("cpu"), requires_grad=True)
    other = made.at(torch.device("cuda", 1))
    assert other.device == torch.device("cuda", 1)
    assert other.requires_grad
    assert made.at(torch.device("cuda", 1)) is other
    assert made.at(torch.device("cpu")) is made


@pytest.mark.parametrize("devices", [["cpu", "cpu"], None])
def test_stages_that_are_placed_have_the_same_bits(devices):
    torch.manual_seed(0)
    model, reference, inputs = LooksAtDevices(), LooksAtDevices(), torch.randn(4, 8)
    reference.load_state_dict(model.state_dict())
    options = {"num_stages": 2, "num_microbatches": 2, "loss_fn": lambda output: output.square().mean()}
    with pl.Pipeline(model, devices=devices, **options) as pipe:
        assert_bit_equal(pipe.step(inputs), sequential_step(reference, inputs, **options), "loss")
        assert_same_gradients(pipe, reference)


def test_the_code_of_a_later_stage_sees_its_own_device():
    """A stage on the meta device stands for one on a GPU: nothing in it may be made on the CPU."""
    model = LooksAtDevices()
    cut = Cut(model, ((torch.randn(2, 8),), {}), num_stages=2, cuts=None)
    part = cut.part(1, torch.device("meta"))
    for unit in cut.stages[1]:
        unit.module.to("meta")
    received = [torch.randn(2, 8, device="meta") for _ in cut.plan_of_first.stage(1).incoming]
    inputs = ((torch.randn(2, 8, device="meta"),), {})
    output, _ = part(cut.plan_of_first, inputs, received, lambda *_: torch.no_grad())
    assert output.device.type == "meta"
    seen = cut._trees[1].clones.root.seen
    assert {device.type for pair in seen for device in pair} == {"meta"}
