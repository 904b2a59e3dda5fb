"""Draws are a function of the key, whoever runs: threads, recomputes, checkpoints, compiled code."""

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeloom.errors import DrawError, PipeloomWarning
from pipeloom.runtime.draw_key import DrawKey
from pipeloom.runtime.draws import drawing, drawing_in_backward, stand_in_for_defaults

KEY = DrawKey(seed=7, step_index=3, data_rank=0, microbatch=1, unit="blocks.0")
BACKWARD = KEY._replace(unit="backward of stage 0")
INTEGERS = st.integers(0, 2**31)
KEYS = st.builds(DrawKey, INTEGERS, INTEGERS, INTEGERS, INTEGERS, st.text())


def drawn(key: DrawKey = KEY, call: int = 0) -> Tensor:
    with drawing(key, call):
        return torch.rand(64)


class Noise(nn.Module):
    """As a diffusion model does it: noise of the input's shape."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.randn_like(inputs)


class InPlace(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * torch.empty_like(inputs).normal_()


class Sampled(nn.Module):
    """Every other way in which models draw."""

    def forward(self, inputs: Tensor) -> Tensor:
        weights = inputs.detach().abs().flatten()
        picked = torch.multinomial(weights + 0.1, 4).sum()
        coins = torch.bernoulli(torch.full_like(inputs, 0.5))
        gamma = torch.distributions.Gamma(2.0, 1.0).sample()
        dirichlet = torch.distributions.Dirichlet(torch.ones(3)).sample().sum()
        shuffled = torch.randperm(8, device="cpu")[0] + torch.randint(5, ()) + torch.poisson(torch.ones(()))
        return inputs * coins + picked + gamma + dirichlet + shuffled + torch.rand((), dtype=torch.float64)


class DroppedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.5, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.attention(inputs, inputs, inputs)[0]


class FusedAttention(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        heads = inputs.unsqueeze(1)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5).squeeze(1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 16, 2, dropout=0.5, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.lstm(inputs)[0]


class Checkpointed(nn.Module):
    """A user's own checkpoint inside a unit."""

    def __init__(self, inner: nn.Module, **options: bool) -> None:
        super().__init__()
        self.inner = inner
        self.options = options

    def forward(self, inputs: Tensor) -> Tensor:
        return checkpoint(self.inner, inputs, **self.options)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 16))


DRAWING_UNITS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Dropout(0.5),
    "dropout in place": lambda: nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5, inplace=True)),
    "dropout1d": lambda: nn.Dropout1d(0.5),
    "dropout2d": lambda: nn.Sequential(nn.Unflatten(2, (4, 4)), nn.Dropout2d(0.5), nn.Flatten(2)),
    "alpha dropout": lambda: nn.AlphaDropout(0.5),
    "feature alpha dropout": lambda: nn.FeatureAlphaDropout(0.5),
    "rrelu": nn.RReLU,
    "noise": Noise,
    "in place": InPlace,
    "sampled": Sampled,
    "attention": DroppedAttention,
    "fused attention": FusedAttention,
    "recurrent": Recurrent,
    "transformer": lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True),
    "checkpointed": lambda: Checkpointed(mlp(), use_reentrant=False),
    "checkpointed, reentrant": lambda: Checkpointed(mlp(), use_reentrant=True),
}


def run(unit: nn.Module, key: DrawKey) -> tuple[Tensor, Tensor]:
    """Output and gradient of the input, of shape [4, 6, 16]."""
    inputs = torch.linspace(-1, 1, 4 * 6 * 16).reshape(4, 6, 16).requires_grad_()
    with drawing(key):
        output = unit(inputs)
    with drawing_in_backward(key._replace(unit="backward")):
        output.square().sum().backward()
    return output.detach(), inputs.grad


def in_threads(works: list[Callable[[], object]]) -> list[object]:
    """Run at the same time; results in order."""
    results: list[object] = [None] * len(works)
    start = threading.Barrier(len(works))

    def work(position: int) -> None:
        start.wait()
        results[position] = works[position]()

    threads = [threading.Thread(target=work, args=(position,)) for position in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def assert_same(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])


@given(KEYS, st.integers(0, 9), st.integers(0, 9))
def test_a_seed_fits_every_generator(key: DrawKey, call: int, order: int) -> None:
    seed = key.generator_seed(call, order)
    assert 0 <= seed < 2**63
    assert torch.Generator().manual_seed(seed).initial_seed() == seed


@given(KEYS, KEYS)
def test_different_keys_have_different_seeds(one: DrawKey, other: DrawKey) -> None:
    assert (one == other) == (one.generator_seed() == other.generator_seed())
    assert one.generator_seed(0) != one.generator_seed(1)


