"""The two halves of the backward of one micro-batch on one stage."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor, nn

from pipeloom.halves.frozen import looking_away
from pipeloom.halves.mode import SplitMode, has_weights
from pipeloom.halves.waiting import Waiting


class Halves:
    """One micro-batch on one stage, from its forward to W.

    ::

        halves = Halves()
        with halves.forward():
            output = module(value)              # any torch code, the loss too
        with halves.input_gradients():
            output.backward(grad)               # I: fills value.grad, leaves the weights for later
        halves.weight_gradients()               # W: adds to the parameters' .grad

    Bits are those of one whole backward, as long as the Ws of a stage run in the order of its Is. Not for two threads
    at once.

    Args:
        frozen: modules without anything to train, which run as if nobody looked (`frozen_in`).
    """

    def __init__(self, frozen: Collection[nn.Module] = ()) -> None:
        self._waiting = Waiting()
        self._mode = SplitMode(self._waiting)
        self._frozen = frozen

    def forward(self) -> AbstractContextManager[object]:
        """Put this around the forward; around the second one, where a stage recomputes."""
        return self._looking() if self._frozen else self._mode

    @contextmanager
    def _looking(self) -> Iterator[None]:
        with self._mode, looking_away(self._frozen, self._mode, has_weights):
            yield

    @contextmanager
    def input_gradients(self) -> Iterator[None]:
        """Put this around a backward: it becomes I.

        After an error in it, nothing waits for W.

        Raises:
            RuntimeStateError: the backward is to be differentiated again, or runs for the second time.
        """
        self._waiting.is_collecting = True
        try:
            with self.forward():  # for checkpoints, whose forward runs again
                yield
        except BaseException:
            self._waiting.drop()
            raise
        finally:
            self._waiting.is_collecting = False

    def weight_gradients(self) -> None:
        """W: add what I has left to the parameters' gradients, and free it."""
        with self._mode:
            self._waiting.run(self._mode.in_w.values(), self._mode.shared)

    @property
    def in_w(self) -> Mapping[int, Tensor]:
        """The parameters whose gradients come in W, by their ids."""
        return self._mode.in_w

    def undecided(self, in_w: Set[int]) -> list[Tensor]:
        """The parameters whose gradients come in I here, and in W in other micro-batches, which had these ids."""
        in_i = self._mode.in_i
        return [in_i[each] for each in in_i.keys() & in_w]

    @property
    def num_waiting(self) -> int:
        """How many functions wait for W."""
        return len(self._waiting)
