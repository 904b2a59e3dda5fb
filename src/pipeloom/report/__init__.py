"""A timeline for people: drawn as text, described, and in figures."""

from pipeloom.report.describe import describe
from pipeloom.report.figures import figures_in_seconds, figures_in_ticks, whole
from pipeloom.report.text import draw, shortest_action_s

__all__ = ["describe", "draw", "figures_in_seconds", "figures_in_ticks", "shortest_action_s", "whole"]
