"""Any split of names over stages and ranks is written as files, and loads back as one."""

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipeloom.archive.verify import verify_folder
from pipeloom.checkpoint import Layout, Snapshot, load_snapshot, save_snapshot
from pipeloom.checkpoint.parts import Copies, parts_of
from tests.archive.samples import RankThread, run_ranks

NAMES = [f"{number}.weight" for number in range(6)]


def whole() -> Snapshot:
    torch.manual_seed(0)
    model = {name: torch.randn(3, index + 1) for index, name in enumerate(NAMES)}
    state = {name: {"step": torch.tensor(4.0), "exp_avg": tensor * 2, "calls": 4} for name, tensor in model.items()}
    groups = [{"names": NAMES[:4], "options": {"lr": 0.1}}, {"names": NAMES[4:], "options": {"lr": 0.2}}]
    return Snapshot(4, model, state, {"position": 9}, groups)


def share(snapshot: Snapshot, stages: dict[int, list[str]], num_ranks: int) -> Snapshot:
    """What a rank that holds these stages has."""
    mine = [name for names in stages.values() for name in names]
    groups = [{**group, "names": [n for n in group["names"] if n in mine]} for group in snapshot.groups]
    return Snapshot(
        snapshot.step_index,
        {name: snapshot.model[name] for name in mine},
        {name: snapshot.optimizer[name] for name in mine},
        snapshot.training,
        groups,
        Layout(4, num_ranks, "1f1b", stages),
    )


def assert_same(loaded: Snapshot, made: Snapshot) -> None:
    assert loaded.model.keys() == made.model.keys()
    assert all(torch.equal(loaded.model[name], made.model[name]) for name in made.model)
    assert loaded.optimizer.keys() == made.optimizer.keys()
    pairs = [(loaded.optimizer[n][slot], value) for n, slots in made.optimizer.items() for slot, value in slots.items()]
    assert all(torch.equal(torch.as_tensor(one), torch.as_tensor(other)) for one, other in pairs)


@settings(max_examples=25)
@given(st.lists(st.integers(0, 3), min_size=6, max_size=6), st.integers(1, 4), st.sets(st.sampled_from(NAMES)))
def test_any_split_loads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, stage_of: list[int], num_ranks: int, asked: set[str]
) -> None:
    folder, made = tmp_path_factory.mktemp("split") / "step-000004", whole()
    stages = {stage: [n for n, s in zip(NAMES, stage_of, strict=True) if s == stage] for stage in range(4)}

    def save(group: RankThread) -> Path:
        mine = {stage: names for stage, names in stages.items() if stage % num_ranks == group.rank}
        return save_snapshot(folder, share(made, mine, num_ranks), group)

    assert run_ranks(num_ranks, save) == [folder] * num_ranks
    assert_same(load_snapshot(folder), made)
    assert_same(load_snapshot(folder, asked), share(made, {0: sorted(asked)}, 1))
    options = {name: group["options"]["lr"] for group in load_snapshot(folder).groups for name in group["names"]}
    assert options == {name: 0.1 if name in NAMES[:4] else 0.2 for name in NAMES}


def test_each_stage_has_its_files(tmp_path: Path) -> None:
    stages = {0: NAMES[:2], 2: NAMES[2:]}
    contents = verify_folder(save_snapshot(tmp_path / "a", share(whole(), stages, 1))).contents
    assert contents.stages == {"0": NAMES[:2], "2": NAMES[2:]}
    assert {contents.model[name].file for name in NAMES[:2]} == {"stage-000.safetensors"}
    assert {contents.optimizer[f"exp_avg.{name}"].file for name in NAMES[2:]} == {"stage-002.optimizer.safetensors"}


def test_names_that_no_stage_has_go_to_the_first(tmp_path: Path) -> None:
    made = Snapshot(1, {"loss.scale": torch.ones(1)}, {}, {}, layout=Layout(4, 2, "1f1b", {3: ["9.weight"], 2: []}))
    parts = parts_of(made)
    assert [sorted(parts), parts[2].names, parts[3].names] == [[2, 3], ["loss.scale"], []]


def test_rank_without_a_stage_has_no_part() -> None:
    assert parts_of(Snapshot(1, {}, {}, {}, layout=Layout(4, 2, "1f1b", {}))) == {}


def test_tied_weight_is_written_once_and_comes_back_as_one(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.randn(64, 64))
    model = {"0.weight": weight, "5.weight": weight}
    layout = Layout(2, 1, "1f1b", {0: ["0.weight"], 1: ["5.weight"]})
    loaded = load_snapshot(save_snapshot(tmp_path / "a", Snapshot(1, model, {}, {}, (), layout)))
    assert loaded.model["5.weight"] is loaded.model["0.weight"]
    assert (tmp_path / "a" / "stage-001.safetensors").stat().st_size < 200
    assert load_snapshot(tmp_path / "a", ["5.weight"]).model.keys() == {"5.weight"}


def test_copies_do_not_follow_what_training_changes() -> None:
    made = whole()
    before = copy.deepcopy(made)
    copies = Copies().of(parts_of(made))
    for tensor in made.model.values():
        tensor.zero_()
    tensors = copies[0].tensors[".safetensors"]
    assert all(torch.equal(tensors[name], before.model[name]) for name in NAMES)


def test_memory_of_copies_is_used_again() -> None:
    copies, made = Copies(), whole()
    places = [
        {name: tensor.data_ptr() for name, tensor in copies.of(parts_of(made))[0].tensors[".safetensors"].items()}
        for _ in range(2)
    ]
    assert places[0] == places[1]
    made.model["0.weight"] = torch.ones(9)
    again = copies.of(parts_of(made))[0].tensors[".safetensors"]
    assert again["0.weight"].tolist() == [1] * 9
    assert again["1.weight"].data_ptr() == places[0]["1.weight"]


def test_memory_may_be_reserved_before() -> None:
    copies, parts = Copies(), parts_of(whole())
    copies.reserve(parts)
    places = {key: tensor.data_ptr() for key, tensor in copies._memory.items()}
    copied = copies.of(parts)[0].tensors[".safetensors"]
    assert {name: tensor.data_ptr() for name, tensor in copied.items()} == {
        name: places[".safetensors", name] for name in NAMES
    }
    assert all(torch.equal(copied[name], tensor) for name, tensor in whole().model.items())
