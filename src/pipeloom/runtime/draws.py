"""Random numbers that do not depend on who runs a unit.

The obvious way, seeding the default generator before each unit, is wrong here: ranks are threads of one process, and
the CPU's default generator belongs to the process. Two ranks would interleave their draws, and every run would drop
other activations. Seeding per rank is wrong too: another cut, or a recompute, would move a unit to another place in
the stream.

So each call of a unit gets a stream of its own, seeded by a hash of *what* runs (`DrawKey`), and every draw inside
`drawing` is answered from it: draws of the dispatcher in `draw_kernels`, and what Python code asks of the default
generator (`torch.manual_seed`, `torch.get_rng_state`, `torch.random.fork_rng`) by `_StandIn` below. That includes
`torch.utils.checkpoint` inside a unit, which saves the state in the forward and restores it in the backward; the
backward must therefore run inside `drawing_in_backward`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from pipeloom.chance import AROUND, Generators, are_keyed, watch_units
from pipeloom.chance import entered as chance_entered
from pipeloom.errors import DrawError, PipeloomWarning
from pipeloom.runtime.draw_kernels import current_stream, entered, is_same_generator
from pipeloom.runtime.draw_key import DrawKey
from pipeloom.runtime.foreign_draws import ForeignDraws

_HAS_CUDA = torch.version.cuda is not None or torch.version.hip is not None


class DrawStream:
    """The generators of one call of a unit, one per device, made when the first draw asks.

    Args:
        key: what the numbers are a function of.
        call: which call of the unit within one forward of the micro-batch.
        is_backward: draws are right only in a state that the forward saved; see `drawing_in_backward`.
    """

    __slots__ = ("_call", "_chance", "_generators", "_is_backward", "_key", "_restored")

    def __init__(self, key: DrawKey, call: int, *, is_backward: bool) -> None:
        self._key = key
        self._call = call
        self._is_backward = is_backward
        self._restored: set[torch.device] = set()
        self._generators: dict[torch.device, torch.Generator] = {}
        self._chance: Generators | None = None

    def generator(self, device: torch.device) -> torch.Generator:
        """The stream on a device, without the check of `generator_to_draw`."""
        found = self._generators.get(device)
        if found is None:
            order = sum(known.type == device.type for known in self._generators)
            seeded = torch.Generator(device).manual_seed(self._key.generator_seed(self._call, order))
            # A backward over several devices runs in several threads: the first one's generator stays.
            found = self._generators.setdefault(device, seeded)
        return found

    @property
    def chance(self) -> Generators:
        """What answers Python's ``random`` and ``numpy.random``."""
        if self._chance is None:
            of = self._key.unit if self._is_backward else None
            self._chance = Generators(self._key.generator_seed(self._call), backward_of=of)
        return self._chance

    def generator_to_draw(self, device: torch.device) -> torch.Generator:
        """The generator for a draw that runs now. Warns in a backward that restored no state from its forward."""
        if self._is_outside(device):
            _warn(
                f"random numbers were drawn in the backward of {self._key.unit!r} (micro-batch {self._key.microbatch}) "
                "outside a checkpoint that restores the random state of its forward: they depend on where the model "
                "is cut, and a recomputed dropout has another mask than its forward.\n"
                "hint: use torch.utils.checkpoint with preserve_rng_state=True."
            )
        return self.generator(device)

    def state(self, device: torch.device) -> torch.Tensor:
        """`torch.get_rng_state` inside the stream; with the CPU's go the states of ``random`` and ``numpy.random``."""
        state = self.generator(device).get_state()
        # Going back to this state means leaving the checkpoint that was entered in between.
        state.pipeloom_is_outside = self._is_outside(device)  # type: ignore[attr-defined]
        if device.type == "cpu" and are_keyed():  # a checkpoint keeps torch's states, and nothing else
            state.pipeloom_chance = self.chance.state()  # type: ignore[attr-defined]
        return state

    def restore(self, device: torch.device, state: torch.Tensor) -> None:
        """`torch.set_rng_state` inside the stream: a recompute draws by ``random`` too what its forward drew."""
        (self._restored.discard if getattr(state, "pipeloom_is_outside", False) else self._restored.add)(device)
        self.generator(device).set_state(state)
        if hasattr(state, "pipeloom_chance"):
            self.chance.restore(state.pipeloom_chance)

    def _is_outside(self, device: torch.device) -> bool:
        """Whether this is a backward, and no checkpoint in it has restored this device's state."""
        return self._is_backward and device not in self._restored

    def check_given(self, generator: torch.Generator) -> None:
        """Warn of a draw that named a generator of the user's; torch passes the stream's own from draw to draw."""
        if any(is_same_generator(generator, own) for own in self._generators.values()):
            return
        module, _, glue = self._key.unit.rpartition(": ")
        who = f"{glue} in {module or 'the model'}" if ": " in self._key.unit else f"unit {glue!r}"
        _warn(
            f"{who} draws from a torch.Generator of its own: the numbers depend on the order in "
            "which micro-batches run, and a recompute draws others than its forward did.\n"
            "hint: draw without generator=; Pipeloom seeds every unit by step and micro-batch."
        )


