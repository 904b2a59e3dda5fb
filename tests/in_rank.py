"""Run something in a fresh thread, or in one that is like a rank's; note what torch is asked for there."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipeloom.runtime.ambient import Ambient


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
