"""The intermediate representation: actions, placements, schedules, what waits for what, and when it ran."""

from pipeloom.ir.action import Action, Kind, Overlap, Pin
from pipeloom.ir.links import Links
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Program, Schedule
from pipeloom.ir.timeline import Span, Timeline

__all__ = ["Action", "Kind", "Links", "Overlap", "Pin", "Placement", "Program", "Schedule", "Span", "Timeline"]
