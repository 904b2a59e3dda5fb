"""The loss that a model computes itself: where it is in the output, and what it counts (contract 4).

Hugging Face models take ``labels=`` and return the mean over those that are not −100, but never say how many these are,
and the weight of a micro-batch is needed before its backward. Averaging such means by rows is the gradient-accumulation
bug of 2024. So labels are counted here, by what the model's class says of its loss. transformers is never imported: its
models say ``loss_type``, ``loss_function`` and ``config``, and their forward shows whether it shifts labels.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import LossError

_CRITERIA = frozenset(
    {"loss_function", "CrossEntropyLoss", "cross_entropy", "BCEWithLogitsLoss", "MSELoss", "mse_loss", "ctc_loss"}
)
_SHIFTED = frozenset({"shift_labels", "shift_logits"})
"""What transformers calls labels that it has moved by one."""
_CLASSIFIED = frozenset(f"For{kind}Classification" for kind in ("Sequence", "Image", "Video", "Audio"))
_SEGMENTED = "ForSemanticSegmentation"
_SEQUENCES = frozenset({"ForCTC", "ParakeetForRNNT", "ParakeetForTDT"})
"""Their −100 are padding; each row counts once."""


def own_loss(output: Any) -> Any:
    """The loss in what a model returned: itself, its ``loss``, or a tuple's first element if that is a scalar.

    A tuple (scalar, integer) is a sum and its count, and stays whole; so does what holds no loss.

    Raises:
        LossError: the output is two floating scalars: a sum and a count, or a loss and a metric.
    """
    named = _named(output)
    if isinstance(named, Tensor) and named.numel() == 1:
        return named
    is_listed = isinstance(output, list | tuple) and bool(output) and is_loss(output[0])
    if not is_listed:
        return output
    if len(output) == 2 and _is_integer(output[1]):
        return tuple(output)
    if len(output) == 2 and (isinstance(output[1], float) or is_loss(output[1])):
        raise LossError(
            "the model returned two floating scalars, which may be (sum, count), or a loss and a metric",
            'return the count as an integer, or {"loss": loss, ...} with what else there is',
        )
    return output[0]


def missing_loss_hint(output: Any) -> str:
    """What to do about an output in which there is no loss."""
    if isinstance(output, list | tuple):
        place = next((i for i, each in enumerate(output) if is_loss(each)), None)
        if place:
            return f"is it output[{place}]? pass loss_fn=lambda output: output[{place}]"
    if isinstance(output, Mapping) and output and all(is_loss(each) for each in output.values()):
        return "pass loss_fn=lambda losses: sum(losses.values())"
    if isinstance(output, Mapping) or hasattr(output, "loss"):
        return "pass labels= if the model computes its loss from them, else loss_fn="
    return "pass loss_fn=; without it the model's output is the loss, or holds it as .loss or as its first element"


@dataclass(frozen=True)
class ModelLoss:
    """How a model with a loss of its own counts the labels of a micro-batch.

    Args:
        owner: the Hugging Face model that computes the loss; None: the model says nothing of its loss.
        is_shifted: whether label t + 1 belongs to position t, so that the first label of a row is never counted.
        names: the positional arguments of the whole model's forward.
    """

    owner: Any = None
    is_shifted: bool = False
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: Any) -> ModelLoss:
        """Read it off a model, a list of stages, or a wrapper (PEFT, DDP, `torch.compile`, a module of the user's)."""
        if isinstance(model, list | tuple) and model:
            return cls.of(model[0])  # keyword arguments go to the first stage
        if not isinstance(model, nn.Module):
            return cls()
        takers = [each for each in model.modules() if "labels" in parameters_of(each)]
        found = next((each for each in takers if _CRITERIA & _vocabulary(each)), takers[0] if takers else None)
        is_known = hasattr(found, "loss_type") and getattr(found, "_loss_function", None) is None
        owner = found if is_known else None
        return cls(owner, owner is not None and _has_shift(owner) and not _has_prompt(model), parameters_of(model))

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name."""
        return {**dict(zip(self.names, args, strict=False)), **kwargs}

    def is_sum(self, calls: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the loss of the batch is the sum of the micro-batches' (CTC of speech models, as configured)."""
        kind = getattr(self.owner, "loss_type", None)
        has_labels = any(call.get("labels") is not None for call in calls)
        return kind == "ForCTC" and has_labels and getattr(self.owner.config, "ctc_loss_reduction", "") == "sum"

    def counts(self, calls: Sequence[Mapping[str, Any]], num_samples: Sequence[int]) -> list[float] | None:
        """Per micro-batch, the labels that its mean is taken over; None where the model does not say.

        Args:
            calls: per micro-batch, the model's arguments by name.
            num_samples: per micro-batch, its rows.

        Raises:
            LossError: the model is told to divide by a count of the user's.
        """
        if any(call.get("num_items_in_batch") is not None for call in calls):
            raise LossError(
                "num_items_in_batch was given, but labels are counted here, over all micro-batches, and each loss is "
                "weighted by them; dividing twice would be wrong",
                'leave it out, or pass loss_reduction="sum" to add the losses up as the model returns them',
            )
        if self.owner is None or any(call.get("labels") is None for call in calls):
            return None
        found = [self._counted(call) for call in calls]
        if any(each is None for each in found):
            return [float(each) for each in num_samples]
        return [float(each) for each in torch.stack([each for each in found if each is not None]).tolist()]  # one wait

    def _counted(self, call: Mapping[str, Any]) -> Tensor | None:
        """The labels counted, a scalar; None: rows."""
        labels, moved = call["labels"], call.get("shift_labels") if self.is_shifted else None
        if not isinstance(labels, Tensor) or not _is_whole(labels) or self._is_by_rows:
            return None
        if moved is None:
            moved = labels[..., 1:] if self.is_shifted else labels
        return (moved != self._ignored(call)).sum()

    @property
    def _is_by_rows(self) -> bool:
        kind, config = self.owner.loss_type, self.owner.config
        problem = getattr(config, "problem_type", None)
        is_single = getattr(config, "num_labels", None) == 1 and problem is None
        has_regression = is_single or problem in ("regression", "multi_label_classification")
        return kind in _SEQUENCES or (has_regression and (kind in _CLASSIFIED or kind == _SEGMENTED))

    def _ignored(self, call: Mapping[str, Any]) -> int:
        if self.owner.loss_type != _SEGMENTED:
            return int(call.get("ignore_index", -100))
        config = self.owner.config
        return int(getattr(config, "loss_ignore_index", getattr(config, "semantic_loss_ignore_index", 255)))


def _named(output: Any) -> Any:
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def is_loss(value: Any) -> bool:
    """Whether a value is a floating tensor without dimensions."""
    return isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()


def _is_integer(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and _is_whole(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _is_whole(value: Tensor) -> bool:
    return not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool


def _has_shift(owner: Any) -> bool:
    """Whether labels are moved by one: by the loss function, or by the forward under the names that transformers uses.

    An encoder–decoder moves its decoder's input instead, and what it calls moved labels are the labels.
    """
    words = _vocabulary(owner)
    is_own = bool(_SHIFTED & words)
    is_fed = "decoder_input_ids" in words
    if "loss_function" not in words:
        return is_own and not is_fed
    return "shift_labels" in inspect.signature(owner.loss_function).parameters and not (is_own and is_fed)


def _has_prompt(model: Any) -> bool:
    """Whether PEFT puts learned tokens, labelled −100, in front: the first label of a row then counts too."""
    config = getattr(model, "active_peft_config", None)
    kind = str(getattr(config, "peft_type", ""))
    return bool(getattr(config, "is_prompt_learning", False)) and not kind.endswith("PREFIX_TUNING")


def _forward(module: nn.Module) -> Any:
    return inspect.unwrap(getattr(type(module), "forward", module.forward))


def parameters_of(module: nn.Module) -> tuple[str, ...]:
    """The names of what a module's forward takes, in order."""
    code = getattr(_forward(module), "__code__", None)
    return () if code is None else code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]


def _vocabulary(module: nn.Module) -> frozenset[str]:
    """Every name in a module's forward: what it calls, its variables, and the keywords of its calls."""
    code = getattr(_forward(module), "__code__", None)
    return frozenset() if code is None else frozenset((*code.co_names, *code.co_varnames, *_keywords(code.co_consts)))


def _keywords(constants: Sequence[Any]) -> Iterator[str]:
    for each in constants:
        if isinstance(each, tuple):
            yield from (name for name in each if isinstance(name, str))
