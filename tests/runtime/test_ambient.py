"""Every test reads what a fresh thread sees, or leaves behind, around `Ambient.entered`."""

import contextlib
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pipeloom.runtime.ambient import Ambient
from tests.in_rank import NotedFunctions, NotedOperators, in_rank, in_thread

COLOUR = contextvars.ContextVar("colour", default="none")


@contextlib.contextmanager
def default_device(device: str) -> Any:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def colour(value: str) -> Any:
    token = COLOUR.set(value)
    try:
        yield
    finally:
        COLOUR.reset(token)


@contextlib.contextmanager
def intraop_threads(count: int) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def cache_disabled() -> Any:
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(True)


@contextlib.contextmanager
def autocast_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", dtype)
    try:
        yield
    finally:
        torch.set_autocast_dtype("cpu", before)


def is_hooks_disabled() -> bool:
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            return False
    except RuntimeError:
        return True


STATES: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Callable[[], Any], Any]] = {
    "no_grad": (torch.no_grad, torch.is_grad_enabled, False),
    "enable_grad": (torch.enable_grad, torch.is_grad_enabled, True),
    "inference_mode": (torch.inference_mode, torch.is_inference_mode_enabled, True),
    "grad inside inference_mode": (torch.inference_mode, torch.is_grad_enabled, False),
    "multithreaded backward": (
        lambda: torch.autograd.set_multithreading_enabled(False),
        torch._C._is_multithreading_enabled,
        False,
    ),
    "device context": (lambda: torch.device("meta"), lambda: torch.ones(2).device.type, "meta"),
    "default device": (lambda: default_device("meta"), lambda: torch.ones(2).device.type, "meta"),
    "default device, asked": (lambda: default_device("meta"), lambda: torch.get_default_device().type, "meta"),
    "context variable": (lambda: colour("red"), COLOUR.get, "red"),
    "autocast cache": (cache_disabled, torch.is_autocast_cache_enabled, False),
    "autocast dtype": (
        lambda: autocast_dtype(torch.float16),
        lambda: torch.get_autocast_dtype("cpu"),
        torch.float16,
    ),
    "hooks disabled": (
        lambda: torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"),
        is_hooks_disabled,
        True,
    ),
}


@pytest.mark.parametrize(("made", "read", "expected"), STATES.values(), ids=STATES.keys())
def test_state_is_carried(
    made: Callable[[], AbstractContextManager[Any]], read: Callable[[], Any], expected: Any
) -> None:
    with made():
        assert in_rank(read) == expected
    assert in_rank(read) == in_thread(read)


@pytest.mark.parametrize(("made", "read", "_expected"), STATES.values(), ids=STATES.keys())
def test_state_is_restored_after_an_exception(
    made: Callable[[], AbstractContextManager[Any]], read: Callable[[], Any], _expected: Any
) -> None:
    with made():
        ambient = Ambient.capture()

    def work() -> tuple[Any, Any]:
        before = read()
        with pytest.raises(ZeroDivisionError, match="in a stage"), ambient.entered():
            raise ZeroDivisionError("in a stage")
        return before, read()

    before, after = in_thread(work)
    assert before == after


def test_state_of_the_caller_is_read_once() -> None:
    with torch.no_grad():
        ambient = Ambient.capture()
    with ambient.entered():
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()


def test_two_ranks_at_once_have_each_their_own() -> None:
    with torch.no_grad():
        without_grad = Ambient.capture()
    ambients = [without_grad, Ambient.capture()]
    together = threading.Barrier(2)

    def work(ambient: Ambient) -> bool:
        with ambient.entered():
            together.wait(timeout=30)
            is_enabled = torch.is_grad_enabled()
            together.wait(timeout=30)
            return is_enabled

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(work, ambients)) == [False, True]


# Modes


def test_function_mode_sees_the_ranks_calls() -> None:
    with NotedFunctions() as mode:
        in_rank(lambda: torch.add(torch.ones(2), 1))
    assert "add" in mode.names


def test_dispatch_mode_sees_forward_and_backward() -> None:
    layer = nn.Linear(2, 2, bias=False)
    with NotedOperators() as mode:
        in_rank(lambda: layer(torch.ones(3, 2)).sum().backward())
    assert mode.names.count("mm") == 2  # forward, and the gradient of the weight


