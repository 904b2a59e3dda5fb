"""What ranks do in the tests of what travels between them; an assertion that fails ends the rank with code 1."""

from __future__ import annotations

import copy
import gc
import os
import threading
import time
import weakref
from collections import namedtuple

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.errors import PeerFailed, RuntimeStateError
from pipeloom.processes.lanes import Lanes
from pipeloom.testing import sequential_step
from tests.facade.models import Calls
from tests.numerics.asserts import assert_bit_equal, assert_same_gradients, assert_same_state

WIDTH = 8


class Widened(nn.Module):
    """Hands on rows of ``num_columns``, so that a boundary is as large as wanted."""

    def __init__(self, num_columns: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, num_columns)

    def forward(self, x: Tensor) -> Tensor:
        """(B, WIDTH) → (B, num_columns)."""
        return torch.tanh(self.linear(x))


class Many(nn.Module):
    """Hands on a dict: large and small tensors, a view, the same tensor twice, integers, plain values, nothing."""

    def __init__(self, num_columns: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, num_columns)

    def forward(self, x: Tensor) -> dict[str, object]:
        """(B, WIDTH) → what `Joined` takes."""
        large = torch.tanh(self.linear(x))
        return {
            "large": large,
            "twice": [large, x],
            "first": large.t()[:3],
            "mask": x > 0,
            "index": torch.arange(len(x)),
            "scale": 0.5,
            "none": None,
            "empty": x[:0],
        }


class Joined(nn.Module):
    """Takes it up again."""

    def __init__(self, num_columns: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_columns, WIDTH)

    def forward(self, value: dict) -> Tensor:
        """What `Many` made → (B, WIDTH)."""
        assert value["twice"][0] is value["large"]
        assert value["none"] is None
        assert value["empty"].shape == (0, WIDTH)
        hidden = self.linear(value["large"] + value["twice"][0]) * value["scale"]
        return (hidden + value["twice"][1]) * value["mask"] + value["first"].sum() * value["index"][:, None]


def trains_like_the_oracle(layers: list[nn.Module], batches: list[int], num_microbatches: int) -> None:
    """A step for each number of rows, with the bits of the oracle."""
    torch.manual_seed(0)
    for layer in layers:
        layer.linear.reset_parameters()
    model = nn.Sequential(*layers)
    reference, loss_fn = copy.deepcopy(model), nn.MSELoss()
    options = {"num_microbatches": num_microbatches, "loss_fn": loss_fn}
    with pl.Pipeline(model, num_stages=len(layers), **options) as pipe:
        for step_index, num_rows in enumerate(batches):
            inputs = torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(num_rows))
            target = torch.zeros(num_rows, layers[-1].linear.out_features)
            found = pipe.step(inputs, target=target)
            expected = sequential_step(reference, inputs, target=target, step_index=step_index, **options)
            assert_bit_equal(found, expected, "loss")
        assert_same_gradients(pipe, reference)
        assert_same_state(pipe, reference)


def evaluates_and_is_whole_again(num_ranks: int) -> None:
    """Outputs are on the last rank, or everywhere; the model comes back whole, with what was trained."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_ranks)))
    model[0].register_buffer("table", torch.arange(3.0), persistent=False)
    model[-1].weight = model[0].weight
    reference, inputs = copy.deepcopy(model), torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0))
    pipe = pl.Pipeline(model, num_stages=num_ranks, num_microbatches=3, loss_fn=lambda o: o.square().mean())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (pipe, reference)]
    pipe.step(inputs)
    sequential_step(reference, inputs, num_microbatches=3, loss_fn=lambda o: o.square().mean(), num_stages=num_ranks)
    for optimizer in optimizers:
        optimizer.step()
    is_last = pipe.group.rank == num_ranks - 1
    output, everywhere = pipe(inputs), pipe(inputs, broadcast_output=True)
    assert (output is not None) == is_last
    expected = torch.cat([reference(part) for part in inputs.chunk(3)])
    assert_bit_equal(everywhere, expected, "output")
    whole = pipe.full_state_dict(to=1)
    assert list(whole) == (list(reference.state_dict()) if pipe.group.rank == 1 else [])
    for name, value in whole.items():
        assert_bit_equal(value, reference.state_dict()[name], name)
    assert pipe.unwrap() is model
    assert_bit_equal(model(inputs), reference(inputs), "output of the whole model")
    assert model[-1].weight is model[0].weight
    assert model[0].table.tolist() == [0.0, 1.0, 2.0]


def is_given_another_batch(rank_of_it: int, num_ranks: int) -> None:
    """One rank reads other data."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(num_ranks)]
    pipe = pl.Pipeline(nn.Sequential(*layers), num_stages=num_ranks, loss_fn=lambda o: o.sum())
    value = 2.0 if pipe.group.rank == rank_of_it else 1.0
    pipe.step(torch.full((6, WIDTH), value))


