"""Draws by Python's ``random`` and by numpy's global generator, answered per thread."""

from pipeloom.chance.generators import AROUND, Generators, entered, stand_in, watch_units

__all__ = ["AROUND", "Generators", "entered", "stand_in", "watch_units"]
