"""`pipeloom check`: its verdict, its exit code, and one message for what is wrong."""

import json
from pathlib import Path

import pytest

from pipeloom import cli

GOLDEN = Path(__file__).parent / "golden"
MODELS = """
import torch
from torch import nn
from tests.parity.models import Drifting, Net, Twice, batch, made

value, target = batch()


def net():
    return made(Net), {"value": value}


def bare():
    return made(Net)


def inputs():
    return value


def twice():
    return made(Twice), value


def wrong():
    return nn.Sequential(nn.Linear(8, 8), Drifting(), nn.Linear(8, 3)), value


def stages():
    return [nn.Linear(8, 8), nn.Linear(8, 3)], value


def not_finite():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)), value * torch.nan


class Early(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, value):
        value = self.layers[0](value)
        if value.sum() > 0:
            value = self.layers[1](value)
        return self.layers[2](value)


def early():
    return Early(), value


class Raises(nn.Linear):
    def forward(self, value):
        if value.device.type != "meta":
            raise ZeroDivisionError("of its own")
        return super().forward(value)


def raises():
    return nn.Sequential(nn.Linear(8, 8), Raises(8, 8)), value


def fails():
    raise OSError("no such weights")
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run ``pipeloom check`` beside a module of models: exit code, stdout and stderr."""
    name = f"models_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODELS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    monkeypatch.chdir(tmp_path)

    def run(text):
        code = cli.main(["check", *(f"{name}{word}" if word.startswith(":") else word for word in text.split())])
        captured = capsys.readouterr()
        return code, captured.out, captured.err.replace(name, "mine")

    return run


def test_help_is_pinned(capsys):
    assert cli.main(["check", "--help"]) == 0
    assert capsys.readouterr().out == (GOLDEN / "help_check.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("more", ["", " --inputs :inputs --schedule gpipe", " --cuts blocks.1,head --device cpu -m 2"])
def test_a_right_model_ends_well(run, more):
    model = ":bare" if "inputs" in more else ":net"
    code, out, err = run(f"{model}{'' if 'cuts' in more else ' --stages 3'}{more}")
    assert (code, err) == (0, "")
    assert out.startswith("verdict: right: the loss and 18 gradients are equal to the bit\nloss: ")
    assert "\nNet: " in out
    assert "\nbubble: " in out
    assert max(map(len, out.splitlines())) <= 120


def test_a_regrouped_sum_is_right(run):
    code, out, _ = run(":twice --stages 3")
    assert code == 0
    assert "of the loss and 8 gradients differ, by no more than the order of sums explains" in out
    assert "  not to the bit: layer." in out


def test_a_wrong_model_ends_with_one_and_names_gradients(run):
    code, out, err = run(":wrong --stages 2")
    assert (code, err) == (1, "")
    assert out.startswith("verdict: WRONG: 7 of the loss and 6 gradients differ from the un-pipelined model\n")
    assert "  wrong: loss: off by" in out
    assert "  wrong: 1.linear.weight: off by" in out


def test_json_has_every_figure(run):
    code, out, _ = run(":net --stages 2 --json")
    figures = json.loads(out)
    assert (code, figures["verdict"], figures["bit_equal"], figures["num_microbatches"]) == (0, "right", True, 4)
    assert {each["name"] for each in figures["tensors"]} >= {"loss", "head.weight"}
    assert all(each["bit_equal"] and each["right"] and each["relative"] == 0 for each in figures["tensors"])
    assert figures["split"]["num_stages"] == len(figures["stage_s"]) == 2
    assert 0 < figures["simulated_bubble_fraction"] < 1
    assert any("BatchNorm" in each for each in figures["advice"])


def test_a_list_of_stages_needs_no_number(run):
    code, out, _ = run(":stages")
    assert code == 0
    assert "1f1b: 2 ranks, 4 micro-batches of a batch of 8 rows" in out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (":early --stages 2", "mine:early cannot be checked: the model's own forward looks at numbers that another"),
        (":not_finite --stages 2", "mine:not_finite cannot be checked: step 0: the loss of micro-batch 0 is nan"),
        (":raises --stages 2", "mine:raises raised"),
        (":fails --stages 2", "mine:fails raised"),
    ],
)
def test_a_model_that_cannot_be_checked_ends_with_one(run, text, message):
    code, out, err = run(text)
    assert (code, out) == (1, "")
    assert err.startswith(f"pipeloom: error: {message}")


def test_what_a_model_raises_is_shown_with_its_own_line(run):
    _, _, err = run(":raises --stages 2")
    assert 'raise ZeroDivisionError("of its own")' in err
    raised, note = err.rstrip().splitlines()[-2:]
    assert raised == "ZeroDivisionError: of its own"
    assert note.startswith("raised while the model ran to see how to cut it")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (":net", "the number of stages is missing\nhint: give --stages N, or say where to cut with --cuts"),
        (":bare --stages 2", "a Net has to be run, and no inputs for it are known\nhint: let the factory return"),
        (":net --stages 0", "argument --stages: 0 was given; at least 1 is needed"),
        (":net --stages 2 --schedule 1f1", "schedule '1f1' is unknown"),
        (":net --stages 2 -m 9", "a batch of 8 samples was given for 9 micro-batches"),
        (":net --stages 2 --device mars", "--device mars cannot be used: "),
        (":net --stages 2 --device meta", "--device meta was given, where no numbers are"),
        (":net --stages 2 --cuts nowhere", "cuts=[…, 'nowhere', …] was given, but no module of that name"),
        (":nothing --stages 2", "'mine:nothing' was given, but 'mine' has no 'nothing'"),
        ("--stages 2", "the following arguments are required: MODULE:FACTORY"),
        (":net --stage 2", "--stage is no option\nhint: did you mean '--stages'"),
    ],
)
def test_wrong_use_ends_with_two_and_one_message(run, text, message):
    code, out, err = run(text)
    assert (code, out) == (2, "")
    assert err.startswith(f"pipeloom: error: {message}")
    assert err.count("pipeloom: error") == 1