def asks_for_other_ranks(num_stages: int, **options: object) -> None:
    """A pipeline that these processes cannot be."""
    pl.Pipeline(nn.Sequential(*(nn.Linear(2, 2) for _ in range(num_stages))), num_stages=num_stages, **options)


def goes_on_after_a_failed_step(num_ranks: int) -> None:
    """Contract 14: every rank raises, and the next step is as if nothing had been."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_ranks)))
    reference, inputs = copy.deepcopy(model), torch.ones(6, WIDTH)
    is_failing = [True]

    def loss_fn(output: Tensor) -> Tensor:
        if is_failing[0]:
            raise ZeroDivisionError("the loss went wrong")
        return output.square().mean()

    pipe = pl.Pipeline(model, num_stages=num_ranks, num_microbatches=3, loss_fn=loss_fn)
    with pytest.raises((ZeroDivisionError, pl.PipeloomError), match="the loss went wrong"):
        pipe.step(inputs)
    assert all(parameter.grad is None for parameter in pipe.parameters())
    assert pipe.clip_grad_norm_(1.0).item() == 0.0, "what all ranks do together works again"
    assert len(pipe.full_state_dict()) == (2 * num_ranks if pipe.group.rank == 0 else 0)
    is_failing[0] = False
    pipe.step(inputs)
    sequential_step(reference, inputs, num_microbatches=3, loss_fn=loss_fn)
    assert_same_gradients(pipe, reference)


class Narrowed(nn.Module):
    """Takes `Widened`'s rows back to a few columns."""

    def __init__(self, num_columns: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_columns, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(B, num_columns) → (B, WIDTH)."""
        return self.linear(x)


def makes_its_own_model(seeds: list[int], cuts: list[list[int]]) -> None:
    """Each rank from a seed, and with cuts, of its own."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(seeds[rank])
    pl.Pipeline(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))), cuts=cuts[rank])


def loss_uses_a_weight_elsewhere() -> None:
    """A closure over the first layer's weight."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    weight = model[0].weight
    pl.Pipeline(model, num_stages=2, loss_fn=lambda output: (output @ weight).sum())


def goes_on_after_each_exchange(num_ranks: int) -> None:
    """A step right after what the others may still be receiving, and an end right after it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(200, 200) for _ in range(num_ranks)))
    pipe = pl.Pipeline(model, num_stages=num_ranks, num_microbatches=2, loss_fn=nn.functional.mse_loss)
    inputs = torch.ones(4, 200)
    for _ in range(5):
        assert pipe(inputs, broadcast_output=True).shape == (4, 200)
        pipe.step(inputs, target=inputs)
    assert len(pipe.full_state_dict(to=1)) == (2 * num_ranks if pipe.group.rank == 1 else 0)
    pipe.close()


class OneTuple(nn.Module):
    """A tuple of one small tensor: its form once was taken for that of gradients."""

    def forward(self, x: Tensor) -> tuple[Tensor]:
        """(B, WIDTH) → ((B, WIDTH),)."""
        return (x * 2,)


def broadcasts_containers() -> None:
    """Outputs of every form on every rank, with steps between."""
    for last, expected in ((OneTuple(), (2.0,)), (Calls(lambda x: {"out": x[:1, :1]}), {"out": 1.0})):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), last)
        nn.init.eye_(model[0].weight)
        nn.init.zeros_(model[0].bias)
        with pl.Pipeline(model, num_stages=2, num_microbatches=1, loss_fn=_first_sum) as pipe:
            for _ in range(2):
                found = pipe(torch.ones(2, WIDTH), broadcast_output=True)
                pipe.step(torch.ones(2, WIDTH))
        value = found[0] if isinstance(expected, tuple) else found["out"]
        assert float(value.flatten()[0]) == (expected[0] if isinstance(expected, tuple) else expected["out"])


