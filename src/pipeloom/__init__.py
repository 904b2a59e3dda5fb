"""Pipeline parallelism for any PyTorch model: schedules as data, gradients equal to one device.

Names load on first use: drawing a schedule costs milliseconds, importing torch costs seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeloom import errors, testing
    from pipeloom.batch.microbatches import PerSample, Replicated
    from pipeloom.cost import Costs
    from pipeloom.errors import PipeloomError, PipeloomWarning
    from pipeloom.ir import Action, Kind, Placement, Schedule, Span, Timeline
    from pipeloom.ir.verify import Limits, verify
    from pipeloom.outline.description import split
    from pipeloom.pipeline import Pipeline
    from pipeloom.schedules import schedule
    from pipeloom.sim import simulate

__version__ = "0.1.0"

__all__ = [
    "Action",
    "Costs",
    "Kind",
    "Limits",
    "PerSample",
    "Pipeline",
    "PipeloomError",
    "PipeloomWarning",
    "Placement",
    "Replicated",
    "Schedule",
    "Span",
    "Timeline",
    "errors",
    "schedule",
    "simulate",
    "split",
    "testing",
    "verify",
]

_HOMES = {
    "Action": "ir",
    "Costs": "cost",
    "Kind": "ir",
    "Limits": "ir.verify",
    "Pipeline": "pipeline",
    "PipeloomError": "errors",
    "PipeloomWarning": "errors",
    "Placement": "ir",
    "PerSample": "batch.microbatches",
    "Replicated": "batch.microbatches",
    "Schedule": "ir",
    "Span": "ir",
    "Timeline": "ir",
    "schedule": "schedules",
    "simulate": "sim",
    "split": "outline.description",
    "verify": "ir.verify",
}


def __getattr__(name: str) -> Any:
    if name in ("errors", "testing"):
        return importlib.import_module(f"pipeloom.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'pipeloom' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"pipeloom.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
