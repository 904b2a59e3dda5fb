"""Generators: pure functions from counts to a `Schedule`, one a file, and their registry."""

from pipeloom.schedules.gpipe import gpipe
from pipeloom.schedules.one_f_one_b import one_f_one_b
from pipeloom.schedules.registry import GENERATORS, schedule

__all__ = ["GENERATORS", "gpipe", "one_f_one_b", "schedule"]