def test_modes_keep_their_order() -> None:
    with NotedFunctions() as outer, NotedFunctions() as inner:
        stack = in_rank(lambda: torch.overrides._get_current_function_mode_stack())
    assert [mode is each for mode, each in zip(stack, (outer, inner), strict=True)] == [True, True]


def test_device_context_is_pushed_once() -> None:
    with torch.device("meta"), NotedFunctions():
        assert len(in_rank(torch.overrides._get_current_function_mode_stack)) == 2


@pytest.mark.parametrize("mode_type", [NotedFunctions, NotedOperators])
def test_modes_leave_after_an_exception(mode_type: Any) -> None:
    with mode_type() as mode:
        ambient = Ambient.capture()

    def work() -> None:
        with pytest.raises(ZeroDivisionError, match="in a stage"), ambient.entered():
            raise ZeroDivisionError("in a stage")
        mode.names.clear()
        torch.ones(2).add(1)

    in_thread(work)
    assert mode.names == []


def test_a_mode_that_a_stage_left_behind_goes_too() -> None:
    with NotedFunctions():
        ambient = Ambient.capture()

    def work() -> int:
        with ambient.entered():
            NotedFunctions().__enter__()
        return len(torch.overrides._get_current_function_mode_stack())

    assert in_thread(work) == 0


def test_flop_counter_counts_all_ranks() -> None:
    layers = [nn.Linear(4, 4, bias=False) for _ in range(3)]
    counter = FlopCounterMode(display=False)
    with counter:
        ambient = Ambient.capture()

        def work(layer: nn.Module) -> None:
            with ambient.entered():
                layer(torch.ones(2, 4)).sum().backward()

        with ThreadPoolExecutor(3) as threads:
            list(threads.map(work, layers))
    assert counter.get_total_flops() == 3 * 2 * (2 * 2 * 4 * 4)


def test_same_thread_is_not_entered_twice() -> None:
    with NotedFunctions() as functions, NotedOperators() as operators, Ambient.capture().entered():
        torch.ones(2)
    assert functions.names.count("ones") == 1
    assert operators.names.count("ones") == 1


# Saved tensors


def test_saved_tensor_hooks_act_in_the_rank() -> None:
    packed: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor

    weight = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        in_rank(lambda: (weight * torch.ones(2)).sum().backward())
    assert packed == [torch.Size([2])]


def test_saved_tensor_hooks_do_not_stay() -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda _: 1 / 0, lambda tensor: tensor):
        ambient = Ambient.capture()

    def work() -> bool:
        with ambient.entered():
            pass
        return bool((torch.ones(2, requires_grad=True) * torch.ones(2)).requires_grad)

    assert in_thread(work)


# Arithmetic


def test_a_thread_that_computed_before_takes_the_callers_thread_count() -> None:
    with ThreadPoolExecutor(1) as threads, intraop_threads(1):
        with intraop_threads(2):
            assert threads.submit(torch.get_num_threads).result() == 2
        ambient = Ambient.capture()
        stale = threads.submit(torch.get_num_threads).result()

        def work() -> int:
            with ambient.entered():
                return torch.get_num_threads()

        assert (stale, threads.submit(work).result()) == (2, 1)


def test_flushing_of_denormals_is_carried_and_restored() -> None:
    def is_flushed() -> bool:
        return bool((torch.tensor([1e-310], dtype=torch.float64) * 1.0 == 0.0).item())

    with ThreadPoolExecutor(1) as threads:
        assert not threads.submit(is_flushed).result()
        torch.set_flush_denormal(True)
        ambient = Ambient.capture()
        torch.set_flush_denormal(False)

        def work() -> bool:
            with ambient.entered():
                return is_flushed()

        assert threads.submit(work).result()
        assert not threads.submit(is_flushed).result()


def test_choice_of_attention_kernel_belongs_to_the_process() -> None:
    query = torch.ones(1, 1, 4, 8)

    def attend() -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(query, query, query)

    with NotedOperators() as usual:
        in_rank(attend)
    with sdpa_kernel(SDPBackend.MATH), NotedOperators() as mode:
        in_rank(attend)
    assert any("flash_attention" in name for name in usual.names)
    assert not any("flash_attention" in name for name in mode.names)
