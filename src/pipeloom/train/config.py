"""What a run is: one frozen value, checked in one place before anything slow begins.

Scattered ``config.get("lr", 3e-4)`` calls let a misspelt key train for an hour with the default. Here every
key is a field, an unknown one is an error with the near names, and defaults, file and flags are layers of
plain values that are merged first and checked once, so that a message can say which layer is to blame.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from pipeloom.errors import ConfigError, near

SEE_HELP = "`pipeloom train --help` lists every key with its default"


class Section(BaseModel):
    """One table of the TOML file; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelConfig(Section):
    """The model, and the byte windows that it reads."""

    factory: str = Field(default="pipeloom.train.gpt:gpt", description="module:function returning an nn.Module")
    num_layers: int = Field(default=4, ge=1, description="transformer blocks")
    width: int = Field(default=192, ge=2, description="channels of a position")
    num_heads: int = Field(default=4, ge=1, description="attention heads; each has an even share of the width")
    sequence_length: int = Field(default=128, ge=1, description="bytes in a training window")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="probability, in every block")


class DataConfig(Section):
    """The text, as bytes."""

    paths: tuple[str, ...] = Field(
        default=(), description="text, .jsonl (key `text`) or folders; none: Python's standard library"
    )
    held_out_fraction: float = Field(default=0.1, gt=0, lt=1, description="of the documents, not trained on")


class TrainConfig(Section):
    """The loop."""

    steps: int = Field(default=750, ge=1, description="optimizer steps, over which the learning rate decays")
    batch_size: int = Field(default=8, ge=1, description="windows in a step, over all micro-batches")
    seed: int = Field(default=0, ge=0, lt=2**63, description="of initial weights, data order and dropout")
    threads: int = Field(default=1, ge=1, description="torch's threads inside one operation, per rank")
    autocast: Literal["off", "bfloat16"] = Field(default="off", description="precision of the forward pass")
    folder: str = Field(default="", description="where the run is kept; none: runs/<date>-<time>")


class OptimizerConfig(Section):
    """AdamW: linear warm-up, cosine decay, clipped gradients."""

    learning_rate: float = Field(default=2e-3, gt=0, description="at the end of the warm-up")
    final_fraction: float = Field(default=0.05, ge=0, le=1, description="of it, left at the last step")
    warmup_steps: int = Field(default=80, ge=0, description="steps of linear warm-up")
    weight_decay: float = Field(default=0.1, ge=0, description="on matrices, not on biases and norms")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="decay of the second moment")
    epsilon: float = Field(default=1e-8, gt=0, description="added to the denominator")
    clip_norm: float = Field(default=1.0, gt=0, description="largest norm of the whole gradient")


class PipelineConfig(Section):
    """How the model is cut and run."""

    num_stages: int = Field(default=2, ge=1, description="parts of the model, each on a rank of its own")
    schedule: str = Field(default="1f1b", description="a schedule's name, as `pipeloom show` knows it")
    num_microbatches: int = Field(default=4, ge=1, description="parts of a batch")
    recompute: bool = Field(default=False, description="run forwards again before backwards, to save memory")
    cuts: tuple[int, ...] = Field(default=(), description="children before which a stage starts; none: even")


class CheckpointConfig(Section):
    """What is kept to continue from."""

    enabled: bool = Field(default=True, description="save at intervals, at the end and when interrupted")
    interval_steps: int = Field(default=250, ge=0, description="steps between checkpoints; 0: only at the end")
    num_kept: int = Field(default=2, ge=1, description="newest checkpoints that are kept")


class MetricsConfig(Section):
    """What is reported."""

    interval_steps: int = Field(default=10, ge=1, description="steps between printed lines")
    held_out_interval_steps: int = Field(default=250, ge=0, description="steps between held-out losses; 0: ends")
    num_held_out_windows: int = Field(default=512, ge=1, description="held-out windows that are scored")
    tensorboard: bool = Field(default=True, description="write event files, where tensorboard is installed")


class TrainingConfig(Section):
    """A whole run."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    pipeline: PipelineConfig = PipelineConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()


class Layer(NamedTuple):
    """Some keys by section, and where they come from: a file's name, or "command line"."""

    origin: str
    values: Mapping[str, Any]


def sections() -> Iterator[tuple[str, str, dict[str, FieldInfo]]]:
    """Yield (name, what it is about, its fields by key) of every section, in the order of the file."""
    for name, section in TrainingConfig():
        yield name, str(type(section).__doc__), type(section).model_fields


