"""The simulator: a schedule and its costs give a `pipeloom.ir.Timeline`."""

from pipeloom.sim.simulator import simulate

__all__ = ["simulate"]
