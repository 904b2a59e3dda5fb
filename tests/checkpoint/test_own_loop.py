"""A loop of one's own goes on as if it had not stopped, on whatever cut it is loaded."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from pipeloom import Pipeline
from pipeloom.checkpoint import CheckpointStore, Saver, load_checkpoint, load_snapshot, save_checkpoint
from pipeloom.errors import CheckpointError, PipeloomWarning
from tests.archive.samples import RankThread, flip_bit, run_ranks

MakeRun = Callable[..., "Run"]


def milestones(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.MultiStepLR(optimizer, [2, 3, 5], gamma=0.5)


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)


def cycle(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)


def warm_then_cosine(optimizer: torch.optim.Optimizer) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, 8)]
    return lr_scheduler.SequentialLR(optimizer, parts, [2])


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.05, betas=(0.8, 0.9))


def momentum(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)


class Run:
    """A model with dropout and running statistics, two groups of parameters, and data in order."""

    def __init__(self, seed: int, num_stages: int, schedule: str, make: Any, schedule_rates: Any) -> None:
        torch.manual_seed(seed)
        layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 2)]
        self.pipe = Pipeline(
            nn.Sequential(*layers),
            num_stages=num_stages,
            schedule=schedule,
            num_microbatches=2,
            loss_fn=nn.functional.mse_loss,
            seed=seed,
        )
        parameters = list(self.pipe.parameters())
        self.optimizer = make(
            [
                {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
            ]
        )
        self.scheduler = schedule_rates(self.optimizer)
        self.position = 0

    def step(self) -> float:
        inputs = torch.linspace(-1, 1, 24).reshape(6, 4) * (1 + self.position)
        self.position += 1
        loss = self.pipe.step(inputs, target=inputs[:, :2])
        self.optimizer.step()
        self.optimizer.zero_grad()
        is_plateau = isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau)
        self.scheduler.step(*([1.0] if is_plateau else []))
        return float(loss)

    def save(self, place: Any) -> Path:
        state = {"scheduler": self.scheduler, "extra": {"position": self.position}}
        return save_checkpoint(place, self.pipe, self.optimizer, **state)

    def load(self, place: Any) -> None:
        extra = load_checkpoint(place, self.pipe, self.optimizer, scheduler=self.scheduler)
        self.position = extra["position"]

    def state(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.pipe.state_dict().items()}


@pytest.fixture
def make_run() -> Iterator[MakeRun]:
    made: list[Run] = []

    def make(
        seed: int = 0, num_stages: int = 2, schedule: str = "1f1b", optimizer: Any = adamw, rates: Any = milestones
    ) -> Run:
        made.append(Run(seed, num_stages, schedule, optimizer, rates))
        return made[-1]

    yield make
    for run in made:
        run.pipe.close()


def assert_they_go_on_equal(straight: Run, resumed: Run, num_steps: int = 4) -> None:
    for _ in range(num_steps):
        assert straight.step() == resumed.step()
    ours, theirs = straight.state(), resumed.state()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("optimizer", [adamw, momentum])
@pytest.mark.parametrize("rates", [milestones, plateau, cycle, warm_then_cosine])
def test_loaded_run_is_the_same_run(make_run: MakeRun, tmp_path: Path, optimizer: Any, rates: Any) -> None:
    straight = make_run(optimizer=optimizer, rates=rates)
    for _ in range(3):
        straight.step()
    resumed = make_run(1, optimizer=optimizer, rates=rates)
    resumed.load(straight.save(tmp_path / "a"))
    assert_they_go_on_equal(straight, resumed)


@pytest.mark.parametrize(("num_stages", "schedule"), [(1, "gpipe"), (3, "1f1b"), (4, "gpipe")])
def test_cut_may_be_another(make_run: MakeRun, tmp_path: Path, num_stages: int, schedule: str) -> None:
    straight = make_run()
    straight.step()
    resumed = make_run(1, num_stages, schedule)
    resumed.load(straight.save(tmp_path / "a"))
    assert_they_go_on_equal(straight, resumed)


def test_hyperparameters_come_back_and_how_to_compute_does_not(make_run: MakeRun, tmp_path: Path) -> None:
    saved, loaded = make_run(), make_run(1)
    saved.optimizer.param_groups[0].update(lr=0.5, fused=True)
    for group in loaded.optimizer.param_groups:
        group.update(lr=9.0, betas=(0.1, 0.1), weight_decay=9.0, foreach=True)
    loaded.load(saved.save(tmp_path / "a"))
    first, second = loaded.optimizer.param_groups
    assert (first["lr"], first["betas"], first["weight_decay"]) == (0.5, (0.8, 0.9), 0.1)
    assert (first["foreach"], first["fused"]) == (True, None)
    assert (second["lr"], second["weight_decay"]) == (0.05, 0.0)


def test_groups_that_were_made_otherwise_are_refused(make_run: MakeRun, tmp_path: Path) -> None:
    saved, other = make_run(), make_run()
    other.optimizer = adamw(other.pipe.parameters())
    before = other.optimizer.param_groups[0]["lr"] = 7.0
    with pytest.raises(CheckpointError, match=r"'0.weight' and '0.bias' are in one group .* weight_decay 0.1 and 0.0"):
        load_checkpoint(saved.save(tmp_path / "a"), other.pipe, other.optimizer)
    assert other.optimizer.param_groups[0]["lr"] == before


def test_store_gets_the_newest_good_one(make_run: MakeRun, tmp_path: Path) -> None:
    store, run, states = CheckpointStore(tmp_path / "store", num_kept=2), make_run(), []
    for _ in range(3):
        run.step()
        run.save(store)
        states.append(run.state())
    assert store.steps() == [2, 3]
    flip_bit(store.path_of(3) / "stage-000.safetensors", -1)
    other = make_run(1)
    with (
        pytest.warns(PipeloomWarning, match=r"passed over a damaged checkpoint: .*step-000003/stage-000\.safetensors"),
        pytest.warns(PipeloomWarning, match=r"checkpoints after step 2 were moved to .*set-aside-1"),
    ):
        other.load(store)
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in other.state().items())


def test_saver_writes_in_the_background(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    with Saver(CheckpointStore(tmp_path / "store")) as saver:
        for _ in range(2):
            run.step()
            assert run.save(saver) == saver.store.path_of(run.pipe.step_index)
    other = make_run(1)
    other.load(saver)
    assert_they_go_on_equal(run, other, 1)


def test_gradient_scaler_comes_back(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    scaler.scale(torch.ones(()))
    place = save_checkpoint(tmp_path / "a", run.pipe, scaler=scaler)
    other = torch.amp.GradScaler("cpu")
    load_checkpoint(place, run.pipe, scaler=other)
    assert other.state_dict() == scaler.state_dict()
    assert other.get_scale() == 128.0


def test_random_draws_go_on_where_they_were(make_run: MakeRun, tmp_path: Path) -> None:
    saved, loaded = make_run(5), make_run(6)
    saved.step()
    load_checkpoint(save_checkpoint(tmp_path / "a", saved.pipe), loaded.pipe)
    assert (loaded.pipe.seed, loaded.pipe.step_index) == (5, 1)


def test_extra_comes_back_with_its_types(make_run: MakeRun, tmp_path: Path) -> None:
    extra = {"order": (3, 1, 2), "best": math.inf, "epoch_of": {7: 2}, "name": None}
    pipe = make_run().pipe
    assert load_checkpoint(save_checkpoint(tmp_path / "a", pipe, extra=extra), pipe) == extra
    assert load_checkpoint(save_checkpoint(str(tmp_path / "b"), pipe), pipe) is None


@pytest.mark.parametrize(
    ("saved", "asked", "message"),
    [
        ({}, {"optimizer"}, "a was saved without the state of the optimizer"),
        ({"optimizer"}, {"scheduler"}, "a was saved without the state of the scheduler"),
        ({"optimizer"}, {"other optimizer"}, "has the state of AdamW, but the optimizer is SGD"),
    ],
)
def test_what_was_not_saved_is_not_made_up(
    make_run: MakeRun, tmp_path: Path, saved: set[str], asked: set[str], message: str
) -> None:
    def some(run: Run, names: set[str]) -> dict[str, Any]:
        every = {"optimizer": run.optimizer, "scheduler": run.scheduler}
        every["other optimizer"] = torch.optim.SGD(run.pipe.parameters(), lr=0.1)
        return {name.split()[-1]: each for name, each in every.items() if name in names}

    run, other = make_run(), make_run(1)
    place, before = save_checkpoint(tmp_path / "a", run.pipe, **some(run, saved)), other.state()
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(place, other.pipe, **some(other, asked))
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state().items())


def test_scheduler_that_holds_a_function_is_refused_by_name(make_run: MakeRun, tmp_path: Path) -> None:
    class Scheduler:
        def state_dict(self) -> dict[str, Any]:
            return {"last_epoch": 3, "rate": lambda step: step}

    with pytest.raises(CheckpointError, match=r"'scheduler' of the training state\['rate'\] is of type function"):
        save_checkpoint(tmp_path / "a", make_run().pipe, scheduler=Scheduler())
    assert list(tmp_path.iterdir()) == []


def test_optimizer_of_foreign_parameters_is_refused(make_run: MakeRun, tmp_path: Path) -> None:
    foreign = nn.Parameter(torch.ones(3, 5))
    optimizer = adamw([foreign])
    foreign.sum().backward()
    optimizer.step()
    with pytest.raises(CheckpointError, match=r"state of a parameter of shape \(3, 5\) that is not the model's"):
        save_checkpoint(tmp_path / "a", make_run().pipe, optimizer)


def test_checkpoint_of_another_model_changes_nothing(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    with Pipeline(nn.Sequential(nn.Linear(4, 9)), num_stages=1) as other:
        before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
        with pytest.raises(
            CheckpointError, match=r"a is a checkpoint of another model:\n  only in the checkpoint: 1\."
        ):
            load_checkpoint(run.save(tmp_path / "a"), other)
        assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


def test_damaged_checkpoint_is_refused_by_the_files_name(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    place = run.save(tmp_path / "a")
    flip_bit(place / "stage-000.optimizer.safetensors", -1)
    with pytest.raises(CheckpointError, match=r"stage-000\.optimizer\.safetensors is damaged"):
        run.load(place)


class PartOfPipe:
    """One rank's part of a pipeline: half of the parameters."""

    def __init__(self, whole: dict[str, nn.Parameter], group: RankThread) -> None:
        names = sorted(whole)[group.rank :: group.num_ranks]
        self.own = {name: nn.Parameter(whole[name].detach().clone()) for name in names}
        self.seed, self.step_index, self.group = 3, 7, group
        stages = {group.rank: names}
        self.layout = {
            "num_stages": group.num_ranks,
            "num_ranks": group.num_ranks,
            "schedule": "1f1b",
            "stages": stages,
        }

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self.own.items())

    def state_dict(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.own.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        assert state.keys() == self.own.keys()
        for name, tensor in state.items():
            self.own[name].data.copy_(tensor)


@pytest.mark.parametrize(("num_writers", "num_readers"), [(2, 2), (2, 1), (1, 3), (3, 2)])
def test_ranks_save_and_other_ranks_load(tmp_path: Path, num_writers: int, num_readers: int) -> None:
    whole = {f"{number}.weight": nn.Parameter(torch.randn(3, 2)) for number in range(5)}

    def write(group: RankThread) -> None:
        pipe = PartOfPipe(whole, group)
        optimizer = adamw(pipe.own.values())
        sum(parameter.sum() for parameter in pipe.own.values()).backward()
        optimizer.step()
        save_checkpoint(tmp_path / "a", pipe, optimizer, extra=group.rank)

    def read(group: RankThread) -> Any:
        pipe = PartOfPipe({name: nn.Parameter(torch.zeros(3, 2)) for name in whole}, group)
        optimizer = adamw(pipe.own.values())
        extra = load_checkpoint(tmp_path / "a", pipe, optimizer)
        averages = {name: optimizer.state[parameter]["exp_avg"] for name, parameter in pipe.own.items()}
        return extra, pipe.step_index, pipe.state_dict(), averages

    assert run_ranks(num_writers, write) == [None] * num_writers
    saved, got = load_snapshot(tmp_path / "a"), run_ranks(num_readers, read)
    assert [(extra, step_index) for extra, step_index, *_ in got] == [(0, 7)] * num_readers
    model = {name: tensor for _, _, state, _ in got for name, tensor in state.items()}
    averages = {name: tensor for *_, state in got for name, tensor in state.items()}
    assert all(torch.equal(model[name], saved.model[name]) for name in whole)
    assert all(torch.equal(averages[name], saved.optimizer[name]["exp_avg"]) for name in whole)


def test_all_ranks_refuse_a_model_that_one_of_them_lacks(tmp_path: Path) -> None:
    whole = {f"{number}.weight": nn.Parameter(torch.zeros(2)) for number in range(4)}
    run_ranks(2, lambda group: save_checkpoint(tmp_path / "a", PartOfPipe(whole, group)) and None)

    def read(group: RankThread) -> Any:
        other = whole | {"9.weight": nn.Parameter(torch.zeros(2)), "3.weight": nn.Parameter(torch.zeros(5))}
        return load_checkpoint(tmp_path / "a", PartOfPipe(other, group))

    outcomes = run_ranks(2, read)
    assert [type(outcome) for outcome in outcomes] == [CheckpointError] * 2
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert "only in the model: 9.weight\n  of another form: 3.weight float32[2] in the" in str(outcomes[0])
