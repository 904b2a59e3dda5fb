"""Running statistics of the whole batch from micro-batches, and buffers that a recompute must not touch."""

import copy
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeloom.errors import SplitError
from pipeloom.runtime.batch_norm import DeferredStatistics, frozen_buffers

SHAPES = {
    "1d": (lambda **options: nn.BatchNorm1d(6, **options), (12, 6)),
    "1d of sequences": (lambda **options: nn.BatchNorm1d(6, **options), (12, 6, 5)),
    "2d": (lambda **options: nn.BatchNorm2d(6, **options), (12, 6, 4, 3)),
    "3d": (lambda **options: nn.BatchNorm3d(6, **options), (12, 6, 2, 2, 2)),
}


class Average(nn.Module):
    """An exponential average of its inputs, written past autograd, as codebooks of quantizers do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("num_calls", torch.tensor(0))
        self.register_buffer("cache", None)

    def forward(self, inputs: Tensor) -> Tensor:
        self.average.data.mul_(0.9).add_(inputs.detach().mean(0), alpha=0.1)
        self.num_calls = self.num_calls + 1
        self.cache = inputs.detach().sum()
        return inputs * self.average


def values(*shape: int) -> Tensor:
    return torch.randn(shape) * torch.linspace(0.1, 3, shape[1]).reshape(-1, *[1] * (len(shape) - 2)) + 4


def running(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def assert_buffers(module: nn.Module, expected: dict[str, Tensor], **tolerance: float) -> None:
    torch.testing.assert_close(running(module), expected, **(tolerance or {"rtol": 0, "atol": 0}))


def deferred_steps(module: nn.Module, steps: list[list[Tensor]]) -> DeferredStatistics:
    deferred = DeferredStatistics(module)
    for microbatches in steps:
        deferred.begin(len(microbatches))
        for microbatch in microbatches:
            module(microbatch)
        deferred.commit()
    return deferred


@pytest.mark.parametrize("momentum", [0.1, 0.5, None])
@pytest.mark.parametrize("name", SHAPES)
def test_statistics_are_those_of_the_full_batch(name: str, momentum: float | None) -> None:
    make, shape = SHAPES[name]
    module = make(momentum=momentum)
    expected = copy.deepcopy(module)
    batches = [values(*shape) for _ in range(3)]
    for batch in batches:
        expected(batch)
    deferred_steps(module, [list(batch.split([5, 3, 4])) for batch in batches])
    assert_buffers(module, running(expected), rtol=1e-6, atol=1e-6)
    assert module.num_batches_tracked == 3


@given(st.lists(st.integers(2, 9), min_size=1, max_size=6), st.floats(0, 1000))
def test_statistics_are_stable_however_the_batch_is_cut(sizes: list[int], offset: float) -> None:
    batch = torch.randn(sum(sizes), 3, dtype=torch.float64) + offset
    module = nn.BatchNorm1d(3, momentum=1.0).double()
    deferred_steps(module, [list(batch.split(sizes))])
    torch.testing.assert_close(module.running_mean, batch.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(module.running_var, batch.var(0), rtol=1e-9, atol=1e-12)


def test_a_small_variance_far_from_zero_survives_single_precision() -> None:
    batch = torch.randn(64, 3) + 1000
    module = nn.BatchNorm1d(3, momentum=1.0)
    deferred_steps(module, [list(batch.split(8))])
    torch.testing.assert_close(module.running_var, batch.double().var(0).float(), rtol=1e-3, atol=0)


def test_outputs_and_gradients_are_those_of_the_microbatch() -> None:
    module = nn.BatchNorm1d(6)
    plain, microbatches = copy.deepcopy(module), list(values(12, 6).split(4))
    deferred_steps(module, [microbatches])
    deferred = DeferredStatistics(module)
    deferred.begin()
    for microbatch in microbatches:
        one, other = module(microbatch), plain(microbatch)
        assert torch.equal(one, other)
        one.square().sum().backward()
        other.square().sum().backward()
    assert torch.equal(module.weight.grad, plain.weight.grad)


def test_half_precision_inputs_are_summed_in_single_precision() -> None:
    batch = values(12, 6)
    module, expected = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
    expected(batch.bfloat16().float())
    deferred_steps(module, [list(batch.bfloat16().split(4))])
    assert module.running_var.dtype == torch.float32
    assert_buffers(module, running(expected), rtol=1e-6, atol=1e-6)


def test_a_layer_that_runs_twice_in_a_forward_is_updated_twice() -> None:
    layer = nn.BatchNorm1d(6)
    module = nn.Sequential(layer, nn.Linear(6, 6), layer)
    first, second = values(12, 6), values(12, 6)
    expected = copy.deepcopy(layer)
    expected(first)
    expected(second)
    deferred = DeferredStatistics(module)
    deferred.begin(num_microbatches=2)
    for one, other in zip(first.split(6), second.split(6), strict=True):
        layer(one)
        layer(other)
    deferred.commit()
    assert_buffers(layer, running(expected), rtol=1e-6, atol=1e-6)


def test_runs_that_do_not_divide_count_as_one() -> None:
    module, batch = nn.BatchNorm1d(6), values(12, 6)
    deferred = DeferredStatistics(module)
    deferred.begin(num_microbatches=2)
    for microbatch in batch.split(4):
        module(microbatch)
    deferred.commit()
    assert module.num_batches_tracked == 1
    torch.testing.assert_close(module.running_mean, batch.mean(0) * 0.1)


def test_layers_that_do_not_learn_statistics_are_left_alone() -> None:
    frozen, untracked, unused = (
        nn.BatchNorm1d(6).eval(),
        nn.BatchNorm1d(6, track_running_stats=False),
        nn.BatchNorm1d(6),
    )
    module = nn.ModuleList([frozen, untracked, unused])
    before = running(module)
    deferred = DeferredStatistics(module)
    deferred.begin()
    frozen(values(4, 6))
    untracked(values(4, 6))
    deferred.commit()
    assert_buffers(module, before)
    assert [layer.track_running_stats for layer in module] == [True, False, True]


def test_a_frozen_layer_normalises_by_its_running_statistics_during_a_step() -> None:
    layer, batch = nn.BatchNorm1d(6).eval(), values(4, 6)
    expected = layer(batch)
    DeferredStatistics(layer).begin()
    assert torch.equal(layer(batch), expected)
    assert not torch.allclose(expected, layer.train()(batch))


@pytest.mark.parametrize("end", ["discard", "begin"])
def test_a_step_that_failed_leaves_nothing_behind(end: str) -> None:
    module, lost, kept = nn.BatchNorm1d(6), values(4, 6), values(4, 6)
    before = running(module)
    deferred = DeferredStatistics(module)
    deferred.begin()
    module(lost)
    getattr(deferred, end)()
    assert_buffers(module, before)
    deferred.begin()
    module(kept)
    deferred.commit()
    torch.testing.assert_close(module.running_mean, kept.mean(0) * 0.1)


def test_commit_after_discard_updates_nothing() -> None:
    module = nn.BatchNorm1d(6)
    before = running(module)
    deferred = DeferredStatistics(module)
    deferred.begin()
    module(values(4, 6))
    deferred.discard()
    deferred.commit()
    assert_buffers(module, before)
    assert module.track_running_stats


def test_between_steps_the_layer_is_as_the_user_made_it() -> None:
    module = nn.BatchNorm1d(6)
    deferred_steps(module, [[values(4, 6)]])
    assert module.track_running_stats
    assert not module._forward_pre_hooks
    module(values(4, 6))
    assert module.num_batches_tracked == 2


def test_synchronised_layers_are_refused_by_name() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    with pytest.raises(SplitError, match=r"layer '1' is a SyncBatchNorm[^$]*hint: use batch_norm='per-microbatch'"):
        DeferredStatistics(module)


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_a_recompute_by_torchs_checkpoint_is_not_counted(is_reentrant: bool) -> None:
    module, batch = nn.BatchNorm1d(6, momentum=None), values(8, 6)
    deferred = DeferredStatistics(module)
    deferred.begin(2)
    for microbatch in batch.split(4):
        checkpoint(module, microbatch.requires_grad_(), use_reentrant=is_reentrant).square().sum().backward()
    deferred.commit()
    assert module.num_batches_tracked == 1
    torch.testing.assert_close(module.running_mean, batch.detach().mean(0))


def test_a_recompute_in_frozen_buffers_is_not_counted() -> None:
    module, batch = nn.BatchNorm1d(6, momentum=None), values(8, 6)
    deferred = DeferredStatistics(module)
    deferred.begin()
    module(batch)
    with frozen_buffers(module):
        module(batch)
    deferred.commit()
    torch.testing.assert_close(module.running_var, batch.var(0))
    assert module.num_batches_tracked == 1


@pytest.mark.parametrize("make", [lambda: nn.BatchNorm1d(6), lambda: nn.BatchNorm1d(6, momentum=None), Average])
def test_frozen_buffers_are_read_and_not_written(make) -> None:
    module, inputs = nn.Sequential(nn.Linear(6, 6), make()), values(8, 6)
    module(inputs)
    before, tensors = running(module), [id(buffer) for buffer in module.buffers()]
    expected = copy.deepcopy(module)(inputs)
    with frozen_buffers(module):
        assert torch.equal(module(inputs), expected)
        assert any(not torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())
    assert_buffers(module, before)
    assert [id(buffer) for buffer in module.buffers()] == tensors


def test_buffers_that_a_recompute_makes_are_dropped() -> None:
    module = nn.BatchNorm1d(6)
    names = set(module.state_dict())
    with frozen_buffers(module):
        module.register_buffer("seen", torch.ones(1))
    assert set(module.state_dict()) == names


@pytest.mark.parametrize("make", [lambda: nn.BatchNorm1d(6), lambda: nn.BatchNorm1d(6).eval(), Average])
def test_the_graph_of_a_recompute_gives_the_same_gradients(make) -> None:
    module, inputs = nn.Sequential(nn.Linear(6, 6), make()), values(8, 6)
    plain = copy.deepcopy(module)
    plain(inputs).square().sum().backward()
    with frozen_buffers(module):
        loss = module(inputs).square().sum()
    # Forwards of other micro-batches come between a recompute and its backward.
    module(values(8, 6))
    loss.backward()
    assert torch.equal(module[0].weight.grad, plain[0].weight.grad)


def test_buffers_come_back_after_an_exception() -> None:
    module = nn.Sequential(Average())
    before = running(module)
    with pytest.raises(RuntimeError, match="size"), frozen_buffers(module):
        module(values(8, 7))
    assert_buffers(module, before)
    assert module[0].cache is None


def test_a_shared_buffer_stays_shared() -> None:
    one, other = nn.Module(), nn.Module()
    one.register_buffer("table", torch.zeros(2))
    other.register_buffer("table", one.table)
    with frozen_buffers(nn.ModuleList([one, other])):
        one.table.add_(1)
        assert torch.equal(other.table, torch.ones(2))
    assert one.table is other.table
    assert torch.equal(one.table, torch.zeros(2))


def test_another_threads_forward_counts_during_a_recompute() -> None:
    recomputed, other = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
    batch = values(8, 6)
    deferred = DeferredStatistics(nn.ModuleList([recomputed, other]))
    deferred.begin()
    recomputed(batch)
    with frozen_buffers(recomputed):
        recomputed(batch)
        thread = threading.Thread(target=other, args=(batch,))
        thread.start()
        thread.join()
    deferred.commit()
    assert torch.equal(recomputed.running_mean, other.running_mean)
    torch.testing.assert_close(other.running_mean, batch.mean(0) * 0.1)


def test_frozen_buffers_nest() -> None:
    module = nn.BatchNorm1d(6)
    deferred = DeferredStatistics(module)
    deferred.begin()
    with frozen_buffers(module):
        with frozen_buffers(module):
            module(values(8, 6))
        module(values(8, 6))
    deferred.commit()
    assert module.num_batches_tracked == 0
