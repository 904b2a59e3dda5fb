"""ZB-1p (Qi et al., ICLR 2024, section 3.1): the zero-bubble heuristic with room for p micro-batches on each rank.

Its memory is that of 1F1B's first rank. There is no closed formula: the order depends on the costs
(`pipeloom.schedules.rounds`), and at those of the paper's table 6 the rates of its table 5 come out. Any number of
micro-batches. 4 ranks × 8 micro-batches, F, I and W one tick each::

    GPU 0: F0 F1 F2 F3  .  .  . I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7
    GPU 1:  . F0 F1 F2  .  . I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7
    GPU 2:  .  . F0 F1  . I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7
    GPU 3:  .  .  . F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7
"""

from __future__ import annotations

from pipeloom.ir import Schedule
from pipeloom.schedules.entry import Entry
from pipeloom.schedules.formulas import Formulas
from pipeloom.schedules.rounds import shortest
from pipeloom.schedules.shape import ONE_STAGE, Shape
from pipeloom.schedules.stage_costs import StageCosts


def zb_1p(num_ranks: int, num_microbatches: int, *, costs: StageCosts | None = None) -> Schedule:
    """The best of eight orders in which a rank holds at most as many micro-batches as there are ranks.

    Args:
        num_ranks: how many ranks there are.
        num_microbatches: how many micro-batches there are.
        costs: of one stage per rank; None: equal seconds. Without bytes, half of what is held until I stays until W.

    Raises:
        UnsupportedShape: there is no rank or no micro-batch.
        CostError: the costs are for another number of stages.
    """
    return shortest("zb-1p", Shape(num_ranks, num_microbatches), costs, num_ranks)


ENTRY = Entry("zb-1p", zb_1p, Formulas(), takes=frozenset({"costs"}), demands=(ONE_STAGE,), aliases=("zb-auto",))
