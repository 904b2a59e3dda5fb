"""Which stored tensor is which of the model's, settled for the whole model before anything is read.

Looking names up while loading finds the missing one after an hour, on one rank, while the others wait for it. And
"missing" has innocent kinds: a tied weight is stored once, a base model is stored without the prefix that it has inside
a model with a head. Names are matched exactly, then by ties, then by one prefix, if just one explains all of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from torch import Tensor, nn

from pipeloom.archive.shard import Form
from pipeloom.errors import CheckpointError, near
from pipeloom.weights.renamed import as_model_names
from pipeloom.weights.stored import Source, Weights

Place = tuple[str, nn.Module, str]
"""The whole model's name of a parameter or buffer, the module that has it, and that module's name for it."""
_NUM_NAMED: Final = 5


def places_of(model: nn.Module) -> Iterator[Place]:
    """Yield the place of each parameter and buffer, under each of its names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for held in (module._parameters, module._buffers):
            for attribute, tensor in held.items():
                if tensor is not None:
                    yield f"{prefix}.{attribute}" if prefix else attribute, module, attribute


def held_at(module: nn.Module, attribute: str) -> Tensor | None:
    """Return a module's own parameter or buffer."""
    parameter = module._parameters.get(attribute)
    return module._buffers.get(attribute) if parameter is None else parameter


@dataclass(frozen=True)
class Match:
    """What a model's tensors are made of.

    Attributes:
        source: where they are read.
        names: for each of the model's names, the stored ones: several, if a tied tensor is stored more than once; none,
            if it is a buffer that is not stored and has its values.
    """

    source: Source
    names: Mapping[str, tuple[str, ...]]


def match(model: nn.Module, weights: Weights) -> Match:
    """Find each of the model's tensors among those that are stored; what the model does not have is ignored.

    Args:
        model: as `pipeloom.weights.build.build` made it, before any part of it is materialised: tied parameters
            are known by being one object.
        weights: what is stored.

    Raises:
        CheckpointError: a parameter, or a buffer without values, is not stored; a shape differs; two prefixes would
            explain the names equally well. Names the first few.
    """
    source = as_model_names(model, weights)
    groups = _groups(model)
    prefix = _Prefix.found([names for names, _, is_stored in groups if is_stored], source)
    matched, missing, misfits = {}, [], []
    for names, tensor, is_stored in groups:
        stored = tuple(dict.fromkeys(found for name in names if (found := prefix.stored(name)) is not None))
        if not stored and is_stored and tensor.is_meta:
            missing.append(names[0])
        forms = [source.forms[name] for name in stored]
        misfits += [_misfit(names[0], tensor, form) for form in forms if form.shape != tuple(tensor.shape)]
        matched.update(dict.fromkeys(names, stored))
    if misfits:
        raise CheckpointError(
            f"{weights.path} is of another model: {_listed(misfits, '; ')}",
            "build the model from the weights' own configuration",
        )
    if missing:
        raise _unstored(missing, source, {name for names in matched.values() for name in names})
    return Match(source, matched)


def _groups(model: nn.Module) -> list[tuple[list[str], Tensor, bool]]:
    """Return each tensor with its names, and whether it is one that is stored."""
    groups: dict[int, tuple[list[str], Tensor, bool]] = {}
    for name, module, attribute in places_of(model):
        tensor = held_at(module, attribute)
        if tensor is not None:
            is_stored = attribute not in module._non_persistent_buffers_set
            names, _, was_stored = groups.get(id(tensor), ([], tensor, False))
            groups[id(tensor)] = [*names, name], tensor, is_stored or was_stored
    return list(groups.values())


class _Prefix:
    """How the model's names become stored ones: as they are, or with one prefix more or less."""

    def __init__(self, weights: Source, removed: str = "", added: str = "") -> None:
        self._forms = weights.forms
        self._removed, self._added = removed, added

    @classmethod
    def found(cls, groups: list[list[str]], weights: Source) -> _Prefix:
        """Find the one prefix that explains what is not stored as it is; none where there is no such."""
        plain = cls(weights)
        absent = [names for names in groups if not any(map(plain.stored, names))]
        if not absent:
            return plain
        heads = {name.partition(".")[0] + "." for names in absent for name in names if "." in name}
        candidates = [cls(weights, removed=head) for head in sorted(heads)]
        if len(absent) == len(groups):
            stored_heads = {name.partition(".")[0] + "." for name in weights.forms if "." in name}
            candidates += [cls(weights, added=head) for head in sorted(stored_heads)]
        explaining = [each for each in candidates if each._explains(absent)]
        if len(explaining) > 1:
            how = " or ".join(f"{each._removed or each._added!r}" for each in explaining)
            raise CheckpointError(
                f"{weights.path} does not have {absent[0][0]!r}, and more than one prefix would explain it: {how}",
                "rename the stored tensors to the model's names",
            )
        return explaining[0] if explaining else plain

    def stored(self, name: str) -> str | None:
        """Return the stored name, or None where there is none."""
        if name in self._forms:
            return name
        renamed = self._added + name.removeprefix(self._removed)
        return renamed if renamed in self._forms and name.startswith(self._removed) else None

    def _explains(self, absent: Iterable[list[str]]) -> bool:
        return all(any(map(self.stored, names)) for names in absent)


def _misfit(name: str, tensor: Tensor, form: Form) -> str:
    return f"{name!r} has shape {[*tensor.shape]} in the model, {[*form.shape]} as stored"


def _unstored(missing: list[str], weights: Source, taken: Collection[str]) -> CheckpointError:
    """A name or two may be written otherwise, as one that nothing else in the model has; more is another model."""
    free = [name for name in weights.forms if name not in taken]
    alike = near(missing[0], free) if len(missing) <= _NUM_NAMED else None
    return CheckpointError(
        f"{weights.path} has no tensor for {len(missing)} of the model's parameters and buffers: "
        f"{_listed([repr(name) for name in missing], ', ')}",
        alike
        or "give the weights of this model, saved with all of its parts; nothing is made up for others, so a new head "
        "needs Pipeline(model) with the model itself, and adapters are put into the model once the pipeline is made",
    )


def _listed(texts: list[str], separator: str) -> str:
    more = f" and {len(texts) - _NUM_NAMED} more" if len(texts) > _NUM_NAMED else ""
    return separator.join(texts[:_NUM_NAMED]) + more
