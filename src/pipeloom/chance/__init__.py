"""Draws by Python's ``random`` and by numpy's global generator: refused, or, after `key_draws`, answered per thread."""

from pipeloom.chance.generators import AROUND, Generators, are_keyed, entered, key_draws, watch_units
from pipeloom.chance.refusal import remedy

__all__ = ["AROUND", "Generators", "are_keyed", "entered", "key_draws", "remedy", "watch_units"]
