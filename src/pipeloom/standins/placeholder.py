"""A tensor without numbers: what a unit of another stage returns, and what all units see in the dry run.

torch's `FakeTensor` does this already, but libraries know it: transformers takes another path when it meets one, and
a plan made on that path is the plan of another model [seen: Llama's glue is 21 calls real, 32 under fake tensors]. A
plain tensor on the meta device is no way either: it reports that device, and ``torch.arange(n, device=x.device)`` in
the user's code would go there. A placeholder reports the model's device and has a meta tensor inside.

Outside `computing` any kernel on a placeholder raises: a value of another stage was used where it may not be.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from pipeloom.batch.copies import Alias

_thread = threading.local()


class NoNumbers(Exception):
    """The numbers of a placeholder were asked for, or the shape of something that depends on them."""


class Unseen(NoNumbers):
    """A placeholder came from where nothing is seen; no stage could be given the real one in its stead."""


def is_about_numbers(error: BaseException) -> bool:
    """Whether code asked for numbers, in torch's words or in ours."""
    return isinstance(error, NoNumbers) or "is not supported for tensor subclasses" in str(error)


class Computing:
    """What the kernels did that ran on placeholders inside `computing`.

    Attributes:
        num_flops: of matrix products and convolutions, as torch's `FlopCounterMode` counts them.
        written: storages that were written into, of placeholders, and of real tensors by kernels that saw some.
        has_read: whether the shape of a placeholder depends on the numbers of a real tensor.
        found: of the unit that runs, the ops of which it uses tensors that it was not given.
        has_gone_back: whether it ran backward through what was there before it.
    """

    def __init__(self) -> None:
        self.num_flops = 0
        self.written: set[int] = set()
        self.has_read = False
        self.found: set[int] = set()
        self.has_gone_back = False
        self._op: int | None = None
        self._given: set[int] | None = None
        self._first_node = 0

    def begin(self, op: int, given: Iterable[Any] | None = None) -> None:
        """An op begins; of a unit's, ``given`` are the tensors that it may use."""
        self._op, self._given = op, None if given is None else set(map(id, given))
        self.found, self.has_gone_back = set(), False
        self._first_node = torch._C._autograd._get_sequence_nr()

    def made(self, placeholder: Placeholder) -> Placeholder:
        """Note of a new placeholder who made it."""
        placeholder.maker = self._op
        return placeholder

    def used(self, placeholder: Placeholder) -> None:
        """Note what a kernel uses that is neither the unit's own nor given to it."""
        if self._given is None or placeholder.maker in (None, self._op) or id(placeholder) in self._given:
            return
        if torch._C._current_graph_task_id() == -1:
            self.found.add(placeholder.maker)

    def ran(self) -> None:
        """Note whether a kernel is one of a backward through an earlier op."""
        if self._given is not None and torch._C._current_graph_task_id() != -1:
            node = torch._C._current_autograd_node()
            self.has_gone_back |= node is not None and node._sequence_nr() < self._first_node


@contextmanager
def computing() -> Iterator[Computing]:
    """Let kernels run on placeholders of this thread: shapes and dtypes, no numbers."""
    before = getattr(_thread, "computing", None)
    _thread.computing = now = Computing()
    try:
        yield now
    finally:
        _thread.computing = before


class Placeholder(Tensor):
    """A tensor of a shape, dtype and device, with or without a gradient, and no numbers.

    Args:
        meta: a tensor on the meta device.
        device: what the placeholder reports.
    """

    meta: Tensor
    maker: int | None = None
    is_uncertain: bool = False
    """Whether its shape depends on numbers, so that it is another one in the stage which has them."""
    others: tuple[Tensor | None, ...] = ()
    """Of an uncertain shape, meta tensors of some that it may have instead."""
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(  # noqa: D102
        cls: type[Placeholder], meta: Tensor, device: torch.device, requires_grad: bool = False
    ) -> Placeholder:
        made: Placeholder = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.size(),
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            layout=meta.layout,
            device=device,
            requires_grad=requires_grad,
        )
        made.meta = meta
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    @classmethod
    def like(cls, tensor: Tensor, device: torch.device | None = None, *, is_leaf: bool | None = None) -> Placeholder:
        """A placeholder for a tensor, on its device unless another is given; a leaf of the graph or not, as that is."""
        made = cls(_to_meta(tensor), device or tensor.device, requires_grad=tensor.requires_grad)
        if (tensor.is_leaf if is_leaf is None else is_leaf) or not made.requires_grad:
            return made
        with torch.enable_grad(), computing():
            alias: Placeholder = Alias.apply(made)  # type: ignore[no-untyped-call]
        return alias

    def at(self, device: torch.device) -> Placeholder:
        """The same on another device; always the same object for one device."""
        if device == self.device:
            return self
        found: dict[torch.device, Placeholder] = self.__dict__.setdefault("elsewhere", {})
        if device not in found:  # ranks may share a device: the first one's stays
            made = Placeholder(self.meta, device, self.requires_grad)
            made.is_uncertain = self.is_uncertain
            found.setdefault(device, made)
        return found[device]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        return f"Placeholder({str(self.dtype).removeprefix('torch.')}{tuple(self.shape)})"

    def __deepcopy__(self, memo: Any) -> Placeholder:
        del memo
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        now: Computing | None = getattr(_thread, "computing", None)
        if now is None:
            if func is torch.ops.aten.detach.default:  # torch shows tensors and makes parameters with it
                return cls(args[0].meta, args[0].device)
            if func is torch.ops.aten.is_same_size.default:
                return args[0].shape == args[1].shape
            raise NoNumbers(f"{func} needs the numbers of a value of another stage")
        return _computed(now, func, args, kwargs or {})


