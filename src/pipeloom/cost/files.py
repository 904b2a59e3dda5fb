"""Costs from a JSON or TOML file. A misspelt key would silently cost nothing, so unknown keys are refused."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from pipeloom.cost.costs import Costs
from pipeloom.errors import CostError, near

_KEYS = tuple(field.name for field in fields(Costs))
_REQUIRED = ("forward_s", "input_grad_s", "weight_grad_s")


def read_costs(path: str | Path, num_stages: int) -> Costs:
    """Read costs; the keys are the fields of `Costs`, each a number for all stages or a list.

    ::

        {"forward_s": [0.010, 0.012], "input_grad_s": 0.011, "weight_grad_s": 0.009, "transfer_s": 0.001}

    Args:
        path: a file whose name ends in ``.toml``, or JSON under any other name.
        num_stages: how many stages a single number counts for.

    Raises:
        CostError: the file cannot be read, is not of that form, has an unknown key, lacks one of ``forward_s
            input_grad_s weight_grad_s``, or holds values that `Costs` refuses.
    """
    values = _parsed(Path(path))
    if not isinstance(values, dict):
        raise CostError(f"{path} holds a {type(values).__name__}; keys with costs are needed")
    _check_keys(str(path), values)
    try:
        return Costs.uniform(num_stages, **{key: _checked(key, value) for key, value in values.items()})
    except CostError as error:
        raise CostError(f"{path}: {error.message}", error.hint) from None


def _parsed(path: Path) -> object:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CostError(f"costs file {str(path)!r} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CostError(f"costs file {str(path)!r} cannot be read: {error}") from None
    return _parsed_toml(path, text) if path.suffix == ".toml" else _parsed_json(path, text)


def _parsed_json(path: Path, text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CostError(f"{path} is not JSON: {error}", "name a TOML file *.toml") from None


def _parsed_toml(path: Path, text: str) -> object:
    import tomllib

    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise CostError(f"{path} is not TOML: {error}") from None


def _check_keys(path: str, values: dict[str, object]) -> None:
    for key in values:
        if key not in _KEYS:
            hint = near(key, _KEYS) or f"the keys are {' '.join(_KEYS)}"
            raise CostError(f"{path} has the key {key!r}, which is unknown", hint)
    missing = [key for key in _REQUIRED if key not in values]
    if missing:
        raise CostError(f"{path} lacks {' and '.join(missing)}", f"needed are {' '.join(_REQUIRED)}")


def _checked(key: str, value: object) -> Any:
    """A number or a list of them; what is in it is checked by `Costs`."""
    if isinstance(value, str | dict | bool | None):
        raise CostError(f"{key} holds {value!r}; a number or a list of numbers, one per stage, is needed")
    if isinstance(value, list) and key in ("transfer_s", "transfer_bytes_per_s"):
        raise CostError(f"{key} holds a list; it is one number for every transfer")
    return value
