"""Generators: pure functions from counts to a `Schedule`, one a file, and their registry.

Start with `one_f_one_b`: warm-up, steady phase and cool-down as three loops; most others share theirs in `phases`.
"""

from pipeloom.schedules.gpipe import gpipe
from pipeloom.schedules.one_f_one_b import one_f_one_b
from pipeloom.schedules.registry import ENTRIES, GENERATORS, entry, schedule

__all__ = ["ENTRIES", "GENERATORS", "entry", "gpipe", "one_f_one_b", "schedule"]
