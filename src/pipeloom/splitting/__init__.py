"""From a model to stages."""

from pipeloom.splitting.balance import balanced_cuts
from pipeloom.splitting.share import Share
from pipeloom.splitting.split import Split, Unit, split
from pipeloom.splitting.ties import Ties

__all__ = ["Share", "Split", "Ties", "Unit", "balanced_cuts", "split"]
