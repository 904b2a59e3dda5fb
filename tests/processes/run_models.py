"""What ranks do in the tests of models that are cut by running them; a failed assertion ends the rank with code 1."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

import pipeloom as pl
from pipeloom.checkpoint import CheckpointStore, Saver, load_checkpoint, save_checkpoint
from pipeloom.testing import sequential_step
from tests.numerics.asserts import assert_bit_equal, assert_same_gradients, assert_same_state

WIDTH = 8
BLOCKS = 8


class Block(nn.Module):
    """A residual block with dropout and a buffer that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        """(B, WIDTH), (B, 1) → (B, WIDTH)."""
        return x + self.drop(torch.tanh(self.norm(self.linear(x)))) * scale


class Skips(nn.Module):
    """Skips over every distance, a class token of its own, tied ends, a counter, another way for padded batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.token = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, mask: Tensor, *, shift: float = 0.0) -> dict[str, Any]:
        """(B, WIDTH), (B,) → a dict with the output, a skipped value, and what needs no gradient."""
        self.calls.add_(1)
        x = self.first(x) + self.token
        first, kept = x, []
        scale = mask[:, None].to(x.dtype)
        if not bool(mask.all()):
            x = x * scale
        for index, block in enumerate(self.blocks):
            x = block(x, scale)
            kept.append(x)
            if index >= BLOCKS // 2:
                x = x + kept[BLOCKS - 1 - index]
        return {"out": self.last(x) + first + shift, "middle": kept[1], "mask": mask, "none": None}


def loss_fn(output: dict[str, Any], target: Tensor) -> Tensor:
    """A scalar of all that comes out."""
    return (output["out"] - target).square().mean() + output["middle"].square().mean() * 0.1


def model() -> Skips:
    """The same one in every process."""
    torch.manual_seed(0)
    return Skips()


def batch(num_rows: int, step: int) -> dict[str, Tensor]:
    """Keyword arguments of a step; the last rows are padding in every other batch."""
    generator = torch.Generator().manual_seed(step)
    mask = torch.ones(num_rows, dtype=torch.bool)
    mask[num_rows - step % 2 :] = False
    return {"x": torch.randn(num_rows, WIDTH, generator=generator), "mask": mask}


def _trained(pipe: pl.Pipeline, reference: nn.Module, num_stages: int, sizes: list[int], cuts: Any = None) -> None:
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (pipe, reference)]
    for step, size in enumerate(sizes):
        inputs, target = batch(size, step), torch.zeros(size, WIDTH)
        found = pipe.step(**inputs, target=target)
        options: dict[str, Any] = {"num_microbatches": 4, "loss_fn": loss_fn, "num_stages": num_stages}
        options["cuts"] = cuts
        expected = sequential_step(reference, **inputs, target=target, step_index=step, **options)
        assert_bit_equal(found, expected, "loss")
        assert_same_gradients(pipe, reference)
        norms = [pipe.clip_grad_norm_(0.5), nn.utils.clip_grad_norm_(reference.parameters(), 0.5)]
        assert torch.allclose(*norms, rtol=1e-6)
        for parameter, other in _pairs(pipe, reference):
            parameter.grad.copy_(other.grad)  # norms are summed by stage, so they may differ in the last bit
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(pipe, reference)


def _pairs(pipe: pl.Pipeline, reference: nn.Module) -> list[tuple[Tensor, Tensor]]:
    own = dict(reference.named_parameters())
    return [(parameter, own[name]) for name, parameter in pipe.named_parameters() if parameter.grad is not None]


def at_once(forward: Callable[[], None], backward: Callable[[], None]) -> None:
    """Runs a pair with a thread for its forward."""
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(forward)
        backward()
        running.result()


IN_PAIRS = {"schedule": "dualpipe-v", "num_stages": 4, "overlap": at_once, "receive_slots": 3}


def trains(num_ranks: int, options: dict[str, Any]) -> None:
    """Steps with batches of several sizes, with the bits of the oracle; then the model is whole again."""
    made, reference = model(), model()
    given = {"num_stages": num_ranks, "num_microbatches": 4, "loss_fn": loss_fn, "example_kwargs": batch(3, 0)}
    with pl.Pipeline(made, **given | options) as pipe:
        _trained(pipe, reference, pipe.num_stages, [12, 12, 10, 12], options.get("cuts"))
        evaluated = pipe.eval()(**batch(9, 1), broadcast_output=True)
        parts = [batch(9, 1)["x"].split([3, 2, 2, 2]), batch(9, 1)["mask"].split([3, 2, 2, 2])]
        expected = torch.cat([reference.eval()(*part)["out"] for part in zip(*parts, strict=True)])
        assert_bit_equal(evaluated["out"], expected, "output")
        assert pipe.unwrap() is made
    for (name, tensor), other in zip(made.state_dict().items(), reference.state_dict().values(), strict=True):
        if name != "calls":  # evaluation was counted in one of them
            assert_bit_equal(tensor, other, name)
    assert made.last.weight is made.first.weight


def reads_its_weights(num_ranks: int, path: str) -> None:
    """A factory and a file: parameters are read where they live, and train as those of a model that was loaded."""
    reference = model()
    reference.token.data.fill_(2.0)
    if int(__import__("os").environ["RANK"]) == 0:
        state = {name: each.clone() for name, each in reference.state_dict().items() if name != "last.weight"}
        save_file(state, f"{path}.part")
        Path(f"{path}.part").rename(path)
    import time

    while not Path(path).exists():
        time.sleep(0.01)
    torch.manual_seed(7)
    options = {"num_stages": num_ranks, "num_microbatches": 4, "loss_fn": loss_fn, "example_kwargs": batch(3, 0)}
    with pl.Pipeline(factory=Skips, weights=path, **options) as pipe:
        here = [each for each in pipe._root.parameters() if not each.is_meta]
        assert 0 < len(here) < len(list(reference.parameters())) + 1
        _trained(pipe, reference, num_ranks, [12, 12])


class LooksLate(nn.Module):
    """Looks at numbers when the layers are done, and then uses a weight that it used first too, and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.both, self.late = nn.Parameter(torch.full((WIDTH,), 1.3)), nn.Parameter(torch.full((WIDTH,), 0.7))

    def forward(self, x: Tensor) -> Tensor:
        """(B, WIDTH) → a loss."""
        x = x * self.both
        for layer in self.layers:
            x = layer(x).tanh()
        if x.abs().max() > 0.1:
            x = x * self.both + self.late
        return x.square().mean()


