"""From a model to stages."""

from pipeloom.splitting.balance import balanced_cuts
from pipeloom.splitting.split import Split, Unit, split

__all__ = ["Split", "Unit", "balanced_cuts", "split"]
