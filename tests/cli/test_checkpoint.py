"""`pipeloom checkpoint`: what it prints, its exit codes, and that looking loads nothing that could run a file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeloom import cli
from pipeloom.archive.steps import folder_of
from tests.archive.samples import flip_bit, reseal, save

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    """A run with checkpoints of two steps."""
    monkeypatch.chdir(tmp_path)
    for step_index in (100, 200):
        save(folder_of(Path("run/checkpoints"), step_index), step_index)
    return Path("run")


def checkpoint(*arguments):
    return cli.main(["checkpoint", *map(str, arguments)])


@pytest.mark.parametrize("action", ["", "inspect", "verify", "merge"])
def test_help_is_pinned(action, capsys):
    assert checkpoint(*action.split(), "--help") == 0
    golden = GOLDEN / f"help_checkpoint{action and '_' + action}.txt"
    assert capsys.readouterr().out == golden.read_text(encoding="utf-8")


def test_inspect_prints_layout_sizes_and_names(run_folder, capsys):
    assert checkpoint("inspect", run_folder / "checkpoints" / "step-000100") == 0
    printed = capsys.readouterr().out
    assert printed == (GOLDEN / "inspect.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", ["run", "run/checkpoints", "run/checkpoints/step-000200"])
def test_newest_of_a_run_is_inspected(run_folder, path, capsys):
    assert checkpoint("inspect", path) == 0
    assert capsys.readouterr().out.startswith("run/checkpoints/step-000200: step 200\nsaved from 2 stages on 1 rank")


def test_inspect_as_json(run_folder, capsys):
    assert checkpoint("inspect", "run", "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["path"], figures["step_index"]) == ("run/checkpoints/step-000200", 200)
    assert figures["layout"] == {"num_stages": 2, "num_ranks": 1, "schedule": "1f1b"}
    assert figures["model"]["1.weight"] == {"file": "stage-001.safetensors", "dtype": "uint8", "shape": [64, 128]}
    assert (figures["model_bytes"], figures["stages"]) == (16384, {"0": ["0.weight"], "1": ["1.weight"]})


def test_verify_looks_at_every_checkpoint_of_a_run(run_folder, capsys):
    assert checkpoint("verify", "run") == 0
    assert capsys.readouterr().out == "run/checkpoints/step-000100: good\nrun/checkpoints/step-000200: good\n"


def test_verify_names_every_fault(run_folder, capsys):
    broken = run_folder / "checkpoints" / "step-000200"
    flip_bit(broken / "stage-001.safetensors", -1)
    (broken / "training.json").unlink()
    assert checkpoint("verify", "run") == 1
    assert capsys.readouterr() == (
        "run/checkpoints/step-000100: good\n"
        "run/checkpoints/step-000200: 2 faults\n"
        f"  {broken}/stage-001.safetensors is damaged: its SHA-256 is not the manifest's\n"
        f"  {broken}/training.json is missing, but the manifest lists it\n",
        "",
    )


def test_verify_as_json(run_folder, capsys):
    (run_folder / "checkpoints" / "step-000200" / "manifest.json").unlink()
    assert checkpoint("verify", "run/checkpoints/step-000200", "--json") == 1
    (found,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert found["path"] == "run/checkpoints/step-000200"
    assert found["faults"] == ["cannot read run/checkpoints/step-000200/manifest.json: No such file or directory"]


def test_merge_writes_one_file_and_never_over_another(run_folder, capsys):
    assert checkpoint("merge", "run", "model.safetensors") == 0
    assert capsys.readouterr().out == "model.safetensors: 2 tensors of run/checkpoints/step-000200\n"
    before = Path("model.safetensors").read_bytes()
    assert checkpoint("merge", "run", "model.safetensors") == 2
    assert "model.safetensors exists already; nothing is ever overwritten" in capsys.readouterr().err
    assert Path("model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no action was given\nhint: the actions are inspect verify merge; see pipeloom checkpoint --help"),
        (["verfy", "run"], "'verfy' is no action\nhint: did you mean 'verify'"),
        (["zzz"], "'zzz' is no action\nhint: the actions are inspect verify merge"),
        (["inspect"], "the following arguments are required: PATH"),
        (["verify", "run", "--jsn"], "--jsn is no option\nhint: did you mean '--json'"),
        (["merge", "run"], "the following arguments are required: OUT"),
        (["merge", "run", "a", "b"], "'b' is one argument too many"),
        (["inspect", "nowhere"], "there is no checkpoint in nowhere\nhint: give a folder like runs/NAME"),
        (["verify", "."], "there is no checkpoint in ."),
        (["inspect", "run/checkpoints/step-000300"], "cannot read run/checkpoints/step-000300/manifest.json: No such"),
        (["merge", "run", "nowhere/out"], "cannot write nowhere/out: "),
    ],
)
def test_wrong_words_are_one_message(run_folder, arguments, message, capsys):
    assert checkpoint(*arguments) == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"pipeloom: error: {message}")
    assert (output.out, output.err.count("error: ")) == ("", 1)


def test_damaged_manifest_is_one_message(run_folder, capsys):
    (run_folder / "checkpoints" / "step-000200" / "manifest.json").write_text("{")
    assert checkpoint("inspect", "run") == 2
    assert "pipeloom: error: run/checkpoints/step-000200/manifest.json is damaged: " in capsys.readouterr().err


def test_names_cannot_steer_the_terminal(run_folder, capsys):
    reseal(Path("run/checkpoints/step-000200"), lambda value: value["stages"].update({"0": ["\x1b[2J\n0.weight"]}))
    assert checkpoint("inspect", "run") == 0
    assert "  \\x1b[2J\\n0.weight  no tensor\n" in capsys.readouterr().out


@pytest.mark.parametrize("action", ["inspect", "verify"])
def test_looking_loads_nothing_heavy(run_folder, action):
    script = (
        "import sys; from pipeloom.cli import main\n"
        f"assert main(['checkpoint', '{action}', 'run']) == 0\n"
        "print(sorted({'torch', 'numpy', 'safetensors', 'pydantic', 'rich'} & set(sys.modules)), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stderr == "[]\n"
