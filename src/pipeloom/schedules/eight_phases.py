"""The eight phases of DualPipe: micro-batches from both ends, forwards from one over backwards from the other.

To a rank, one direction is near: it enters ``num_before`` ranks away; and one is far. In DualPipe they belong to two
copies of the model, in DualPipeV to the two halves of a V. The comments have the algebra of the DualPipe repository:
0 is the near direction, 1 the far one, ``&`` an overlap, I and W the halves of a split backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from pipeloom.ir import Action, Kind, Overlap, Program
from pipeloom.schedules.formulas import Times

Cell = tuple[Action, ...]
"""One action, or two that overlap."""


class Direction:
    """What comes to a rank from one end.

    Args:
        stage: of the rank, through which it goes.
        microbatches: those that come, in order.
        num_made: how many the phases are made for; more may be made than come.
    """

    def __init__(self, stage: int, microbatches: range, num_made: int) -> None:
        self.stage = stage
        self.num_made = num_made
        self._microbatches = microbatches
        self._num_done = {Kind.FORWARD: 0, Kind.BACKWARD: 0}

    def forward(self) -> Action:
        """F of the next one."""
        return self._next(Kind.FORWARD, Kind.FORWARD)

    def backward(self, kind: Kind = Kind.BACKWARD) -> Action:
        """B, or I, of the next one."""
        return self._next(kind, Kind.BACKWARD)

    def has(self, action: Action) -> bool:
        """Whether the micro-batch of one of its actions comes."""
        return action.microbatch in self._microbatches

    def _next(self, kind: Kind, counted: Kind) -> Action:
        index = self._num_done[counted]
        self._num_done[counted] += 1
        return Action(kind, self.stage, self._microbatches.start + index)


def eight_phases(near: Direction, far: Direction, num_before: int, num_behind: int) -> Iterator[Cell]:
    """The program of one rank, a cell after the other.

    Args:
        near: direction 0.
        far: direction 1.
        num_before: ranks between this one and the near end.
        num_behind: ranks between this one and the middle, or the turn of the V.
    """
    num_both = num_before + 1
    num_steady = near.num_made - 2 * (num_both + num_behind) + num_both
    weight_grads: deque[Action] = deque()

    def input_grad(of: Direction) -> Cell:
        action = of.backward(Kind.INPUT_GRAD)
        weight_grads.append(Action(Kind.WEIGHT_GRAD, action.stage, action.microbatch))
        return (action,)

    for _ in range(2 * num_behind):  # 1: F0
        yield (near.forward(),)
    for _ in range(num_both):  # 2: F0 F1
        yield (near.forward(),)
        yield (far.forward(),)
    for _ in range(num_behind):  # 3: I1 W1 F1
        yield input_grad(far)
        yield (weight_grads.popleft(),)
        yield (far.forward(),)
    for i in range(num_steady):  # 4: F0&B1 F1&B0
        pair = (near.forward(), far.backward())
        # In the middle that forward is the one that this backward waits for.
        yield from [pair] if i or num_behind else [(action,) for action in pair]
        yield (far.forward(), near.backward())
    for _ in range(num_behind):  # 5: B1 F1&B0
        yield (far.backward(),)
        yield (far.forward(), near.backward())
    for i in range(num_both):  # 6: B1 B0, from half of them on I1 I0
        yield input_grad(far) if 2 * i >= num_both else (far.backward(),)
        yield input_grad(near) if 2 * i + 1 >= num_both else (near.backward(),)
    for _ in range(num_behind):  # 7: W I0
        yield (weight_grads.popleft(),)
        yield input_grad(near)
    for _ in range(num_both):  # 8: W
        yield (weight_grads.popleft(),)


def program_of(cells: Iterable[Cell], near: Direction, far: Direction) -> tuple[Program, list[Overlap]]:
    """The actions of a rank whose micro-batches come, and the pairs that overlap."""
    program: list[Action] = []
    overlaps = []
    for cell in cells:
        present = [action for action in cell if (near if action.stage == near.stage else far).has(action)]
        program += present
        if len(present) == 2:
            overlaps.append(Overlap(*present))
    return tuple(program), overlaps


def pairs_hide_waits(times: Times) -> bool:
    """Whether the formulas hold that count a pair as one action after the other: T_W ≤ T_I ≤ T_F ≤ T_B."""
    return times.weight_grad_s <= times.input_grad_s <= times.forward_s <= times.backward_s
