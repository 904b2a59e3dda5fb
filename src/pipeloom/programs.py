"""What a pipeline runs: a schedule for each number of micro-batches, checked and lowered once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from pipeloom.errors import ScheduleError, SplitError, UnknownSchedule, UnsupportedShape
from pipeloom.ir import Kind, Links, Placement, Schedule
from pipeloom.ir.action import COMPUTE_KINDS, STAGE_KINDS
from pipeloom.ir.counts import is_whole
from pipeloom.ir.links import NO_LINKS
from pipeloom.ir.verify import require_valid
from pipeloom.passes import add_recompute, add_reductions, add_transfers, close_pairs, post_receives_early
from pipeloom.runtime.executor import Plan
from pipeloom.runtime.pairs import OverlapFn
from pipeloom.schedules import schedule as make_schedule
from pipeloom.schedules.forward_only import evaluation
from pipeloom.schedules.registry import entry

Recompute = bool | str | Sequence[bool] | Sequence[str]

_RUNNABLE = COMPUTE_KINDS | STAGE_KINDS | {Kind.UPDATE}


class Programs:
    """The plans of one pipeline, made when they are first asked for.

    Args:
        schedule: a name, or a `Schedule` without transfers.
        num_stages: of the model.
        recompute: which stages recompute: one value, or one per stage; or names of modules that do.
        num_ranks: how many ranks hold them; None: as the schedule has it by itself.
        overlap: runs pairs of actions that overlap.
        receive_slots: receive buffers of a rank; None: the fewest that suffice.

    Attributes:
        recomputed: the stages that recompute as a whole.
        recomputed_names: names, or patterns of names, of modules that recompute by themselves.
        name: of the schedule.
        placement: which rank holds which stage.
        updates_weights: whether the schedule does so by itself, on the way.

    Raises:
        UnknownSchedule: no schedule has that name.
        ScheduleError: ``overlap`` cannot be called.
        SplitError: ``recompute`` has another number of values than there are stages.
    """

    def __init__(
        self,
        schedule: str | Schedule,
        num_stages: int,
        recompute: Recompute,
        num_ranks: int | None = None,
        overlap: OverlapFn | None = None,
        receive_slots: int | None = None,
    ) -> None:
        if overlap is not None and not callable(overlap):
            raise ScheduleError(f"overlap={overlap!r} was given; a function of two calls is needed")
        self._schedule = schedule
        self._num_ranks = num_ranks
        self._overlap, self._receive_slots = overlap, receive_slots
        self._num_stages = num_stages
        self.recomputed, self.recomputed_names = _recomputed(recompute, num_stages)
        self._plans: dict[tuple[int, bool, Links], Plan] = {}
        self._stream: tuple[tuple[tuple[int, ...], Links], Plan] | None = None
        made = self._made(self.checked(None))
        self.name, self.placement, self.updates_weights = made.name, made.placement, bool(made.updates)

    def checked(self, num_microbatches: int | None) -> int:
        """A number of micro-batches that can be run; None: the schedule's own, or one per stage.

        Raises:
            UnsupportedShape: it is no positive whole number, or not that of the given `Schedule`.
        """
        given, own = num_microbatches, self._schedule
        if given is not None and (not is_whole(given) or given < 1):
            raise UnsupportedShape(f"num_microbatches={given!r} was given; a whole number of at least 1 is needed")
        if not isinstance(own, Schedule):
            usual = entry(own).microbatches_per_batch if isinstance(own, str) else None
            return int(given or usual or self._num_stages)
        if given not in (None, own.num_microbatches):
            raise UnsupportedShape(
                f"num_microbatches={given} was given with a schedule of {own.num_microbatches} micro-batches",
                "leave num_microbatches out, or give the schedule by its name",
            )
        return own.num_microbatches

    def training(self, num_microbatches: int, links: Links = NO_LINKS) -> Plan:
        """Forwards and backwards, with recomputation, transfers, and where there are two replicas their reductions.

        Raises:
            ScheduleError: the schedule does not fit the stages, is wrong, or holds what cannot be run.
        """
        key = (num_microbatches, True, links)
        if key not in self._plans:
            self._plans[key] = self._planned(self._made(num_microbatches), links)
        return self._plans[key]

    def batch_sizes(self, num_batches: int, num_microbatches: int) -> list[int]:
        """Of a stream, into how many micro-batches each batch is cut.

        Args:
            num_batches: of the stream.
            num_microbatches: into how many a batch is cut; a given `Schedule` says itself where its batches end.

        Raises:
            UnsupportedShape: the given `Schedule` is one of another number of batches.
        """
        own = self._schedule
        if not isinstance(own, Schedule):
            return [num_microbatches] * num_batches
        ends = [0, *[last + 1 for last in own.updates]]
        if len(own.updates) != num_batches:
            raise UnsupportedShape(
                f"{num_batches} batches were given with a schedule that updates weights {len(own.updates)} times; each "
                "batch is one update",
                "give as many batches, or the schedule by its name",
            )
        return [end - start for start, end in pairwise(ends)]

    def stream(self, sizes: Sequence[int], links: Links = NO_LINKS) -> Plan:
        """Forwards, backwards and updates of many batches, one after another; the last such plan is kept.

        Args:
            sizes: per batch, its micro-batches; all the same where the schedule is given by name.
            links: between stages that are no neighbours.
        """
        key = (tuple(sizes), links)
        if self._stream is None or self._stream[0] != key:
            self._stream = key, self._planned(self._made(sum(sizes), sizes[0]), links)
        return self._stream[1]

    def evaluation(self, num_microbatches: int, links: Links = NO_LINKS) -> Plan:
        """Forwards alone, on the same placement; of two replicas the first, whose outputs are all in one place."""
        key = (num_microbatches, False, links)
        if key not in self._plans:
            made = evaluation(Placement(self.placement.ranks), num_microbatches).with_links(Links(links.forward))
            self._plans[key] = self._lowered(made)
        return self._plans[key]

    def _planned(self, made: Schedule, links: Links) -> Plan:
        computed = add_recompute(require_valid(made.with_links(links)), self.recomputed)
        return self._lowered(add_reductions(computed) if made.placement.opposed else computed)

    def _lowered(self, computed: Schedule) -> Plan:
        made = add_transfers(computed)
        made = made if self._overlap is None else close_pairs(made)
        made = made if self._receive_slots is None else post_receives_early(made, self._receive_slots)
        return Plan(require_valid(made), self._overlap)

    def _made(self, num_microbatches: int, microbatches_per_update: int | None = None) -> Schedule:
        made = self._schedule
        if not isinstance(made, str | Schedule):
            raise UnknownSchedule(f"schedule={made!r} was given; a name or a Schedule is needed")
        if isinstance(made, str):
            options: dict[str, Any] = {}
            if entry(made).is_asynchronous:  # one batch, where nobody says how many there are
                options["microbatches_per_update"] = microbatches_per_update or num_microbatches
            return self._named(made, num_microbatches, options)
        if made.num_stages != self._num_stages:
            raise UnsupportedShape(
                f"the schedule is for {made.num_stages} stages; the model has {self._num_stages}",
                f"cut the model into {made.num_stages} stages, or give the schedule by its name",
            )
        other = next((action for action in made if action.kind not in _RUNNABLE), None)
        if other is not None or made.is_forward_only:
            raise UnsupportedShape(
                f"the schedule {'has forwards only' if other is None else f'holds {other}'}; a training step runs "
                "schedules of computations, and adds transfers itself"
            )
        return made

    def _named(self, name: str, num_microbatches: int, options: dict[str, Any]) -> Schedule:
        stages_per_rank = entry(name).stages_per_rank
        if self._num_ranks is not None and is_whole(self._num_ranks) and self._num_ranks > 0:
            stages_per_rank = max(1, self._num_stages // self._num_ranks)
        num_ranks, rest = divmod(self._num_stages, stages_per_rank)
        if rest or not num_ranks:
            raise UnsupportedShape(
                f"schedule {name!r} holds {stages_per_rank} stages on each rank; the model is cut into "
                f"{self._num_stages}",
                f"cut it into {max(1, num_ranks) * stages_per_rank} or {(num_ranks + 1) * stages_per_rank} stages",
            )
        return make_schedule(
            name, num_ranks=num_ranks, stages_per_rank=stages_per_rank, num_microbatches=num_microbatches, **options
        )


def _recomputed(recompute: Recompute, num_stages: int) -> tuple[frozenset[int], tuple[str, ...]]:
    """The stages that recompute as a whole, and names of what else does."""
    if isinstance(recompute, str):
        return frozenset(), (recompute,)
    flags = [recompute] * num_stages if isinstance(recompute, bool) else recompute
    is_list = isinstance(flags, Sequence)
    if is_list and flags and all(isinstance(each, str) for each in flags):
        return frozenset(), tuple(map(str, flags))
    if not is_list or not all(isinstance(each, bool) for each in flags):
        raise SplitError(
            f"recompute={flags!r} was given; True, False, or one of them for each stage, or names of modules are needed"
        )
    if len(flags) != num_stages:
        raise SplitError(f"recompute={list(flags)} has {len(flags)} values for {num_stages} stages; give one for each")
    return frozenset(stage for stage, flag in enumerate(flags) if flag), ()
