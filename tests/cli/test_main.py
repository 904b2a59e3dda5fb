"""The command line as a whole: dispatch, exit codes, one message, closed pipes, cold start."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import pipeloom
from pipeloom import cli
from pipeloom.errors import ConfigError

GOLDEN = Path(__file__).parent / "golden"
NAMES = " ".join(cli.COMMANDS)


def process(*arguments, **options):
    command = [sys.executable, "-m", "pipeloom", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **options)


@pytest.fixture
def train(monkeypatch):
    """Put a function in the place of `pipeloom train`."""

    def put(run):
        monkeypatch.setitem(sys.modules, "pipeloom.cli.train", SimpleNamespace(run=run))

    return put


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--help"], "help"),
        (["show", "--help"], "help_show"),
        (["simulate", "-h"], "help_simulate"),
        (["split", "--help"], "help_split"),
        (["compare", "--help"], "help_compare"),
        (["convert", "--help"], "help_convert"),
    ],
)
def test_help_is_pinned(arguments, name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"pipeloom {pipeloom.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], f"no command was given\nhint: the commands are {NAMES}; see pipeloom --help"),
        (["shwo"], "'shwo' is no command\nhint: did you mean 'show'?"),
        (["zzz"], f"'zzz' is no command\nhint: the commands are {NAMES}"),
        (["--versoin"], "'--versoin' is no command\nhint: did you mean '--version' or 'train' or 'checkpoint'?"),
    ],
)
def test_wrong_command(arguments, message, capsys):
    assert cli.main(arguments) == 2
    assert capsys.readouterr() == ("", f"pipeloom: error: {message}\n")


def test_train_gets_the_rest(train):
    seen = []
    train(lambda rest: seen.append(rest) or 0)
    assert cli.main(["train", "--help", "--train.steps", "3"]) == 0
    assert seen == [["--help", "--train.steps", "3"]]


def test_error_of_the_tree_is_one_message(train, capsys):
    def run(rest):
        raise ConfigError("--train.steps is 0; at least 1 is needed", "leave it out")

    train(run)
    assert cli.main(["train"]) == 2
    assert capsys.readouterr().err == (
        "pipeloom: error: --train.steps is 0; at least 1 is needed\nhint: leave it out\n"
    )


def test_error_of_the_program_is_not_hidden(train):
    def run(rest):
        raise ZeroDivisionError("a bug")

    train(run)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        cli.main(["train"])


def test_interrupt_is_quiet(train, capsys):
    def run(rest):
        raise KeyboardInterrupt

    train(run)
    assert cli.main(["train"]) == 130
    assert capsys.readouterr().err == "pipeloom: error: interrupted\n"


@pytest.mark.parametrize(("given", "code"), [(None, 0), (3, 3), ("text", 1)])
def test_exit_of_a_command_is_kept(train, given, code):
    def run(rest):
        raise SystemExit(given)

    train(run)
    assert cli.main(["train"]) == code


def test_arguments_are_those_of_the_process():
    result = process("show", "gpipe", "--stages", "2", "-m", "1", "--forward-only")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "GPU 0: F0  .\nGPU 1:  . F0\nIdle fraction: 50%\n"


def test_wrong_value_without_traceback():
    result = process("show", "gpipe", "--stages", "two", "-m", "1")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "pipeloom: error: argument --stages: 'two' was given; a whole number is needed\n"
        "hint: see pipeloom show --help\n"
    )


@pytest.mark.parametrize("num_microbatches", ["1", "999"])
def test_closed_pipe_is_quiet(num_microbatches):
    """As in `pipeloom show … | head -1`: nobody reads, be it a line or far more than a pipe holds."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "pipeloom", "show", "gpipe", "-p", "16", "-m", num_microbatches]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    try:
        result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False, timeout=60, env=buffered)
    finally:
        os.close(writer)
    assert (result.returncode, result.stderr) == (141, b"")


def test_encoding_that_lacks_a_character():
    """The help has a `…`; where only ASCII can be written it becomes `?`, not a traceback."""
    result = process("simulate", "--help", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (result.returncode, result.stderr) == (0, "")
    assert "--forward X[,X?]" in result.stdout


@pytest.mark.parametrize("command", ["show", "simulate"])
def test_nothing_heavy_is_loaded(command):
    script = (
        "import sys; from pipeloom.cli import main\n"
        f"main(['{command}', '1f1b', '--stages', '4', '-m', '8', '--json'])\n"
        "print(sorted({'torch', 'numpy', 'pydantic', 'rich', 'tyro'} & set(sys.modules)), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stderr == "[]\n"
