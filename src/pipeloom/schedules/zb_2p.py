"""ZB-2p (Qi et al., ICLR 2024, section 3.1): the zero-bubble heuristic with room for 2p micro-batches on each rank.

With twice the memory of 1F1B's first rank, next to no bubble is left in the longest rank span. There is no closed
formula: the order depends on the costs (`pipeloom.schedules.rounds`), and at those of the paper's table 6 the rates
of its table 5 come out. Any number of micro-batches. 4 ranks × 8 micro-batches, F, I and W one tick each::

    GPU 0: F0 F1 F2 F3 F4 F5 F6 I0 F7 W0 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 I7 W7  .  .  .
    GPU 1:  . F0 F1 F2 F3 F4 I0 F5 I1 F6 I2 F7 I3 W0 I4 W1 I5 W2 I6 W3 I7 W4 W5 W6 W7  .  .
    GPU 2:  .  . F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 F6 I4 F7 I5 W0 I6 W1 I7 W2 W3 W4 W5 W6 W7  .
    GPU 3:  .  .  . F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 F7 I7 W0 W1 W2 W3 W4 W5 W6 W7
"""

from __future__ import annotations

from pipeloom.ir import Schedule
from pipeloom.schedules.entry import Entry
from pipeloom.schedules.formulas import Formulas
from pipeloom.schedules.rounds import shortest
from pipeloom.schedules.shape import ONE_STAGE, Shape
from pipeloom.schedules.stage_costs import StageCosts


def zb_2p(num_ranks: int, num_microbatches: int, *, costs: StageCosts | None = None) -> Schedule:
    """The best of eight orders in which a rank holds at most twice as many micro-batches as there are ranks.

    Args:
        num_ranks: how many ranks there are.
        num_microbatches: how many micro-batches there are.
        costs: of one stage per rank; None: equal seconds. Without bytes, half of what is held until I stays until W.

    Raises:
        UnsupportedShape: there is no rank or no micro-batch.
        CostError: the costs are for another number of stages.
    """
    return shortest("zb-2p", Shape(num_ranks, num_microbatches), costs, 2 * num_ranks)


ENTRY = Entry(
    "zb-2p",
    zb_2p,
    Formulas(),
    takes=frozenset({"costs"}),
    demands=(ONE_STAGE,),
)
