"""One rank of a pipeline whose ranks are processes."""

from __future__ import annotations

import pickle
import weakref
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pipeloom.batch.losses import StepLoss, Verdict
from pipeloom.batch.told import hear, told
from pipeloom.errors import NonFiniteLoss, PeerFailed, ProcessError
from pipeloom.ir import Placement, Schedule
from pipeloom.peers import Cause, Ending, Stalls
from pipeloom.processes.checksum import checksum_of
from pipeloom.processes.company import Company
from pipeloom.processes.lanes import Lanes
from pipeloom.processes.opposite import Opposite
from pipeloom.processes.parcels import Parcel, parcel_of, value_of, weights_of, weights_parcel
from pipeloom.processes.post import Call, Post, Waiting
from pipeloom.processes.transport import DistributedTransport
from pipeloom.runtime.context import StepContext
from pipeloom.runtime.executor import Plan, execute
from pipeloom.runtime.gradients import GradientChanges
from pipeloom.runtime.replicas import Second, scopes_of, table_of
from pipeloom.runtime.stage import Stage
from pipeloom.runtime.trace import Trace

_MOST_ACTIONS = 4096
"""Of a schedule whose spans go over connections that nobody reads while ranks compute: 64 KiB."""


class Tie(Protocol):
    """A weight that a stage owns, and a later stage's copy of it; `pipeloom.splitting.ties.Tie` is one."""

    @property
    def owner(self) -> nn.Parameter:
        """The weight; where its stage is on another rank, it shares the copy's memory."""

    @property
    def copy(self) -> nn.Parameter:
        """What the later stage has."""

    @property
    def owner_stage(self) -> int:
        """The stage that owns it."""

    @property
    def stage(self) -> int:
        """The later stage."""