def looks_late(num_ranks: int) -> None:
    """Code without a plan, on the last rank, has the weights that an earlier rank owns."""
    torch.manual_seed(0)
    made = LooksLate()
    reference, x = copy.deepcopy(made), torch.randn(6, WIDTH)
    options: dict[str, Any] = {"num_stages": num_ranks, "num_microbatches": 3}
    with pl.Pipeline(made, **options, example_args=(x[:2],)) as pipe:
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (pipe, reference)]
        for step in range(3):
            assert_bit_equal(pipe.step(x), sequential_step(reference, x, step_index=step, **options), "loss")
            assert_same_gradients(pipe, reference)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_same_state(pipe, reference)


class Activation(nn.Module):
    """With a buffer that nobody writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        """(B, WIDTH) → (B, WIDTH)."""
        return torch.tanh(x + self.shift)


class Shares(nn.Module):
    """Blocks that were all given one activation."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), activation) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """(B, WIDTH) → a loss."""
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def shares_a_layer(num_ranks: int, kind: type[nn.Module]) -> None:
    """Stages run clones of such blocks; what is theirs alone is elsewhere, and comes back as it was trained."""
    torch.manual_seed(0)
    made = Shares(kind())
    reference, x = copy.deepcopy(made), torch.randn(6, WIDTH)
    options: dict[str, Any] = {"num_stages": num_ranks, "num_microbatches": 3}
    pipe = pl.Pipeline(made, **options)
    for step in range(2):
        assert_bit_equal(pipe.step(x), sequential_step(reference, x, step_index=step, **options), "loss")
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (pipe, reference)]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert sum(not each.is_meta for each in made.parameters()) == 8 // num_ranks
    pipe.unwrap()
    for name, tensor in reference.state_dict().items():
        assert_bit_equal(made.state_dict()[name], tensor, name)


class Doubled(nn.Module):
    """A parametrization with a weight of its own, as an adapter has."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, weight: Tensor) -> Tensor:
        """A weight → a weight."""
        return weight * 2 * self.scale