def test_seeds_do_not_change_from_process_to_process() -> None:
    program = (
        "from pipeloom.runtime.draw_key import DrawKey; print(DrawKey(7, 3, 0, 1, 'blocks.0').generator_seed(), end='')"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(other.stdout) == KEY.generator_seed()
    # A checkpoint that is resumed years later has to find the same numbers.
    assert KEY.generator_seed() == 8708931229579298770


@pytest.mark.parametrize("field", ["seed", "step_index", "data_rank", "microbatch"])
def test_every_part_of_the_key_counts(field: str) -> None:
    other = KEY._replace(**{field: getattr(KEY, field) + 1})
    assert torch.equal(drawn(), drawn())
    assert not torch.equal(drawn(), drawn(other))


def test_the_unit_and_its_call_count() -> None:
    assert not torch.equal(drawn(), drawn(KEY._replace(unit="blocks.1")))
    assert not torch.equal(drawn(), drawn(KEY, call=1))


@pytest.mark.parametrize("name", DRAWING_UNITS)
def test_a_unit_draws_the_same_again_and_leaves_the_default_generator_alone(name: str) -> None:
    unit = DRAWING_UNITS[name]()
    before = torch.get_rng_state()
    first = run(unit, KEY)
    torch.rand(5)
    torch.set_rng_state(before)
    assert_same(run(unit, KEY), first)
    assert not torch.equal(run(unit, KEY._replace(microbatch=2))[0], first[0])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", DRAWING_UNITS)
def test_units_in_two_threads_draw_what_they_draw_alone(name: str) -> None:
    units = [DRAWING_UNITS[name](), DRAWING_UNITS["transformer"]()]
    keys = [KEY._replace(unit=str(position)) for position in range(2)]
    alone = [run(unit, key) for unit, key in zip(units, keys, strict=True)]

    def repeat(position: int) -> list[tuple[Tensor, Tensor]]:
        return [run(units[position], keys[position]) for _ in range(10)]

    together = in_threads([lambda: repeat(0), lambda: repeat(1)])
    for expected, results in zip(alone, together, strict=True):
        for result in results:
            assert_same(result, expected)


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_a_checkpoint_inside_a_unit_recomputes_the_same_mask(is_reentrant: bool) -> None:
    unit = mlp()
    plain = run(unit, KEY)
    saved = run(Checkpointed(unit, use_reentrant=is_reentrant), KEY)
    # Torch saves the state and draws from it, so the numbers are the same as without the checkpoint.
    assert_same(saved, plain)


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_a_checkpoint_within_a_checkpoint_recomputes_the_same_mask(is_reentrant: bool) -> None:
    inner = mlp()
    outer = nn.Sequential(nn.Dropout(0.5), Checkpointed(inner, use_reentrant=False), nn.Dropout(0.5))
    assert_same(run(Checkpointed(outer, use_reentrant=is_reentrant), KEY), run(outer, KEY))
    assert_same(run(outer, KEY), run(nn.Sequential(outer[0], inner, outer[2]), KEY))


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_a_checkpoint_that_saves_no_state_is_warned_of(is_reentrant: bool) -> None:
    unit = Checkpointed(mlp(), use_reentrant=is_reentrant, preserve_rng_state=False)
    with pytest.warns(PipeloomWarning, match=r"backward of 'backward' \(micro-batch 1\)[^$]*preserve_rng_state=True"):
        run(unit, KEY)


def test_draws_after_a_checkpoint_in_the_backward_are_warned_of_again() -> None:
    inputs = torch.ones(8, requires_grad=True)
    with drawing(KEY):
        hidden = inputs * 1
        output = checkpoint(mlp()[1], hidden, use_reentrant=False)
    hidden.register_hook(lambda grad: grad + torch.randn_like(grad))
    with drawing_in_backward(BACKWARD), pytest.warns(PipeloomWarning, match="drawn in the backward") as caught:
        output.sum().backward()
    assert len(caught) == 1


def test_a_deep_backward_takes_the_stream_to_torchs_own_threads() -> None:
    class Deep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, inputs, depth):
            ctx.depth = depth
            return inputs.clone()

        @staticmethod
        def backward(ctx, grad):
            idents.add(threading.get_ident())
            if ctx.depth == 0:
                torch.set_rng_state(state)
                seen.append(torch.rand(3))
                return grad, None
            with torch.enable_grad():
                Deep.apply(torch.ones(1, requires_grad=True), ctx.depth - 1).sum().backward()
            return grad, None

    idents: set[int] = set()
    seen: list[Tensor] = []
    with drawing(KEY):
        state = torch.get_rng_state()
        expected = torch.rand(3)
    # Beyond 60 nested backwards, autograd goes on in another thread, as it does for a GPU.
    with drawing_in_backward(BACKWARD):
        Deep.apply(torch.ones(1, requires_grad=True), 70).sum().backward()
    assert len(idents) > 1
    assert torch.equal(seen[0], expected)


