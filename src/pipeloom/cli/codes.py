"""The exit codes of `pipeloom`, besides 0."""

from __future__ import annotations

from typing import Final

FAILED: Final = 1
"""`pipeloom train`: a rank failed, by an exception, a kill or a stall."""
FOUND_FAULTS: Final = 1
"""`pipeloom checkpoint verify` found damage; `pipeloom check` a model that does not pipeline, or a difference."""
WRONG_VALUE: Final = 2
"""Whatever the user can put right."""
INTERRUPTED: Final = 130
"""Ctrl-C: 128 and the number of its signal, as shells count."""
CLOSED_PIPE: Final = 141
"""Nobody reads the output any more: likewise."""
TERMINATED: Final = 143
"""SIGTERM: likewise."""