def gets_weights_later(num_ranks: int) -> None:
    """Each rank trains what its own layers were given between steps."""
    made, reference = model(), model()
    options: dict[str, Any] = {"num_stages": num_ranks, "num_microbatches": 4, "loss_fn": loss_fn}
    with pl.Pipeline(made, **options) as pipe:
        inputs, target = batch(8, 0), torch.zeros(8, WIDTH)
        for step in range(3):
            if step == 1:
                for block in (*made.blocks, *reference.blocks):
                    parametrize.register_parametrization(block.linear, "weight", Doubled(), unsafe=True)
            found = pipe.step(**inputs, target=target)
            expected = sequential_step(reference, **inputs, target=target, step_index=step, **options)
            assert_bit_equal(found, expected, "loss")
            assert not any(each.is_meta for each in pipe.parameters())
            assert_same_gradients(pipe, reference)
            for each in (pipe, reference):
                torch.optim.SGD(each.parameters(), lr=0.1).step()
                each.zero_grad()
        whole = pipe.full_state_dict()
        assert pipe.group.rank or whole.keys() == reference.state_dict().keys()
        assert_same_state(pipe, reference)


def runs_schedules(num_ranks: int, names: list[str]) -> None:
    """Loss and gradients have the oracle's bits under each schedule, with one or two stages on each rank."""
    from pipeloom.halves import functions
    from pipeloom.schedules.registry import ENTRIES
    from tests.runtime.test_every_schedule import Gpt, token_loss, tokens

    functions.MIN_MULTIPLICATIONS = 0  # or a small model has nothing to split
    for name in names:
        torch.manual_seed(0)
        made = Gpt()
        reference, (x, target) = copy.deepcopy(made), tokens()
        num_stages = num_ranks * ENTRIES[name].stages_per_rank
        options: dict[str, Any] = {"num_stages": num_stages, "num_microbatches": 8, "loss_fn": token_loss}
        with pl.Pipeline(made, schedule=name, **options, example_args=(x[:2],)) as pipe:
            loss = pipe.step(x, target=target)
            expected = sequential_step(reference, x, target=target, schedule=pipe.schedule, **options)
            assert_bit_equal(loss, expected, name)
            assert_same_gradients(pipe, reference)


def has_no_inputs_yet(num_ranks: int) -> None:
    """Before the first step nobody knows what is here, unless example inputs say it."""
    pipe = pl.Pipeline(model(), num_stages=num_ranks, num_microbatches=4, loss_fn=loss_fn)
    list(pipe.parameters())


def resumes(num_ranks: int, folder: str, *, in_background: bool) -> None:
    """A checkpoint of a model that was cut by running it goes on with the same bits."""
    place = Saver(CheckpointStore(Path(folder))) if in_background else folder
    options = {"num_stages": num_ranks, "num_microbatches": 4, "loss_fn": loss_fn, "example_kwargs": batch(3, 0)}
    states = []
    for is_second in (False, True):
        with pl.Pipeline(model(), **options) as pipe:
            optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-2)
            step = partial(_step, pipe, optimizer)
            if is_second:
                load_checkpoint(place, pipe, optimizer)
            else:
                step(0)
                save_checkpoint(place, pipe, optimizer)
                if isinstance(place, Saver):
                    place.finish()
            step(1)
            states.append({name: each.clone() for name, each in pipe.state_dict().items()})
    for name, tensor in states[0].items():
        assert_bit_equal(states[1][name], tensor, name)


def _step(pipe: pl.Pipeline, optimizer: torch.optim.Optimizer, index: int) -> None:
    pipe.step_index = index
    pipe.step(**batch(12, index), target=torch.zeros(12, WIDTH))
    optimizer.step()
    optimizer.zero_grad()


def trains_a_library_model(make: Callable[[], tuple[nn.Module, dict[str, Any]]], num_ranks: int) -> None:
    """A step of a model that has example inputs of its own."""
    made, inputs = make()
    reference = copy.deepcopy(made)
    with pl.Pipeline(made, num_stages=num_ranks, num_microbatches=4) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        found = pipe.step(**inputs)
        expected = sequential_step(reference, num_microbatches=4, num_stages=num_ranks, **inputs)
        assert_bit_equal(found, expected, "loss")
        assert_same_gradients(pipe, reference)
        optimizer.step()


def t5() -> tuple[nn.Module, dict[str, Any]]:
    """An encoder and a decoder that share their embedding with the head."""
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2}
    config = transformers.T5Config(
        num_layers=3, num_decoder_layers=3, decoder_start_token_id=0, use_cache=False, **sizes
    )
    ids = torch.randint(0, 64, (8, 12), generator=torch.Generator().manual_seed(1))
    return transformers.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids.flip(1)}
