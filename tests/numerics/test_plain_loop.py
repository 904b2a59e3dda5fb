"""Contract 1: without dropout, the bits of a loop that anybody would write, with nothing of Pipeloom in it."""

import copy

import pytest
import torch
from torch import nn

import pipeloom as pl
from tests.numerics.asserts import assert_bit_equal, assert_same_gradients
from tests.numerics.models import CASES, stages, token_loss

PLAIN = ("mlp", "convolution", "transformer", "containers")


def _plain_step(model, inputs, target, loss_fn, num_microbatches):
    total = torch.zeros(())
    for x, y in zip(inputs.tensor_split(num_microbatches), target.tensor_split(num_microbatches), strict=True):
        loss = loss_fn(model(x), y)
        is_even = len(inputs) % num_microbatches == 0
        loss = loss / num_microbatches if is_even else loss * (len(x) / len(inputs))
        loss.backward()
        total = total + loss.detach()
    return total


@pytest.mark.parametrize(("num_rows", "num_microbatches"), [(12, 4), (12, 3), (10, 4), (7, 5)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("case", PLAIN)
def test_gradient_accumulation(case, schedule, num_rows, num_microbatches):
    case = CASES[case]
    model = case.build()
    reference = copy.deepcopy(model)
    inputs, target = case.batch(num_rows)
    with pl.Pipeline(
        model, num_stages=stages(3), schedule=schedule, num_microbatches=num_microbatches, loss_fn=case.loss_fn
    ) as pipe:
        for _ in range(2):
            found = pipe.step(inputs, target=target)
            expected = _plain_step(reference, inputs, target, case.loss_fn, num_microbatches)
            assert_bit_equal(found, expected, "loss")
        assert_same_gradients(pipe, reference)


def test_autocast_around_the_forward_only():
    """As torch's documentation has it: forward and loss under autocast, backward outside."""
    case = CASES["transformer"]
    model = case.build()
    reference = copy.deepcopy(model)
    inputs, target = case.batch(8)
    with pl.Pipeline(model, num_stages=stages(2), num_microbatches=2, loss_fn=case.loss_fn) as pipe:
        with torch.autocast("cpu", torch.bfloat16):
            pipe.step(inputs, target=target)
        for x, y in zip(inputs.chunk(2), target.chunk(2), strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                loss = case.loss_fn(reference(x), y) / 2
            loss.backward()
        assert_same_gradients(pipe, reference)


class Twice(nn.Module):
    """Uses its input twice under autocast, and once as it is, as post-norm attention does."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return torch.tanh(self.one(x).float()) * torch.sigmoid(self.two(x).float()) + x


def test_autocast_casts_a_stages_input_once_for_each_use():
    """autocast keeps the casts of leaves, so a stage whose input is a leaf added two gradients up in bfloat16."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Twice() for _ in range(4)))
    reference, inputs, target = copy.deepcopy(model), *torch.randn(2, 8, 16)
    with pl.Pipeline(model, num_stages=stages(4), num_microbatches=2, loss_fn=nn.functional.mse_loss) as pipe:
        for _ in range(3):  # the first step looks whether stages write into their inputs
            with torch.autocast("cpu", torch.bfloat16):
                pipe.step(inputs, target=target)
            for x, y in zip(inputs.chunk(2), target.chunk(2), strict=True):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = nn.functional.mse_loss(reference(x), y) / 2
                loss.backward()
            assert_same_gradients(pipe, reference)


def _sum_and_count(logits, targets):
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
    return losses, (targets != -1).sum()


def _counted(targets):
    return (targets != -1).sum()


def _padded():
    inputs, target = CASES["transformer"].batch(9)
    target = target.clone()
    target[0, 1:] = -1
    target[4:6] = -1
    target[8, 5] = -1
    return inputs, target


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_counts_known_before_the_backward(schedule):
    """B is seeded with 1/Σcount: what a loop gives that divides each sum by the batch's token count."""
    model = CASES["transformer"].build()
    reference = copy.deepcopy(model)
    inputs, target = _padded()
    options = {"loss_fn": _sum_and_count, "loss_count": _counted}
    with pl.Pipeline(model, num_stages=stages(2), schedule=schedule, num_microbatches=4, **options) as pipe:
        found = pipe.step(inputs, target=target)
        for x, y in zip(inputs.tensor_split(4), target.tensor_split(4), strict=True):
            (_sum_and_count(reference(x), y)[0] / _counted(target)).backward()
        assert_same_gradients(pipe, reference)
    losses, count = _sum_and_count(reference(inputs), target)
    torch.testing.assert_close(found, losses.detach() / count)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_counts_known_after_the_losses(schedule):
    """Without count(target), sums accumulate apart and are scaled once, then join the gradients of earlier steps."""
    model = CASES["transformer"].build()
    reference = copy.deepcopy(model)
    inputs, target = _padded()
    with pl.Pipeline(
        model, num_stages=stages(2), schedule=schedule, num_microbatches=4, loss_fn=_sum_and_count
    ) as pipe:
        for _ in range(2):
            pipe.step(inputs, target=target)
            earlier = [p.grad for p in reference.parameters()]
            reference.zero_grad()
            for x, y in zip(inputs.tensor_split(4), target.tensor_split(4), strict=True):
                _sum_and_count(reference(x), y)[0].backward()
            for parameter, before in zip(reference.parameters(), earlier, strict=True):
                scaled = parameter.grad * (1 / _counted(target).item())
                parameter.grad = scaled if before is None else before + scaled
        assert_same_gradients(pipe, reference)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_padding_never_changes_the_result(num_stages):
    """The gradient-accumulation bug of 2024: means of unequal micro-batches. Ours is the whole batch's token mean."""
    model = CASES["transformer"].build()
    reference = copy.deepcopy(model)
    inputs, target = _padded()
    options = {"loss_fn": _sum_and_count, "loss_count": _counted}
    with pl.Pipeline(model.double(), num_stages=num_stages, num_microbatches=4, **options) as pipe:
        found = pipe.step(inputs, target=target)
        losses, count = _sum_and_count(reference.double()(inputs), target)
        (losses / count).backward()
        torch.testing.assert_close(found, losses.detach() / count, rtol=1e-12, atol=0)
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, reference.get_parameter(name).grad, rtol=1e-10, atol=1e-14)


def test_mean_losses_with_counts_are_the_token_mean():
    """A mean loss with loss_count is weighted by what it counts, not by rows."""
    model = CASES["transformer"].build()
    reference = copy.deepcopy(model)
    inputs, target = _padded()

    def mean_loss(logits, targets):
        return token_loss_ignoring(logits, targets)

    with pl.Pipeline(model, num_stages=stages(2), num_microbatches=3, loss_fn=mean_loss, loss_count=_counted) as pipe:
        found = pipe.step(inputs, target=target)
    torch.testing.assert_close(found, token_loss_ignoring(reference(inputs), target).detach())


def token_loss_ignoring(logits, targets):
    """Mean over the tokens that count."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def test_summed_losses_and_loss_scale():
    case = CASES["mlp"]
    model = case.build()
    reference = copy.deepcopy(model)
    inputs, target = case.batch(10)
    sum_loss = nn.CrossEntropyLoss(reduction="sum")
    with pl.Pipeline(model, num_stages=stages(2), num_microbatches=4, loss_fn=sum_loss, loss_reduction="sum") as pipe:
        found = pipe.step(inputs, target=target, loss_scale=8.0)
        total = torch.zeros(())
        for x, y in zip(inputs.tensor_split(4), target.tensor_split(4), strict=True):
            loss = sum_loss(reference(x), y)
            (loss * 8.0).backward()
            total = total + loss.detach()
        assert_bit_equal(found, total, "loss")
        assert_same_gradients(pipe, reference)


def test_token_loss_is_the_plain_one():
    """The loss that the cases use is torch's own mean."""
    logits, targets = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    expected = nn.CrossEntropyLoss()(logits.reshape(6, 5), targets.reshape(6))
    assert torch.equal(token_loss(logits, targets), expected)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch accumulates in the parameter's dtype")
def test_gradients_accumulate_in_the_dtype_that_is_asked_for():
    """Contract 5: bfloat16 parameters, gradients added up in float32, as a loop that sets torch's own switch."""
    case = CASES["mlp"]
    model, reference = case.build().bfloat16(), case.build().bfloat16()
    inputs, target = case.batch(8)
    for parameter in reference.parameters():
        parameter.grad_dtype = torch.float32
    pipe = pl.Pipeline(model, num_stages=stages(3), num_microbatches=4, loss_fn=case.loss_fn, grad_dtype=torch.float32)
    pipe.step(inputs.bfloat16(), target=target)
    _plain_step(reference, inputs.bfloat16(), target, case.loss_fn, 4)
    assert all(parameter.grad.dtype == torch.float32 for parameter in pipe.parameters())
    assert_same_gradients(pipe, reference)
    pipe.close()