class _StandIn:
    """Stands where torch's Python code looks for a default generator: gives the unit's inside a unit.

    Args:
        default: the process's own generator, used outside units.
    """

    def __init__(self, default: torch.Generator) -> None:
        self.default = default

    def __getattr__(self, name: str) -> Any:
        stream = current_stream()
        return getattr(self.default if stream is None else stream.generator(self.default.device), name)

    def get_state(self) -> torch.Tensor:
        stream = current_stream()
        return self.default.get_state() if stream is None else stream.state(self.default.device)

    def set_state(self, state: torch.Tensor) -> Any:
        stream = current_stream()
        return self.default.set_state(state) if stream is None else stream.restore(self.default.device, state)

    def seed(self) -> int:
        if current_stream() is not None:
            raise DrawError(
                "torch.seed() was called inside a unit; a seed that is a function of step and micro-batch is needed, "
                "because a recompute has to draw the same numbers again",
                "remove the call, or use torch.manual_seed with a number.",
            )
        return self.default.seed()


def stand_in_for_defaults(cuda: Any = torch.cuda) -> None:
    """Put stand-ins where `torch.random` and ``torch.cuda`` look up default generators; once is enough.

    One name in a module serves all functions of torch that read it, however a user's code imported them.
    """
    cpu: Any = torch.random
    if not isinstance(cpu.default_generator, _StandIn):
        cpu.default_generator = _StandIn(torch.default_generator)
    # CUDA has no generators before it is initialised.
    if cuda.is_initialized() and not isinstance(cuda.default_generators[0], _StandIn):
        # Another thread may have been here since: never a stand-in for a stand-in.
        cuda.default_generators = tuple(_StandIn(getattr(each, "default", each)) for each in cuda.default_generators)


def drawing(key: DrawKey, call: int = 0, foreign: ForeignDraws | None = None) -> AbstractContextManager[Any]:
    """Answer the random draws of this thread from a stream of their own while one call of a unit runs.

    The same key and call give the same numbers, whoever runs them and whenever. Other threads are not touched. A
    ``torch.manual_seed`` inside seeds the rest of this call only. Contexts nest.

    Args:
        key: what the numbers are a function of.
        call: which call of the unit within one forward of the micro-batch.
        foreign: finds draws by Python's ``random`` and numpy's global generator; None looks for none.

    Raises:
        DrawError: on leaving, if ``foreign`` found such draws; at once for ``torch.seed()``.
    """
    _prepare()
    if key.unit == AROUND:  # what it draws by torch is keyed draw by draw
        return chance_entered(Generators(key.generator_seed(call)))
    context = entered(DrawStream(key, call, is_backward=False))
    watch = None if foreign is None else foreign.watch(key)
    return context if watch is None else _watched(context, watch)


def drawing_in_backward(key: DrawKey) -> AbstractContextManager[None]:
    """Let ``torch.utils.checkpoint`` inside units draw again, in the backward, what it drew in the forward.

    Put it around each backward. Checkpoint restores the state that it saved inside `drawing`; outside of that, draws
    are a function of ``key`` and warn, since a backward spans as many units as its stage has.

    Args:
        key: with a name for the stage's backward where the unit's name stands.
    """
    _prepare()
    return entered(DrawStream(key, 0, is_backward=True))


def _prepare() -> None:
    """Every call of every unit comes here; without CUDA, one look says that the stand-in is there."""
    cpu: Any = torch.random
    if _HAS_CUDA or type(cpu.default_generator) is not _StandIn:
        stand_in_for_defaults()


@contextmanager
def _watched(context: AbstractContextManager[None], watch: AbstractContextManager[None]) -> Iterator[None]:
    with watch, context:
        yield


def _chance_of_unit() -> Generators | None:
    stream = current_stream()
    return None if stream is None else stream.chance


watch_units(_chance_of_unit)


def _warn(message: str) -> None:
    warnings.warn(message, PipeloomWarning, stacklevel=4)