def _first_sum(output: object) -> Tensor:
    return (output[0] if isinstance(output, tuple) else output["out"]).sum()


def hands_on_a_type_of_a_function() -> None:
    """A named tuple that no other process can find."""
    own = namedtuple("own", "x")
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), Calls(own)), Calls(lambda value: value.x)]
    with pl.Pipeline(nn.Sequential(*layers), num_stages=2, loss_fn=lambda o: o.sum()) as pipe:
        pipe.step(torch.ones(2, WIDTH))


def takes_conjugated_inputs() -> None:
    """A view whose numbers are not in memory as they are read."""
    inputs = torch.ones(4, WIDTH, dtype=torch.complex64).conj()
    layers = [Calls(lambda x: x.imag.neg().real + x.real), nn.Linear(WIDTH, WIDTH)]
    with pl.Pipeline(nn.Sequential(*layers), num_stages=2, loss_fn=lambda o: o.sum()) as pipe:
        pipe.step(inputs)


def steps_in_a_child() -> None:
    """A worker of a data loader, say, that got the pipeline by accident."""
    layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    pipe = pl.Pipeline(nn.Sequential(*layers), num_stages=2, loss_fn=lambda o: o.sum())
    child = os.fork()
    if child == 0:
        with pytest.raises(RuntimeStateError, match="used in a child that one of them forked"):
            pipe.step(torch.ones(2, WIDTH))
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    pipe.step(torch.ones(2, WIDTH))


def makes_many_and_closes_none() -> None:
    """Connections and threads go with their pipeline."""
    before = None
    for _ in range(5):
        layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
        pipe = pl.Pipeline(nn.Sequential(*layers), num_stages=2, loss_fn=lambda o: o.sum())
        pipe.step(torch.ones(2, WIDTH))
        del pipe, layers
        gc.collect()
        now = (len(os.listdir("/proc/self/fd")), threading.active_count())
        before = before or now
    assert now <= before


def makes_other_calls(call: str) -> None:
    """One rank makes a call that the others do not."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    pipe = pl.Pipeline(nn.Sequential(*layers), num_stages=3, loss_fn=lambda o: o.sum())
    is_other = pipe.group.rank == 2
    for _ in range(3):
        pipe.step(torch.ones(3, WIDTH))
        if call == "clip" and is_other:
            pipe.clip_grad_norm_(1.0)
        elif call == "broadcast":
            pipe(torch.ones(3, WIDTH), broadcast_output=is_other)
        elif call == "gather":
            pipe.full_state_dict(to=pipe.group.rank)


def reads_slices_of_other_data() -> None:
    """Inputs and targets cut from one tensor, as language models have them, and not the same on all ranks."""
    rank = int(os.environ["RANK"])
    rows = torch.arange(6 * 9).reshape(6, 9) + rank
    model = nn.Sequential(nn.Embedding(70, WIDTH), nn.Linear(WIDTH, 70))
    pipe = pl.Pipeline(model, num_stages=2, loss_fn=lambda o, t: nn.functional.cross_entropy(o.mT, t))
    pipe.step(rows[:, :-1], target=rows[:, 1:])


def has_other_numbers_in_the_middle() -> None:
    """Only one of four micro-batches differs."""
    rows = torch.zeros(32, WIDTH)
    rows[9:14] = float(os.environ["RANK"])
    layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    pl.Pipeline(nn.Sequential(*layers), num_microbatches=4, num_stages=2, loss_fn=lambda o: o.sum()).step(rows)


def ties_a_sparse_embedding() -> None:
    """Its gradient is sparse, the head's is dense."""
    torch.manual_seed(0)
    table = nn.Embedding(17, WIDTH, sparse=True)
    model = nn.Sequential(table, nn.Linear(WIDTH, WIDTH), UsesTable(table))
    reference = copy.deepcopy(model)
    options = {"num_microbatches": 2, "loss_fn": lambda o: o.square().mean()}
    tokens = torch.arange(8).reshape(4, 2)
    with pl.Pipeline(model, cuts=[1], **options) as pipe:
        pipe.step(tokens)
        sequential_step(reference, tokens, cuts=[1], **options)
        if pipe.group.rank == 0:
            found, expected = model[0].weight.grad, reference[0].weight.grad
            assert_bit_equal(found.to_dense(), expected.to_dense(), "gradient")


