"""``module:function`` → the user's model.

Everything that can be wrong with such a name happens in the user's code, so each way of failing gets its own
sentence, with the place in the user's file, instead of a traceback through ours.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeloom.errors import ConfigError, PipeloomError, near
from pipeloom.train.config import ModelConfig

_HINT = "give --model module:function, where the function returns an nn.Module"


def build_model(config: ModelConfig, seed: int) -> nn.Module:
    """Call ``config.factory`` with torch seeded, and return its model.

    The factory takes nothing, or the `[model]` section. The model maps int64 bytes (B, T) to logits of the
    next byte, (B, T, 256). Modules are looked for in the current folder too.

    Raises:
        ConfigError: no such module or function, it fails, or what it returns is no nn.Module.
    """
    name = config.factory
    factory = find_factory(name)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            model = factory(*[config][: num_required(factory)])
        except PipeloomError:
            raise
        except Exception as error:
            raise _failed(f"model factory {name!r} failed", error) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model factory {name!r} returned {type(model).__name__}, no nn.Module", _HINT)
    return model


def find_factory(name: str) -> Callable[..., Any]:
    """Import the function that ``module:function`` names.

    Raises:
        ConfigError: the name has another form, or nothing callable is there.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute.isidentifier():
        raise ConfigError(f"model factory {name!r} is not of the form module:function", _HINT)
    module = _import(module_name)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        hint = near(attribute, [known for known in vars(module) if not known.startswith("_")]) or _HINT
        raise ConfigError(f"module {module_name!r} has no function {attribute!r}", hint)
    return factory  # type: ignore[no-any-return]


def num_required(factory: Callable[..., Any]) -> int:
    """Return how many arguments a call must give."""
    given_by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(factory).parameters.values()
    return sum(p.kind in given_by_place and p.default is p.empty for p in parameters)


def _import(module_name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except Exception as error:
        is_absent = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        if is_absent:
            raise ConfigError(f"there is no module {module_name!r} in {here} or on the path", _HINT) from None
        raise _failed(f"module {module_name!r} cannot be imported", error) from error


def _failed(what: str, error: Exception) -> ConfigError:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return ConfigError(f"{what}: {type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})")
