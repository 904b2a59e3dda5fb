"""Key–value caches of text generation, which a pipeline switches off (contract 15).

A language model's configuration asks for a cache by default, in training too. The model's code makes it, and every
layer writes into it; but each stage runs that code for itself, so the cache that the last stage returns has the last
stage's layers in it and no others. Nothing would say so until somebody went on generating from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from pipeloom.batch.model_losses import parameters_of
from pipeloom.errors import BatchError

_SWITCH = "use_cache"
_CACHES = ("past_key_values", "cache", "cache_params")
"""What transformers calls a cache: up to 5.20 or so, later, and in state-space models."""


def without_cache(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a call with ``use_cache=False`` where the model would else make a cache.

    Raises:
        BatchError: the caller asks for a cache, or passes one.
    """
    names = parameters_of(model) if isinstance(model, nn.Module) else ()
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if not _has_switch(model):
        return dict(kwargs)
    asked = _SWITCH if given.get(_SWITCH) else next((each for each in _CACHES if given.get(each) is not None), None)
    if asked is not None:
        shown = "True" if asked == _SWITCH else f"a {type(given[asked]).__name__}"
        raise BatchError(
            f"{asked}={shown} was given; every stage would fill a key–value cache of its own layers, and micro-batches "
            "have one each",
            "leave it out to train or evaluate, and generate with the model that unwrap() gives back",
        )
    is_by_position = _SWITCH in names[: len(args)]
    return dict(kwargs) if is_by_position else {**kwargs, _SWITCH: False}


def _has_switch(model: Any) -> bool:
    """Whether a model, or the one inside PEFT's wrapper, takes ``use_cache``."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return isinstance(base, nn.Module) and _SWITCH in parameters_of(base)
