"""A configuration as TOML, read and written.

The standard library reads TOML but does not write it, and the libraries that do are made for keeping
comments.  A resolved configuration needs neither: each section is one inline table on a line of its own,
so that the same seven lines are what the terminal shows, what lies in the run's folder, and what
``--config`` takes back.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from pipeloom.errors import ConfigError
from pipeloom.train.config import Layer, TrainingConfig


def read_config_file(path: Path) -> Layer:
    """Return the keys of a TOML file as a layer named after it.

    Raises:
        ConfigError: the file is missing, or not TOML (the message has line and column).
    """
    try:
        return Layer(str(path), tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def to_toml(config: TrainingConfig) -> str:
    """Return the resolved configuration, one line a section; `read_config_file` reads it back."""
    sections = config.model_dump().items()
    return "".join(f"{section} = {_inline_table(values)}\n" for section, values in sections)


def _inline_table(values: dict[str, Any]) -> str:
    return "{ " + ", ".join(f"{key} = {_literal(value)}" for key, value in values.items()) + " }"


def _literal(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for surrogate pairs (so: no ASCII escapes) and the bare DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)