def test_contexts_nest() -> None:
    with drawing(KEY):
        first = torch.rand(2)
        with drawing(KEY._replace(unit="inner")):
            torch.rand(100)
        second = torch.rand(2)
    assert torch.equal(torch.cat([first, second]), drawn()[:4])


def test_an_exception_restores_the_default_generator() -> None:
    expected = torch.rand(3, generator=torch.Generator().manual_seed(5))
    with pytest.raises(ZeroDivisionError, match="by zero"), drawing(KEY):
        _ = 1 // 0
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), expected)


def test_manual_seed_inside_a_unit_seeds_the_rest_of_this_call_only() -> None:
    before = torch.get_rng_state()
    with drawing(KEY):
        generator = torch.manual_seed(11)
        inside = torch.rand(3)
        assert torch.initial_seed() == generator.initial_seed() == 11
    assert torch.equal(inside, torch.rand(3, generator=torch.Generator().manual_seed(11)))
    assert torch.equal(torch.get_rng_state(), before)


def test_fork_rng_inside_a_unit_forks_the_units_stream() -> None:
    with drawing(KEY):
        with torch.random.fork_rng():
            forked = torch.rand(64)
        after = torch.rand(64)
    assert torch.equal(forked, after)
    assert torch.equal(after, drawn())


def test_seed_inside_a_unit_is_refused() -> None:
    with pytest.raises(DrawError, match=r"torch\.seed\(\) was called inside a unit[^$]*use torch\.manual_seed"):  # noqa: SIM117
        with drawing(KEY):
            torch.seed()
    torch.seed()
    assert torch.initial_seed() != KEY.generator_seed()


def test_outside_units_torch_answers_as_ever() -> None:
    drawn()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(3)))
    torch.set_rng_state(state)
    assert torch.equal(torch.get_rng_state(), torch.default_generator.get_state())


def test_a_generator_of_the_users_is_used_and_warned_of() -> None:
    own = torch.Generator().manual_seed(2)
    with drawing(KEY), pytest.warns(PipeloomWarning, match=r"unit 'blocks\.0' draws from a torch\.Generator of its"):
        values = torch.rand(3, generator=own)
    assert torch.equal(values, torch.rand(3, generator=torch.Generator().manual_seed(2)))


def test_the_default_generator_by_name_is_the_units() -> None:
    with drawing(KEY):
        values = torch.empty(64).uniform_(generator=torch.default_generator)
    assert torch.equal(values, drawn())


def test_cuda_generators_are_stood_in_for_once_cuda_is_initialised() -> None:
    # No GPU here: the CPU's kind of generator stands where CUDA keeps its own.
    default = torch.Generator().manual_seed(1)
    before = default.get_state()
    cuda = SimpleNamespace(is_initialized=lambda: True, default_generators=(default,))
    stand_in_for_defaults(cuda)
    stand_in_for_defaults(cuda)
    (stand_in,) = cuda.default_generators
    with drawing(KEY):
        stand_in.set_state(before)
        stand_in.manual_seed(4)
    assert stand_in.default is default
    assert torch.equal(stand_in.get_state(), before)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["dropout", "transformer"])
def test_a_compiled_unit_draws_as_an_eager_one(backend: str, name: str) -> None:
    torch._dynamo.reset()
    unit = DRAWING_UNITS[name]()
    compiled = torch.compile(unit, backend=backend)
    before = torch.get_rng_state()
    first = run(compiled, KEY)
    assert torch.equal(first[0] == 0, run(unit, KEY)[0] == 0)
    results = in_threads([lambda: run(compiled, KEY), lambda: run(compiled, KEY._replace(microbatch=2))])
    assert_same(results[0], first)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_higher_order_operator_draws_the_same_again() -> None:
    torch._dynamo.reset()

    def choose() -> Tensor:
        with drawing(KEY):
            return torch.cond(torch.tensor(True), nn.functional.dropout, torch.neg, (torch.ones(64),))

    assert torch.equal(choose(), choose())
    assert set(choose().tolist()) == {0.0, 2.0}


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_unit_compiled_to_machine_code_draws_the_same_again() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(Checkpointed(mlp(), use_reentrant=False))
    before = torch.get_rng_state()
    first = run(compiled, KEY)
    other = run(compiled, KEY._replace(microbatch=2))
    results = in_threads([lambda: run(compiled, KEY), lambda: run(compiled, KEY._replace(microbatch=2))])
    assert_same(results[0], first)
    assert_same(results[1], other)
    assert not torch.equal(first[0], other[0])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("unit", "who"), [(": randn", "randn in the model"), ("blocks.0: randn", r"randn in blocks\.0")]
)
def test_a_draw_of_glue_that_names_a_generator_is_named_as_glue(unit: str, who: str) -> None:
    with drawing(KEY._replace(unit=unit)), pytest.warns(PipeloomWarning, match=f"^{who} draws from a torch"):
        torch.rand(3, generator=torch.Generator().manual_seed(2))
