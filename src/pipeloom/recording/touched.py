"""What a unit and the code around it do to each other's attributes.

A parent may set something on a layer before it calls it (``layer.scale = i``, ``self.norms.eval()``), and a layer may
leave a number on itself for a parent to read. On a stage, a parent sees stand-ins: so both are found in the dry run, by
comparing attributes before and after each call, and carried over when the unit runs.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from pipeloom.errors import UncuttableCode
from pipeloom.recording.ops import Recording
from pipeloom.recording.shared import is_same
from pipeloom.standins.clone import Clones
from pipeloom.standins.followed import OF_EVERY_MODULE, Place
from pipeloom.standins.unknown import Unknown

_OF_TORCH = OF_EVERY_MODULE - {"training"}
_PLAIN = (bool, int, float, str, type(None))
_LEFT = (*_PLAIN, Unknown)
_ABSENT = object()


class Touched:
    """The attributes of a model's clones during a dry run.

    Args:
        clones: of the model.
        units: names of its units.
    """

    def __init__(self, clones: Clones, units: Collection[str]) -> None:
        self._inside: dict[str, dict[str, nn.Module]] = {unit: {} for unit in units}
        self._around: dict[str, nn.Module] = {}
        for name, clone in clones.of.items():
            own = [unit for unit in units if name == unit or name.startswith(f"{unit}.")]
            for unit in own:
                self._inside[unit][name] = clone
            if not own:
                self._around[name] = clone
        self._seen = {name: _state(clone) for inner in self._inside.values() for name, clone in inner.items()}
        self._parts = {name: _parts(clone) for name, clone in clones.of.items()}

    def before(self, unit: str) -> dict[Place, Any]:
        """What code outside of a unit has set on it since it last ran.

        Raises:
            UncuttableCode: it has put another module in the place of one inside.
        """
        self._check_parts(self._inside[unit], f"inside of {unit!r}")
        return self._changed(unit)

    def after(self, unit: str) -> dict[Place, Any]:
        """The plain values that a unit's call left on it."""
        found = {place: value for place, value in self._changed(unit).items() if _is_left(value)}
        for name, clone in self._inside[unit].items():
            self._seen[name], self._parts[name] = _state(clone), _parts(clone)
        return found

    def end(self, recording: Recording) -> None:
        """Look at the code around units when it has run, and at what it set.

        Raises:
            UncuttableCode: it has assigned a buffer, or put another module in the place of one.
        """
        self._check_parts(self._around, "around the units")
        places: dict[str, dict[Place, None]] = {}
        for op in recording.ops:
            places.setdefault(op.what, {}).update(dict.fromkeys(op.given))
        for op in recording.ops:  # what was set before one call of a unit holds for the next, in another stage too
            op.given = tuple(places[op.what])

    def _changed(self, unit: str) -> dict[Place, Any]:
        found: dict[Place, Any] = {}
        for name, clone in self._inside[unit].items():
            before = self._seen[name]
            for key, value in _state(clone).items():
                if not is_same(value, before.get(key, _ABSENT)):
                    found[name, key] = value
        return found

    def _check_parts(self, modules: dict[str, nn.Module], where: str) -> None:
        for name, clone in modules.items():
            children, buffers = self._parts[name]
            for key, child in clone._modules.items():
                if children.get(key, child) is not child:
                    raise UncuttableCode(
                        f"the model's forward puts another module in the place of {_joined(name, key)!r}, {where}; "
                        "which stage runs which module is decided once",
                        "have both modules in the model, and choose between them with `if`",
                    )
            for key, buffer in clone._buffers.items():
                before = buffers.get(key)
                if before is not None and buffer is not before and modules is self._around:
                    raise UncuttableCode(
                        f"the model's forward assigns the buffer {_joined(name, key)!r} anew; stages have it in "
                        "common, and would go on with the old one",
                        f"write into it, self.{key}.copy_(...), or keep it in a module that is called",
                    )


def _state(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if key not in _OF_TORCH}


def _parts(module: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor | None]]:
    return dict(module._modules), dict(module._buffers)


def _is_left(value: Any) -> bool:
    """Plain, or a flat tuple of such, as a shape."""
    return all(isinstance(each, _LEFT) for each in (value if isinstance(value, tuple) else (value,)))


def _joined(module: str, key: str) -> str:
    return f"{module}.{key}" if module else key
