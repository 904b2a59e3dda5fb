"""What a run is: one frozen value, checked in one place before anything slow begins.

Scattered ``config.get("lr", 3e-4)`` calls let a misspelt key train for an hour with the default.  Here
every key is a field, an unknown one is an error with the near names, and defaults, file and flags are
layers of plain values that are merged first and checked once, so that a message can say which layer is
to blame.  Nothing here imports torch: ``pipeloom train --help`` answers at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from pipeloom.errors import ConfigError, near

SEE_HELP = "`pipeloom train --help` lists every key with its default"


class Section(BaseModel):
    """One table of the TOML file; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelConfig(Section):
    """The model, and the byte windows that it reads."""

    factory: str = Field("pipeloom.train.gpt:gpt", description="module:function that returns the nn.Module")
    num_layers: int = Field(4, ge=1, description="transformer blocks")
    width: int = Field(256, ge=2, description="channels of a position")
    num_heads: int = Field(4, ge=1, description="attention heads; must divide the width")
    sequence_length: int = Field(128, ge=1, description="bytes in a training window")
    dropout: float = Field(0.0, ge=0, lt=1, description="probability, in every block")


class DataConfig(Section):
    """The text; a window is cut anywhere in it."""

    paths: tuple[str, ...] = Field(
        (), description="text files, .jsonl files (key `text`) or folders; none: Python's standard library"
    )
    held_out_fraction: float = Field(0.1, gt=0, lt=1, description="share of the documents never trained on")


class TrainConfig(Section):
    """The loop."""

    steps: int = Field(800, ge=1, description="optimizer steps, on which the learning rate's decay ends")
    batch_size: int = Field(8, ge=1, description="windows in a step, over all micro-batches")
    seed: int = Field(0, ge=0, lt=2**63, description="of initial weights, data order and dropout")
    threads: int = Field(1, ge=1, description="torch's threads inside one operation, per rank")
    autocast: Literal["off", "bfloat16"] = Field("off", description="lower precision of the forward pass")
    folder: str = Field("", description="where the run is kept; empty: runs/<date>-<time>")


class OptimizerConfig(Section):
    """AdamW: linear warm-up, cosine decay, clipped gradients."""

    learning_rate: float = Field(2e-3, gt=0, description="at the end of the warm-up")
    final_fraction: float = Field(0.05, ge=0, le=1, description="of the learning rate, left at the last step")
    warmup_steps: int = Field(60, ge=0, description="steps of linear warm-up")
    weight_decay: float = Field(0.1, ge=0, description="on matrices, not on biases and norms")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: float = Field(0.95, ge=0, lt=1, description="decay of the second moment")
    epsilon: float = Field(1e-8, gt=0, description="added to the denominator")
    clip_norm: float = Field(1.0, gt=0, description="largest norm of the whole gradient")


class PipelineConfig(Section):
    """How the model is cut and run."""

    num_stages: int = Field(2, ge=1, description="parts of the model, one rank each")
    schedule: str = Field("1f1b", description="name of a schedule; see `pipeloom show --help`")
    num_microbatches: int = Field(4, ge=1, description="parts of a batch")
    recompute: bool = Field(False, description="run forwards again in the backward pass, to save memory")
    cuts: tuple[int, ...] = Field((), description="children before which a stage starts; none: even cuts")


class CheckpointConfig(Section):
    """What is kept to continue from."""

    enabled: bool = Field(True, description="save at intervals, at the end and when interrupted")
    interval_steps: int = Field(200, ge=0, description="steps between checkpoints; 0: only at the end")
    num_kept: int = Field(2, ge=1, description="newest checkpoints that are kept")


class MetricsConfig(Section):
    """What is reported."""

    interval_steps: int = Field(10, ge=1, description="steps between printed lines")
    held_out_interval_steps: int = Field(200, ge=0, description="steps between held-out losses; 0: ends only")
    num_held_out_windows: int = Field(512, ge=1, description="held-out windows that are scored")
    tensorboard: bool = Field(True, description="write event files, if tensorboard is installed")


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
    """Some keys and where they come from: a file's name, or "command line"."""

    origin: str
    values: Mapping[str, Any]


def dotted_keys() -> Iterator[tuple[str, str]]:
    """Yield every (section, key) in the order of the file."""
    for section, field in TrainingConfig.model_fields.items():
        yield from ((section, key) for key in field.annotation.model_fields)  # type: ignore[union-attr]


def resolve(layers: Sequence[Layer]) -> TrainingConfig:
    """Return the configuration that the layers make on top of the defaults; later layers win.

    Raises:
        ConfigError: a key that does not exist, a value that its key cannot take, or two values that
            exclude each other; names the key, the value and the layer.
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


def _table(origin: str, section: str, values: Any) -> Mapping[str, Any]:
    if section not in TrainingConfig.model_fields:
        hint = near(section, TrainingConfig.model_fields) or SEE_HELP
        raise ConfigError(f"{origin}: there is no section or key {section!r}", hint)
    if not isinstance(values, Mapping):
        raise ConfigError(f"{origin}: {section!r} is a section, but was given {values!r}", f"write [{section}]")
    return values


def _config_error(error: ErrorDetails, layers: Sequence[Layer]) -> ConfigError:
    section, key = str(error["loc"][0]), str(error["loc"][1])
    origin = next(layer.origin for layer in reversed(layers) if key in layer.values.get(section, {}))
    if error["type"] == "extra_forbidden":
        known = [".".join(pair) for pair in dotted_keys()]
        return ConfigError(f"{origin}: there is no key '{section}.{key}'", near(f"{section}.{key}", known))
    reason = error["msg"].removeprefix("Input ")
    return ConfigError(f"{origin}: {section}.{key} was given {error['input']!r}, but it {reason}", SEE_HELP)


def _check_together(config: TrainingConfig) -> None:
    """Refuse values that are each fine, but not together."""
    model, train, pipeline = config.model, config.train, config.pipeline
    if model.width % model.num_heads:
        raise ConfigError(
            f"model.width is {model.width}, which {model.num_heads} heads (model.num_heads) do not divide",
            "choose a width that is a multiple of the number of heads",
        )
    if train.batch_size < pipeline.num_microbatches:
        raise ConfigError(
            f"train.batch_size is {train.batch_size}, fewer than the {pipeline.num_microbatches} micro-batches "
            "of pipeline.num_microbatches: some would be empty",
            "raise --train.batch_size or lower --pipeline.num_microbatches",
        )
