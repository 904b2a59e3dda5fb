"""``module:factory`` → the user's own model, and inputs for it.

A path, a class, a function, a pair: users have their models in many ways, and a command that takes one of them only is
a command that they have to write a file for. What they got wrong is one message; what their code raises is theirs, and
its own last lines say more than any sentence of ours.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.batch.trees import flatten, unflatten
from pipeloom.cli.codes import FAILED
from pipeloom.cli.terminal import print_error
from pipeloom.errors import ConfigError, PipeloomError, near
from pipeloom.weights.build import build

Model = nn.Module | list[nn.Module]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]

_HINT = "give module:factory, where the factory returns an nn.Module, (module, inputs) or (module, args, kwargs)"
_OURS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), "<frozen ")
_NUM_FRAMES = 3
"""Of a traceback of the user's code, how many are shown: the last ones."""


@dataclass(frozen=True)
class Loaded:
    """A model and what came with it.

    Args:
        model: a module, or a list with one module per stage.
        inputs: positional and keyword arguments; None if there are none.
    """

    model: Model
    inputs: Inputs | None

    @property
    def required_inputs(self) -> Inputs:
        """The inputs.

        Raises:
            ConfigError: there are none.
        """
        if self.inputs is None:
            raise ConfigError(
                f"a {type(self.model).__name__} has to be run, and no inputs for it are known",
                "let the factory return (module, args, kwargs), or give --inputs module:function",
            )
        return self.inputs


def load(name: str, inputs: str | None = None, *, is_bare: bool) -> Loaded:
    """Find a model by its name, and inputs for it.

    Args:
        name: ``module:factory``; the factory takes nothing and returns a module, a list of stage modules,
            ``(module, inputs)`` or ``(module, args, kwargs)``. A module that exists already may be named as well.
        inputs: ``module:function``, which returns a dict of keyword arguments, a tuple of positional ones,
            ``(args, kwargs)``, or one value. By default what the factory returned, else the ``dummy_inputs`` of a model
            of transformers.
        is_bare: leave the parameters on the meta device, so that a model of any size can be made.

    Raises:
        ConfigError: a name has another form, nothing of that name is there, or it returns something else.
        SystemExit: the user's code raised; its last lines are on stderr, and the exit code is 1.
    """
    model, given = _made(name, _find(name), is_bare=is_bare)
    if inputs is not None:
        function = _callable(inputs, _find(inputs))
        with user_code(inputs):
            given = _as_inputs(function())
    return Loaded(model, given or _dummy_inputs(model))


@contextmanager
def user_code(name: str) -> Iterator[None]:
    """Let an exception of the user's code end the command with its own last lines, and exit code 1."""
    try:
        yield
    except PipeloomError:
        raise
    except Exception as error:
        told = traceback.TracebackException.from_exception(error)
        told.stack = traceback.StackSummary.from_list(_last_frames(told.stack))
        print_error("\n".join([f"{name} raised", "".join(told.format(chain=False)).rstrip()]))
        raise SystemExit(FAILED) from error


