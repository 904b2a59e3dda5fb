"""What is intercepted: every operator that draws, below modes and subclasses too, and nothing else."""

import sys

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipeloom.errors import DrawError
from pipeloom.runtime import draw_kernels
from pipeloom.runtime.draw_kernels import DRAWING_OVERLOADS, current_stream, device_of, entered, forked


class CountingStream:
    """Hands out one generator and counts."""

    def __init__(self) -> None:
        self.own = torch.Generator().manual_seed(1)
        self.num_draws = 0
        self.given: list[torch.Generator] = []

    def generator_to_draw(self, device: torch.device) -> torch.Generator:
        self.num_draws += 1
        return self.own

    def check_given(self, generator: torch.Generator) -> None:
        self.given.append(generator)


DRAWS = {
    "rand": lambda: torch.rand(3),
    "rand out": lambda: torch.rand(3, out=torch.empty(3)),
    "rand_like": lambda: torch.rand_like(torch.ones(3)),
    "randn": lambda: torch.randn(3),
    "randn_like": lambda: torch.randn_like(torch.ones(3)),
    "randint": lambda: torch.randint(9, (3,)),
    "randint low": lambda: torch.randint(2, 9, (3,)),
    "randint_like": lambda: torch.randint_like(torch.ones(3), 9),
    "randperm": lambda: torch.randperm(9),
    "normal of numbers": lambda: torch.normal(0.0, 1.0, (3,)),
    "normal of means": lambda: torch.normal(torch.zeros(3), 1.0),
    "normal of deviations": lambda: torch.normal(0.0, torch.ones(3)),
    "normal of both": lambda: torch.normal(torch.zeros(3), torch.ones(3)),
    "bernoulli": lambda: torch.bernoulli(torch.full((3,), 0.5)),
    "bernoulli p": lambda: torch.bernoulli(torch.ones(3), 0.5),
    "bernoulli_": lambda: torch.empty(3).bernoulli_(0.5),
    "bernoulli_ of tensor": lambda: torch.empty(3).bernoulli_(torch.full((3,), 0.5)),
    "binomial": lambda: torch.binomial(torch.full((3,), 9.0), torch.full((3,), 0.5)),
    "poisson": lambda: torch.poisson(torch.ones(3)),
    "multinomial": lambda: torch.multinomial(torch.ones(5), 2),
    "gamma": lambda: torch._standard_gamma(torch.ones(3)),
    "dirichlet": lambda: torch._sample_dirichlet(torch.ones(3)),
    "uniform_": lambda: torch.empty(3).uniform_(),
    "normal_": lambda: torch.empty(3).normal_(),
    "log_normal_": lambda: torch.empty(3).log_normal_(),
    "cauchy_": lambda: torch.empty(3).cauchy_(),
    "exponential_": lambda: torch.empty(3).exponential_(),
    "geometric_": lambda: torch.empty(3).geometric_(0.5),
    "random_": lambda: torch.empty(3).random_(),
    "random_ to": lambda: torch.empty(3).random_(9),
    "random_ from": lambda: torch.empty(3).random_(2, 9),
    "native_dropout": lambda: torch.native_dropout(torch.ones(9), 0.5, True),
    "rrelu": lambda: torch.rrelu(-torch.ones(9), training=True),
    "functional": lambda: torch.ops.aten.normal_functional(torch.ones(3)),
    "vmap, different": lambda: torch.vmap(
        lambda x: torch.nn.functional.dropout(x) + torch.rand(4), randomness="different"
    )(torch.ones(2, 4)),
    "vmap, same": lambda: torch.vmap(lambda x: torch.nn.functional.dropout(x), randomness="same")(torch.ones(2, 4)),
    "gradient": lambda: torch.func.grad(lambda x: torch.nn.functional.dropout(x).sum())(torch.ones(4)),
    "inference": lambda: torch.inference_mode()(lambda: torch.rand(3))(),
    "sparse": lambda: torch.nn.functional.dropout(torch.ones(4).to_sparse().coalesce().values()),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_answered_by_the_stream(name: str) -> None:
    stream, before = CountingStream(), torch.get_rng_state()
    with entered(stream):
        DRAWS[name]()
    assert stream.num_draws >= 1
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_outside_is_torchs_own(name: str) -> None:
    before = torch.get_rng_state()
    DRAWS[name]()
    assert not torch.equal(torch.get_rng_state(), before)


def test_entering_and_leaving_takes_and_gives_back_every_reference() -> None:
    stream = CountingStream()
    before, nones = sys.getrefcount(stream), sys.getrefcount(None)
    for _ in range(100):
        with entered(stream), entered(None), entered(stream):
            assert current_stream() is stream
    # What the thread keeps is None; a stolen reference to it would end the process one day.
    assert sys.getrefcount(stream) == before
    assert abs(sys.getrefcount(None) - nones) < 50


def test_the_values_are_those_of_the_generator() -> None:
    with entered(CountingStream()):
        values = torch.rand(5)
    assert torch.equal(values, torch.rand(5, generator=torch.Generator().manual_seed(1)))


def test_operators_that_do_not_draw_ask_for_nothing() -> None:
    stream = CountingStream()
    with entered(stream):
        torch.nn.functional.dropout(torch.ones(3) @ torch.ones(3, 3), training=False)
        torch.rand(3, device="meta")
    assert stream.num_draws == 0
    assert current_stream() is None


def test_every_drawing_operator_of_torch_is_known() -> None:
    names = {overload.name().split(".")[0].removeprefix("aten::") for overload in DRAWING_OVERLOADS}
    takers = {"bernoulli_", "uniform_", "normal_", "random_", "exponential_", "multinomial", "randperm"}
    without = {"native_dropout", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"}
    assert takers | without | {"_cudnn_rnn", "_fused_dropout"} <= names
    assert "dropout" not in names


def test_a_generator_that_was_given_is_kept_and_reported() -> None:
    stream, own = CountingStream(), torch.Generator().manual_seed(9)
    with entered(stream):
        values = torch.empty(3).uniform_(generator=own)
    assert len(stream.given) == 1
    assert torch.equal(values, torch.empty(3).uniform_(generator=torch.Generator().manual_seed(9)))


class Passing(TorchDispatchMode):
    """What profilers and selective checkpoints do: see every operator, and run it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["rand", "native_dropout", "bernoulli", "randperm"])
def test_draws_below_a_dispatch_mode_are_seen(name: str) -> None:
    stream, before = CountingStream(), torch.get_rng_state()
    with entered(stream), Passing():
        DRAWS[name]()
    assert stream.num_draws >= 1
    assert torch.equal(torch.get_rng_state(), before)


class Rounded(Tensor):
    """A tensor subclass whose operators draw, as stochastic rounding does."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Rounded":
        return Tensor._make_wrapper_subclass(cls, inner.shape)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = [each.inner if isinstance(each, Rounded) else each for each in args]
        return (func(*plain, **(kwargs or {})) + torch.rand(3)).floor()


def test_draws_inside_a_tensor_subclass_are_seen() -> None:
    stream = CountingStream()
    with entered(stream):
        rounded = Rounded(torch.ones(3)) + 1
    assert stream.num_draws == 1
    assert torch.equal(rounded, torch.full((3,), 2.0))


def test_a_fake_tensor_draws_nothing() -> None:
    stream = CountingStream()
    with entered(stream), FakeTensorMode():
        assert torch.nn.functional.dropout(torch.ones(3, device="cuda")).device.type == "cuda"
    assert stream.num_draws == 0


def test_a_traced_graph_holds_no_generator() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    with entered(CountingStream()):
        graph = make_fx(lambda inputs: inputs.bernoulli(0.5), tracing_mode="fake")(torch.ones(3)).graph
    drawn = [node for node in graph.nodes if node.op == "call_function"]
    assert [str(node.target) for node in drawn] == ["aten.bernoulli.p"]
    assert "generator" not in drawn[0].kwargs


def test_forked_lends_the_stream_to_a_default_generator() -> None:
    default, own = torch.Generator().manual_seed(3), torch.Generator().manual_seed(1)
    before = default.get_state()
    with forked(default, own):
        lent = torch.rand(4, generator=default)
    assert torch.equal(torch.cat([lent, torch.rand(2, generator=own)]), torch.rand(6, generator=own.manual_seed(1)))
    assert torch.equal(default.get_state(), before)


def test_forked_gives_the_state_back_when_the_kernel_fails() -> None:
    default, own = torch.Generator().manual_seed(3), torch.Generator().manual_seed(1)
    before = default.get_state()
    with pytest.raises(RuntimeError, match="negative"), forked(default, own):
        torch.rand(-1, generator=default)
    assert torch.equal(default.get_state(), before)
    assert torch.equal(torch.rand(2, generator=own), torch.rand(2, generator=torch.Generator().manual_seed(1)))


def test_a_kernel_without_generator_is_lent_one_where_it_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # No GPU here: the CPU plays a device whose dropout takes no generator.
    monkeypatch.setattr(draw_kernels, "_WITHOUT_FORK", ("meta",))
    before, values = torch.get_rng_state(), torch.ones(64)
    generator = torch.Generator().manual_seed(1)
    expected = [values.bernoulli(0.5, generator=generator) * 2 for _ in range(2)]
    with entered(CountingStream()):
        dropped = [torch.native_dropout(values, 0.5, True)[0] for _ in range(2)]
    assert torch.equal(torch.stack(dropped), torch.stack(expected))
    assert torch.equal(torch.get_rng_state(), before)


def test_fused_attention_without_dropout_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw_kernels, "_WITHOUT_FORK", ("meta",))
    stream, heads = CountingStream(), torch.ones(1, 2, 4, 8)
    with entered(stream), draw_kernels._fork_lock:
        torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
    assert stream.num_draws == 0


def test_a_device_without_a_generator_to_lend_is_refused() -> None:
    with pytest.raises(DrawError, match=r"drew on mps:0 by an operator that takes no generator"):
        draw_kernels._default_of(torch.device("mps", 0))


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((3,), {}, "cpu"),
        ((1.0, torch.ones(2, device="meta")), {}, "meta"),
        ((3,), {"out": torch.ones(2, device="meta")}, "meta"),
    ],
)
def test_a_draw_happens_where_its_first_tensor_is(args: tuple, kwargs: dict, expected: str) -> None:
    assert device_of(args, kwargs) == torch.device(expected)
