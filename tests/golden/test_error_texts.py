"""Every message that a user of the facade can meet, whole: reviewed as text, changed on purpose.

``python -m tests.golden.test_error_texts`` writes the file anew.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import pipeloom as pl

GOLDEN = Path(__file__).with_name("error_texts.txt")


def chain(*layers):
    return nn.Sequential(*(layers or (nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))))


class Returns(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, value):
        return self.function(value)


class Own(nn.Sequential):
    def forward(self, value):
        return value


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = chain(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.right, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, value):
        return self.left(value) + self.right(value)


class Again(Branches):
    def forward(self, value):
        return self.left[1](self.right(self.left[1](value)))


def branches(model=None, **options):
    pl.split(model or Branches(), (zeros(2, 4),), **options)


def shared():
    layer = nn.Linear(4, 4)
    return chain(layer, nn.Tanh(), layer)


def zeros(*shape):
    return torch.zeros(*shape)


def step(model=None, *args, target=None, **options):
    options = {"num_stages": 2, "num_microbatches": 2} | options
    with pl.Pipeline(model or chain(), **options) as pipe:
        pipe.step(*(args or (zeros(4, 4),)), target=target)


def evaluate(model):
    with pl.Pipeline(model, num_stages=2, num_microbatches=2) as pipe:
        pipe(torch.arange(16.0).reshape(4, 4))


def without_gradients():
    with torch.no_grad():
        step()


def closed():
    pipe = pl.Pipeline(chain())
    pipe.close()
    pipe.step(zeros(4, 4))


def untraced():
    with pl.Pipeline(chain()) as pipe:
        _ = pipe.timeline


def raises(_):
    raise ValueError("what the layer says")


CASES = {
    "more stages than layers": lambda: pl.Pipeline(chain(), num_stages=4),
    "no stage": lambda: pl.Pipeline(chain(), num_stages=0),
    "cuts out of order": lambda: pl.Pipeline(chain(), cuts=[2, 1]),
    "cuts that are none": lambda: pl.Pipeline(chain(), cuts=2),
    "cuts against stages": lambda: pl.Pipeline(chain(), cuts=[1], num_stages=3),
    "not a chain": lambda: pl.Pipeline(Own(nn.Tanh()), num_stages=2).group,
    "not a model": lambda: pl.Pipeline(3),
    "a list of other things": lambda: pl.Pipeline([nn.Tanh(), "relu"]),
    "a list and cuts": lambda: pl.Pipeline([nn.Tanh(), nn.Tanh()], cuts=[1]),
    "a module in two stages": lambda: pl.Pipeline(shared(), num_stages=2),
    "unknown schedule": lambda: pl.Pipeline(chain(), num_stages=2, schedule="1f1"),
    "schedule for other stages": lambda: step(schedule=pl.schedule("gpipe", num_ranks=3, num_microbatches=2)),
    "micro-batches that are none": lambda: pl.Pipeline(chain(), num_microbatches=0),
    "ranks": lambda: pl.Pipeline(chain(), num_stages=2, num_ranks=3),
    "devices": lambda: pl.Pipeline(chain(), num_stages=2, devices=["cpu"]),
    "recompute": lambda: pl.Pipeline(chain(), num_stages=2, recompute=[True]),
    "batch norm": lambda: pl.Pipeline(chain(), batch_norm="sync"),
    "on_nan": lambda: pl.Pipeline(chain(), on_nan="stop"),
    "loss_reduction": lambda: pl.Pipeline(chain(), loss_reduction="none"),
    "batch smaller than micro-batches": lambda: step(None, zeros(1, 4)),
    "no batch": lambda: step(None, 3),
    "outputs that do not fit": lambda: step(chain(nn.Linear(4, 5), nn.Linear(4, 3)), loss_fn=torch.mean),
    "object that cannot cross": lambda: step(chain(Returns(iter), Returns(list)), loss_fn=torch.mean),
    "output leaf that differs": lambda: evaluate(chain(nn.Identity(), Returns(lambda x: (x, int(x[0, 0]))))),
    "exception of a layer": lambda: step(chain(nn.Tanh(), Returns(raises))),
    "loss that is no scalar": lambda: step(loss_fn=lambda output: output),
    "loss that is the output": lambda: step(),
    "loss without a graph": lambda: step(loss_fn=lambda output: output.argmax()),
    "count that is no number": lambda: step(loss_fn=lambda output: (output.sum(), "four")),
    "missing target": lambda: step(loss_fn=nn.MSELoss()),
    "target with a graph": lambda: step(loss_fn=nn.MSELoss(), target=zeros(4, 3).requires_grad_()),
    "NaN": lambda: step(loss_fn=lambda output: output.mean() * math.nan),
    "nothing counts": lambda: step(loss_fn=lambda output: (output.sum() * 0, 0)),
    "gradients switched off": without_gradients,
    "a module to split without inputs": lambda: pl.split(Branches(), num_stages=2),
    "no model to split": lambda: pl.split("model", num_stages=2),
    "more stages than calls": lambda: branches(num_stages=9),
    "cuts that are one name": lambda: branches(cuts="right"),
    "cuts that are one number": lambda: branches(cuts=2),
    "cuts that have no order": lambda: branches(cuts={"right"}),
    "cuts of two kinds": lambda: branches(cuts=[1, "right"]),
    "a cut at a name that nobody has": lambda: branches(cuts=["rihgt"]),
    "a cut at a module that is not called": lambda: branches(cuts=["spare"]),
    "a cut inside of what stays whole": lambda: branches(cuts=["right.weight"]),
    "names out of order": lambda: branches(cuts=["right", "left.1"]),
    "the same cut twice": lambda: branches(cuts=["right", "right"]),
    "an index of no call": lambda: branches(cuts=[1, 9]),
    "names against stages": lambda: branches(cuts=["right"], num_stages=3),
    "a cut between calls that write": lambda: branches(Again(), cuts=[1]),
    "closed": closed,
    "no timeline": untraced,
}


def text_of(case):
    try:
        CASES[case]()
    except Exception as error:
        return "\n".join([f"{type(error).__name__}: {error}", *(f"note: {n}" for n in getattr(error, "__notes__", []))])
    raise AssertionError(f"{case} raises nothing")


def written():
    blocks = GOLDEN.read_text().split("\n== ")[1:] if GOLDEN.exists() else []
    return dict(block.rstrip("\n").split("\n", 1) for block in blocks)


@pytest.mark.parametrize("case", CASES)
def test_error_text(case):
    assert text_of(case) == written()[case]


def test_texts_have_no_leftovers():
    assert list(written()) == list(CASES)


@pytest.mark.parametrize("case", CASES)
def test_text_reads_well(case):
    message = written()[case].partition(": ")[2]
    first_line = message.split("\n")[0]
    assert first_line == first_line.strip()
    assert not first_line.endswith(".")
    assert "  " not in message


if __name__ == "__main__":
    torch.manual_seed(0)
    head = "What the facade says when it cannot do what was asked.\n"
    GOLDEN.write_text(head + "".join(f"\n== {case}\n{text_of(case)}\n" for case in CASES))
