"""The loop: the rate, the optimizer, and a resumed run that is the same run."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from pipeloom import Pipeline
from pipeloom.checkpoint import CheckpointStore, load_checkpoint, load_snapshot, save_snapshot
from pipeloom.errors import CheckpointError, PipeloomWarning
from pipeloom.testing import sequential_step
from pipeloom.train.batches import Batches, held_out_windows
from pipeloom.train.config import OptimizerConfig, TrainingConfig
from pipeloom.train.corpus import load_corpus
from pipeloom.train.factory import build_model
from pipeloom.train.held_out import HeldOut, next_byte_loss
from pipeloom.train.loop import Loop, learning_rate_at, make_optimizer
from pipeloom.train.metrics import HeldOutRecord, Record, StepRecord

MakeLoop = Callable[..., Loop]


@pytest.fixture
def make_loop(config: TrainingConfig, tmp_path: Path) -> Iterator[MakeLoop]:
    """Build loops over the small text, with dropout on."""
    corpus = load_corpus(config.data.paths, config.data.held_out_fraction, 16)
    windows = held_out_windows(corpus.held_out, 8, 16)
    with contextlib.ExitStack() as stack:

        def make(
            schedule: str = "1f1b", num_stages: int = 2, width: int = 16, records: list[Record] | None = None
        ) -> Loop:
            model = build_model(config.model.model_copy(update={"dropout": 0.3, "width": width}), seed=0)
            pipe = Pipeline(
                model, num_stages=num_stages, schedule=schedule, num_microbatches=4, loss_fn=next_byte_loss, seed=5
            )
            return Loop(
                config=config,
                pipe=stack.enter_context(pipe),
                optimizer=make_optimizer(pipe, config.optimizer),
                batches=Batches(corpus.training, batch_size=4, sequence_length=16, seed=3),
                fingerprint=corpus.fingerprint,
                held_out=HeldOut(windows, 3.0, contextlib.nullcontext),
                precision=contextlib.nullcontext,
                sink=([] if records is None else records).append,
                store=CheckpointStore(tmp_path / "checkpoints"),
            )

        yield make


def state_of(loop: Loop) -> dict[str, torch.Tensor]:
    """Everything that a step changes, cloned."""
    snapshot = loop.snapshot()
    slots = {f"{n}/{slot}": t for n, state in snapshot.optimizer.items() for slot, t in state.items()}
    return {name: tensor.clone() for name, tensor in (snapshot.model | slots).items()}


def assert_equal_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def take_steps(loop: Loop, num_steps: int) -> list[StepRecord]:
    return [loop.step() for _ in range(num_steps)]


@pytest.mark.parametrize(
    ("step_index", "rate"),
    [(0, 0.25), (1, 0.5), (3, 1.0), (4, 1.0), (9, 0.55), (14, 0.1), (20, 0.1)],
)
def test_rate_warms_up_and_falls_as_a_cosine(step_index: int, rate: float) -> None:
    config = OptimizerConfig(learning_rate=1.0, final_fraction=0.1, warmup_steps=4)
    assert learning_rate_at(step_index, 15, config) == pytest.approx(rate)


@pytest.mark.parametrize(("num_steps", "warmup_steps"), [(1, 0), (1, 1), (1, 5), (2, 1), (5, 9)])
def test_rate_is_positive_in_short_runs(num_steps: int, warmup_steps: int) -> None:
    config = OptimizerConfig(warmup_steps=warmup_steps)
    rates = [learning_rate_at(step_index, num_steps, config) for step_index in range(num_steps)]
    assert all(0 < rate <= config.learning_rate for rate in rates)


def test_only_matrices_decay(make_loop: MakeLoop) -> None:
    loop = make_loop()
    decayed, free = loop.optimizer.param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in free["params"]} == {1}
    assert len(decayed["params"]) + len(free["params"]) == len(list(loop.pipe.parameters()))


def test_frozen_parameters_are_not_optimized(make_loop: MakeLoop) -> None:
    loop = make_loop()
    frozen = next(iter(loop.pipe.parameters())).requires_grad_(False)
    groups = make_optimizer(loop.pipe, loop.config.optimizer).param_groups
    assert all(frozen is not parameter for group in groups for parameter in group["params"])


def test_steps_are_the_oracles_to_the_bit(make_loop: MakeLoop, config: TrainingConfig) -> None:
    loop = make_loop()
    model = build_model(config.model.model_copy(update={"dropout": 0.3}), seed=0)
    holder = Pipeline(model, num_stages=1)
    optimizer = make_optimizer(holder, config.optimizer)
    batches = make_loop().batches
    for step_index in range(3):
        inputs, targets = next(batches)
        key = {"seed": 5, "step_index": step_index, "num_microbatches": 4}
        loss = sequential_step(model, inputs, target=targets, loss_fn=next_byte_loss, **key)
        nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step_index, config.train.steps, config.optimizer)
        optimizer.step()
        optimizer.zero_grad()
        assert loop.step().loss == float(loss)
    assert_equal_bits(dict(model.state_dict()), dict(loop.pipe.state_dict()))


@pytest.mark.parametrize("num_before", [1, 3, 5])
def test_resumed_run_is_the_same_run(make_loop: MakeLoop, tmp_path: Path, num_before: int) -> None:
    straight, first, resumed = make_loop(), make_loop(), make_loop()
    losses = [record.loss for record in take_steps(straight, 6)]
    take_steps(first, num_before)
    save_snapshot(tmp_path / "saved", first.snapshot())
    resumed.restore(load_snapshot(tmp_path / "saved"))
    again = [record.loss for record in take_steps(resumed, 6 - num_before)]
    assert again == losses[num_before:]
    assert_equal_bits(state_of(straight), state_of(resumed))
    assert resumed.batches.position == straight.batches.position == 24


@pytest.mark.parametrize(("schedule", "num_stages"), [("gpipe", 2), ("1f1b", 3), ("1f1b", 1)])
def test_resumed_run_may_be_cut_otherwise(make_loop: MakeLoop, tmp_path: Path, schedule: str, num_stages: int) -> None:
    straight, resumed = make_loop(), make_loop(schedule, num_stages)
    take_steps(straight, 2)
    save_snapshot(tmp_path / "step-000002", straight.snapshot())
    resumed.restore(load_snapshot(tmp_path / "step-000002"))
    take_steps(straight, 2)
    take_steps(resumed, 2)
    assert_equal_bits(state_of(straight), state_of(resumed))


def test_without_the_step_the_run_would_differ(make_loop: MakeLoop) -> None:
    straight, resumed = make_loop(), make_loop()
    take_steps(straight, 2)
    resumed.restore(straight.snapshot())
    resumed.pipe.step_index = 0
    assert straight.step().loss != resumed.step().loss


def test_checkpoint_of_another_model_is_refused_and_changes_nothing(make_loop: MakeLoop) -> None:
    small, large = make_loop(width=16), make_loop(width=32)
    before = state_of(large)
    with pytest.raises(CheckpointError, match=r"step 0 is a checkpoint of another model(?s:.*)0\.tables\.0\.weight"):
        large.restore(small.snapshot())
    assert_equal_bits(before, state_of(large))


def test_checkpoint_of_another_text_is_refused(make_loop: MakeLoop) -> None:
    loop = make_loop()
    snapshot = replace(loop.snapshot(), training=loop.snapshot().training | {"fingerprint": "another"})
    with pytest.raises(CheckpointError, match="step 0 was trained on another text"):
        loop.restore(snapshot)


def test_run_reports_saves_and_evaluates_when_due(make_loop: MakeLoop) -> None:
    records: list[Record] = []
    loop = make_loop(records=records)
    loop.run(5)
    assert [r.step for r in records if isinstance(r, StepRecord)] == [1, 2, 3, 4, 5]
    assert [r.step for r in records if isinstance(r, HeldOutRecord)] == [0, 3, 5]
    assert loop.store is not None
    assert loop.store.steps() == [3, 5]


@pytest.mark.parametrize(("num_before", "scored"), [(2, [3, 5]), (3, [3, 5])])
def test_run_that_is_started_again_is_scored_when_due(make_loop: MakeLoop, num_before: int, scored: list[int]) -> None:
    records: list[Record] = []
    loop = make_loop(records=records)
    take_steps(loop, num_before)
    loop.is_under_way = True
    loop.run(5)
    assert [r.step for r in records if isinstance(r, HeldOutRecord)] == scored


def test_nothing_is_done_twice_at_the_end(make_loop: MakeLoop) -> None:
    records: list[Record] = []
    loop = make_loop(records=records)
    loop.run(3)
    loop.run(3)
    assert [r.step for r in records if isinstance(r, HeldOutRecord)] == [0, 3]
    assert loop.saved_step == 3


def test_signal_saves_and_stops_after_the_step(make_loop: MakeLoop) -> None:
    loop = make_loop()
    loop.sink = lambda record: loop.stop.note(signal.SIGTERM) if record.step == 2 else None
    loop.run(6)
    assert loop.step_index == loop.saved_step == 2
    assert loop.evaluation is not None
    assert loop.evaluation.step == 0


def test_signal_before_the_first_step_does_nothing(make_loop: MakeLoop) -> None:
    records: list[Record] = []
    loop = make_loop(records=records)
    loop.stop.note(signal.SIGINT)
    loop.run(6)
    assert records == []
    assert loop.store is not None
    assert loop.store.steps() == []


def full_disk(path: Path, pieces: object) -> str:
    raise OSError(28, "No space left on device")


def test_failed_save_is_counted_and_training_goes_on(make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The full disk has room again before the last save, which is then as any other."""
    records: list[Record] = []
    loop = make_loop(records=records)

    def step(record: Record) -> None:
        records.append(record)
        if record.step == 4 and isinstance(record, StepRecord):
            loop.saver._settle()
            patch.undo()

    loop.sink = step
    with monkeypatch.context() as patch:
        patch.setattr("pipeloom.archive.shard.write_new", full_disk)
        with pytest.warns(PipeloomWarning, match=r"step-000003: .*No space left"):
            loop.run(5)
    assert loop.store is not None
    assert (loop.store.steps(), loop.saved_step) == ([5], 5)
    assert [r.failed_saves for r in records if isinstance(r, StepRecord)][-1] == 1


