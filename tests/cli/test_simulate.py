import json
from pathlib import Path

import pytest

from pipeloom.cli import main

GOLDEN = Path(__file__).parent / "golden"
SHAPE = "--stages 4 --micro-batches 8"


def output(capsys, text):
    code = main(["simulate", *text.split()])
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    return captured.out


def figures(capsys, text):
    return json.loads(output(capsys, f"{text} --json"))


def test_output_is_pinned(capsys):
    shown = output(capsys, "1f1b -p 4 -m 4 --forward 1,2,1,1 --transfer 0.5 --bytes-held-to-input-grad 100")
    assert shown == (GOLDEN / "simulate_1f1b.txt").read_text(encoding="utf-8")


def test_keys_are_pinned(capsys):
    assert list(figures(capsys, f"1f1b {SHAPE}")) == [
        "schedule",
        "forward_only",
        "num_ranks",
        "num_stages",
        "num_microbatches",
        "placement",
        "makespan_s",
        "longest_rank_span_s",
        "bubble_fraction",
        "bubble_fraction_unsynchronised",
        "peak_activation_bytes",
        "peak_held_to_input_grad",
        "peak_held_to_weight_grad",
        "peak_versions_held",
    ]


def test_costs_from_options(capsys):
    """Rank 0 is idle for 3 hops there and back: 3 × (1 + 2 + 2 × 0.25) beside 8 × 3."""
    shown = figures(capsys, f"gpipe {SHAPE} --forward 1.0 --input-grad 1.5 --weight-grad 0.5 --transfer 0.25")
    assert shown["makespan_s"] == 8 * 3 + 3 * 3.5
    assert shown["bubble_fraction"] == pytest.approx(10.5 / 34.5)


def test_a_cost_for_each_stage(capsys):
    shown = figures(capsys, "gpipe --stages 2 -m 3 --forward-only --forward 1,3")
    assert (shown["makespan_s"], shown["longest_rank_span_s"]) == (10.0, 9.0)
    assert shown["bubble_fraction_unsynchronised"] == pytest.approx(1 - 12 / 18)


def test_bytes(capsys):
    shown = figures(capsys, f"1f1b {SHAPE} --bytes-held-to-input-grad 10,20,30,40")
    assert shown["peak_activation_bytes"] == [40, 60, 60, 40]


