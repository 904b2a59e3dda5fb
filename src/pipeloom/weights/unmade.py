"""Tensors that cost nothing while a model is built, and those that must be there all the same.

``torch.device("meta")`` makes everything without values. Here only what nobody could know is without them:
uninitialised memory, random draws, and whatever is computed of these. ``arange``, ``zeros``, ``tensor`` and what comes
of them is real, whatever device the model's code names::

    torch.empty(n)                  memory that nobody touches yet: costs nothing; a buffer once real values are written
    torch.zeros(n), full, ones      real; large ones are filled when somebody reads them
    torch.randn(n), x.normal_()     no values; x remembers it, also through views
    arange(n) * randn(n)            no values
    bool(randn(1) > 0)              refused: the model's structure would be random
"""

from __future__ import annotations

import enum
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from pipeloom.errors import SplitError
from pipeloom.weights.ledger import Ledger, State

EAGER_BYTES: Final = 1 << 20
"""Constants up to here are filled at once."""
MOST_BYTES: Final = 1 << 32
"""Above, not even addresses are asked for: some systems refuse them."""

Operator = torch._ops.OpOverload


class _Kind(enum.Enum):
    CONSTANT = enum.auto()
    VIEW = enum.auto()
    DRAW = enum.auto()
    OTHER = enum.auto()


_FILLS: Final[dict[str, Any]] = {"empty": None, "empty_strided": None, "zeros": 0, "ones": 1, "full": ...}
"""What needs only a shape → the value that it writes; ``full`` is told."""
_OVERWRITES: Final = ("copy_", "fill_", "zero_")
_READS_BY_ADDRESS: Final = frozenset(
    {Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.data_ptr, Tensor.__reduce_ex__, Tensor.__dlpack__}
)


_SET_CONTENT: Final = Tensor.data.__set__  # type: ignore[attr-defined]


def _family(func: Operator) -> str:
    return str(func.overloadpacket.__name__).removeprefix("new_").removesuffix("_like")


@cache
def _kind(func: Operator) -> _Kind:
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _Kind.DRAW
    if _family(func) in _FILLS and func.namespace == "aten":
        return _Kind.CONSTANT
    aliases = [argument.alias_info for argument in func._schema.arguments if argument.alias_info is not None]
    is_view = bool(aliases) and not any(alias.is_write for alias in aliases)
    # `set_` lets a tensor see other memory; no value changes.
    return _Kind.VIEW if is_view or func.overloadpacket is torch.ops.aten.set_ else _Kind.OTHER