def test_last_save_that_fails_is_an_error(make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make_loop()
    monkeypatch.setattr("pipeloom.archive.shard.write_new", full_disk)
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*step-000002: .*No space left"):
        loop.run(2)
    assert loop.store is not None
    assert loop.store.steps() == []


def test_saved_state_is_that_of_its_step(make_loop: MakeLoop) -> None:
    """Training goes on while it is written."""
    straight, loop = make_loop(), make_loop()
    take_steps(straight, 3)
    loop.run(5)
    assert loop.store is not None
    saved = load_snapshot(loop.store.path_of(3))
    slots = {f"{n}/{slot}": t for n, state in saved.optimizer.items() for slot, t in state.items()}
    assert_equal_bits(state_of(straight), saved.model | slots)


def test_checkpoint_of_ones_own_loop_goes_on_in_it(make_loop: MakeLoop, tmp_path: Path) -> None:
    loop, other = make_loop(), make_loop("gpipe", 3)
    take_steps(loop, 2)
    save_snapshot(tmp_path / "a", loop.snapshot())
    load_checkpoint(tmp_path / "a", other.pipe)
    assert_equal_bits(dict(loop.pipe.state_dict()), dict(other.pipe.state_dict()))
    assert other.pipe.step_index == 2


def test_no_store_saves_nothing(make_loop: MakeLoop, tmp_path: Path) -> None:
    loop = make_loop()
    loop.store = None
    loop.run(4)
    assert loop.saved_step == 0
    assert not (tmp_path / "checkpoints").exists()


def test_figures_of_a_step(make_loop: MakeLoop) -> None:
    first, second = take_steps(make_loop(), 2)
    assert (first.step, second.step, first.learning_rate, second.learning_rate) == (1, 2, 1e-3, 2e-3)
    assert second.tokens_per_s == pytest.approx(2 * 64 / (first.step_s + second.step_s))
    assert second.remaining_s == pytest.approx(4 * (first.step_s + second.step_s) / 2)
    assert 0 <= second.bubble_fraction < 1


def test_gradients_are_clipped_and_their_norm_is_reported_before(make_loop: MakeLoop, config: TrainingConfig) -> None:
    loop = make_loop()
    tight = config.optimizer.model_copy(update={"clip_norm": 1e-3})
    loop.config = config.model_copy(update={"optimizer": tight})
    seen: list[float] = []
    loop.optimizer.register_step_pre_hook(
        lambda *_: seen.append(float(nn.utils.get_total_norm([p.grad for p in loop.pipe.parameters()])))
    )
    assert loop.step().grad_norm > 0.1
    assert seen == [pytest.approx(1e-3, rel=1e-2)]
