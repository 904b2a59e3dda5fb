"""The intermediate representation: actions, placements, schedules, what waits for what, and when it ran."""

from pipeloom.ir.action import Action, Kind
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Program, Schedule
from pipeloom.ir.timeline import Span, Timeline

__all__ = ["Action", "Kind", "Placement", "Program", "Schedule", "Span", "Timeline"]
