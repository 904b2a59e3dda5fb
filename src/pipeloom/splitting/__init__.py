"""From a model to stages."""

from pipeloom.splitting.balance import balanced_cuts
from pipeloom.splitting.cut import Cut, Inputs
from pipeloom.splitting.cuts import Cuts, asked
from pipeloom.splitting.plan import Plan
from pipeloom.splitting.replica import Replica
from pipeloom.splitting.share import Share
from pipeloom.splitting.split import Split, check_count, needs_inputs, split
from pipeloom.splitting.ties import Ties
from pipeloom.splitting.unit import Unit
from pipeloom.standins.absent import check_here

__all__ = [
    "Cut",
    "Cuts",
    "Inputs",
    "Plan",
    "Replica",
    "Share",
    "Split",
    "Ties",
    "Unit",
    "asked",
    "balanced_cuts",
    "check_count",
    "check_here",
    "needs_inputs",
    "split",
]
