"""Autocast in the threads of the ranks: around forwards only, and with one cast of each weight."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

from pipeloom.runtime import ambient as ambient_module
from pipeloom.runtime.ambient import Ambient
from tests.in_rank import NotedOperators, in_thread


def linear_dtype(layer: nn.Module) -> torch.dtype:
    dtype: torch.dtype = layer(torch.ones(2, 4)).dtype
    return dtype


def test_autocast_is_on_for_forwards_only() -> None:
    layer = nn.Linear(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        ambient = Ambient.capture()

    def work() -> list[torch.dtype]:
        with ambient.entered():
            outside = linear_dtype(layer)
            with ambient.autocast():
                inside = linear_dtype(layer)
            return [outside, inside, linear_dtype(layer)]

    assert in_thread(work) == [torch.float32, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("enter", [Ambient.entered, Ambient.entered_here])
def test_autocast_is_off_in_the_same_thread_outside_forwards(
    enter: Callable[[Ambient], AbstractContextManager[None]],
) -> None:
    layer = nn.Linear(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        ambient = Ambient.capture()
        with enter(ambient):
            assert linear_dtype(layer) == torch.float32
            with ambient.autocast():
                assert linear_dtype(layer) == torch.bfloat16
        assert linear_dtype(layer) == torch.bfloat16


def test_autocast_dtype_is_the_callers() -> None:
    with torch.autocast("cpu", torch.float16):
        ambient = Ambient.capture(device_types=["cpu"])

    def work() -> torch.dtype:
        with ambient.entered(), ambient.autocast():
            return torch.get_autocast_dtype("cpu")

    assert in_thread(work) == torch.float16


def test_autocast_of_another_device_is_carried() -> None:
    torch.set_autocast_enabled("cuda", True)
    try:
        ambient = Ambient.capture()
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert [(each.device_type, each.is_enabled) for each in ambient.autocasts] == [("cpu", False), ("cuda", True)]


def test_device_without_autocast_is_left_out() -> None:
    assert Ambient.capture(device_types=["meta", "cpu"]).autocasts == Ambient.capture(["cpu"]).autocasts


def test_autocast_ends_with_an_exception() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        ambient = Ambient.capture()

    def work() -> tuple[bool, bool]:
        with ambient.entered():
            with pytest.raises(ZeroDivisionError, match="in a stage"), ambient.autocast():
                raise ZeroDivisionError("in a stage")
            return torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()

    assert in_thread(work) == (False, True)


def test_autocast_that_is_off_is_one_shared_context() -> None:
    ambients = [Ambient.capture(), Ambient.capture()]
    assert ambients[0].autocast() is ambients[1].autocast()


def casts_of(mode: NotedOperators) -> int:
    return mode.names.count("_to_copy")


def test_a_weight_is_cast_once_though_another_rank_ends_its_forward() -> None:
    """In torch 2.13 the end of any thread's outermost autocast clears the cache of the whole process."""
    weight, x = torch.ones(4, 4, requires_grad=True), torch.ones(2, 4, dtype=torch.bfloat16)
    first, second = threading.Event(), threading.Event()
    with torch.autocast("cpu", torch.bfloat16):
        ambient = Ambient.capture()

    def other() -> None:
        with ambient.entered():
            assert first.wait(timeout=30)
            with ambient.autocast():
                pass
            second.set()

    with ThreadPoolExecutor(1) as threads, ambient.entered(), NotedOperators() as mode:
        ended = threads.submit(other)
        with ambient.autocast():
            nn.functional.linear(x, weight)
            first.set()
            assert second.wait(timeout=30)
            nn.functional.linear(x, weight)
        ended.result()
    assert casts_of(mode) == 1


def test_casts_are_dropped_when_the_last_rank_ends() -> None:
    weight, x = torch.ones(4, 4, requires_grad=True), torch.ones(2, 4, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        ambient = Ambient.capture()
    outputs = []
    for _ in range(2):
        with ambient.entered(), ambient.autocast():
            outputs.append(nn.functional.linear(x, weight).sum().item())
        with torch.no_grad():
            weight.mul_(2)
    assert outputs == [32.0, 64.0]


def test_casts_are_dropped_after_an_exception() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        ambient = Ambient.capture()
    with pytest.raises(ZeroDivisionError, match="in a stage"), ambient.entered():
        raise ZeroDivisionError("in a stage")
    assert ambient_module._CAST_CACHE._num_holders == 0
    assert torch.autocast_increment_nesting() == 1
    assert torch.autocast_decrement_nesting() == 0


def gradients(layer: nn.Linear, batches: list[torch.Tensor], forward: AbstractContextManager[Any]) -> torch.Tensor:
    """Of a weight that each micro-batch uses twice; backwards run outside autocast."""
    layer.zero_grad()
    outputs = []
    for batch in batches:
        with forward:
            outputs.append(layer(layer(batch).relu()).float().square().mean())
    for output in outputs:
        output.backward()
    assert layer.weight.grad is not None
    return layer.weight.grad.clone()


def test_one_cast_a_step_has_the_bits_of_one_a_microbatch() -> None:
    torch.manual_seed(3)
    layer, batches = nn.Linear(16, 16), [torch.randn(8, 16) for _ in range(4)]
    expected = gradients(layer, batches, torch.autocast("cpu", torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        ambient = Ambient.capture()

    def work() -> torch.Tensor:
        with ambient.entered():
            return gradients(layer, batches, _Again(ambient.autocast))

    assert torch.equal(in_thread(work), expected)


def test_a_forward_without_graph_does_not_spoil_the_next() -> None:
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        ambient = Ambient.capture()
    with ambient.entered():
        with torch.no_grad(), ambient.autocast():
            layer(x)
        with ambient.autocast():
            output = layer(x)
        output.sum().backward()
    assert layer.weight.grad is not None


class _Again(AbstractContextManager[Any]):
    """A context that is made anew each time it is entered."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self.make = make

    def __enter__(self) -> Any:
        self.entered = self.make()
        return self.entered.__enter__()

    def __exit__(self, *error: Any) -> Any:
        return self.entered.__exit__(*error)