def _last_frames(frames: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The user's own last frames; a library's, or ours, where the fault seems to be there."""
    theirs = [each for each in frames if not each.filename.startswith(_OURS)]
    is_ours = bool(frames) and frames[-1].filename.startswith(_OURS[0])
    return list(frames if is_ours else theirs or frames)[-_NUM_FRAMES:]


def _find(name: str) -> Any:
    module_name, _, path = name.partition(":")
    if not all(part.isidentifier() for text in (module_name, path) for part in text.split(".")):
        raise ConfigError(f"{name!r} is not of the form module:factory", _HINT)
    found = _import(module_name, path)
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            known = [each for each in dir(found) if not each.startswith("_")]
            raise ConfigError(f"{name!r} was given, but {module_name!r} has no {path!r}", near(path, known) or _HINT)
        found = getattr(found, attribute)
    return found


def _import(module_name: str, path: str) -> Any:
    here = str(Path.cwd())  # as with ``python -m``, and left there for what a factory imports later
    if here not in sys.path:
        sys.path.insert(0, here)
    with user_code(module_name):
        try:
            return importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if not f"{module_name}.".startswith(f"{error.name}."):
                raise
    is_file = module_name.endswith(".py")
    hint = f"name the module, not its file: {module_name.removesuffix('.py')}:{path}" if is_file else _HINT
    raise ConfigError(f"there is no module {module_name!r} in {Path.cwd()} or on the path", hint)


def _callable(name: str, found: Any) -> Callable[[], Any]:
    if not callable(found):
        raise ConfigError(f"{name!r} is a {type(found).__name__}; a function without arguments is needed", _HINT)
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise ConfigError(
            f"{name!r} cannot be called without arguments: {error}", "write a function without arguments around it"
        ) from None
    except ValueError:  # of C: it has no signature
        pass
    return found  # type: ignore[no-any-return]


def _made(name: str, found: Any, *, is_bare: bool) -> tuple[Model, Inputs | None]:
    if isinstance(found, nn.Module | list | tuple):
        return _parted(name, found)
    factory = _callable(name, found)
    if not is_bare:
        with user_code(name):
            made = factory()
        return _parted(name, made)
    kept: list[tuple[Model, Inputs | None]] = []

    def bare() -> nn.Module:
        model, inputs = _parted(name, factory())
        kept.append((model, inputs and _without_memory(inputs)))
        return nn.ModuleList(model) if isinstance(model, list) else model

    with user_code(name):
        build(bare)
    model, inputs = kept[0]
    return model, inputs and _with_numbers(inputs)


def _parted(name: str, made: Any) -> tuple[Model, Inputs | None]:
    """What a factory returned, as a model and inputs."""
    model, *rest = made if isinstance(made, tuple) and made else (made,)
    is_list = isinstance(model, list) and model and all(isinstance(each, nn.Module) for each in model)
    if len(rest) > 2 or not (is_list or isinstance(model, nn.Module)):
        kinds = ", ".join(type(each).__name__ for each in (model, *rest))
        raise ConfigError(f"{name!r} returned {f'({kinds})' if rest else kinds}", _HINT)
    if not rest:
        return model, None
    return model, _as_inputs(rest[0] if len(rest) == 1 else (_as_args(rest[0]), rest[1]))


def _as_inputs(given: Any) -> Inputs:
    if isinstance(given, Mapping):
        return (), dict(given)
    is_pair = isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], tuple | list)
    if is_pair and isinstance(given[1], Mapping):
        return tuple(given[0]), dict(given[1])
    return _as_args(given), {}


def _as_args(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, tuple | list) else (given,)


def _dummy_inputs(model: Model) -> Inputs | None:
    """Those of a model of transformers; an image model inherits tokens, which are none of its inputs."""
    with user_code("dummy_inputs"):
        given = getattr(model, "dummy_inputs", None)
    main = getattr(model, "main_input_name", None)
    return ((), dict(given)) if isinstance(given, Mapping) and (main is None or main in given) else None


def _without_memory(inputs: Inputs) -> Inputs:
    """Inputs made beside a model without parameters: random ones have no numbers, and their memory is nobody's."""
    return _mapped(inputs, lambda each: each.detach() if each.is_meta else each.detach().clone())


def _with_numbers(inputs: Inputs) -> Inputs:
    # Ones: a token that is no padding, a mask that lets all pass. Only shapes and types matter for most models.
    return _mapped(inputs, lambda each: torch.ones(each.shape, dtype=each.dtype) if each.is_meta else each)


def _mapped(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    leaves, structure = flatten(inputs)
    made = [
        change(each).requires_grad_(each.requires_grad) if isinstance(each, Tensor) else each for each in leaves
    ]  # fmt: skip
    changed: Inputs = unflatten(made, structure)
    return changed
