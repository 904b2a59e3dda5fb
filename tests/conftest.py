"""What every test shares: one thread per process, seeds, and how hypothesis searches."""

import os
import random
import sys

import pytest
from hypothesis import HealthCheck, settings

# Several test processes on few cores: contended threads make torch twenty times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("search", deadline=None, max_examples=2_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Seed whatever is loaded; loading torch here would cost the light tests two seconds."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def small_products_are_split() -> None:
    """Split the backward of products that are too small to be worth it, or small models would test nothing of it."""
    if "pipeloom.halves.functions" in sys.modules:
        sys.modules["pipeloom.halves.functions"].MIN_MULTIPLICATIONS = 0
