"""What to do about a cut: stages that take longer than others, boundaries that are fat, layers that see micro-batches.

Advice is for what the figures show, with the figures. What is fine is not mentioned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipeloom.outline.outline import Outline, in_bytes
from pipeloom.schedules import schedule as make_schedule
from pipeloom.sim import simulate
from pipeloom.splitting import balanced_cuts
from pipeloom.testing.check import Check, Model, costs_of

UNEVEN: Final = 1.25
"""A stage with so many times its even share of the work is named."""
BETTER: Final = 0.9
"""Other cuts are named if the largest share is below this part of what it is."""
FAT_BYTES: Final = 1 << 14
"""Below, a message takes as long as its latency, whatever its size."""
THINNER: Final = 0.5
"""A cut is named if it carries at most this share of the bytes of the one that was made."""
_NEARBY: Final = 0.15
"""How far a thinner cut may be from the one that was made, as a share of all calls."""
_IDLE: Final = 0.3


def advice(checked: Check, model: Model) -> list[str]:
    """Say what could be better.

    Args:
        checked: what came out.
        model: what was checked.
    """
    parts = [model] if isinstance(model, nn.Module) else model
    modules = [each for part in parts for each in part.modules()]
    return [
        *_on_stages(checked.outline),
        *_on_boundaries(checked.outline, checked.bytes_at),
        *_on_layers(modules, checked),
        *_on_microbatches(checked),
        *checked.warnings,
    ]


def _on_stages(outline: Outline) -> Iterator[str]:
    work, num_stages = _work(outline), outline.num_stages
    if not sum(work) or num_stages < 2:
        return
    shares, even = _shares(work, _starts(outline)), 1 / num_stages
    worst = max(range(num_stages), key=lambda stage: shares[stage])
    if shares[worst] <= UNEVEN * even:
        return
    said = f"stage {worst} has {shares[worst]:.0%} of the FLOPs, {even:.0%} would be even, and the others wait for it"
    calls = [call for call, unit in enumerate(outline.units) if unit.stage == worst]
    largest = max(calls, key=lambda call: work[call])
    best = balanced_cuts(work, num_stages)
    if max(_shares(work, best)) < BETTER * shares[worst]:
        yield f"{said}: with --cuts {_places(outline, best)} it would be {max(_shares(work, best)):.0%} at most"
    elif work[largest] > BETTER * shares[worst] * sum(work):
        yield f"{said}: most of it is {_call(outline, largest)}; if that has parts, name them with --cuts"
    else:
        yield f"{said}: another number of stages may divide its blocks more evenly"


def _places(outline: Outline, starts: Sequence[int]) -> str:
    """Where stages begin, by name, which holds whatever the units are; by number where a name is called before."""
    names = [unit.name for unit in outline.units]
    is_first = all(names.index(names[start]) == start for start in starts)
    return ",".join(names[start] if is_first else str(start) for start in starts)


def _work(outline: Outline) -> list[float]:
    """FLOPs of each call, or nothing where the model was not run."""
    return [float(each.num_flops or 0) for each in outline.units]


def _starts(outline: Outline) -> list[int]:
    return [i for i in range(1, len(outline.units)) if outline.units[i].stage != outline.units[i - 1].stage]


def _shares(work: Sequence[float], starts: Sequence[int]) -> list[float]:
    total = sum(work) or 1.0
    return [sum(work[start:end]) / total for start, end in pairwise([0, *starts, len(work)])]


def _on_boundaries(outline: Outline, sizes: Sequence[int]) -> Iterator[str]:
    starts, work, num_calls = _starts(outline), _work(outline), len(outline.units)
    reach = max(1, round(_NEARBY * num_calls))
    for start in starts if len(sizes) == num_calls else ():
        if sizes[start] < FAT_BYTES:
            continue
        others = []
        for k in range(max(1, start - reach), min(num_calls, start + reach + 1)):
            moved = sorted({*starts, k} - {start})
            is_even = max(_shares(work, moved)) <= UNEVEN * max(_shares(work, starts))
            if sizes[k] <= THINNER * sizes[start] and k not in starts and is_even:
                others.append(k)
        if others:
            best = min(others, key=lambda k: (sizes[k], abs(k - start)))
            yield (
                f"the cut before {_call(outline, start)} carries {in_bytes(sizes[start])} a micro-batch; one before "
                f"{_call(outline, best)} would carry {in_bytes(sizes[best])}"
            )


def _call(outline: Outline, index: int) -> str:
    return f"call {index} ({outline.units[index].name})"


def _on_layers(modules: Sequence[nn.Module], checked: Check) -> Iterator[str]:
    norms = [each for each in modules if isinstance(each, _BatchNorm) and each.training]
    if norms:
        yield (
            f"{len(norms)} BatchNorm layer{'s' if len(norms) > 1 else ''} normalise{'s' if len(norms) == 1 else ''} by "
            f"micro-batch, of {checked.rows // checked.num_microbatches} rows here, in a pipeline as in gradient "
            "accumulation. batch_norm='deferred' gives the running statistics of the whole batch; only layers in eval "
            "mode, or others such as GroupNorm, make gradients independent of the micro-batches"
        )
    if not any(each.training for each in modules):
        yield (
            "the model is in eval mode, so dropout and BatchNorm were not checked as in training; let the factory call "
            "train()"
        )
    if not checked.has_own_loss:
        yield "the model returns no loss, so the mean of the squares of its outputs stood for one"


def _on_microbatches(checked: Check) -> Iterator[str]:
    schedule = checked.timeline.schedule
    idle, num_ranks = checked.predicted.bubble_fraction, schedule.num_ranks
    if idle <= _IDLE or num_ranks < 2:
        return
    more = 4 * num_ranks
    if more <= checked.num_microbatches:
        return
    longer = make_schedule(schedule.name, num_ranks=num_ranks, num_microbatches=more)
    then = simulate(longer, costs_of(checked.timeline)).bubble_fraction
    yield (
        f"with {checked.num_microbatches} micro-batches the ranks idle {idle:.0%} of the time; with {more} it would be "
        f"{then:.0%}"
    )
