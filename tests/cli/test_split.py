"""`pipeloom split`: where a model is looked for, what it may come with, and one message for what is wrong."""

import json
import subprocess
import sys

import pytest

from pipeloom import cli

MODELS = """
import sys

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTModel


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, scale=1.0):
        return self.second(self.first(x) * scale + x)


def net():
    return Net()


def with_kwargs():
    return Net(), {"x": torch.randn(3, 4)}


def with_args():
    return Net(), (torch.ones(3, 4), 2.0)


def with_both():
    return Net(), (torch.ones(3, 4),), {"scale": 2.0}


def with_a_tensor():
    return Net(), torch.zeros(3, 4)


def stages():
    return [nn.Linear(4, 4), nn.Linear(4, 4)]


def chain():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def llama():
    return LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                                        num_attention_heads=2, vocab_size=50))


def vit():
    return ViTModel(ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
                              image_size=32, patch_size=16))


def wide():
    return Net(1 << 20), torch.empty(1, 1 << 20)


def fails():
    return inner()


def inner():
    raise ZeroDivisionError("of my own")


def forward_fails():
    return Net(), torch.zeros(3, 5)


def needs(width):
    return Net(width)


def number():
    return 3


def too_much():
    return Net(), (), {}, 4


def tensor():
    return torch.zeros(2, 4)


def pair():
    return (torch.zeros(2, 4),), {"scale": 3.0}


def named():
    return {"x": torch.zeros(2, 4)}


ready = Net()
width = 4
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder with models, which is left without a trace."""
    (tmp_path / "split_models.py").write_text(MODELS, "utf-8")
    (tmp_path / "split_broken.py").write_text("import split_nothing\n", "utf-8")
    (tmp_path / "split_faulty.py").write_text("x = 1\nraise KeyError('at import')\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("split_models", "split_broken", "split_faulty"):
        sys.modules.pop(name, None)


def split(text):
    return cli.main(["split", *text.split()])


def shown(capsys, text):
    """What a command prints as JSON, which must end well."""
    code = split(f"split_models:{text} --json")
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    return json.loads(captured.out)


def test_the_table_is_printed(capsys):
    assert split("split_models:with_both --stages 2") == 0
    assert capsys.readouterr().out.splitlines() == [
        "Net: 2 calls of 2 units, 2 stages",
        "40 parameters (160 B), 192 FLOPs in a forward",
        "2 pieces of glue: 2 on stage 0",
        "",
        "stage  units   parameters  bytes  FLOPs  receives     sends",
        "    0  first           20   80 B    96   -            48 B to 1",
        "    1  second          20   80 B    96   48 B from 0  -",
        "",
        "value       from  to  shape   dtype    bytes  gradient",
        "add in Net     0  1   (3, 4)  float32   48 B  yes",
    ]


@pytest.mark.parametrize("factory", ["with_kwargs", "with_args", "with_both", "with_a_tensor"])
def test_inputs_come_with_the_model(capsys, factory):
    (value,) = shown(capsys, f"{factory} --stages 2")["values"]
    assert (value["made_by"], value["shape"]) == ("add in Net", [3, 4])


@pytest.mark.parametrize("function", ["tensor", "pair", "named"])
@pytest.mark.parametrize("factory", ["net", "Net", "ready", "with_both"])
def test_inputs_of_a_function_win(capsys, factory, function):
    (value,) = shown(capsys, f"{factory} --stages 2 --inputs split_models:{function}")["values"]
    assert value["shape"] == [2, 4]


def test_a_model_of_transformers_has_inputs(capsys):
    read = shown(capsys, "llama --cuts model.layers.1.mlp")
    assert (read["model"], read["stages"][1]["units"][0]) == ("LlamaForCausalLM", "model.layers.1.mlp.gate_proj")
    assert read["values"][0]["shape"][2] == 16


@pytest.mark.parametrize(
    ("arguments", "units"),
    [
        ("chain --stages 2", [["0"], ["1", "2"]]),
        ("chain --cuts 2", [["0", "1"], ["2"]]),
        ("chain --cuts 1,2 --stages 3", [["0"], ["1"], ["2"]]),
        ("stages", [["0"], ["1"]]),
        ("with_both --cuts second", [["first"], ["second"]]),
        ("with_both --stages 2 --cuts 1,1", [["first"], ["second"]]),
        ("with_both --stages 1", [["first", "second"]]),
    ],
)
def test_cuts(capsys, arguments, units):
    assert [stage["units"] for stage in shown(capsys, arguments)["stages"]] == units


def test_parameters_are_never_made(capsys):
    """Eight terabytes would not fit."""
    read = shown(capsys, "wide --stages 2")
    assert read["parameter_bytes"] == 2 * 4 * ((1 << 40) + (1 << 20))


WRONG = {
    "": "the following arguments are required: MODULE:FACTORY",
    "split_models:with_both": "the number of stages is missing\nhint: give --stages N, or say where to cut with --cuts",
    "split_models": "'split_models' is not of the form module:factory\nhint: give module:factory, where the factory",
    "split_models:": "'split_models:' is not of the form module:factory",
    "./split_models:net": "'./split_models:net' is not of the form module:factory",
    "nowhere:net --stages 2": "there is no module 'nowhere' in ",
    "nowhere.deep:net --stages 2": "there is no module 'nowhere.deep' in ",
    "split_models:nett --stages 2": "'split_models:nett' was given, but 'split_models' has no 'nett'\nhint: did you",
    "split_models:width --stages 2": "'split_models:width' is a int; a function without arguments is needed",
    "split_models:needs --stages 2": "'split_models:needs' cannot be called without arguments: missing a required",
    "split_models:number --stages 2": "'split_models:number' returned int\nhint: give module:factory, where",
    "split_models:too_much --stages 2": "'split_models:too_much' returned (Net, tuple, dict, int)",
    "split_models:net --stages 2": "a Net has to be run, and no inputs for it are known\nhint: let the factory return",
    "split_models:vit --stages 2": "a ViTModel has to be run, and no inputs for it are known",
    "split_models:net --stages 2 --inputs split_models:no": "'split_models:no' was given, but 'split_models' has no",
    "split_models:net --stages 2 --inputs x": "'x' is not of the form module:factory",
    "split_models:with_both --stages 0": "argument --stages: 0 was given; at least 1 is needed",
    "split_models:with_both --stages two": "argument --stages: 'two' was given; a whole number is needed",
    "split_models:with_both --stages 3": "num_stages=3 was given, but the model has 2 parts that a cut can separate",
    "split_models:with_both --cuts third": "cuts=[…, 'third', …] was given, but no module of that name was called",
    "split_models:with_both --cuts 2": "cuts=[2] were given, which start stages before calls [2]; they must ascend",
    "split_models:with_both --cuts 1,,2": "argument --cuts: '1,,2' was given; numbers or names are needed, with commas",
    "split_models:with_both --cuts 1 --stages 3": "cuts=[1] make 2 stages, but num_stages=3 was given",
    "split_models:stages --stages 3": "a list of 2 stage modules was given with num_stages=3",
    "split_models:with_both --stages 2 --jsno": "--jsno is no option\nhint: did you mean '--json'",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_value_is_one_message(capsys, arguments):
    assert split(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"pipeloom: error: {WRONG[arguments]}")
    assert captured.err.count("error:") == 1


def test_a_file_is_told_from_a_module(capsys):
    assert split("split_models.py:net --stages 2") == 2
    assert capsys.readouterr().err.endswith("hint: name the module, not its file: split_models:net\n")


FAILING = {
    "split_models:fails --stages 2": ["in fails", "in inner", "ZeroDivisionError: of my own"],
    "split_models:net --stages 2 --inputs split_models:fails": ["in inner", "ZeroDivisionError: of my own"],
    "split_models:forward_fails --stages 2": ["in forward", "RuntimeError: "],
    "split_broken:net --stages 2": ["split_broken.py", "ModuleNotFoundError: No module named 'split_nothing'"],
    "split_faulty:net --stages 2": ["split_faulty.py", "KeyError: 'at import'"],
}


@pytest.mark.parametrize("arguments", FAILING)
def test_what_the_users_code_raises_is_shown(capsys, arguments):
    assert split(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert all(part in captured.err for part in FAILING[arguments])
    assert "pipeloom/" not in captured.err


def test_the_current_folder_is_on_the_path(folder):
    """Of an installed command it is not, until somebody puts it there."""
    code = "import sys; sys.path.pop(0); from pipeloom.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "split", "split_models:chain", "--stages", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Sequential: 3 calls of 3 units, 2 stages\n")