class DistributedRuntime:
    """Runs this rank's part of schedules, in the thread that calls.

    Args:
        company: the processes.
        stages: this rank's, by index.
        placement: which rank runs which stage.
        channels: the ordered pairs of ranks between which schedules send.
        ties: between one of these stages and one on another rank, by a number that both use.
        second: the second replica's stages here, where the placement has two.
        has_ties: whether any two ranks share a weight.

    Attributes:
        rank: of this process.
        num_ranks: how many there are.
        trace: of the last call, of all ranks; None if it was not traced.
        peak_live_slots: per rank, the most receives that were live at once in the last call.
    """

    def __init__(
        self,
        company: Company,
        stages: Mapping[int, Stage],
        placement: Placement,
        channels: Collection[tuple[int, int]],
        ties: Mapping[int, Tie],
        second: Second | None = None,
        *,
        has_ties: bool,
    ) -> None:
        world = company.world
        self.rank, self.num_ranks = world.rank, world.num_ranks
        self._company, self._where = company, company.where
        self._failures, self._collective = company.failures, company.collective
        self._stages, self._placement = dict(stages), placement
        self._ties, self._has_ties = ties, has_ties
        self._number, self._num_exchanges = 0, 0
        self._is_long = False
        self.trace: Trace | None = None
        self.peak_live_slots: tuple[int, ...] = ()
        self._lanes = lanes = Lanes(world.backend, world.global_ranks, channels, world.rank, world.device)
        stalled = partial(_stalled, company.stalls, company.limit_s)
        connections = company.connect_again("direct")
        self._post = Post(company.mesh, connections, lanes, company.failures, company.limit_s, stalled)
        company.where.post, self._post.look = self._post, company.look
        self._transport = DistributedTransport(self._post)
        self._second = second
        self._loss: StepLoss | None = None
        self._opposite = None if second is None else Opposite(self._stages, second, placement, self.rank, self._post)
        self._let_go = weakref.finalize(self, _shut, company.ending, lanes, self._post)

    def meet(self) -> None:
        """Make torch's groups, once all ranks have come as far; nobody begins a step before all have them.

        Making them waits for all ranks, and hears of deaths only.

        Raises:
            PeerFailed: another rank failed first, or is gone.
            ProcessError: torch.distributed failed by itself.
        """
        self.all_gather(b"", "the stages")
        with self._company.hearing():
            self._lanes.open()
        self.all_gather(b"", "the groups")
        self._company.leave()

    def run(self, plan: Plan, context: StepContext, *, has_trace: bool) -> GradientChanges:
        """Run this rank's program of one step or evaluation; `agree` has to follow.

        Returns:
            The changes of the gradients of its stages, which can still be undone.

        Raises:
            PeerFailed: another rank failed first, or is gone.
            BaseException: what a stage raised here. Gradients are as they were before.
        """
        self._loss, num_stages = context.loss, self._placement.num_stages
        scopes = {} if context.loss is None else scopes_of(self._stages, self._second, context.loss, num_stages)
        opposite = self._opposite if plan.schedule.placement.opposed else None
        own = [self._stages] if opposite is None else [self._stages, opposite.stages]
        changes = GradientChanges(scopes, self._failed)
        with changes, context.ambient.entered_here(), torch.set_grad_enabled(context.loss is not None):
            self._begin(plan.schedule, context)
            self.trace = Trace(plan.schedule) if has_trace else None
            reduce = None if opposite is None else opposite.reduce
            table = table_of(own, plan, scopes, self._transport, context, self._second, reduce)
            self._refresh()
            with nullcontext() if opposite is None else opposite.step(context):
                execute(plan, self.rank, table, self._transport, self._where.control, self.trace)
        return changes

    def agree(self, verdict: Callable[[], Verdict] | None) -> Verdict | None:
        """End a call on all ranks together, with the verdict of the rank that has the losses.

        Args:
            verdict: makes it; None in an evaluation.
        """
        own = self._found(verdict) if verdict else None
        times = None if self.trace is None else self.trace.of(self.rank)
        said = pickle.dumps((own, times, self._transport.peak_live_slots))
        self._post.end()
        what = f"the end of {self._where.what}"
        self._post.flush(what)  # nobody sends the rest while this rank meets the others
        gather = self.all_gather if verdict is None or self._is_long else self._gathered
        parts = [pickle.loads(each) for each in gather(said, what)]
        self._post.settle()
        self._company.leave()
        self.peak_live_slots = tuple(slots for _, _, slots in parts)
        for rank, (_, spans, _) in enumerate(parts):
            if self.trace is not None and spans is not None:
                self.trace.put(rank, *spans)
        return verdict and self._agreed(verdict, [found for found, _, _ in parts if found is not None])

    def _found(self, verdict: Callable[[], Verdict]) -> Any:
        """What this rank knows of the losses; of two replicas each has some, and nobody all."""
        if self._second is None:
            return _plain(verdict()) if self._has_last_stage else None
        assert self._loss is not None, "a training step has losses"
        return told(self._loss)

    def _agreed(self, verdict: Callable[[], Verdict], found: Sequence[Any]) -> Verdict:
        if self._second is None:
            return _verdict(found[0])
        assert self._loss is not None, "a training step has losses"
        for each in found:
            hear(self._loss, each)
        return verdict()

    def _gathered(self, payload: bytes, what: str) -> list[bytes]:
        """`all_gather` at the end of a step, over the connections that ranks read themselves.

        By way of the rank that ends last, as a rule: that makes 2 (n - 1) messages instead of n (n - 1), and nobody's
        thread of connections wakes. Nobody comes to the end of a step that others have not begun, so there is no
        need to compare what the ranks are at.
        """
        key, first = what.encode(), self._placement.rank_of(0)
        if self.rank != first:
            self._post.tell(first, key, payload)
            gathered: list[bytes] = pickle.loads(self._post.hear(first, key))
            return gathered
        others = [rank for rank in range(self.num_ranks) if rank != first]
        said = {rank: self._post.hear(rank, key) for rank in others} | {first: payload}
        parts = [said[rank] for rank in range(self.num_ranks)]
        words = pickle.dumps(parts)
        for rank in others:
            self._post.tell(rank, key, words)
        self._post.flush(what)
        return parts

    def all_gather(self, payload: bytes, what: str) -> list[bytes]:
        """Every rank's payload, in rank order; all ranks have to call it, and it waits for them."""
        return self._company.all_gather(payload, what)

    def gather_ties(self) -> None:
        """After a step: hand each share of a weight's gradient to the rank that owns it."""
        for number, tie in self._ties.items():
            if tie.stage in self._stages:
                self._give(tie.owner_stage, f"share {number}", tie.copy.grad)
                tie.copy.grad = None
        for number, tie in self._ties.items():
            if tie.owner_stage in self._stages:
                share = self._get(tie.stage, f"share {number}")
                tie.copy.grad = None if share is None else share.to(tie.copy.device)
        if self._has_ties:  # or a rank could end its program with a share still under way
            self.all_gather(b"", f"the shares of {self._where.what}")
            self._post.settle()

    def to_all(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every rank's tensors on every rank, by name, on the CPU; collective."""
        parts = self._exchange(_on_cpu(tensors), range(self.num_ranks), range(self.num_ranks))
        return dict(tensors) | {name: leaf for part in parts for name, leaf in zip(part.form, part.leaves, strict=True)}

    def to_one(self, values: dict[str, Any], rank: int) -> dict[str, Any]:
        """Every rank's values on one rank, tensors on the CPU, and nothing on the others; collective."""
        if rank not in range(self.num_ranks):
            raise ProcessError(f"to={rank!r} was given; a rank is needed, from 0 to {self.num_ranks - 1}")
        parts = self._exchange(_on_cpu(values), range(self.num_ranks), [rank])
        if self.rank != rank:
            return {}
        return values | {name: leaf for part in parts for name, leaf in zip(part.form, part.leaves, strict=True)}

    def from_last(self, value: Any) -> Any:
        """What the rank of the last stage has, on every rank; collective."""
        last = self._placement.rank_of(self._placement.num_stages - 1)
        parts = self._exchange(parcel_of(value), [last], range(self.num_ranks))
        return value if self.rank == last else value_of(parts[0])

    def _exchange(self, parcel: Parcel, senders: Sequence[int], receivers: Sequence[int]) -> list[Parcel]:
        """Send to all receivers but this rank, then receive what came from others; nobody leaves before all have it."""
        self._company.check_usable()
        self._num_exchanges += 1
        key = f"exchange {self._num_exchanges} after {self._where.what}".encode()
        if self.rank in senders:
            for peer in receivers:
                if peer != self.rank:
                    self._post.give(peer, key, parcel, is_direct=False)
        parts = [self._post.get(peer, key) for peer in senders if peer != self.rank] if self.rank in receivers else []
        self.all_gather(b"", key.decode())
        self._post.settle()
        return parts

    def wait_for_late_ranks(self) -> None:
        """Nothing is ever late: a call ends in the thread that made it."""

    def close(self) -> None:
        """Say good-bye and close the connections."""
        self.close_after(None)

    def close_after(self, error: BaseException | None) -> None:
        """Say why, if an exception of this rank's user is the reason, and close the connections."""
        self._let_go.detach()
        self._company.close_after(None if isinstance(error, NonFiniteLoss) else error)  # all ranks say that one
        _shut(self._company.ending, self._lanes, self._post)

    @property
    def _has_last_stage(self) -> bool:
        return self._placement.num_stages - 1 in self._stages

    def _refresh(self) -> None:
        """Before a step: give the stages on other ranks that share a weight its present value."""
        for number, tie in self._ties.items():
            if tie.owner_stage in self._stages:
                self._give(tie.stage, f"tie {number}", tie.owner.detach())
        for number, tie in self._ties.items():
            if tie.stage in self._stages:
                with torch.no_grad():
                    tie.owner.copy_(self._get(tie.owner_stage, f"tie {number}"))

    def _begin(self, schedule: Schedule, context: StepContext) -> None:
        self._number += 1  # first: the calls are counted alike on a rank that hears of a failure before it begins
        self._num_exchanges = 0
        self._collective.epoch += 1
        self._company.check_usable()
        self._failures.check()
        is_step = context.loss is not None
        self._where.begin(f"step {context.step_index}" if is_step else f"an evaluation after step {context.step_index}")
        self._is_long = sum(map(len, schedule.programs)) > _MOST_ACTIONS
        plans = [plan.digest for plan in context.plans]
        checksum = zlib.crc32(f"{schedule.digest} {context.seed} {context.step_index} {plans}".encode())
        self._transport.begin(schedule, Call(self._number, checksum, checksum_of(context)))

    def _failed(self, error: BaseException) -> None:
        """Tell the others, unless they know: what ends their step is what ended this one.

        Raises:
            PeerFailed: another rank failed at the same time, and its cause is what all ranks raise.
        """
        try:
            if not isinstance(error, PeerFailed | NonFiniteLoss):
                self._failures.report(error)
                self._failures.check()
        finally:
            self._company.leave()

    def _give(self, stage: int, key: str, value: Tensor | None) -> None:
        self._post.give(self._placement.rank_of(stage), key.encode(), weights_parcel([value]), is_direct=False)

    def _get(self, stage: int, key: str) -> Any:
        (value,) = weights_of(self._post.get(self._placement.rank_of(stage), key.encode()))
        return value


def _stalled(stalls: Stalls, limit_s: float, waiting: Waiting) -> Cause:
    return stalls.cause(waiting.what, limit_s)


def _shut(ending: Ending, lanes: Lanes, post: Post) -> None:
    ending.close()
    lanes.close()
    post.close()


def _on_cpu(values: Mapping[str, Any]) -> Parcel:
    once = {id(each): each.detach().cpu() if isinstance(each, Tensor) else each for each in values.values()}
    return Parcel(tuple(once[id(each)] for each in values.values()), tuple(values))


def _plain(verdict: Verdict) -> Any:
    fault = verdict.fault
    said = None if fault is None else (fault.message, fault.step_index, fault.microbatch, fault.hint)
    return verdict.value.tolist(), str(verdict.value.dtype).removeprefix("torch."), verdict.scale, said


def _verdict(plain: Any) -> Verdict:
    value, dtype, scale, said = plain
    fault = None
    if said is not None:
        message, step_index, microbatch, hint = said
        fault = NonFiniteLoss(message, step_index=step_index, microbatch=microbatch, hint=hint)
    return Verdict(torch.tensor(value, dtype=getattr(torch, dtype)), scale, fault)
