"""The learning rate as a function of the step.

A scheduler object that counts its own calls is one more thing to save, and is off by one after a resume
as soon as somebody calls it in another order.  A function of the step needs no state.
"""

from __future__ import annotations

import math

from pipeloom.train.config import OptimizerConfig


def learning_rate_at(step_index: int, num_steps: int, config: OptimizerConfig) -> float:
    """Return the rate of step ``step_index`` (from 0): linear warm-up, then half a cosine.

    The last of ``num_steps`` steps has ``config.final_fraction`` of the full rate (SGDR, Loshchilov and
    Hutter 2017, equation 5, with one cycle).
    """
    if step_index < config.warmup_steps:
        return config.learning_rate * (step_index + 1) / config.warmup_steps
    decay_steps = max(1, num_steps - 1 - config.warmup_steps)
    progress = min(1.0, (step_index - config.warmup_steps) / decay_steps)
    share = config.final_fraction + (1 - config.final_fraction) * (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * share
