"""What an action takes, in seconds and bytes: given, read from a file, or one tick each."""

from pipeloom.cost.costs import Costs
from pipeloom.cost.files import read_costs

__all__ = ["Costs", "read_costs"]