class Unmade(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered: no memory for what has no values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = Ledger()
        self._is_paused = False

    def __torch_dispatch__(
        self, func: Operator, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._is_paused or kwargs.get("layout") not in (None, torch.strided):
            return func(*args, **kwargs)
        kind = _kind(func)
        if kind is _Kind.CONSTANT:
            return self._constant(func, args, kwargs)
        if kind is _Kind.VIEW:
            return func(*args, **kwargs)
        written, read = _written_and_read(func, args, kwargs)
        if kind is _Kind.DRAW or self._is_unknowable(func, written, read):
            return self._without_values(func, args, kwargs, written)
        self.ledger.settle([*written, *read])
        made = func(*args, **_at(kwargs, func, "cpu"))
        for tensor in written:
            self.ledger.forget(tensor)
        return made

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, torch is itself again."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def refuse(self, what: str) -> SplitError:
        """The error of a model whose structure depends on what is not there."""
        return SplitError(
            f"the factory reads values of a tensor that has none ({what}): parameters and random numbers are not made "
            f"when weights are given, they are read from there",
            "let the factory take the value from its configuration, or make the model and give it whole",
        )

    def _constant(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Make what depends on a shape only; of a tensor without values too."""
        bare: Tensor = func(*tree_map(_bare, args), **{**kwargs, "device": "meta", "pin_memory": False})
        num_bytes = math.prod(bare.shape) * bare.dtype.itemsize
        if num_bytes > MOST_BYTES:
            return bare
        made = torch.empty_strided(bare.shape, bare.stride(), dtype=bare.dtype, device="cpu")
        fill = args[-1] if _family(func) == "full" else _FILLS[_family(func)]
        if fill is None:
            self.ledger.note(made, State.UNWRITTEN)
        elif num_bytes > EAGER_BYTES:
            self.ledger.note(made, State.PENDING, fill)
        else:
            made.fill_(fill)
        return made

    def _is_unknowable(self, func: Operator, written: list[Tensor], read: list[Tensor]) -> bool:
        # What is overwritten may be both: `x.copy_(x)`.
        is_lost = any(self.ledger.state(tensor) is State.DRAWN and not _overwrites(func, tensor) for tensor in written)
        return is_lost or any(map(self.ledger.is_unknown, read))

    def _without_values(
        self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor]
    ) -> Any:
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*func.tags}:
            if func is torch.ops.aten._local_scalar_dense.default and _is_initialiser():
                return False  # "must anything be drawn anew?": no
            raise self.refuse(str(func))
        originals: dict[int, Tensor] = {}

        def bare(leaf: Any) -> Any:
            stripped = _bare(leaf)
            if isinstance(leaf, Tensor):
                originals[id(stripped)] = leaf
            return stripped

        bare_args, bare_kwargs = tree_map(bare, (args, kwargs))
        made = func(*bare_args, **_at(bare_kwargs, func, "meta"))
        for tensor in written:
            if not tensor.is_meta:
                self.ledger.note(tensor, State.DRAWN)
        return tree_map(lambda leaf: originals.get(id(leaf), leaf), made)


class Home(TorchFunctionMode):
    """Makes tensors on the CPU, whatever the model's code says; sees the readers that dispatch never does."""

    def __init__(self, unmade: Unmade) -> None:
        super().__init__()
        self._unmade = unmade

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._unmade._is_paused:
            return func(*args, **kwargs)
        if func in _READS_BY_ADDRESS:
            self._expose(args[0], func)
        if func == _SET_CONTENT and args[0].is_meta:  # torch refuses real content for what is on meta
            with self._unmade.paused():
                args = args[0], _bare(args[1])
        if kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)

    def _expose(self, tensor: Tensor, func: Callable[..., Any]) -> None:
        """Somebody will read, or write, past torch."""
        if self._unmade.ledger.state(tensor) is State.DRAWN and func is not Tensor.data_ptr:
            raise self._unmade.refuse(f"Tensor.{func.__name__}")
        self._unmade.ledger.settle([tensor])
        self._unmade.ledger.forget(tensor)


def _written_and_read(
    func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that an operator writes to, and those that it takes only to read."""
    written: list[Tensor] = []
    read: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        given = args[position] if position < len(args) else kwargs.get(argument.name)
        is_write = argument.alias_info is not None and argument.alias_info.is_write
        (written if is_write else read).extend(leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor))
    return written, read


def _overwrites(func: Operator, tensor: Tensor) -> bool:
    """Whether an operator gives all of a tensor's memory new values."""
    is_whole = not tensor.is_meta and tensor.numel() * tensor.dtype.itemsize == tensor.untyped_storage().nbytes()
    return is_whole and func.overloadpacket.__name__ in _OVERWRITES


def _bare(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or leaf.is_meta:
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


def _at(kwargs: dict[str, Any], func: Operator, device: str) -> dict[str, Any]:
    if "generator" in kwargs and device == "meta":
        kwargs = {**kwargs, "generator": None}
    takes_device = any(argument.name == "device" for argument in func._schema.arguments)
    is_named = kwargs.get("device") is not None or (device == "meta" and not _has_tensor(func))
    return {**kwargs, "device": device} if takes_device and is_named else kwargs


@cache
def _has_tensor(func: Operator) -> bool:
    return any("Tensor" in str(argument.type) for argument in func._schema.arguments)


def _is_initialiser() -> bool:
    """Whether one of torch's own initialisers asks: some draw again what is out of bounds, until nothing is."""
    frame = sys._getframe(1)
    for _ in range(12):
        if frame.f_globals.get("__name__") == "torch.nn.init":
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
