"""A schedule of one's own is a value like any other: here, 1F1B whose ranks each hold one micro-batch fewer.

It saves memory and idles more; nothing else has to know about it.
"""

from __future__ import annotations

import torch
from torch import nn

import pipeloom as pl

F, B = pl.Kind.FORWARD, pl.Kind.BACKWARD


def frugal(num_ranks: int, num_microbatches: int) -> pl.Schedule:
    """1F1B with one warm-up forward less on every rank that can spare it."""
    programs = []
    for rank in range(num_ranks):
        num_warmup = min(max(num_ranks - 2 - rank, 0), num_microbatches - 1)
        program = [pl.Action(F, rank, i) for i in range(num_warmup)]
        for i in range(num_microbatches - num_warmup):
            program += [pl.Action(F, rank, num_warmup + i), pl.Action(B, rank, i)]
        program += [pl.Action(B, rank, i) for i in range(num_microbatches - num_warmup, num_microbatches)]
        programs.append(tuple(program))
    return pl.Schedule(pl.Placement.single(num_ranks), tuple(programs), num_microbatches, name="frugal")


def main() -> pl.Schedule:
    """Verify it, compare it with 1F1B, run it."""
    ours, known = frugal(4, 6), pl.schedule("1f1b", num_ranks=4, num_microbatches=6)
    assert pl.verify(ours) == []
    for schedule in (known, ours):
        timeline = pl.simulate(schedule, pl.Costs.unit(4))
        print(f"{schedule.name}: idle {timeline.bubble_fraction:.0%}, holds {timeline.peak_held_to_input_grad}")
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    with pl.Pipeline(model, num_stages=4, schedule=ours, loss_fn=nn.functional.mse_loss) as pipe:
        loss = pipe.step(torch.ones(6, 8), target=torch.zeros(6, 8))
    print(f"and it trains: loss {loss:.3f}")
    return ours


if __name__ == "__main__":
    main()
