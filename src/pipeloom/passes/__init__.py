"""Passes: pure functions from a `Schedule` to a `Schedule`."""

from pipeloom.passes.recompute import add_recompute
from pipeloom.passes.transfers import add_transfers

__all__ = ["add_recompute", "add_transfers"]
