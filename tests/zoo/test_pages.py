"""What the guide shows of models whose libraries are not among Pipeloom's dependencies; `tests/house` runs the rest."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/any-model.md"


def test_the_guides_detector_trains():
    pytest.importorskip("ultralytics")
    shown = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert len(shown) == 1
    namespace = {"__name__": "page"}
    exec(compile(shown[0], str(PAGE), "exec"), namespace)
    assert namespace["loss"].isfinite()
