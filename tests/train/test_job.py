"""A whole run in this process: what it prints, what it leaves behind, how it stops."""

import io
import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from pipeloom import Pipeline
from pipeloom.checkpoint import CheckpointStore, Snapshot
from pipeloom.errors import ConfigError, DataError, NonFiniteLoss, SplitError, UnknownSchedule
from pipeloom.train.config import Layer
from pipeloom.train.job import train
from pipeloom.train.loop import Loop


@pytest.fixture(autouse=True)
def one_thread_and_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(layer: Layer, is_terminal: bool = False, **options: Any) -> tuple[int, str]:
    """The signal that stopped it, and what was printed."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=is_terminal, width=120)
    flags = Layer("command line", {section: values for section, values in options.pop("flags", {}).items()})
    return train([layer, flags], console, **options), stream.getvalue()


def snapshot_at(folder: str, step_index: int) -> Snapshot:
    snapshot, _ = CheckpointStore(Path(folder) / "checkpoints").latest_good()
    assert snapshot.step_index == step_index
    return snapshot


def assert_same_state(first: Snapshot, second: Snapshot) -> None:
    pairs = [(first.model, second.model), *((state, second.optimizer[n]) for n, state in first.optimizer.items())]
    assert first.optimizer.keys() == second.optimizer.keys()
    assert all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs)
    assert first.training["position"] == second.training["position"]


def test_run_prints_its_configuration_figures_and_margin(layer: Layer) -> None:
    number, printed = run(layer)
    lines = printed.splitlines()
    assert number == 0
    assert lines[0].startswith('model = { factory = "pipeloom.train.gpt:gpt", num_layers = 2')
    assert [line.split()[1] for line in lines if line.startswith("step: ") and "grad_norm" in line] == [
        "1",
        "2",
        "4",
        "6",
    ]
    assert [line.split()[1] for line in lines if "held_out_loss" in line] == ["0", "3", "6"]
    assert "the margin is " in lines[-1]


def test_run_leaves_configuration_metrics_and_checkpoints(layer: Layer) -> None:
    run(layer)
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert sorted(path.name for path in Path("run").iterdir()) == ["checkpoints", "config.toml", "metrics.jsonl"]
    assert CheckpointStore(Path("run/checkpoints")).steps() == [3, 6]


def test_terminal_gets_a_bar(layer: Layer) -> None:
    _, printed = run(layer, is_terminal=True)
    assert "6/6" in printed
    assert "\x1b[" in printed


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_stopped_and_resumed_is_bit_equal(layer: Layer, dropout: float) -> None:
    run(layer, flags={"model": {"dropout": dropout}})
    apart = {"model": {"dropout": dropout}, "train": {"folder": "apart"}}
    run(layer, flags=apart, stop_after=3)
    number, printed = run(layer, flags={"train": {"folder": "apart"}}, resume="")
    assert number == 0
    assert "run: apart, from step 3" in printed
    assert_same_state(snapshot_at("run", 6), snapshot_at("apart", 6))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"num_stages": 2}, {"num_stages": 1}),
        ({"num_stages": 2}, {"num_stages": 3}),
        ({"num_stages": 2, "schedule": "gpipe"}, {"num_stages": 3, "schedule": "1f1b"}),
        ({"num_stages": 1, "schedule": "1f1b"}, {"num_stages": 2, "schedule": "gpipe", "recompute": True}),
    ],
)
def test_resumed_on_another_cut_is_bit_equal(layer: Layer, first: dict[str, Any], second: dict[str, Any]) -> None:
    model = {"dropout": 0.2}
    run(layer, flags={"model": model, "pipeline": first})
    run(layer, flags={"model": model, "pipeline": first, "train": {"folder": "apart"}}, stop_after=3)
    run(layer, flags={"pipeline": second, "train": {"folder": "apart"}}, resume="")
    assert_same_state(snapshot_at("run", 6), snapshot_at("apart", 6))


def test_resuming_an_earlier_checkpoint_repeats_the_later_one(layer: Layer) -> None:
    run(layer)
    before = snapshot_at("run", 6)
    _, printed = run(layer, resume="run/checkpoints/step-000003")
    assert "note: checkpoints after step 3 were moved to " in printed
    assert_same_state(before, snapshot_at("run", 6))


@pytest.mark.parametrize(
    ("number", "word"), [(signal.SIGINT, "interrupted after step 2; "), (signal.SIGTERM, "terminated after step 2; ")]
)
def test_signal_saves_and_says_how_to_go_on(
    layer: Layer, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, word: str
) -> None:
    step = Loop.step

    def interrupted_step(loop: Loop) -> Any:
        if loop.step_index == 1:
            signal.raise_signal(number)
        return step(loop)

    monkeypatch.setattr(Loop, "step", interrupted_step)
    stopped_by, printed = run(layer)
    assert stopped_by == number
    last, hint = printed.splitlines()[-2:]
    assert last.startswith(f"{word}saved ")
    assert hint.startswith("continue with: pipeloom train --resume ")
    snapshot_at("run", 2)


def test_stop_after_leaves_the_schedule_alone(layer: Layer) -> None:
    run(layer, flags={"train": {"folder": "whole"}})
    _, printed = run(layer, stop_after=2)
    assert "continue with: pipeloom train --resume" in printed
    whole, part = (Path(f"{name}/metrics.jsonl").read_text().splitlines() for name in ("whole", "run"))
    rates = [[json.loads(line).get("learning_rate") for line in lines[:3]] for lines in (whole, part)]
    assert rates[0] == rates[1]


@pytest.mark.parametrize(
    ("stops", "note"),
    [
        ((None, None), "note: step 6 of 6 is reached, nothing is left to train; --train.steps N goes on to step N"),
        ((3, 2), "note: step 3 of 6 is reached, nothing is left to train before --stop_after 2"),
    ],
)
def test_resumed_run_with_nothing_left_says_so(layer: Layer, stops: tuple[int | None, int | None], note: str) -> None:
    _, first = run(layer, stop_after=stops[0])
    number, printed = run(layer, resume="", stop_after=stops[1])
    assert number == 0
    assert "note: " not in first
    assert note in printed.splitlines()


def test_checkpoints_can_be_switched_off(layer: Layer) -> None:
    _, printed = run(layer, flags={"checkpoint": {"enabled": False}})
    assert "nothing saved" in printed
    assert not Path("run/checkpoints").exists()


def test_half_precision_changes_the_bits_and_trains(layer: Layer) -> None:
    run(layer, flags={"train": {"folder": "full"}})
    run(layer, flags={"train": {"autocast": "bfloat16"}})
    full, half = snapshot_at("full", 6).model, snapshot_at("run", 6).model
    name = "1.up.weight"
    assert not torch.equal(full[name], half[name])
    assert torch.allclose(full[name], half[name], atol=0.02)


def test_pipeline_gets_its_part_of_the_configuration(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Pipeline] = []

    class Recorded(Pipeline):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr("pipeloom.train.job.Pipeline", Recorded)
    pipeline = {"num_stages": 3, "cuts": [1, 2], "num_microbatches": 3, "schedule": "gpipe", "recompute": True}
    run(layer, flags={"train": {"seed": 7}, "pipeline": pipeline}, stop_after=1)
    (pipe,) = made
    assert (pipe.seed, pipe.num_stages, pipe.num_microbatches) == (7, 3, 3)
    assert "R" in str([str(action) for action in pipe.schedule.program(0)])


def test_rank_threads_end_with_the_run(layer: Layer) -> None:
    before = set(threading.enumerate())
    run(layer, stop_after=1)
    started = set(threading.enumerate()) - before
    for thread in started:
        thread.join(timeout=10)
    assert [thread.name for thread in started if thread.is_alive()] == []


def test_threads_are_torchs(layer: Layer) -> None:
    before = torch.get_num_threads()
    try:
        run(layer, flags={"train": {"threads": 2}}, stop_after=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("flags", "error", "message"),
    [
        ({"data": {"paths": ["none.txt"]}}, DataError, r"cannot read the data path 'none\.txt'"),
        ({"pipeline": {"schedule": "1f1"}}, UnknownSchedule, r"'1f1'(?s:.*)did you mean '1f1b'"),
        ({"pipeline": {"num_stages": 50}}, SplitError, "50 stages were asked for, but the model has 5 layers"),
        ({"pipeline": {"num_stages": 3, "cuts": [3, 2]}}, SplitError, r"cuts=\[3, 2\] were given"),
        ({"model": {"factory": "nowhere:gpt"}}, ConfigError, "there is no module 'nowhere'"),
        ({"model": {"factory": "torch.nn:Identity"}}, SplitError, "forward was seen to call none of its modules"),
    ],
)
def test_bad_input_makes_no_folder(layer: Layer, flags: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run(layer, flags=flags)
    assert not Path("run").exists()


def test_loss_that_explodes_names_the_step_and_keeps_the_checkpoint(
    layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Loop.step

    def poisoned_step(loop: Loop) -> Any:
        if loop.step_index == 4:
            next(iter(loop.pipe.parameters())).data.fill_(float("nan"))
        return step(loop)

    monkeypatch.setattr(Loop, "step", poisoned_step)
    with pytest.raises(NonFiniteLoss, match="step 4: the loss of micro-batch 0 is nan"):
        run(layer)
    snapshot_at("run", 3)