class UsesTable(nn.Module):
    """Looks its rows up in the table of another stage, and so gets a sparse gradient for it."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.weight = table.weight

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, WIDTH) → the same, and a row of the table."""
        row = nn.functional.embedding(torch.zeros(1, dtype=torch.long), self.weight, sparse=True)
        return x + row


def ends_right_after_a_step_with_a_large_tie() -> None:
    """The share of the gradient was still under way when the program ended."""
    model = nn.Sequential(nn.Embedding(200_000, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 200_000, bias=False))
    model[2].weight = model[0].weight
    pipe = pl.Pipeline(model, cuts=[1], num_microbatches=2, loss_fn=lambda o: o.square().mean())
    pipe.step(torch.zeros(2, 1, dtype=torch.long))


def evaluates_more_than_the_sockets_hold() -> None:
    """The last stage is late; what the first one has sent by then is more than connections take."""
    late = [True]

    def slow(x: Tensor) -> Tensor:
        if late.pop() if late else False:
            time.sleep(2.0)
        return x

    layers = [nn.Linear(WIDTH, 3_000), nn.Sequential(Calls(slow), nn.Linear(3_000, 1))]
    with pl.Pipeline(nn.Sequential(*layers), num_stages=2, num_microbatches=900, loss_fn=lambda o: o.mean()) as pipe:
        output = pipe(torch.ones(900, WIDTH))
        assert (output is None) == (pipe.group.rank == 0)


def goes_on_after_a_torn_transfer(num_columns: int) -> None:
    """Ctrl-C before a header: the next step once computed with this step's numbers, or named what nobody had heard."""
    layers = [nn.Linear(WIDTH, num_columns), nn.Linear(num_columns, WIDTH)]
    pipe = pl.Pipeline(nn.Sequential(*layers), num_stages=2, num_microbatches=1, loss_fn=lambda o: o.mean())
    if pipe.group.rank == 0:
        post = pipe._runtime._post
        way = post._mesh if num_columns > 10_000 else post._direct
        send = way.send

        def interrupted(*_: object) -> None:
            way.send = send
            raise KeyboardInterrupt

        way.send = interrupted
    with pytest.raises((KeyboardInterrupt, PeerFailed)):
        pipe.step(torch.ones(4, WIDTH))
    pipe.step(torch.ones(4, WIDTH))


def dies_while_others_make_the_pipeline() -> None:
    """Between the connections and the groups."""
    if os.environ["RANK"] == "1":
        Lanes.open = lambda _: os._exit(9)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    pl.Pipeline(nn.Sequential(*layers), num_stages=2)


def is_used_after_it_was_closed() -> None:
    """Each call says so."""
    layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    with pl.Pipeline(nn.Sequential(*layers), num_stages=2, loss_fn=lambda o: o.sum()) as pipe:
        pipe.step(torch.ones(2, WIDTH))
    for call in (
        pipe.full_state_dict,
        pipe.unwrap,
        lambda: pipe.clip_grad_norm_(1.0),
        lambda: pipe(torch.ones(2, WIDTH)),
    ):
        with pytest.raises(RuntimeStateError, match="the pipeline is closed"):
            call()


def fails_within_a_context() -> None:
    """The recommended form; the failing rank once lacked the line that the others end with."""
    layers = [nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), Calls(_fail))]
    with pl.Pipeline(nn.Sequential(*layers), num_stages=2, loss_fn=lambda o: o.sum()) as pipe:
        pipe.step(torch.ones(2, WIDTH))


def _fail(_: Tensor) -> Tensor:
    raise ValueError("the user's own mistake")


def evaluation_keeps_nothing() -> None:
    """A boundary tensor is free once its stage has read it."""
    seen = []

    def noted(x: Tensor) -> Tensor:
        assert all(each() is None for each in seen), "an earlier micro-batch's input is still there"
        seen.append(weakref.ref(x))
        return x * 2

    layers = [nn.Linear(WIDTH, WIDTH), Calls(noted)]
    with pl.Pipeline(nn.Sequential(*layers), num_stages=2, num_microbatches=4, loss_fn=lambda o: o.sum()) as pipe:
        pipe(torch.ones(8, WIDTH))
