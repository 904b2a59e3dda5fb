"""Passes: pure functions from a `Schedule` to a `Schedule`."""

from pipeloom.passes.early_receives import post_receives_early
from pipeloom.passes.early_recompute import early_recompute
from pipeloom.passes.pairs import close_pairs
from pipeloom.passes.recompute import add_recompute, without_recompute
from pipeloom.passes.sharding import add_reductions, add_sharding, without_sharding
from pipeloom.passes.transfers import add_transfers, without_transfers

__all__ = [
    "add_recompute",
    "add_reductions",
    "add_sharding",
    "add_transfers",
    "close_pairs",
    "early_recompute",
    "post_receives_early",
    "without_recompute",
    "without_sharding",
    "without_transfers",
]
