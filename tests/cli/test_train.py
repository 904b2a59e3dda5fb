"""`pipeloom train` as a command: flags, exit codes, one message, and a whole run in a process of its own."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeloom import cli
from pipeloom.cli.train import build_parser, flag_names, parse
from pipeloom.errors import ConfigError, PeerFailed
from pipeloom.launch.words import Ended

GOLDEN = Path(__file__).parent / "golden" / "help_train.txt"
TINY = """
[model]
num_layers = 1
width = 8
num_heads = 1
sequence_length = 8

[data]
paths = ["text"]
held_out_fraction = 0.5

[train]
steps = 3
batch_size = 2
folder = "run"

[pipeline]
num_microbatches = 2

[optimizer]
warmup_steps = 1

[metrics]
num_held_out_windows = 4
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A working folder with a little text and a configuration."""
    monkeypatch.chdir(tmp_path)
    Path("text").mkdir()
    for number in range(6):
        Path(f"text/{number}.txt").write_text(f"text number {number} is a text " * 3)
    Path("tiny.toml").write_text(TINY)


def train(*arguments):
    return cli.main(["train", *arguments])


def last_steps():
    lines = map(json.loads, Path("run/metrics.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if line["kind"] == "step"]


def test_help_is_pinned_flag_by_flag(capsys):
    assert train("--help") == 0
    flags = [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.startswith("  --")]
    assert flags == [line for line in GOLDEN.read_text(encoding="utf-8").splitlines() if line.startswith("  --")]


def test_help_names_what_every_flag_does_without_torch():
    code = "import sys; from pipeloom.cli.train import build_parser; build_parser().format_help();"
    code += "print([name for name in ('torch', 'numpy', 'rich') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_run_then_resume_then_nothing_left(capsys):
    assert train("--config", "tiny.toml", "--stop_after", "2") == 0
    assert train("--resume", "run") == 0
    assert last_steps() == [1, 2, 3]
    assert train("--resume", "run") == 0
    assert last_steps() == [1, 2, 3]
    assert capsys.readouterr().err == ""


def test_flags_win_over_the_file(capsys):
    assert train("--config", "tiny.toml", "--train.steps", "1", "--pipeline.schedule=gpipe") == 0
    printed = capsys.readouterr().out
    assert "train = { steps = 1, batch_size = 2," in printed
    assert 'schedule = "gpipe"' in printed


def test_saved_configuration_feeds_back(capsys):
    train("--config", "tiny.toml")
    first = capsys.readouterr().out.splitlines()
    assert train("--config", "run/config.toml", "--train.folder", "again") == 0
    again = capsys.readouterr().out.splitlines()
    assert [line.replace('folder = "again"', 'folder = "run"') for line in again[:7]] == first[:7]
    assert Path("again/checkpoints/step-000003/stage-000.safetensors").read_bytes() == (
        Path("run/checkpoints/step-000003/stage-000.safetensors").read_bytes()
    )


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["--train.steps", "3"], {"train.steps": "3"}),
        (["--train.steps=3"], {"train.steps": "3"}),
        (["--train.batch-size", "3"], {"train.batch_size": "3"}),
        (["--data.paths", "a", "b", "--train.seed", "1"], {"data.paths": ["a", "b"], "train.seed": "1"}),
        (["--pipeline.cuts", "1", "-2"], {"pipeline.cuts": ["1", "-2"]}),
        (["--pipeline.recompute"], {"pipeline.recompute": "true"}),
        (["--checkpoint.enabled", "false"], {"checkpoint.enabled": "false"}),
        (["--resume"], {"resume": ""}),
        (["--resume", "runs/a-b"], {"resume": "runs/a-b"}),
        (["--resume", "--stop-after", "9"], {"resume": "", "stop_after": 9}),
        (["--model", "my:gpt"], {"model.factory": "my:gpt"}),
        (["--train.steps", "1", "--train.steps", "2"], {"train.steps": "2"}),
        (["--config=a-b.toml"], {"config": "a-b.toml"}),
        ([], {}),
    ],
)
def test_words_are_sorted(words, given):
    assert parse(words) == given


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--train.stps", "3"], r"there is no flag '--train\.stps'\nhint: did you mean '--train\.steps'"),
        (["--stps=3"], "there is no flag '--stps'"),
        (["--train.step", "3"], r"there is no flag '--train\.step'"),
        (["-x"], "there is no flag '-x'"),
        (["words", "3"], "unexpected 'words 3': every value follows its --flag"),
        (["--train.steps"], r"argument --train\.steps: expected one argument"),
        (["--stop_after", "x"], "argument --stop_after: invalid int value: 'x'"),
    ],
)
def test_wrong_words_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        parse(words)


def test_every_flag_has_a_unique_name():
    names = list(flag_names(build_parser()))
    assert len(names) == len(set(names)) > 30


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--train.steps", "abc"], "command line: train.steps was given 'abc', but it should be a valid integer"),
        (["--train.steps", "-1"], "command line: train.steps was given '-1', but it should be greater than"),
        (["--pipeline.recompute", "maybe"], "pipeline.recompute was given 'maybe', but it should be a valid boolean"),
        (["--train.batch_size", "1"], "train.batch_size is 1, fewer than the 2 micro-batches"),
        (["--train.stps", "3"], "there is no flag '--train.stps'"),
        (["--stop_after", "0"], "--stop_after was given 0"),
        (["--launch", "0"], "argument --launch: 0 was given; at least 1 is needed"),
        (["--launch", "2", "--max_restarts", "-1"], "argument --max_restarts: -1 was given; at least 1 is needed"),
        (["--max-restarts", "2"], "--max_restarts was given without --launch"),
        (["--launch", "2", "--pipeline.num_stages", "3"], "num_stages is 3, but there are 2 processes"),
        (["--launch", "2", "--train.steps", "x"], "command line: train.steps was given 'x'"),
        (["--launch", "2", "--resume", "--stop-after", "0"], "--stop_after was given 0"),
        (["--pipeline.schedule", "1f1"], "schedule '1f1' is unknown"),
        (["--pipeline.schedule", "pipedream"], "'pipedream', which updates weights before a step is over"),
        (["--pipeline.num_stages", "9"], "9 stages were asked for"),
        (["--data.paths", "nowhere.txt"], "cannot read the data path 'nowhere.txt'"),
        (["--data.paths", "empty"], "there is no text in empty"),
        (["--data.paths", "bad.jsonl"], "bad.jsonl, line 2 is not JSON"),
        (["--model", "nowhere:gpt"], "there is no module 'nowhere'"),
        (["--model", "gpt"], "model factory 'gpt' is not of the form module:function"),
        (["--config", "nowhere.toml"], "cannot read the configuration nowhere.toml"),
        (["--resume", "nowhere"], "nowhere is neither a run nor a checkpoint"),
        (["--train.folder", "text"], "the run folder text is not an empty folder"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(words, message, capsys):
    Path("empty").mkdir()
    Path("bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    assert train("--config", "tiny.toml", *words) == 2
    output = capsys.readouterr()
    assert output.err.count("error: ") == 1
    assert message in output.err
    assert "Traceback" not in output.err
    assert output.out == ""


def test_second_run_in_a_folder_is_refused_and_the_first_is_whole(capsys):
    train("--config", "tiny.toml")
    before = Path("run/metrics.jsonl").read_bytes()
    assert train("--config", "tiny.toml", "--train.seed", "1") == 2
    assert "the run folder run holds a run; a new run would overwrite it" in capsys.readouterr().err
    assert Path("run/metrics.jsonl").read_bytes() == before


def test_checkpoint_of_another_model_lists_what_differs(capsys):
    train("--config", "tiny.toml")
    assert train("--resume", "run", "--model.width", "16", "--train.steps", "9") == 2
    message = capsys.readouterr().err
    assert "the checkpoint of step 3 is a checkpoint of another model:" in message
    assert "0.tables.0.weight float32[256, 8] in the checkpoint, float32[256, 16] in the model" in message
    assert last_steps() == [1, 2, 3]


def test_truncated_checkpoint_is_refused_by_file_name(capsys):
    train("--config", "tiny.toml")
    weights = Path("run/checkpoints/step-000003/stage-000.safetensors")
    weights.write_bytes(weights.read_bytes()[:-8])
    assert train("--resume", "run/checkpoints/step-000003") == 2
    assert f"{weights} is truncated: " in capsys.readouterr().err


USERS_MODEL = """
from torch import nn

