"""A timeline for people: drawn as text, and described."""

from pipeloom.report.describe import describe
from pipeloom.report.text import draw, shortest_action_s

__all__ = ["describe", "draw", "shortest_action_s"]
