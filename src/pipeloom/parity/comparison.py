"""Tensors held against what they should be: to the bit, or by how much they differ.

"All close" is no answer here. The promise is equal bits on the CPU, and where a cut regroups a sum a bound of 1e-6 in
float32 (contract 1 and 2). A bound on each element would fail on gradients that are zero but for rounding, as that of a
bias before a BatchNorm; so a tensor is measured against its own largest element, and rounding against the model's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

_REGROUPED: Final = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 8e-3, torch.bfloat16: 6e-2}
"""Contract 2; eight times the rounding of a number for types that it does not speak of."""
_UNORDERED: Final = 100
"""A GPU's kernels may add up in any order: as many times more is allowed there."""
_MOST_NAMED: Final = 5


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor, held against what it should be.

    Args:
        name: of the parameter; "loss"; or which input it is the gradient of.
        is_bit_equal: whether all bits are equal; NaN is equal to NaN.
        largest: the largest difference of two elements.
        scale: the largest element of what it should be.
        allowed: the largest difference that regrouped sums explain.
        is_regrouped: whether the cut regroups its sums, so that bits may differ on any device.
        what: set where there is nothing to compare: a gradient is missing, or there should be none.
    """

    name: str
    is_bit_equal: bool
    largest: float = 0.0
    scale: float = 0.0
    allowed: float = 0.0
    is_regrouped: bool = False
    what: str = ""

    @property
    def is_right(self) -> bool:
        """Whether it is what it should be, but for regrouped sums."""
        return self.is_bit_equal or (not self.what and self.largest <= self.allowed)

    @property
    def relative(self) -> float:
        """The largest difference as a share of ``scale``."""
        return self.largest / self.scale if self.scale else float(self.largest > 0)

    def __str__(self) -> str:
        if self.is_bit_equal:
            return f"{self.name}: equal to the bit"
        return f"{self.name}: {self.what or f'off by {self.relative:.1e}, relative'}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One step, held against the un-pipelined model.

    Args:
        loss: of the pipelined step.
        expected_loss: of the un-pipelined model.
        differences: of the loss, and of every parameter's gradient.
    """

    loss: float
    expected_loss: float
    differences: tuple[Difference, ...]

    @property
    def is_bit_equal(self) -> bool:
        """Whether everything is equal to the bit."""
        return all(each.is_bit_equal for each in self.differences)

    @property
    def wrong(self) -> list[Difference]:
        """What differs by more than regrouped sums explain, the loss first, then the largest differences first."""
        found = [each for each in self.differences if not each.is_right]
        return sorted(found, key=lambda each: (each.name != "loss", not each.what, -each.relative))

    @property
    def inexact(self) -> list[Difference]:
        """What is right, but not to the bit, largest differences first."""
        found = [each for each in self.differences if each.is_right and not each.is_bit_equal]
        return sorted(found, key=lambda each: -each.relative)

    def __str__(self) -> str:
        num_equal = sum(each.is_bit_equal for each in self.differences)
        counts = f"{num_equal} of {len(self.differences)} equal to the bit (the loss, and gradients)"
        rest = first_of([*self.wrong, *self.inexact])
        return f"{counts}; {rest}" if rest else counts


def first_of(differences: list[Difference]) -> str:
    """A few of them in words."""
    named = "; ".join(map(str, differences[:_MOST_NAMED]))
    more = len(differences) - _MOST_NAMED
    return f"{named}; and {more} more" if more > 0 else named


@dataclass(frozen=True, slots=True)
class Pair:
    """Two tensors to compare.

    Args:
        name: of them.
        found: what a step gave.
        expected: what it should be.
        is_regrouped: whether the cut regroups its sums.
        coarsest: the coarsest type that takes part in computing it.
    """

    name: str
    found: Tensor | None
    expected: Tensor | None
    is_regrouped: bool
    coarsest: torch.dtype


def compared(pairs: Iterable[Pair]) -> tuple[Difference, ...]:
    """Hold each against what it should be."""
    given = list(pairs)
    unequal = [pair for pair in given if not _is_equal(pair.found, pair.expected)]
    largest = max((_largest(pair.expected) for pair in given if pair.name != "loss"), default=0.0) if unequal else 0.0
    names = {id(pair) for pair in unequal}
    return tuple(
        _measured(pair, largest) if id(pair) in names else Difference(pair.name, is_bit_equal=True) for pair in given
    )


def _is_equal(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None:
        return found is expected
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    found, expected = _plain(found), _plain(expected)
    return torch.equal(found, expected) or bool(_both(found, expected).all())


def _both(found: Tensor, expected: Tensor) -> Tensor:
    return (found == expected) | (found.isnan() & expected.isnan())


def _measured(pair: Pair, largest_of_all: float) -> Difference:
    found, expected = pair.found, pair.expected
    if found is None or expected is None:
        what = "no gradient, and there should be one" if found is None else "a gradient, and there should be none"
        return Difference(pair.name, is_bit_equal=False, what=what)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        what = f"{found.dtype} {tuple(found.shape)}, and should be {expected.dtype} {tuple(expected.shape)}"
        return Difference(pair.name, is_bit_equal=False, what=what)
    scale, kind = _largest(expected), found.device.type
    share = _REGROUPED.get(pair.coarsest, _REGROUPED[torch.float32]) * (1 if kind == "cpu" else _UNORDERED)
    rounding = torch.finfo(pair.coarsest).eps * largest_of_all
    wide, wanted = _wide(found), _wide(expected)
    gap = torch.where(_both(wide, wanted), 0.0, (wide - wanted).abs())
    if not bool(gap.isfinite().all()):
        return Difference(pair.name, is_bit_equal=False, what="not finite where it should be, or the other way round")
    allowed = share * scale + rounding
    return Difference(pair.name, False, float(gap.max()), scale, allowed, pair.is_regrouped or kind != "cpu")


def _largest(tensor: Tensor | None) -> float:
    """The largest finite element, without its sign."""
    if tensor is None or not tensor.numel():
        return 0.0
    return float(_wide(tensor).abs().nan_to_num(0.0, 0.0, 0.0).max())


def _plain(tensor: Tensor) -> Tensor:
    return (tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()).cpu()


def _wide(tensor: Tensor) -> Tensor:
    return _plain(tensor).to(torch.complex128 if tensor.is_complex() else torch.float64)
