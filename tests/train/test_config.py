"""Layers make one configuration; whatever is wrong in one is named with the layer."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.errors import ConfigError
from pipeloom.train.config import Layer, TrainingConfig, read_config_file, resolve, sections, to_toml, with_processes

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))


def test_nothing_given_is_the_defaults() -> None:
    assert resolve([]) == TrainingConfig()


def test_later_layers_win_key_by_key() -> None:
    file = Layer("run.toml", {"train": {"steps": 10, "seed": 3}})
    flags = Layer("command line", {"train": {"steps": "20"}})
    train = resolve([file, flags]).train
    assert (train.steps, train.seed, train.batch_size) == (20, 3, TrainingConfig().train.batch_size)


def test_text_from_flags_becomes_values() -> None:
    values = {
        "train": {"steps": "7"},
        "optimizer": {"learning_rate": "3e-4"},
        "pipeline": {"num_stages": "3", "cuts": ["2", "5"], "recompute": "true"},
        "data": {"paths": ["a.txt", "b"]},
    }
    config = resolve([Layer("command line", values)])
    assert (config.train.steps, config.optimizer.learning_rate) == (7, 3e-4)
    assert (config.pipeline.cuts, config.pipeline.recompute, config.data.paths) == ((2, 5), True, ("a.txt", "b"))


@pytest.mark.parametrize(
    ("values", "message", "hint"),
    [
        ({"train": {"stps": 3}}, "f.toml: there is no key 'train.stps'", "did you mean 'train.steps'"),
        ({"trian": {"steps": 3}}, "f.toml: there is no section 'trian'", "did you mean 'train'"),
        ({"steps": 3}, "f.toml: there is no section 'steps'", "lists every key"),
        ({"train": 3}, "f.toml: 'train' is a section, but was given 3", r"write \[train\]"),
        ({"train": {"steps": "abc"}}, "f.toml: train.steps was given 'abc', but it should be a valid integer", "help"),
        ({"train": {"steps": 1.5}}, "f.toml: train.steps was given 1.5", "help"),
        ({"train": {"steps": 0}}, "train.steps was given 0, but it should be greater than or equal to 1", "help"),
        ({"train": {"autocast": "half"}}, "train.autocast was given 'half', but it should be 'off' or 'bf", "help"),
        ({"model": {"dropout": 1.0}}, "model.dropout was given 1.0, but it should be less than 1", "help"),
        ({"optimizer": {"learning_rate": float("nan")}}, "optimizer.learning_rate was given nan", "help"),
        ({"pipeline": {"cuts": [1, "x"]}}, "pipeline.cuts was given 'x', but it should be a valid integer", "help"),
        ({"data": {"paths": "a.txt"}}, "data.paths was given 'a.txt', but it should be a valid tuple", "help"),
        ({"pipeline": {"num_microbatches": 99}}, "batch_size is 8, fewer than the 99 micro-batches", "raise --train"),
        ({"pipeline": {"cuts": [1, 2]}}, r"cuts \[1, 2\] make 3 stages, pipeline.num_stages is 2", "num_stages 3"),
    ],
)
def test_wrong_value_is_named(values: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve([Layer("f.toml", values)])
    caught.match(f"(?s)hint: .*{hint}")


def test_message_names_the_layer_to_blame() -> None:
    file, flags = Layer("run.toml", {"train": {"seed": 1}}), Layer("command line", {"train": {"steps": "x"}})
    with pytest.raises(ConfigError, match=r"^command line: train\.steps"):
        resolve([file, flags])
    with pytest.raises(ConfigError, match=r"^run\.toml: train\.steps"):
        resolve([Layer("run.toml", flags.values), Layer("command line", file.values)])
    with pytest.raises(ConfigError, match=r"^command line: train\.steps was given 'y'"):
        resolve([Layer("run.toml", flags.values), Layer("command line", {"train": {"steps": "y"}})])


@pytest.mark.parametrize("section", TrainingConfig.model_fields)
def test_no_section_takes_an_unknown_key(section: str) -> None:
    with pytest.raises(ConfigError, match=rf"there is no key '{section}\.unknown'"):
        resolve([Layer("f.toml", {section: {"unknown": 1}})])


def test_every_key_says_what_it_is_for() -> None:
    fields = [(section, key, field) for section, _, keys in sections() for key, field in keys.items()]
    assert len(fields) > 20
    assert [f"{section}.{key}" for section, key, field in fields if not field.description] == []


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(
    folder=TEXT,
    paths=st.lists(TEXT, max_size=3),
    rate=st.floats(min_value=1e-300, max_value=1e300),
    seed=st.integers(0, 2**63 - 1),
    recompute=st.booleans(),
)
def test_resolved_configuration_feeds_back(
    folder: str, paths: list[str], rate: float, seed: int, recompute: bool
) -> None:
    values = {
        "train": {"folder": folder, "seed": seed},
        "data": {"paths": paths},
        "optimizer": {"learning_rate": rate},
        "pipeline": {"recompute": recompute},
    }
    config = resolve([Layer("flags", values)])
    assert resolve([Layer("config.toml", tomllib.loads(to_toml(config)))]) == config


def test_toml_has_a_line_for_each_section() -> None:
    lines = to_toml(TrainingConfig()).splitlines()
    assert [line.split(" = ")[0] for line in lines] == list(TrainingConfig.model_fields)
    assert lines[4] == (
        'pipeline = { num_stages = 2, schedule = "1f1b", num_microbatches = 4, recompute = false, cuts = [] }'
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[train]\nsteps = x\n", r"bad\.toml is not TOML: Invalid value \(at line 2, column 9\)"),
        (b"\xff\xfe", r"bad\.toml is not TOML: 'utf-8' codec"),
    ],
)
def test_other_file_is_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_config_file(tmp_path / "bad.toml")


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*none\.toml: No such file"):
        read_config_file(tmp_path / "none.toml")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_shipped_configurations_resolve(path: Path) -> None:
    assert resolve([read_config_file(path)]) != TrainingConfig()


SAVED = Layer("the configuration of the checkpoint", {"pipeline": {"num_stages": 4}})


@pytest.mark.parametrize(("num_processes", "num_stages"), [(None, 2), (1, 1), (3, 3)])
def test_processes_are_the_default_number_of_stages(num_processes: int | None, num_stages: int) -> None:
    layers = with_processes([Layer("command line", {"train": {"steps": 3}})], num_processes)
    assert resolve(layers).pipeline.num_stages == num_stages
    assert resolve([SAVED, *layers]).pipeline.num_stages == (num_stages if num_processes else 4)


@pytest.mark.parametrize("given", [3, "3"])
def test_number_of_stages_may_be_said_twice(given: object) -> None:
    layers = [Layer("run.toml", {"pipeline": {"num_stages": 2}}), Layer("flags", {"pipeline": {"num_stages": given}})]
    assert resolve(with_processes(layers, 3)).pipeline.num_stages == 3


def test_other_number_of_stages_than_processes_is_refused() -> None:
    layers = [Layer("run.toml", {"pipeline": {"num_stages": 2}}), Layer("flags", {"train": {"seed": 1}})]
    with pytest.raises(
        ConfigError, match=r"^run\.toml: pipeline\.num_stages is 2, but there are 3 processes"
    ) as caught:
        with_processes(layers, 3)
    assert caught.value.hint is not None
    assert caught.value.hint.endswith("leave pipeline.num_stages out: it is then 3")


def test_one_process_may_hold_many_stages() -> None:
    layers = with_processes([Layer("flags", {"pipeline": {"num_stages": 4}})], 1)
    assert resolve(layers).pipeline.num_stages == 4


@pytest.mark.parametrize("table", [3, {"num_stage": 3}])
def test_bad_table_is_left_to_the_check_of_keys(table: object) -> None:
    layers = with_processes([Layer("f.toml", {"pipeline": table})], 2)
    with pytest.raises(ConfigError, match=r"f\.toml: "):
        resolve(layers)
