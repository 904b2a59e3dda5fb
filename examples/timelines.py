"""The predicted and the measured timeline of one step are of one type, so one function draws both.

The stages are virtual devices: they wait instead of computing, so four of them are honest on two cores.
"""

from __future__ import annotations

import torch
from torch import nn

import pipeloom as pl
from pipeloom.report import draw
from pipeloom.testing import virtual_costs, virtual_stages

FORWARD_S = 0.010


def main() -> tuple[pl.Timeline, pl.Timeline]:
    """Draw both; return predicted and measured."""
    pipe = pl.Pipeline(
        virtual_stages(4, FORWARD_S, 2 * FORWARD_S),
        schedule="1f1b",
        num_microbatches=6,
        loss_fn=nn.functional.mse_loss,
    )
    for _ in range(2):  # the first step pays for what torch loads on first use
        pipe.step(torch.ones(6, 1), target=torch.zeros(6, 1))
    predicted = pl.simulate(pipe.schedule, virtual_costs(4, FORWARD_S, 2 * FORWARD_S))
    for name, timeline in (("predicted", predicted), ("measured", pipe.timeline)):
        print(f"{name}: {timeline.makespan_s:.3f} s, idle {timeline.bubble_fraction:.0%}")
        print(draw(timeline, FORWARD_S), end="\n\n")
    pipe.close()
    return predicted, pipe.timeline


if __name__ == "__main__":
    main()
