"""Public test helpers: the sequential oracle and virtual devices."""

from pipeloom.testing.oracle import sequential_step
from pipeloom.testing.virtual import VirtualStage, virtual_costs, virtual_stages

__all__ = ["VirtualStage", "sequential_step", "virtual_costs", "virtual_stages"]
