"""``module:function`` → the user's model.

Everything that can be wrong with such a name happens in the user's code, so each way of failing gets its
own sentence, with the place in the user's file, instead of a traceback through ours.
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

from pipeloom.errors import ConfigError, near
from pipeloom.train.config import ModelConfig

_HINT = "give --model module:function, a function that returns an nn.Module"


def build_model(config: ModelConfig, seed: int) -> nn.Module:
    """Call ``config.factory`` with torch seeded, and return its model.

    The factory takes nothing, or the `[model]` section.  The model maps int64 bytes (B, T) to logits of
    the next byte, (B, T, 256).  Modules are looked for in the current folder too.

    Raises:
        ConfigError: no such module or function, it fails, or what it returns is no nn.Module.
    """
    factory = find_factory(config.factory)
    arguments = [config] if _wants_section(factory, config.factory) else []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            model = factory(*arguments)
        except Exception as error:
            raise _failed(f"model factory {config.factory!r} failed", error) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model factory {config.factory!r} returned {type(model).__name__}, no nn.Module", _HINT)
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
    if not hasattr(module, attribute):
        hint = near(attribute, [known for known in vars(module) if not known.startswith("_")]) or _HINT
        raise ConfigError(f"module {module_name!r} has no {attribute!r}", hint)
    factory = getattr(module, attribute)
    if not callable(factory):
        raise ConfigError(f"{name!r} is {type(factory).__name__}, which cannot be called", _HINT)
    return factory  # type: ignore[no-any-return]


def _import(module_name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise ConfigError(f"there is no module {error.name!r} in {here} or on the path", _HINT) from None
        raise _failed(f"module {module_name!r} cannot be imported", error) from error
    except Exception as error:
        raise _failed(f"module {module_name!r} cannot be imported", error) from error


def _wants_section(factory: Callable[..., Any], name: str) -> bool:
    parameters = [
        parameter
        for parameter in inspect.signature(factory).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.default is parameter.empty
    ]
    if len(parameters) > 1:
        listed = ", ".join(parameter.name for parameter in parameters)
        raise ConfigError(f"model factory {name!r} takes ({listed}); it may take nothing, or the [model] section")
    return bool(parameters)


def _failed(what: str, error: Exception) -> ConfigError:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return ConfigError(f"{what}: {type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})")