def resolve(layers: Sequence[Layer]) -> TrainingConfig:
    """Return the configuration that the layers make on top of the defaults; later layers win.

    Raises:
        ConfigError: a key that does not exist, a value that its key cannot take, or two values that exclude
            each other; names the key, the value and the layer.
    """
    merged: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for section, values in layer.values.items():
            merged.setdefault(section, {}).update(_table(layer.origin, section, values))
    try:
        config = TrainingConfig.model_validate(merged)
    except ValidationError as error:
        raise _config_error(error.errors()[0], layers) from None
    _check_together(config)
    return config


def with_processes(layers: Sequence[Layer], num_processes: int | None) -> list[Layer]:
    """Cut the model for as many ranks as there are processes, if nothing else is asked for.

    Args:
        layers: of file and flags.
        num_processes: that a launcher starts; None without one.

    Raises:
        ConfigError: another number of stages is asked for than there are processes; names both.
    """
    if num_processes is None:
        return list(layers)
    tables = [(layer.origin, layer.values.get("pipeline")) for layer in layers]
    given = [(origin, str(table["num_stages"])) for origin, table in tables if _asks_for_stages(table)]
    if num_processes > 1 and given and given[-1][1] != str(num_processes):
        origin, num_stages = given[-1]
        raise ConfigError(
            f"{origin}: pipeline.num_stages is {num_stages}, but there are {num_processes} processes; "
            "each of them holds one stage",
            f"start as many processes as stages, or leave pipeline.num_stages out: it is then {num_processes}",
        )
    return [Layer("the number of processes", {"pipeline": {"num_stages": num_processes}}), *layers]


def _asks_for_stages(table: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(table, Mapping) and "num_stages" in table


def read_config_file(path: Path) -> Layer:
    """Return the keys of a TOML file as a layer named after it.

    Raises:
        ConfigError: the file cannot be read, or is not TOML (the message has line and column).
    """
    try:
        return Layer(str(path), tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def to_toml(config: TrainingConfig) -> str:
    """Return the resolved configuration as TOML, an inline table a section; `read_config_file` takes it."""
    tables = {name: [f"{key} = {_literal(value)}" for key, value in section] for name, section in config}
    return "".join(f"{name} = {{ {', '.join(keys)} }}\n" for name, keys in tables.items())


def _literal(value: Any) -> str:
    # JSON's escapes are TOML's, but for surrogate pairs (hence no ASCII escapes) and the bare DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _table(origin: str, section: str, values: Any) -> Mapping[str, Any]:
    if section not in TrainingConfig.model_fields:
        hint = near(section, TrainingConfig.model_fields) or SEE_HELP
        raise ConfigError(f"{origin}: there is no section {section!r}", hint)
    if not isinstance(values, Mapping):
        raise ConfigError(f"{origin}: {section!r} is a section, but was given {values!r}", f"write [{section}]")
    return values


def _config_error(error: ErrorDetails, layers: Sequence[Layer]) -> ConfigError:
    section, key = map(str, error["loc"][:2])
    origin = next(layer.origin for layer in reversed(layers) if key in layer.values.get(section, {}))
    if error["type"] == "extra_forbidden":
        known = [f"{name}.{field}" for name, _, fields in sections() for field in fields]
        return ConfigError(f"{origin}: there is no key '{section}.{key}'", near(f"{section}.{key}", known))
    reason = error["msg"].removeprefix("Input ")
    return ConfigError(f"{origin}: {section}.{key} was given {error['input']!r}, but it {reason}", SEE_HELP)


def _check_together(config: TrainingConfig) -> None:
    """Refuse values that are each fine, but not together."""
    num_windows, num_microbatches = config.train.batch_size, config.pipeline.num_microbatches
    if num_windows < num_microbatches:
        raise ConfigError(
            f"train.batch_size is {num_windows}, fewer than the {num_microbatches} micro-batches of "
            "pipeline.num_microbatches: some would be empty",
            "raise --train.batch_size or lower --pipeline.num_microbatches",
        )
    cuts = config.pipeline.cuts
    if cuts and config.pipeline.num_stages != len(cuts) + 1:
        raise ConfigError(
            f"pipeline.cuts {list(cuts)} make {len(cuts) + 1} stages, pipeline.num_stages is "
            f"{config.pipeline.num_stages}",
            f"add --pipeline.num_stages {len(cuts) + 1}",
        )
