"""The three phases that most schedules share: fill the pipeline, one forward and one backward in turn, drain it.

What differs between them is which stages and micro-batches stand in the two orders, how many forwards fill the
pipeline, and by how much the weight gradients lag.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeloom.ir import Action, Kind

Work = tuple[int, int]
"""A stage and a micro-batch."""


def one_forward_one_backward(forwards: Sequence[Work], backwards: Sequence[Work], num_warmup: int) -> Iterator[Action]:
    """A rank's program with whole backwards.

    Args:
        forwards: what F is done for, in order.
        backwards: what B is done for, in order.
        num_warmup: forwards before the first pair.
    """
    num_pairs = len(forwards) - num_warmup
    for work in forwards[:num_warmup]:
        yield Action(Kind.FORWARD, *work)
    for ahead, behind in zip(forwards[num_warmup:], backwards, strict=False):
        yield Action(Kind.FORWARD, *ahead)
        yield Action(Kind.BACKWARD, *behind)
    for work in backwards[num_pairs:]:
        yield Action(Kind.BACKWARD, *work)


def one_forward_one_input_grad(
    forwards: Sequence[Work], backwards: Sequence[Work], num_warmup: int, lag: int
) -> Iterator[Action]:
    """A rank's program with split backwards: the W of an I stands ``lag`` of them later, where it fills a wait."""
    for work in forwards[:num_warmup]:
        yield Action(Kind.FORWARD, *work)
    for i, work in enumerate(backwards):
        if num_warmup + i < len(forwards):
            yield Action(Kind.FORWARD, *forwards[num_warmup + i])
        yield Action(Kind.INPUT_GRAD, *work)
        if i >= lag:
            yield Action(Kind.WEIGHT_GRAD, *backwards[i - lag])
    for work in backwards[max(0, len(backwards) - lag) :]:
        yield Action(Kind.WEIGHT_GRAD, *work)
