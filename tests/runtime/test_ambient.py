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
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from pipeloom.runtime import ambient as ambient_module
from pipeloom.runtime.ambient import Ambient

COLOUR = contextvars.ContextVar("colour", default="none")


class NotedFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


class NotedOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def in_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function).result()


def in_rank(function: Callable[[], Any]) -> Any:
    """What ``function`` returns in a thread that is made like this one."""
    ambient = Ambient.capture()

    def work() -> Any:
        with ambient.entered():
            return function()

    return in_thread(work)


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


# Autocast


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


def test_autocast_is_off_in_the_same_thread_outside_forwards() -> None:
    layer = nn.Linear(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        ambient = Ambient.capture()
        with ambient.entered():
            assert linear_dtype(layer) == torch.float32
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
