"""Public test helpers: the sequential oracles and virtual devices."""

from pipeloom.testing.asynchronous import asynchronous_steps
from pipeloom.testing.oracle import sequential_step
from pipeloom.testing.virtual import VirtualStage, virtual_costs, virtual_stages

__all__ = ["VirtualStage", "asynchronous_steps", "sequential_step", "virtual_costs", "virtual_stages"]