def storage_of(tensor: Tensor) -> int:
    """Which memory a tensor lies in, or would lie in if it were real."""
    inner = tensor.meta if isinstance(tensor, Placeholder) else tensor
    return inner.untyped_storage()._cdata if inner.layout is torch.strided else id(inner)


def _to_meta(tensor: Tensor) -> Tensor:
    if tensor.device.type == "meta":
        return tensor.detach()
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _computed(now: Computing, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a kernel's shape function; the same placeholder comes out where the kernel returns what it was given."""
    metas: dict[int, Tensor] = {}
    owners: dict[int, Tensor] = {}
    devices: list[torch.device] = []

    def opened(value: Any) -> Any:
        if isinstance(value, Placeholder):
            now.used(value)
            devices.append(value.device)
            owners[id(value.meta)] = value
            return value.meta
        if isinstance(value, Tensor):
            made = metas.get(id(value))
            if made is None:
                made = metas[id(value)] = _to_meta(value)
                owners[id(made)] = value
            return made
        return torch.device("meta") if isinstance(value, torch.device) else value

    asked = kwargs.get("device")
    args = _with_real_indices(now, func, args)
    inner_args, inner_kwargs = tree_map(opened, args), tree_map(opened, kwargs)
    device = torch.device(asked) if asked is not None else next(iter(devices), torch.device("cpu"))
    out = _shape_of(func, inner_args, inner_kwargs, args, kwargs)
    _note_writes(now, func, args, kwargs)
    packet = func._overloadpacket
    if packet in flop_registry:
        now.num_flops += int(flop_registry[packet](*inner_args, **inner_kwargs, out_val=out))

    def closed(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        owner = owners.get(id(value))
        if owner is not None:
            return owner
        return now.made(Placeholder(value, device))

    now.ran()
    return tree_map(closed, out)


def _shape_of(func: Any, metas: Any, keywords: Any, args: Any, kwargs: Any) -> Any:
    try:
        return func(*metas, **keywords)
    except (NotImplementedError, RuntimeError) as error:
        if isinstance(error, NotImplementedError) and (func in _BY_LENGTHS or not _NUMERIC & set(func.tags)):
            return _of_made_up(func, args, kwargs)
        raise NoNumbers(f"{func} needs numbers, not only shapes: {str(error).splitlines()[0]}") from error


_BY_LENGTHS = frozenset({torch.ops.aten._ctc_loss.default, torch.ops.aten._ctc_loss.Tensor})
"""Their shapes depend on numbers, but on those of lengths, which are the user's own."""
_NUMERIC = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def _of_made_up(func: Any, args: Any, kwargs: Any) -> Any:
    """The shapes of a kernel for which torch has no shape function (CTC loss): run it, on numbers that are made up."""

    def made_up(value: Any) -> Any:
        if not isinstance(value, Placeholder):
            return value
        return torch.arange(value.numel(), dtype=torch.float32).sin_().reshape(value.shape).to(value.dtype)

    def bare(value: Any) -> Any:
        return _to_meta(value) if isinstance(value, Tensor) else value

    try:
        return tree_map(bare, func(*tree_map(made_up, args), **tree_map(made_up, kwargs)))
    except (NotImplementedError, RuntimeError) as error:
        raise NoNumbers(f"{func} has no shape function, and fails on numbers that are made up: {error}") from error


def _with_real_indices(now: Computing, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A mask of the user's own that selects from a placeholder has numbers, so how many it selects is known."""
    if func not in _INDEXING:
        return args
    indices: list[Any] = []
    for each in args[1]:
        if isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) and not isinstance(each, Placeholder):
            now.has_read = True
            indices += each.nonzero().unbind(1)
        else:
            indices.append(each)
    return (args[0], indices, *args[2:])


_INDEXING = frozenset(
    {
        torch.ops.aten.index.Tensor,
        torch.ops.aten.index_put.default,
        torch.ops.aten.index_put_.default,
        torch.ops.aten._index_put_impl_.default,
    }
)


def _note_writes(now: Computing, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for each in value if isinstance(value, list | tuple) else (value,):
                if isinstance(each, Tensor):
                    now.written.add(storage_of(each))
