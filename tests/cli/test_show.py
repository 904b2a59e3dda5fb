import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from pipeloom.cli import main
from pipeloom.ir.notation import parse_csv
from pipeloom.passes import add_transfers
from pipeloom.schedules import gpipe, one_f_one_b

GOLDEN = Path(__file__).parent / "golden"


def output(capsys, text):
    """What a command prints, which must end well."""
    code = main(text.split())
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    return captured.out


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ("show gpipe --stages 4 --micro-batches 6 --forward-only", "show_gpipe_forward_only"),
        ("show 1f1b --ranks 4 --micro-batches 8", "show_1f1b"),
        ("show 1F1B -p 4 --stages 4 -v 1 -m 8", "show_1f1b"),
    ],
)
def test_drawings_are_pinned(capsys, arguments, name):
    assert output(capsys, arguments) == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


def test_more_micro_batches_idle_less(capsys):
    assert output(capsys, "show gpipe --stages 4 -m 24 --forward-only").endswith("Idle fraction: 11%\n")


def test_json_of_forward_only(capsys):
    assert json.loads(output(capsys, "show gpipe --stages 2 -m 2 --forward-only --json")) == {
        "schedule": "gpipe",
        "forward_only": True,
        "num_ranks": 2,
        "num_stages": 2,
        "num_microbatches": 2,
        "placement": [0, 1],
        "programs": [["0F0", "0F1"], ["1F0", "1F1"]],
        "makespan": 3,
        "bubble_fraction": pytest.approx(1 / 3),
        "longest_rank_span": 2,
        "peak_held_to_input_grad": [0, 0],
        "peak_held_to_weight_grad": [0, 0],
        "peak_versions_held": [1, 1],
    }


def test_json_of_training(capsys):
    shown = json.loads(output(capsys, "show 1f1b -p 4 -m 8 --json"))
    assert (shown["makespan"], shown["longest_rank_span"]) == (33, 33)
    assert shown["bubble_fraction"] == pytest.approx(3 / 11)
    assert shown["peak_held_to_input_grad"] == shown["peak_held_to_weight_grad"] == [4, 3, 2, 1]
    assert shown["programs"][3][:4] == ["3F0", "3B0", "3F1", "3B1"]


def test_json_numbers_are_whole(capsys):
    """A reader should not meet 33.0 where ticks are counted."""
    assert '"makespan": 33, ' in output(capsys, "show 1f1b -p 4 -m 8 --json")


def test_csv_is_read_back(capsys):
    assert parse_csv(output(capsys, "show 1f1b -p 4 -m 8 --csv")) == one_f_one_b(4, 8)


