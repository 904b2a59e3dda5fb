"""A small text in files, and a configuration that trains on it within a second."""

from pathlib import Path

import pytest

from pipeloom.train.config import Layer, TrainingConfig, resolve

SENTENCES = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen jugs", "how vexingly quick"]


def small_values(text_folder: Path, run_folder: Path) -> dict[str, dict[str, object]]:
    """The keys of a run of seconds."""
    return {
        "model": {"num_layers": 2, "width": 16, "num_heads": 2, "sequence_length": 16},
        "data": {"paths": [str(text_folder)], "held_out_fraction": 0.3},
        "train": {"steps": 6, "batch_size": 4, "folder": str(run_folder)},
        "optimizer": {"warmup_steps": 2},
        "checkpoint": {"interval_steps": 3, "num_kept": 9},
        "metrics": {"interval_steps": 2, "held_out_interval_steps": 3, "num_held_out_windows": 8, "tensorboard": False},
    }


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    """Ten files of a few hundred bytes."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(10):
        lines = [f"{SENTENCES[i % 3]} {number * i}" for i in range(8)]
        (folder / f"{number}.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture
def layer(text_folder: Path, tmp_path: Path) -> Layer:
    """The small configuration as a layer."""
    return Layer("small.toml", small_values(text_folder, tmp_path / "run"))


@pytest.fixture
def config(layer: Layer) -> TrainingConfig:
    """The small configuration, resolved."""
    return resolve([layer])
