"""Draws by Python's ``random`` and by numpy's global generator, answered per thread."""

from pipeloom.chance.generators import AROUND, Generators, entered, stand_in, watch_units
from pipeloom.chance.seeds import first_that_goes

__all__ = ["AROUND", "Generators", "entered", "first_that_goes", "stand_in", "watch_units"]
