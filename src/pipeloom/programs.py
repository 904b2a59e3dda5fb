"""What a pipeline runs: a schedule for each number of micro-batches, checked and lowered once."""

from __future__ import annotations

from collections.abc import Sequence

from pipeloom.errors import SplitError, UnknownSchedule, UnsupportedShape
from pipeloom.ir import Kind, Placement, Schedule
from pipeloom.ir.counts import is_whole
from pipeloom.ir.verify import require_valid
from pipeloom.passes import add_recompute, add_transfers
from pipeloom.runtime.executor import Plan
from pipeloom.schedules import schedule as make_schedule
from pipeloom.schedules.forward_only import evaluation

_RUNNABLE = frozenset({Kind.FORWARD, Kind.BACKWARD})


class Programs:
    """The plans of one pipeline, made when they are first asked for.

    Args:
        schedule: a name, or a `Schedule` of F and B.
        num_stages: of the model.
        recompute: which stages recompute: one value, or one per stage.

    Raises:
        UnknownSchedule: no schedule has that name.
        SplitError: ``recompute`` has another number of values than there are stages.
    """

    def __init__(self, schedule: str | Schedule, num_stages: int, recompute: bool | Sequence[bool]) -> None:
        self._schedule = schedule
        self._num_stages = num_stages
        self.recomputed = _stages_with_recompute(recompute, num_stages)
        self._plans: dict[tuple[int, bool], Plan] = {}
        self.placement: Placement = self._made(self.checked(None)).placement

    def checked(self, num_microbatches: int | None) -> int:
        """A number of micro-batches that can be run; None: the schedule's own, or one per stage.

        Raises:
            UnsupportedShape: it is no positive whole number, or not that of the given `Schedule`.
        """
        given, own = num_microbatches, self._schedule
        if given is not None and (not is_whole(given) or given < 1):
            raise UnsupportedShape(f"num_microbatches={given!r} was given; a whole number of at least 1 is needed")
        if not isinstance(own, Schedule):
            return int(given or self._num_stages)
        if given not in (None, own.num_microbatches):
            raise UnsupportedShape(
                f"num_microbatches={given} was given with a schedule of {own.num_microbatches} micro-batches",
                "leave num_microbatches out, or give the schedule by its name",
            )
        return own.num_microbatches

    def training(self, num_microbatches: int) -> Plan:
        """Forwards and backwards, with recomputation and transfers.

        Raises:
            ScheduleError: the schedule does not fit the stages, is wrong, or holds what cannot be run.
        """
        key = (num_microbatches, True)
        if key not in self._plans:
            computed = add_recompute(require_valid(self._made(num_microbatches)), self.recomputed)
            self._plans[key] = Plan(require_valid(add_transfers(computed)))
        return self._plans[key]

    def evaluation(self, num_microbatches: int) -> Plan:
        """Forwards alone, on the same placement."""
        key = (num_microbatches, False)
        if key not in self._plans:
            self._plans[key] = Plan(require_valid(add_transfers(evaluation(self.placement, num_microbatches))))
        return self._plans[key]

    def _made(self, num_microbatches: int) -> Schedule:
        made = self._schedule
        if not isinstance(made, str | Schedule):
            raise UnknownSchedule(f"schedule={made!r} was given; a name or a Schedule is needed")
        if isinstance(made, str):
            return make_schedule(made, num_ranks=self._num_stages, num_microbatches=num_microbatches)
        if made.num_stages != self._num_stages:
            raise UnsupportedShape(
                f"the schedule is for {made.num_stages} stages; the model has {self._num_stages}",
                f"cut the model into {made.num_stages} stages, or give the schedule by its name",
            )
        other = next((action for action in made if action.kind not in _RUNNABLE), None)
        if other is not None or made.is_forward_only:
            raise UnsupportedShape(
                f"the schedule {'has forwards only' if other is None else f'holds {other}'}; a training step runs "
                "schedules of F and B, and adds recomputation and transfers itself"
            )
        return made


def _stages_with_recompute(recompute: bool | Sequence[bool], num_stages: int) -> frozenset[int]:
    flags = [recompute] * num_stages if isinstance(recompute, bool) else recompute
    if isinstance(flags, str) or not isinstance(flags, Sequence) or not all(isinstance(each, bool) for each in flags):
        raise SplitError(f"recompute={flags!r} was given; True, False, or one of them for each stage is needed")
    if len(flags) != num_stages:
        raise SplitError(f"recompute={list(flags)} has {len(flags)} values for {num_stages} stages; give one for each")
    return frozenset(stage for stage, has_recompute in enumerate(flags) if has_recompute)
