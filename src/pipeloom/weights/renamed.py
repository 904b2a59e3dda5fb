"""Weights of Hugging Face models under the names that the models have today.

What is stored need not be what the model is: transformers keeps the names of a model's first release in its files, and
stores each expert of a mixture by itself where the model has one parameter for all. It has a table of such conversions,
which is asked here: `Renamed` looks like the stored weights, with the model's names, and converts a tensor when read.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.archive.shard import Form
from pipeloom.weights.stored import Source, Weights, dtype_of


def as_model_names(model: nn.Module, weights: Weights) -> Source:
    """Return what is stored under the model's names: itself, unless transformers knows of a conversion."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return weights
    try:
        mapping = importlib.import_module("transformers.conversion_mapping")
        loading = importlib.import_module("transformers.core_model_loading")
        conversions = mapping.get_model_conversion_mapping(model)
    except (ImportError, AttributeError):  # before release 5 files and models had the same names
        return weights
    return Renamed(model, weights, conversions, loading) if conversions else weights


@dataclass
class _Recipe:
    """What one or several of the model's tensors are made of."""

    first: str
    converter: Any
    ingredients: dict[str, list[str]] = field(default_factory=dict)
    """Stored names by the pattern that they have matched."""


class Renamed:
    """The stored tensors as the model's."""

    def __init__(self, model: nn.Module, weights: Weights, conversions: list[Any], loading: Any) -> None:
        self.path = weights.path
        self._model, self._weights = model, weights
        self._recipes: dict[str, _Recipe | str] = {}
        forms: dict[str, Form] = {}
        for target, recipe in self._find(conversions, loading).items():
            if isinstance(recipe, str):
                self._recipes[target], forms[target] = recipe, weights.forms[recipe]
                continue
            for name, tensor in self._convert(recipe, self._bare).items():
                dtype = str(tensor.dtype).removeprefix("torch.")
                self._recipes[name], forms[name] = recipe, Form(dtype, tuple(tensor.shape))
        self.forms: Mapping[str, Form] = forms

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return one of the model's tensors on the CPU; in ``dtype``, by default as it is stored.

        Raises:
            CheckpointError: a file cannot be read.
        """
        recipe = self._recipes.get(name, name)
        if isinstance(recipe, str):
            return self._weights.read(recipe, dtype)
        made = self._convert(recipe, self._weights.read)[name]
        return made if dtype is None else made.to(dtype)

    def _find(self, conversions: list[Any], loading: Any) -> dict[str, _Recipe | str]:
        """Do as transformers does when it loads: rename all, then let at most one converter collect."""
        renamings = [each for each in conversions if isinstance(each, loading.WeightRenaming)]
        converters = [each for each in conversions if isinstance(each, loading.WeightConverter)]
        of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        known = self._model.state_dict()
        prefix = self._model.base_model_prefix
        recipes: dict[str, _Recipe | str] = {}
        for stored in sorted(self._weights.forms, key=loading.dot_natural_key):
            target, pattern = loading.rename_source_key(stored, renamings, converters, prefix, known)
            if target not in known and stored in known:
                target, pattern = stored, None
            if pattern is None:
                recipes[target] = stored
            elif target in known:
                recipe = recipes.setdefault(target, _Recipe(target, of_pattern[pattern]))
                if isinstance(recipe, _Recipe):
                    recipe.ingredients.setdefault(pattern, []).append(stored)
        return recipes

    def _convert(self, recipe: _Recipe, read: Any) -> dict[str, Tensor]:
        converter = copy.deepcopy(recipe.converter)
        for pattern, names in recipe.ingredients.items():
            for name in names:
                converter.add_tensor(recipe.first, name, pattern, read(name))
        made = converter.convert(recipe.first, model=self._model, config=self._model.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}

    def _bare(self, name: str) -> Tensor:
        form = self._weights.forms[name]
        return torch.empty(form.shape, dtype=dtype_of(form), device="meta")