def test_schedule_from_a_file(capsys, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(output(capsys, "show gpipe -p 3 -m 2 --csv"), encoding="utf-8")
    shown = json.loads(output(capsys, f"show --from {path} --json"))
    assert (shown["schedule"], shown["num_ranks"], shown["makespan"]) == ("mine", 3, 12)


def test_lowered_schedule_from_a_file(capsys, tmp_path):
    path = tmp_path / "lowered.csv"
    rows = [",".join(map(str, program)) for program in add_transfers(gpipe(2, 2)).programs]
    path.write_text("\n".join(rows), encoding="utf-8")
    drawn = output(capsys, f"show --from {path}").splitlines()
    assert drawn[:2] == output(capsys, "show gpipe -p 2 -m 2").splitlines()[:2]


WRONG = {
    "": "no schedule was given\nhint: name one of gpipe 1f1b eager-1f1b",
    "1f1 -p 4 -m 8": "schedule '1f1' is unknown; the known ones are gpipe, 1f1b, eager-1f1b",
    "1f1b -p 0 -m 8": "argument -p/--ranks: 0 was given; at least 1 is needed",
    "1f1b -p -2 -m 8": "argument -p/--ranks: -2 was given; at least 1 is needed",
    "1f1b -p 4 -m many": "argument -m/--micro-batches: 'many' was given; a whole number is needed",
    "1f1b -p 4 -m 2.5": "argument -m/--micro-batches: '2.5' was given; a whole number is needed",
    "1f1b -p 4 -m": "argument -m/--micro-batches: expected one argument",
    "1f1b -p 4": "the number of micro-batches is missing\nhint: give --micro-batches N",
    "1f1b -m 4": "the number of stages is missing\nhint: give --stages N or --ranks N",
    "1f1b -v 1 -m 4": "the number of stages is missing",
    "1f1b -p 4 -m 8 --micro-batch 3": "--micro-batch is no option\nhint: did you mean '--micro-batches'",
    "1f1b -p 4 -m 8 --wide=3": "--wide is no option",
    "1f1b gpipe -p 4 -m 8": "'gpipe' is one argument too many",
    "1f1b -p 4 -m 8 --csv --json": "argument --json: not allowed with argument --csv",
    "1f1b -p 3 --stages 4 -m 8": "4 stages and 3 ranks were given; every rank must hold as many",
    "1f1b -p 2 --stages 4 -m 8": "schedule '1f1b' was asked for with 2 ranks × 2 stages per rank; it holds exactly 1",
    "1f1b -p 2 -m 4 --group-size 2": "option 'group_size' was given to schedule '1f1b'; it has none of its own",
    "1f1b -p 2 -m 4 --micro-batches-per-update 2": "option 'microbatches_per_update' was given to schedule '1f1b'; it",
    "pipedream-2bw -p 4 -m 8 --micro-batches-per-update 2": "schedule 'pipedream-2bw' was asked for with 2 micro",
    "--from x.csv --group-size 2": "--from was given with --group-size; the file says all there is to say",
    "1f1b -p 9 -m 99999999": "a schedule of 1,799,999,982 actions was asked for; at most 4,000,000 fit",
    "--from nowhere.csv": "schedule file 'nowhere.csv' does not exist",
    "--from . ": "schedule file '.' cannot be read",
    "--from x.csv -p 4": "--from was given with --ranks; the file says all there is to say",
    "gpipe --from x.csv": "--from was given with gpipe; the file says all there is to say",
    "--from x.csv --forward-only": "--from was given with --forward-only",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_value_is_one_message(capsys, arguments):
    assert main(["show", *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"pipeloom: error: {WRONG[arguments]}")
    assert captured.err.count("error:") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,hello\n", "'hello' is not an action"),
        ("", "the text holds no action"),
        ("0F0,0F999999\n", "holds micro-batch 999999, but 2 actions in all"),
        ("0F0,0B0\n1F0\n", "missing action: 1B0 is missing on rank 1"),
        (",".join(f"0F{i}" for i in range(40)) + "\n1F0\n", "breaks 39 rules"),
        (",".join(f"0F{i}" for i in range(40)) + "\n1F0\n", "… and 29 more"),
        ("0F0,0B0\n1B0,1F0\n", "dependency backwards: 1B0 stands before 1F0"),
    ],
)
def test_faulty_file_is_refused(capsys, tmp_path, text, message):
    path = tmp_path / "faulty.csv"
    path.write_text(text, encoding="utf-8")
    assert main(["show", "--from", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_missing_micro_batches_are_not_listed_one_by_one(capsys, tmp_path):
    """A typo in a number must not become a million lines."""
    path = tmp_path / "typo.csv"
    path.write_text("0F0,0F9999999\n", encoding="utf-8")
    assert main(["show", "--from", str(path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def on_a_terminal(columns, **environment):
    """Run a command on a pseudo-terminal of that width and return what appears there."""
    command = [sys.executable, "-m", "pipeloom", "show", "1f1b", "-p", "4", "-m", "8"]
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "TERM")}
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, stdout=theirs, env={**kept, "COLUMNS": str(columns), "TERM": "xterm", **environment}
    )
    os.close(theirs)
    seen = b""
    try:
        while chunk := os.read(ours, 4096):
            seen += chunk
    except OSError:  # Linux says so when the other side is closed.
        pass
    finally:
        os.close(ours)
    assert process.wait(timeout=60) == 0
    return seen.decode().replace("\r\n", "\n")


def test_terminal_cuts_and_colours():
    lines = on_a_terminal(40).splitlines()
    assert lines[0].startswith("GPU 0: \x1b[34mF0\x1b[0m \x1b[34mF1\x1b[0m")
    assert [line[-1] for line in lines[:4]] == ["…"] * 4


def test_no_color_is_obeyed():
    lines = on_a_terminal(40, NO_COLOR="1").splitlines()
    assert lines[0] == "GPU 0: F0 F1 F2 F3  .  .  .  .  .  . B0…"
    assert len(lines[0]) == 40


def test_wide_terminal_cuts_nothing():
    assert on_a_terminal(200, TERM="dumb") == (GOLDEN / "show_1f1b.txt").read_text(encoding="utf-8")


def test_colour_can_be_forced(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[32mB7---\x1b[0m" in output(capsys, "show 1f1b -p 4 -m 8")


def test_batches_of_a_schedule_that_updates_weights(capsys):
    drawn = output(capsys, "show pipedream-2bw -p 2 -m 8 --micro-batches-per-update 4")
    assert "Weights are updated after the last backward of micro-batches 3 7\n" in drawn


def test_group_size_and_own_stages_per_rank(capsys):
    drawn = output(capsys, "show interleaved --stages 4 -m 4 --group-size 4 --json")
    assert json.loads(drawn)["programs"][0][:5] == ["0F0", "0F1", "0F2", "0F3", "2F0"]