def test_bandwidth(capsys):
    """Messages of 2 s each over one channel: rank 1 runs at the pace of the channel."""
    shown = figures(capsys, "gpipe --stages 2 -m 4 --forward-only --transfer-bytes-per-s 5 --boundary-bytes 10")
    assert shown["makespan_s"] == 1 + 4 * 2 + 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("costs.json", '{"forward_s": 2, "input_grad_s": [1, 1, 1, 1], "weight_grad_s": 1, "transfer_s": 0.5}'),
        ("costs.toml", "forward_s = 2\ninput_grad_s = 1\nweight_grad_s = 1\ntransfer_s = 0.5\n"),
    ],
)
def test_costs_from_a_file(capsys, tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert figures(capsys, f"1f1b {SHAPE} --costs {path}") == figures(
        capsys, f"1f1b {SHAPE} --forward 2 --transfer 0.5"
    )


@pytest.mark.parametrize(("num_microbatches", "is_drawn"), [(4, True), (400, False)])
def test_drawn_where_it_fits(capsys, num_microbatches, is_drawn):
    first = output(capsys, f"1f1b -p 4 -m {num_microbatches}").splitlines()[0]
    assert first.startswith("GPU 0: F0 F1" if is_drawn else "(the drawing needs ")


def test_forward_only_says_how_long(capsys):
    shown = output(capsys, "gpipe -p 4 -m 6 --forward-only --forward 0.5")
    assert "Idle fraction: 33%\nMakespan: 4.5 s\n" in shown
    assert "Held" not in shown


def test_colour(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert output(capsys, "gpipe -p 1 -m 1").startswith("GPU 0: \x1b[34mF0\x1b[0m \x1b[32mB0---\x1b[0m\n")


def test_costs_come_from_one_place(capsys):
    assert main(["simulate", "1f1b", *SHAPE.split(), "--costs", "x.json", "--forward", "1"]) == 2
    assert capsys.readouterr().err == (
        "pipeloom: error: --costs was given with --forward; costs come from one place\nhint: leave one of them out\n"
    )


WRONG = {
    "--forward 1,2": "forward_s has 2 values for 4 stages; one for each is needed",
    "--forward -1": "forward_s holds -1; a finite number of at least 0 is needed",
    "--forward one": "argument --forward: 'one' was given; a number is needed",
    "--forward 1,,2,3": "argument --forward: '' was given; a number is needed",
    "--transfer nan": "transfer_s holds nan; a finite number of at least 0 is needed",
    "--transfer inf": "transfer_s holds inf; a finite number of at least 0 is needed",
    "--transfer 1,2": "argument --transfer: '1,2' was given; a number is needed",
    "--bytes-held-to-input-grad 0.5": "bytes_held_to_input_grad holds 0.5; a whole number of bytes",
    "--transfer-bytes-per-s 1": "boundary_bytes has 0 values for 3 boundaries of stages",
    "--costs nowhere.json": "costs file 'nowhere.json' does not exist",
    "--foward 1": "--foward is no option\nhint: did you mean '--forward'",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_value_is_one_message(capsys, arguments):
    assert main(["simulate", "1f1b", *SHAPE.split(), *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"pipeloom: error: {WRONG[arguments]}")
    assert captured.err.count("error:") == 1


def test_recomputation_is_shown_with_what_it_costs_and_saves(capsys):
    more = "--recompute all --bytes-held-to-input-grad 100 --bytes-held-to-recompute 5"
    late, early = [output(capsys, f"v-min -p 4 -m 8 {more}{each}").splitlines() for each in ("", " --early")]
    without = "Without recomputation: makespan 59 s, activations at most 400 400 400 400 bytes"
    assert "Makespan: 75 s" in late
    assert late[-1] == without
    assert "Makespan: 70 s" in early
    assert early[-2:] == [
        without,
        "With each R right before its backward: makespan 75 s, activations at most 115 115 115 115 bytes",
    ]


def test_recomputation_in_figures(capsys):
    shown = figures(capsys, "1f1b -p 2 -m 2 --recompute 0 --forward 2,1")
    assert shown["others"] == {"Without recomputation": {"makespan_s": 10.0, "peak_activation_bytes": [0, 0]}}
    assert shown["makespan_s"] == 12.0
    own = figures(capsys, "gpipe-recompute -p 2 -m 3 --early")
    assert list(own["others"]) == ["Without recomputation", "With each R right before its backward"]


def test_early_recomputation_has_a_limit(capsys):
    shown = [
        figures(capsys, f"hanayo -p 4 -m 8 --recompute all --early --bytes-held-to-input-grad 100{limit}")
        for limit in ("", " --max-activation-bytes 300")
    ]
    assert max(shown[0]["peak_activation_bytes"]) > 300 >= max(shown[1]["peak_activation_bytes"])
    assert shown[0]["makespan_s"] < shown[1]["makespan_s"] < 82


def test_receive_buffers_are_counted(capsys):
    more = "--receive-slots 3 --transfer-bytes-per-s 100 --boundary-bytes 10"
    assert output(capsys, f"gpipe -p 3 -m 4 {more}").splitlines()[-2:] == [
        "Receive buffers, at most: 3 3 3 messages, by GPU",
        "Their size: 30 30 30 bytes, by GPU",
    ]
    assert output(capsys, "1f1b -p 3 -m 4 --receive-slots 1").splitlines()[-1] == (
        "Receive buffers, at most: 1 1 1 messages, by GPU"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--recompute 0,4", "stage 4 was given to --recompute; there are 4, from 0 on"),
        ("--recompute some", "'some' was given; all, or numbers of stages are needed, as 0,2,3"),
        ("--receive-slots 0", "0 was given; at least 1 is needed"),
    ],
)
def test_memory_options_that_do_not_fit(capsys, given, message):
    try:
        code = main(["simulate", "1f1b", *SHAPE.split(), *given.split()])
    except SystemExit as ended:  # argparse's way
        code = ended.code
    assert code == 2
    assert message in capsys.readouterr().err
