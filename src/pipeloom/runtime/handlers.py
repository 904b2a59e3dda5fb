"""What each kind of action does on a rank: from the values that it takes over to the one that it makes.

What a stage keeps from its forward to its backward stays here; who takes what from whom is the executor's to know.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.batch.losses import StepLoss
from pipeloom.halves import Halves, frozen_in
from pipeloom.ir import Action, Kind
from pipeloom.ir.links import NO_LINKS, Links
from pipeloom.ir.relations import other_stage
from pipeloom.runtime.batch_norm import frozen_buffers
from pipeloom.runtime.boundary import Collector, Gradients, KeptInput, Message, described, detached, moved, run_backward
from pipeloom.runtime.buffer_history import BufferHistory, OwnBuffers, Snapshot, version
from pipeloom.runtime.context import StepContext
from pipeloom.runtime.crossing import Outbox, Routes, StageFlow
from pipeloom.runtime.draws import drawing, drawing_in_backward
from pipeloom.runtime.executor import Handler
from pipeloom.runtime.gradients import GradientScope
from pipeloom.runtime.plain_history import PlainHistory, State
from pipeloom.runtime.selective import running_again
from pipeloom.runtime.stage import Stage
from pipeloom.runtime.sums import Found, add, caught
from pipeloom.runtime.transport.base import Transport

_AS_IT_IS = nullcontext()


@dataclass(slots=True)
class _Held:
    """What a micro-batch leaves on a stage from F (or R) to B.

    Args:
        inputs: per leaf of the stage's input, what collects its gradient.
        outputs: the leaves of the stage's output with their graph; on the last stage the loss alone.
        used: the leaves of the stage's input as its forward used them; where the graph into ``inputs`` begins.
        halves: of a backward that comes in two.
        small: what I found of parameters, but may only be added in W.
    """

    inputs: tuple[Collector | None, ...]
    outputs: tuple[Any, ...]
    used: tuple[Any, ...] = ()
    halves: Halves | None = None
    small: Found = field(default_factory=list)


class RankHandlers:
    """The handlers of one rank for one step, and the micro-batches that it holds meanwhile.

    Args:
        stages: the rank's stages by index.
        num_stages: of the whole model.
        scopes: the gradients that its backwards may add to, by stage: all that are in this process, because a loss
            function may use a weight of any of them; empty in evaluation.
        transport: carries what leaves the rank.
        context: what the step is about.
        links: between stages that are no neighbours.
        split: the micro-batches of stages whose backward comes in two halves, and whether all gradients are added
            in W: where a stage's Ws stand in another order than its Is, or it would add up in two orders.
        recomputed: those whose forward runs again before it, so that the first one keeps nothing but its input.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        num_stages: int,
        scopes: Mapping[int, GradientScope],
        transport: Transport,
        context: StepContext,
        links: Links = NO_LINKS,
        split: Mapping[tuple[int, int], bool] | None = None,
        recomputed: Collection[tuple[int, int]] = (),
    ) -> None:
        self._split, self._recomputed = split or {}, recomputed
        self._waiting: dict[tuple[int, int], tuple[Halves, Found]] = {}
        self._in_w: dict[int, set[int]] = {}
        self._frozen_in: dict[int, tuple[nn.Module, ...]] = {}
        self._routes = Routes(num_stages, links)
        self._stages = stages
        self._last = num_stages - 1
        self._scopes = scopes
        self._transport = transport
        self._context = context
        self._held: dict[tuple[int, int], _Held] = {}
        self._seeds: dict[float, Tensor] = {}
        self._sources: dict[tuple[int, int], tuple[KeptInput, Snapshot, State]] = {}
        self._own_buffers = {index: OwnBuffers(each.module) for index, each in stages.items()}
        self._input_uses = {index: each.input_use for index, each in stages.items()}
        twice = {index for index, _ in recomputed}
        self._histories = {i: BufferHistory(each.module) for i, each in stages.items() if i in twice}
        self._plain = {i: PlainHistory(each.module) for i, each in stages.items() if i in twice}

    @property
    def table(self) -> dict[Kind, Handler]:
        """The handler of every kind that this rank can run."""
        is_training, around = self._context.loss is not None, self._context.around
        table: dict[Kind, Handler] = {
            Kind.FORWARD: self.forward if is_training else self.evaluate,
            Kind.BACKWARD: self.backward,
            Kind.INPUT_GRAD: self.input_grad,
            Kind.WEIGHT_GRAD: self.weight_grad,
            Kind.RECOMPUTE: self.recompute,
            Kind.SEND_F: self.send,
            Kind.SEND_B: self.send,
            Kind.RECV_F: self.receive,
            Kind.RECV_B: self.receive,
            Kind.UNSHARD: _leave_alone,
            Kind.RESHARD: _leave_alone,
            Kind.REDUCE_GRAD: _leave_alone,
        }
        return table if around is None else around(table)

    def evaluate(self, action: Action, given: tuple[Any, ...]) -> Message | Outbox | None:
        """F without a graph."""
        stage = self._stages[action.stage]
        output = self._call(stage, action.microbatch, self._source(action, given).value())
        if action.stage == self._last:
            self._context.outputs[action.microbatch] = detached(output)
            return None
        return self._packed(action, output)[0]

    def forward(self, action: Action, given: tuple[Any, ...]) -> Message | Outbox | None:
        """F: keep the graph for B; or, with recompute, nothing but the stage's input."""
        place, source = (action.stage, action.microbatch), self._source(action, given)
        if place not in self._recomputed:
            # A recompute of another micro-batch may have to know what this forward writes over.
            with self._noting_buffers(action.stage):
                self._held[place], message = self._run_to_keep(action, source)
            return message
        kept, plain = KeptInput(source), self._plain[action.stage].now()
        with self._noting_buffers(action.stage) as buffers:
            # With its graph, which dies here: a forward may differentiate, and R needs as much memory anyway.
            _, message = self._run(action, source)
        kept.forget_unchanged()
        self._sources[place] = (kept, buffers, plain)
        return message

    def _noting_buffers(self, stage: int) -> AbstractContextManager[Snapshot]:
        history = self._histories.get(stage)
        return nullcontext({}) if history is None else history.forward()

    def recompute(self, action: Action, _: tuple[Any, ...]) -> None:
        """R: the forward again, from the input, draws, buffers and counters that F had; it updates nothing."""
        place = (action.stage, action.microbatch)
        kept, buffers, plain = self._sources.pop(place)
        frozen = frozen_buffers(self._stages[action.stage].module, buffers)
        with frozen, self._plain[action.stage].as_they_were(plain):
            self._held[place], _message = self._run_to_keep(action, kept.as_it_was())
        if self._input_uses[action.stage].is_reading:  # or it may have been this forward that wrote
            kept.check_untouched()

    def backward(self, action: Action, given: tuple[Any, ...]) -> Gradients | Outbox | None:
        """B: gradients of the parameters, and of the input for the stages that it came from."""
        return self._back_propagate(action, given, self._held.pop((action.stage, action.microbatch)))

    def input_grad(self, action: Action, given: tuple[Any, ...]) -> Gradients | Outbox | None:
        """I: gradients of the input, for the stages that it came from; those of the parameters wait for W."""
        place = (action.stage, action.microbatch)
        held = self._held.pop(place)
        assert held.halves is not None, "`split` says which backwards come in two halves"
        passed_on = self._back_propagate(action, given, held)
        self._waiting[place] = held.halves, held.small
        return passed_on

    def weight_grad(self, action: Action, _: tuple[Any, ...]) -> None:
        """W: what I has left, added to the gradients of the parameters."""
        halves, small = self._waiting.pop((action.stage, action.microbatch))
        add(small)
        with self._drawing_in_backward(action), running_again(self._stages[action.stage].again):
            halves.weight_gradients()

    def _back_propagate(self, action: Action, given: tuple[Any, ...], held: _Held) -> Gradients | Outbox | None:
        flow = self._flow(action)
        seeded, grads, is_apart = self._seeded(action, flow, held, given)
        if is_apart:
            for scope in self._scopes.values():
                scope.set_apart()
        for each in held.inputs:
            if each is not None:
                each.go_last()
        # A checkpoint of the user's around a module that runs again runs it too, and has to find what its forward
        # found. The mode of a split backward no wider: it sees what is inside call by call.
        with (
            self._drawing_in_backward(action),
            running_again(self._stages[action.stage].again),
            caught(self._late(action, held)) as held.small,
            _AS_IT_IS if held.halves is None else held.halves.input_gradients(),
        ):
            run_backward(seeded, grads)
        passed_on = tuple([None if each is None else each.grad for each in held.inputs])
        if action.stage == 0:
            self._context.input_grads[action.microbatch] = passed_on
            return None
        return (
            Gradients(passed_on, is_apart)
            if flow is None
            else self._routes.returned(action.stage, flow, passed_on, is_apart)
        )

    def _late(self, action: Action, held: _Held) -> Sequence[Tensor]:
        """The parameters whose gradients may not be added before W, though I finds them."""
        if held.halves is None:
            return ()
        if self._split[action.stage, action.microbatch]:
            now = self._stages[action.stage].module.parameters()  # where weights have versions, none of the scope's
            return list(dict.fromkeys([*self._scopes[action.stage].parameters, *now]))
        return held.halves.undecided(self._in_w[action.stage])

    def _drawing_in_backward(self, action: Action) -> AbstractContextManager[None]:
        return drawing_in_backward(self._context.draw_key(action.microbatch, f"backward of stage {action.stage}"))

    def _seeded(
        self, action: Action, flow: StageFlow | None, held: _Held, given: tuple[Any, ...]
    ) -> tuple[Sequence[Any], Sequence[Tensor | None], bool]:
        """Where a backward starts, with which gradients, and whether they are scaled later."""
        device = self._stages[action.stage].device
        if action.stage == self._last:
            seed = self._seed(action.microbatch, held)
            return held.outputs, seed.leaves, seed.is_apart
        if flow is None:
            grads = given[0].to(device)
            return held.outputs, grads.leaves, grads.is_apart
        came, is_apart = self._routes.seeds(action.stage, flow, given)
        values, tensors = (*flow.outgoing, *flow.incoming), (*held.outputs, *held.used)
        pairs = [(tensor, moved(came[value], device)) for value, tensor in zip(values, tensors, strict=True)
                 if value in came]  # fmt: skip
        return [tensor for tensor, _ in pairs], [grad for _, grad in pairs], is_apart

    def send(self, action: Action, given: tuple[Any, ...]) -> None:
        """SEND: post what the stage made."""
        (made,) = given
        self._transport.send(action, made[other_stage(action)] if isinstance(made, Outbox) else made)

    def receive(self, action: Action, _: tuple[Any, ...]) -> None:
        """RECV: post a place for what another rank sends."""
        self._transport.post(action)

    def _seed(self, microbatch: int, held: _Held) -> Gradients:
        """Where the last stage's backward starts; micro-batches that weigh the same share one tensor."""
        loss, (output,) = self._step_loss, held.outputs
        weight = loss.seed(microbatch)
        seed = self._seeds.get(weight)
        # Its version says whether a hook wrote into it.
        if seed is None or version(seed) or seed.dtype != output.dtype or seed.device != output.device:
            self._seeds[weight] = seed = torch.full_like(output, weight)
        return Gradients((seed,), loss.is_deferred)

    def _run_to_keep(self, action: Action, source: Message) -> tuple[_Held, Message | Outbox | None]:
        """A forward whose graph the backward uses, whole or in two halves."""
        if (action.stage, action.microbatch) not in self._split:
            return self._run(action, source)
        halves = Halves(self._frozen(action.stage))
        held, message = self._run(action, source, halves)
        held.halves = halves
        self._in_w.setdefault(action.stage, set()).update(halves.in_w)  # ids: versions of weights come and go
        return held, message

    def _frozen(self, stage: int) -> tuple[nn.Module, ...]:
        """The parts of a stage without anything to train."""
        if all(each.requires_grad for each in self._scopes[stage].parameters):  # soon told
            return ()
        if stage not in self._frozen_in:
            self._frozen_in[stage] = frozen_in(self._stages[stage].module)
        return self._frozen_in[stage]

    def _run(
        self, action: Action, source: Message, halves: Halves | None = None
    ) -> tuple[_Held, Message | Outbox | None]:
        """One stage's forward under autograd: what B needs, and what the next stage gets."""
        use = self._input_uses[action.stage]
        if not source.is_one_tensor:
            return self._run_with(action, source, halves, *source.opened())
        if use.is_reading and not self._context.ambient.has_autocast:  # which caches casts of leaves, of no others
            is_last_use = action.stage > 0 and (action.stage, action.microbatch) not in self._recomputed
            try:
                return self._run_with(action, source, halves, *source.opened_to_read(is_last_use=is_last_use))
            except RuntimeError as error:
                if not use.note_refusal(error):
                    raise
        before = version(source.leaves[0])
        done = self._run_with(action, source, halves, *source.opened())
        use.note(is_written=version(source.leaves[0]) != before)
        return done

    def _run_with(
        self,
        action: Action,
        source: Message,
        halves: Halves | None,
        value: Any,
        inputs: tuple[Collector | None, ...],
    ) -> tuple[_Held, Message | Outbox | None]:
        stage = self._stages[action.stage]
        is_recomputed = (action.stage, action.microbatch) in self._recomputed
        with source.guarded(is_recomputed=is_recomputed), running_again(stage.again):
            if action.stage == self._last:
                loss = self._loss_of(stage, action.microbatch, value, halves)
                return _Held(inputs, (loss,)), None
            output = self._call(stage, action.microbatch, value, halves)
        message, leaves = self._packed(action, output)
        return _Held(inputs, leaves, _used(stage, value)), message

    def _packed(self, action: Action, output: Any) -> tuple[Message | Outbox, tuple[Any, ...]]:
        """What goes to other stages, and its leaves with their graph."""
        part, flow = self._own_buffers[action.stage].part, self._flow(action)
        if flow is None:
            return Message.of(output, part)
        return self._routes.parted(action.stage, flow, output, part), output

    def _flow(self, action: Action) -> StageFlow | None:
        """What crosses, in a model that was cut by running it."""
        return None if self._stages[action.stage].part is None else self._context.flow(action.microbatch, action.stage)

    def _loss_of(self, stage: Stage, microbatch: int, value: Any, halves: Halves | None) -> Tensor:
        context = self._context
        target = moved(context.inputs[microbatch].target, stage.device)
        with context.ambient.autocast(), _mode(halves):
            output = self._units(stage, microbatch, value)
            if context.has_outputs:
                context.outputs[microbatch] = detached(output)
            with drawing(context.draw_key(microbatch, "loss_fn"), foreign=context.foreign):
                return self._step_loss.compute(microbatch, output, target)

    def _call(self, stage: Stage, microbatch: int, value: Any, halves: Halves | None = None) -> Any:
        with self._context.ambient.autocast(), _mode(halves):
            return self._units(stage, microbatch, value)

    def _units(self, stage: Stage, microbatch: int, value: Any) -> Any:
        draws = self._context.draws(microbatch)
        try:
            if stage.part is None:
                return stage(value, draws)
            inputs = self._context.inputs[microbatch]
            args, kwargs = value if stage.index == 0 else moved((inputs.args, inputs.kwargs), stage.device)
            received = () if stage.index == 0 else _leaves_of(value)
            output, sent = stage.part(self._context.plans[microbatch], (args, kwargs), received, draws)
            return output if stage.index == self._last else sent
        except BaseException as error:
            error.add_note(f"stage {stage.index} was given: {described(value)}")
            raise

    def _source(self, action: Action, given: tuple[Message, ...]) -> Message:
        """The input of a stage: the model's, or what the stage before made."""
        if action.stage == 0:
            inputs = self._context.inputs[action.microbatch]
            given = (Message.of_inputs(inputs.args, inputs.kwargs),)
        elif (flow := self._flow(action)) is not None:
            given = (self._routes.joined(action.stage, flow, given),)
        (message,) = given
        return message.to(self._stages[action.stage].device)

    @property
    def _step_loss(self) -> StepLoss:
        assert self._context.loss is not None, "evaluation has no backward"
        return self._context.loss


def _mode(halves: Halves | None) -> AbstractContextManager[object]:
    """Around the units of a forward whose backward may come in two halves."""
    return _AS_IT_IS if halves is None else halves.forward()


def _leave_alone(*_: Any) -> None:
    """Parameters that are whole everywhere need not be gathered, let go or reduced."""


def _used(stage: Stage, value: Any) -> tuple[Any, ...]:
    """The values that a stage used, where gradients of them may come from later stages too."""
    return () if stage.part is None or stage.index == 0 else _leaves_of(value)


def _leaves_of(value: Any) -> tuple[Any, ...]:
    """What came to a stage: one tensor, or a tuple of them."""
    return value if isinstance(value, tuple) else (value,)
