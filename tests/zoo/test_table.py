"""The table of docs/zoo.md: what stands in its cells, and that both sides are measured alike."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.zoo import __main__ as zoo
from benchmarks.zoo import ours
from tests.zoo import models

ROOT = Path(__file__).parents[2]
EQUAL = {"traces": True, "splits": True, "trains": True, "loss_off": 0.0, "worst_gradient_off": 0.0}
FAILED = EQUAL | {"trains": False}


def test_a_cell_is_one_where_all_numbers_of_stages_agree():
    own = [EQUAL | {"units": 9, "glue": 2, "crossing": crossing, "split_s": 0.25} for crossing in (1, 2, 4)]
    torchs = [EQUAL, FAILED | {"error": "no skips"}, FAILED | {"error": "no skips"}]
    errors = []
    cells = list(zoo.line("m", own, torchs, errors))
    assert cells[:6] == ["m", "9", "2", "1 · 2 · 4", "0.25", "equal to the bit"]
    assert cells[6] == "equal to the bit · does not train (1) · does not train (1)"
    assert errors == ["no skips"]


def test_errors_stand_once_below_the_table():
    rows = [{"model": name} | FAILED | {"error": error} for name, error in (("a", "x"), ("b", "y"), ("c", "x"))]
    own = [{"model": name} | EQUAL for name in "abc"]
    lines = zoo.table(own, rows).splitlines()
    assert [line.rpartition("train ")[2] for line in lines[2:5]] == ["(1) |", "(2) |", "(1) |"]
    assert lines[5:] == ["", "1. `x`", "2. `y`"]


def test_our_side_of_a_model_is_measured():
    row = ours.step("nn.Transformer (enc-dec)", 3)
    assert {key: row[key] for key in EQUAL} == EQUAL
    assert row["units"] > 3
    assert row["crossing"] >= 2


def test_what_fails_on_our_side_is_said(monkeypatch):
    def fail(*_, **__):
        raise ValueError("of my own\nand more")

    monkeypatch.setattr("pipeloom.split", fail)
    row = ours.step("nn.Transformer (enc-dec)", 2)
    assert (row["splits"], row["trains"], row["error"]) == (False, False, "ValueError: of my own")


def test_the_page_has_a_line_for_every_model():
    page = (ROOT / "docs/zoo.md").read_text("utf-8")
    named = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")]
    assert set(models.NAMES) <= set(named)


def test_the_command_takes_what_was_measured_of_torch(tmp_path):
    name = "nn.Transformer (enc-dec)"
    rows = [{"model": name} | FAILED | {"error": "no skips"} for _ in zoo.STAGES]
    (tmp_path / "torch.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = [sys.executable, "-m", "benchmarks.zoo", "--torch", str(tmp_path / "torch.jsonl"), "--models", name]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "1. `no skips`"
    assert "| equal to the bit | does not train (1) |" in ran.stdout
