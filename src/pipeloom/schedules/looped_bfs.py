"""Looped breadth-first (Lamy-Poirier, MLSys 2023, section 4): a stage runs all its micro-batches before the next does.

Stages in a loop, v on each of p ranks: the bubble of interleaved 1F1B, ``(p−1)(T_F+T_B)`` with T of one stage, for m
≥ p micro-batches; every rank holds all ``m·v``. The gradients of a stage are complete together, so they are reduced
(or its weights gathered) once a step and while other stages run: meant for few micro-batches and sharded weights.
Like torch, and unlike the paper's figure, the backward takes the micro-batches descending. 4 ranks × 2 stages × 8
micro-batches::

    GPU 0: 0F0 0F1 0F2 0F3 0F4 0F5 0F6 0F7 4F0 4F1 4F2 4F3 4F4 4F5 4F6 4F7   .   .   .   .   .   .   .   .   . 4B7---- 4B6---- 4B5---- 4B4---- 4B3---- 4B2---- 4B1---- 4B0---- 0B7---- 0B6---- 0B5---- 0B4---- 0B3---- 0B2---- 0B1---- 0B0----
    GPU 1:   . 1F0 1F1 1F2 1F3 1F4 1F5 1F6 1F7 5F0 5F1 5F2 5F3 5F4 5F5 5F6 5F7   .   .   .   .   .   . 5B7---- 5B6---- 5B5---- 5B4---- 5B3---- 5B2---- 5B1---- 5B0---- 1B7---- 1B6---- 1B5---- 1B4---- 1B3---- 1B2---- 1B1---- 1B0----   .   .
    GPU 2:   .   . 2F0 2F1 2F2 2F3 2F4 2F5 2F6 2F7 6F0 6F1 6F2 6F3 6F4 6F5 6F6 6F7   .   .   . 6B7---- 6B6---- 6B5---- 6B4---- 6B3---- 6B2---- 6B1---- 6B0---- 2B7---- 2B6---- 2B5---- 2B4---- 2B3---- 2B2---- 2B1---- 2B0----   .   .   .   .
    GPU 3:   .   .   . 3F0 3F1 3F2 3F3 3F4 3F5 3F6 3F7 7F0 7F1 7F2 7F3 7F4 7F5 7F6 7F7 7B7---- 7B6---- 7B5---- 7B4---- 7B3---- 7B2---- 7B1---- 7B0---- 3B7---- 3B6---- 3B5---- 3B4---- 3B3---- 3B2---- 3B1---- 3B0----   .   .   .   .   .   .
"""  # noqa: E501  # a drawing is as wide as it is

from __future__ import annotations

from collections.abc import Iterator

from pipeloom.ir import Action, Kind, Placement, Schedule
from pipeloom.schedules.entry import Entry
from pipeloom.schedules.formulas import Formulas, Peaks
from pipeloom.schedules.interleaved import bubble_s
from pipeloom.schedules.shape import Shape, require


def looped_bfs(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """All forwards, stage after stage; then all backwards, in the opposite order.

    Raises:
        UnsupportedShape: there is no rank, stage or micro-batch.
    """
    require("looped-bfs", Shape(num_ranks, num_microbatches, stages_per_rank))
    stages = [range(rank, num_ranks * stages_per_rank, num_ranks) for rank in range(num_ranks)]
    programs = tuple(tuple(_program(own, num_microbatches)) for own in stages)
    return Schedule(Placement.loop(num_ranks, stages_per_rank), programs, num_microbatches, name="looped-bfs")


def _program(stages: range, num_microbatches: int) -> Iterator[Action]:
    for stage in stages:
        for i in range(num_microbatches):
            yield Action(Kind.FORWARD, stage, i)
    for stage in stages[::-1]:
        for i in reversed(range(num_microbatches)):
            yield Action(Kind.BACKWARD, stage, i)


def peak_held(shape: Shape) -> Peaks:
    """All."""
    return (shape.num_microbatches * shape.stages_per_rank,) * shape.num_ranks


ENTRY = Entry(
    "looped-bfs",
    looped_bfs,
    Formulas(bubble_s, bubble_s, peak_held, peak_held),
    takes=frozenset({"stages_per_rank"}),
    stages_per_rank=2,
    aliases=("bfs", "breadth-first", "looped-breadth-first"),
)
