"""What ranks that are processes do in the tests of streams; a failed assertion ends the rank with code 1."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

import pipeloom as pl
from pipeloom.errors import LossError, PeerFailed, RuntimeStateError
from pipeloom.testing import asynchronous_steps
from tests.asynchronous.models import MODELS, OPTIMIZERS, RULES, batches, plain, seeded, square
from tests.numerics.asserts import assert_bit_equal, assert_same_state


def train(num_ranks: int) -> None:
    """Losses on every rank, and its weights, have the bits of the rule; in two calls, with the momentum kept."""
    for name, kind in itertools.product(RULES, ("chain", "skips")):
        model, parts = seeded(MODELS[kind]), num_ranks if name == "pipedream-2bw" else 1
        reference, given = copy.deepcopy(model), batches(11, num_rows=2 * num_ranks)
        options = {"num_stages": num_ranks, "num_microbatches": parts, "loss_fn": square}
        made: dict[int, torch.optim.Optimizer] = {}

        def kept(
            weights: list[torch.nn.Parameter], made: dict[int, torch.optim.Optimizer] = made
        ) -> torch.optim.Optimizer:
            return made.setdefault(id(weights[0]), OPTIMIZERS["momentum"](weights))

        example = {"example_args": (given[0][0],)} if kind == "skips" else {}
        with pl.Pipeline(model, schedule=name, **options, **example) as pipe:
            stream = pipe.stream(OPTIMIZERS["momentum"])
            for call, part in enumerate((given[:4], given[4:])):
                expected = asynchronous_steps(reference, part, kept, rule=RULES[name], step_index=call, **options)
                assert_bit_equal(stream.train(part), expected, f"losses of {name}, {kind}, call {call}")
            assert_same_state(pipe, reference)
            assert len(stream.optimizers) == 1


def one_loss_is_nan(num_ranks: int) -> None:
    """The rank that sees it says so; the others hear of it, and nobody waits for ever."""
    given = batches(6)
    given[3][0][:] = torch.nan
    with pl.Pipeline(seeded(plain), num_stages=num_ranks, schedule="pipedream", loss_fn=square) as pipe:
        with pytest.raises((LossError, PeerFailed), match="the loss of batch 3 of the stream is nan"):
            pipe.stream(OPTIMIZERS["sgd"]).train(given)
        assert all(parameter.grad is None for parameter in pipe.parameters())


def share_weights(num_ranks: int) -> None:
    """Every rank refuses, also those in between that have no part in the weight."""
    model = seeded(plain)
    model[3].weight = model[0].weight
    options = {"num_stages": num_ranks, "schedule": "pipedream", "loss_fn": square}
    with pl.Pipeline(model, **options) as pipe, pytest.raises(RuntimeStateError, match="stages share weights"):
        pipe.stream(OPTIMIZERS["sgd"]).train(batches(3))


def one_cannot_make_its_optimizer(num_ranks: int) -> None:
    """What is wrong on one rank alone ends all of them."""
    with pl.Pipeline(seeded(plain), num_stages=num_ranks, schedule="pipedream", loss_fn=square) as pipe:

        def optimizer(weights: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
            if pipe.group.rank == 1:
                raise ZeroDivisionError("no optimizer here")
            return torch.optim.SGD(weights, lr=0.1)

        with pytest.raises((ZeroDivisionError, PeerFailed), match="no optimizer here"):
            pipe.stream(optimizer).train(batches(3))
