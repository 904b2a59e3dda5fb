"""What a pipeline has of the model as a whole: its parameters by its own names, its state, its modes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from pipeloom.errors import CheckpointError
from pipeloom.processes import DistributedRuntime, clip_grad_norm
from pipeloom.runtime.local import LocalRuntime
from pipeloom.splitting import Share


class WholeModel(ABC):
    """The model of a pipeline, under the names that it has by itself, of which this process may have a part."""

    step_index: int

    @property
    @abstractmethod
    def _share(self) -> Share:
        """What of the model is in this process."""

    @property
    @abstractmethod
    def _root(self) -> nn.Module:
        """The model."""

    @property
    @abstractmethod
    def _runtime(self) -> LocalRuntime | DistributedRuntime:
        """The processes."""

    if not TYPE_CHECKING:  # a checker would take every name for one that exists

        def __getattr__(self, name: str) -> Any:
            """Called for what is not found; the model may have it, as ``generate`` or ``config``."""
            if hasattr(type(self), name):  # a property, which raised: let it say so itself
                return object.__getattribute__(self, name)
            said = f"{type(self).__name__!r} object has no attribute {name!r}"
            if not name.startswith("_") and name in dir(self._root):
                said += (
                    f"; its model has: pipe.unwrap().{name}, when the training is over, on every rank (devices= places "
                    "stages, save_pretrained() and full_state_dict() save them)"
                )
            raise AttributeError(said, name=name, obj=self)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The whole model's parameters, in its order, each once."""
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with the whole model's names; a list's modules are named by their index."""
        return self._share.named_parameters()

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers under the whole model's names."""
        return self._share.state_dict()

    def full_state_dict(self, to: int = 0) -> dict[str, Any]:
        """All ranks' parts on rank ``to``, nothing on the others; where ranks are processes, all have to call it."""
        return self._share.in_order(self._runtime.to_one(self.state_dict(), to))

    def save_pretrained(self, folder: str | PathLike[str], **options: Any) -> None:
        """Write the model as Hugging Face's ``save_pretrained`` does, for plain ``from_pretrained`` to load.

        Where ranks are processes, all have to call it; rank 0 gets the whole model and writes. Of a PEFT model the
        adapters are written, as PEFT does.

        Args:
            folder: where to.
            options: the model's own ``save_pretrained`` takes them.

        Raises:
            CheckpointError: the model has no ``save_pretrained``, or holds adapters that it would write under names
                that nobody loads; or, on other ranks, rank 0 could not write.
            OSError: ``folder`` is a file, or cannot be written to.
        """
        check_writable(self._root)
        state, fault = self.full_state_dict(to=0), None
        if self._runtime.rank == 0:
            try:
                if Path(folder).is_file():  # transformers would log it, and go on
                    raise NotADirectoryError(f"{folder} is a file; a folder is needed")
                self._root.save_pretrained(folder, state_dict=state, **options)  # type: ignore[operator]
            except Exception as error:  # raised when the others know
                fault = error
        told = self._runtime.all_gather(repr(fault).encode() if fault else b"", f"save_pretrained({str(folder)!r})")
        if fault is not None:
            raise fault
        if told[0]:
            raise CheckpointError(f"rank 0 could not write the model to {folder}: {told[0].decode()}")

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Load parameters and buffers by the whole model's names, as `nn.Module.load_state_dict` does."""
        return self._share.load_state_dict(state, strict)

    def train(self, mode: bool = True) -> Self:
        """Put the model into training mode."""
        self._root.train(mode)
        return self

    def eval(self) -> Self:
        """Put the model into evaluation mode."""
        return self.train(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        self._root.zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """Scale all gradients so that their norm over all stages is at most ``max_norm``; return the norm before."""
        if self._share.is_whole:
            return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type, error_if_nonfinite)
        gather = partial(
            self._runtime.all_gather,
            what=f"clip_grad_norm_({max_norm}, {norm_type}) before step {self.step_index}",
        )
        own, names = dict(self.named_parameters()), self._share.parameter_names
        return clip_grad_norm(own, names, max_norm, norm_type, error_if_nonfinite, gather)

    def optimizer(self, cls: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
        """An optimizer of all parameters: ``pipe.optimizer(torch.optim.AdamW, lr=3e-4)``."""
        return cls(list(self.parameters()) or [nn.Parameter(torch.empty(0))], **options)


def check_writable(model: nn.Module) -> None:
    """Raise if a model cannot be written by its own ``save_pretrained``.

    Raises:
        CheckpointError: it has none, or PEFT put adapters into it that transformers does not know of.
    """
    if not callable(getattr(model, "save_pretrained", None)):
        raise CheckpointError(
            f"save_pretrained() was called for a pipeline of a {type(model).__name__}, which has no save_pretrained; "
            "models of Hugging Face have one",
            "save pipe.full_state_dict(to=0), or for a Hugging Face model inside of yours call its save_pretrained "
            "after unwrap()",
        )
    if "peft_config" in vars(model) and not getattr(model, "_hf_peft_config_loaded", False):
        raise CheckpointError(
            f"PEFT put adapters into the {type(model).__name__} of this pipeline; its save_pretrained does not know, "
            "and would write weights under names that from_pretrained does not look for",
            "make the pipeline of the model that get_peft_model() returned, or unwrap() and save that one",
        )
