"""What each kind of action does on a rank: from the values that it takes over to the one that it makes.

What a stage keeps from its forward to its backward stays here; who takes what from whom is the executor's to know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeloom.batch.losses import StepLoss
from pipeloom.ir import Action, Kind
from pipeloom.runtime.batch_norm import frozen_buffers
from pipeloom.runtime.boundary import Gradients, KeptInput, Message, described, detached, moved, run_backward
from pipeloom.runtime.buffer_history import BufferHistory, OwnBuffers, Snapshot, version
from pipeloom.runtime.context import StepContext
from pipeloom.runtime.draws import drawing, drawing_in_backward
from pipeloom.runtime.executor import Handler
from pipeloom.runtime.gradients import GradientScope
from pipeloom.runtime.stage import Stage
from pipeloom.runtime.transport.base import Transport


@dataclass(slots=True)
class _Held:
    """What a micro-batch leaves on a stage from F (or R) to B.

    Args:
        inputs: per leaf of the stage's input, the tensor that collects its gradient.
        outputs: the leaves of the stage's output with their graph; on the last stage the loss alone.
    """

    inputs: tuple[Tensor | None, ...]
    outputs: tuple[Any, ...]


class RankHandlers:
    """The handlers of one rank for one step, and the micro-batches that it holds meanwhile.

    Args:
        stages: the rank's stages by index.
        num_stages: of the whole model.
        scopes: the gradients that its backwards may add to, by stage: all that are in this process, because a loss
            function may use a weight of any of them; empty in evaluation.
        transport: carries what leaves the rank.
        context: what the step is about.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        num_stages: int,
        scopes: Mapping[int, GradientScope],
        transport: Transport,
        context: StepContext,
    ) -> None:
        self._stages = stages
        self._last = num_stages - 1
        self._scopes = scopes
        self._transport = transport
        self._context = context
        self._held: dict[tuple[int, int], _Held] = {}
        self._seeds: dict[float, Tensor] = {}
        self._sources: dict[tuple[int, int], tuple[KeptInput, Snapshot]] = {}
        self._own_buffers = {index: OwnBuffers(each.module) for index, each in stages.items()}
        self._input_uses = {index: each.input_use for index, each in stages.items()}
        self._histories = {i: BufferHistory(each.module) for i, each in stages.items() if each.has_recompute}

    @property
    def table(self) -> dict[Kind, Handler]:
        """The handler of every kind that this rank can run."""
        is_training = self._context.loss is not None
        return {
            Kind.FORWARD: self.forward if is_training else self.evaluate,
            Kind.BACKWARD: self.backward,
            Kind.RECOMPUTE: self.recompute,
            Kind.SEND_F: self.send,
            Kind.SEND_B: self.send,
            Kind.RECV_F: self.receive,
            Kind.RECV_B: self.receive,
        }

    def evaluate(self, action: Action, given: tuple[Any, ...]) -> Message | None:
        """F without a graph."""
        stage = self._stages[action.stage]
        output = self._call(stage, action.microbatch, self._source(action, given).value())
        if action.stage == self._last:
            self._context.outputs[action.microbatch] = detached(output)
            return None
        return Message.of(output, self._own_buffers[stage.index].part)[0]

    def forward(self, action: Action, given: tuple[Any, ...]) -> Message | None:
        """F: keep the graph for B; or, with recompute, nothing but the stage's input."""
        place, source = (action.stage, action.microbatch), self._source(action, given)
        if self._stages[action.stage].has_recompute:
            kept = KeptInput(source)
            with self._histories[action.stage].forward() as buffers:
                # With its graph, which dies here: a forward may differentiate, and R needs as much memory anyway.
                _, message = self._run(action, source)
            kept.forget_unchanged()
            self._sources[place] = (kept, buffers)
        else:
            self._held[place], message = self._run(action, source)
        return message

    def recompute(self, action: Action, _: tuple[Any, ...]) -> None:
        """R: the forward again, from the input, the random draws and the buffers that F had; it updates nothing."""
        place = (action.stage, action.microbatch)
        kept, buffers = self._sources.pop(place)
        with frozen_buffers(self._stages[action.stage].module, buffers):
            self._held[place], _message = self._run(action, kept.as_it_was())
        if self._input_uses[action.stage].is_reading:  # or it may have been this forward that wrote
            kept.check_untouched()

    def backward(self, action: Action, given: tuple[Gradients, ...]) -> Gradients | None:
        """B: gradients of the parameters, and of the input for the stage before."""
        held = self._held.pop((action.stage, action.microbatch))
        grads = given[0].to(self._stages[action.stage].device) if given else self._seed(action.microbatch, held)
        if grads.is_apart:
            for scope in self._scopes.values():
                scope.set_apart()
        with drawing_in_backward(self._context.draw_key(action.microbatch, f"backward of stage {action.stage}")):
            run_backward(held.outputs, grads.leaves)
        passed_on = tuple([None if each is None else each.grad for each in held.inputs])
        if action.stage == 0:
            self._context.input_grads[action.microbatch] = passed_on
            return None
        return Gradients(passed_on, grads.is_apart)

    def send(self, action: Action, given: tuple[Any, ...]) -> None:
        """SEND: post what the stage made."""
        self._transport.send(action, *given)

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

    def _run(self, action: Action, source: Message) -> tuple[_Held, Message | None]:
        """One stage's forward under autograd: what B needs, and what the next stage gets."""
        stage, use = self._stages[action.stage], self._input_uses[action.stage]
        if not source.is_one_tensor:
            return self._run_with(action, source, *source.opened())
        if use.is_reading:
            is_last_use = not stage.has_recompute and action.stage > 0
            try:
                return self._run_with(action, source, *source.opened_to_read(is_last_use=is_last_use))
            except RuntimeError as error:
                if not use.note_refusal(error):
                    raise
        before = version(source.leaves[0])
        done = self._run_with(action, source, *source.opened())
        use.note(is_written=version(source.leaves[0]) != before)
        return done

    def _run_with(
        self, action: Action, source: Message, value: Any, inputs: tuple[Tensor | None, ...]
    ) -> tuple[_Held, Message | None]:
        stage = self._stages[action.stage]
        with source.guarded(is_recomputed=stage.has_recompute):
            if action.stage == self._last:
                loss = self._loss_of(stage, action.microbatch, value)
                return _Held(inputs, (loss,)), None
            output = self._call(stage, action.microbatch, value)
        message, leaves = Message.of(output, self._own_buffers[stage.index].part)
        return _Held(inputs, leaves), message

    def _loss_of(self, stage: Stage, microbatch: int, value: Any) -> Tensor:
        context = self._context
        target = moved(context.inputs[microbatch].target, stage.device)
        with context.ambient.autocast():
            output = self._units(stage, microbatch, value)
            if context.has_outputs:
                context.outputs[microbatch] = detached(output)
            with drawing(context.draw_key(microbatch, "loss_fn"), foreign=context.foreign):
                return self._step_loss.compute(microbatch, output, target)

    def _call(self, stage: Stage, microbatch: int, value: Any) -> Any:
        with self._context.ambient.autocast():
            return self._units(stage, microbatch, value)

    def _units(self, stage: Stage, microbatch: int, value: Any) -> Any:
        keys = [self._context.draw_key(microbatch, unit.name) for unit in stage.units]
        try:
            return stage(value, keys, self._context.foreign)
        except BaseException as error:
            error.add_note(f"stage {stage.index} was given: {described(value)}")
            raise

    def _source(self, action: Action, given: tuple[Message, ...]) -> Message:
        """The input of a stage: the model's, or what the stage before made."""
        if action.stage == 0:
            inputs = self._context.inputs[action.microbatch]
            given = (Message.of_inputs(inputs.args, inputs.kwargs),)
        (message,) = given
        return message.to(self._stages[action.stage].device)

    @property
    def _step_loss(self) -> StepLoss:
        assert self._context.loss is not None, "evaluation has no backward"
        return self._context.loss