def bytes_mlp():
    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 256))

def classifier():
    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 10))
"""


def test_own_model_and_text_in_a_process_of_its_own():
    Path("my_model.py").write_text(USERS_MODEL)
    command = [sys.executable, "-m", "pipeloom", "train", "--config", "tiny.toml", "--model", "my_model:bytes_mlp"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "model: 0.00 M parameters in 2 stages" in done.stdout
    assert last_steps() == [1, 2, 3]


def test_shipped_model_of_ones_own_trains():
    assert train("--config", "tiny.toml", "--model", "examples.own_model:convolutions") == 0
    assert last_steps() == [1, 2, 3]


def test_own_model_with_another_output_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("my_classifier.py").write_text(USERS_MODEL)
    assert train("--config", "tiny.toml", "--model", "my_classifier:classifier") == 2
    assert "the model returned (1, 8, 10); next-byte logits of shape (1, 8, 256) are needed" in capsys.readouterr().err
    assert not Path("run").exists()


@pytest.mark.parametrize(("number", "code"), [(0, 0), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_was_stopped_has_a_code_of_its_own(number, code, monkeypatch):
    monkeypatch.setattr("pipeloom.train.job.train", lambda layers, console, **options: number)
    assert cli.main(["train"]) == code


@pytest.mark.parametrize(
    ("ended", "code", "error"),
    [
        (Ended(0), 0, ""),
        (Ended(143), 143, ""),
        (Ended(2, "wrong", "mend it"), 2, "pipeloom: error: wrong\nhint: mend it\n"),
        (Ended(1, "Traceback\nrank 1: ValueError: boom"), 1, "Traceback\nrank 1: ValueError: boom\n"),
    ],
)
def test_launcher_has_the_last_word(ended, code, error, capsys, monkeypatch):
    made = []
    monkeypatch.setattr("pipeloom.launch.agent.Launch.run", lambda launch: made.append(launch) or ended)
    assert train("--config", "tiny.toml", "--launch", "2", "--max-restarts", "3") == code
    assert capsys.readouterr() == ("", error)
    (launch,) = made
    assert (launch.num_ranks, launch.max_restarts) == (2, 3)
    assert list(launch.command[1:6]) == ["-u", "-m", "pipeloom", "train", "--config"]


def test_launcher_under_a_launcher_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert train("--config", "tiny.toml", "--launch", "2") == 2
    assert "--launch was given, but a launcher has started this process" in capsys.readouterr().err


def test_failure_of_a_peer_is_no_wrong_value(capsys, monkeypatch):
    def fail(*args, **options):
        raise PeerFailed("rank 0 stops, because rank 1 failed", cause=None)

    monkeypatch.setattr("pipeloom.train.job.train", fail)
    assert train("--config", "tiny.toml") == 1
    assert capsys.readouterr().err == "pipeloom: error: rank 0 stops, because rank 1 failed\n"
