"""Which modules a model consists of: those that were cloned run on as they were, whatever takes their place later."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from pipeloom.errors import RuntimeStateError


def _any(_: str) -> bool:
    return True


class Structure:
    """The modules of a model, as they are now.

    Args:
        root: the model.
        is_watched: whether a module of that name may not be replaced, added or removed.
        is_cloned: whether it may not change its class, nor get new parameters, either.
    """

    def __init__(
        self, root: nn.Module, is_watched: Callable[[str], bool] = _any, is_cloned: Callable[[str], bool] = _any
    ) -> None:
        self._root, self._is_watched, self._is_cloned = root, is_watched, is_cloned
        self._modules, self._forms = self._now()

    def check(self) -> None:
        """Raise if it has changed.

        Raises:
            RuntimeStateError: clones, or stages, would run what was there before.
        """
        modules, forms = self._now()
        changed = {name for name in modules.keys() | self._modules if modules.get(name) is not self._modules.get(name)}
        if changed:
            highest = sorted(n for n in changed if not any(n.startswith(f"{each}.") for each in changed))
            raise RuntimeStateError(
                f"layers {', '.join(highest)} of the model were replaced, added or removed after it was cut; the "
                "stages would run the old ones",
                "unwrap() the pipeline, change the model, and make a new one",
            )
        for name, (kind, parameters) in forms.items():
            old_kind, old_parameters = self._forms[name]
            if kind is not old_kind or not parameters <= old_parameters:
                new = ", ".join(sorted(parameters - old_parameters))
                what = f"parameters {new}" if new else f"the class {kind.__qualname__}"
                raise RuntimeStateError(
                    f"{name or 'the model'!r} was given {what} after the model was cut, which its clones on other "
                    "stages, or in a second replica, do not have",
                    "unwrap() the pipeline, change the model, and make a new one",
                )

    def _now(self) -> tuple[dict[str, nn.Module], dict[str, tuple[type, set[str]]]]:
        found = dict(self._root.named_modules(remove_duplicate=False))
        forms = {
            name: (type(each), {key for key, value in each._parameters.items() if value is not None})
            for name, each in found.items()
            if self._is_cloned(name)
        }
        return {name: each for name, each in found.items() if self._is_watched(name)}, forms
