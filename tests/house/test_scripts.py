"""A script that uses the package ends as any script does: by itself, with exit code 0."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FAILS_AND_GOES_ON = """
import torch
from torch import nn
import pipeloom as pl


class Picky(nn.Module):
    def forward(self, x):
        raise ZeroDivisionError("of my own")


pipe = pl.Pipeline([nn.Linear(4, 4), Picky()], num_microbatches=2, loss_fn=nn.functional.mse_loss)
try:
    pipe.step(torch.ones(4, 4), target=torch.ones(4, 4))
except ZeroDivisionError:
    print("caught")
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter in the repository's root."""
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("attempt", range(4))
def test_a_failed_step_does_not_abort_the_process_at_its_end(attempt: int) -> None:
    # Rank threads free torch's thread-local objects after Python has let go of them: a race with the interpreter's end.
    ended = run("-c", FAILS_AND_GOES_ON)
    assert ended.stdout == "caught\n"
    assert (ended.returncode, ended.stderr) == (0, "")


def test_an_example_runs_as_a_script() -> None:
    ended = run("examples/own_schedule.py")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("1f1b: idle 33%, holds (4, 3, 2, 1)")
