"""A thread for each rank that walks its program, and what it may do there: sleep, or torch and nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.cost import Costs
from pipeloom.ir import Action, Kind, Schedule
from pipeloom.ir.relations import waits_for

Work = Callable[[Action, list[Any]], Any]
"""What an action does with the values of other stages that it waits for; returns its own."""


def threads_s(schedule: Schedule, works: Sequence[Work]) -> float:
    """Seconds that one thread per rank takes for its program, each action waiting for what it waits for.

    Args:
        schedule: computations only.
        works: per rank what its actions do.

    Raises:
        BaseException: what one of the works raised; the other threads end too.
    """
    needs = {action: _values_needed(schedule, action) for action in schedule}
    messages: dict[tuple[Action, Action], SimpleQueue[Any]] = {
        (need, action): SimpleQueue() for action, found in needs.items() for need in found
    }
    receivers: dict[Action, list[SimpleQueue[Any]]] = {}
    for (need, _), queue in messages.items():
        receivers.setdefault(need, []).append(queue)

    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            for action in schedule.program(rank):
                given = [messages[need, action].get() for need in needs[action]]
                if failures:
                    return
                value = works[rank](action, given)
                for queue in receivers.get(action, ()):
                    queue.put(value)
        except BaseException as error:
            failures.append(error)
            for queue in messages.values():  # whoever waits goes on, and finds it
                queue.put(None)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(schedule.num_ranks)]
    start_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return time.perf_counter() - start_s


def _values_needed(schedule: Schedule, action: Action) -> list[Action]:
    return [need for need in waits_for(action, schedule) if need.stage != action.stage]


def sleeping(costs: Costs) -> Work:
    """Only sleep."""
    durations_s = {(kind, stage): costs.duration_s(kind, stage) for kind in Kind for stage in range(costs.num_stages)}

    def work(action: Action, _: list[Any]) -> None:
        time.sleep(durations_s[action.kind, action.stage])

    return work


def by_hand(stages: Sequence[nn.Module], first: Tensor) -> Work:
    """What a loop written for one rank does, with torch and nothing else.

    Args:
        stages: of the whole model; those that the rank's actions name are used.
        first: the model's input for one micro-batch.
    """
    held: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    waiting: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def work(action: Action, received: list[Any]) -> Tensor | None:
        place, stage = (action.stage, action.microbatch), stages[action.stage]
        if action.kind is Kind.FORWARD:
            leaf = (received[0] if received else first).detach().requires_grad_()
            output = stage(leaf)
            held[place] = leaf, output
            return output.detach()
        if action.kind is Kind.RECOMPUTE:
            leaf, _ = held[place]
            held[place] = leaf, stage(leaf)
            return None
        if action.kind is Kind.WEIGHT_GRAD:
            output, grad = waiting.pop(place)
            torch.autograd.backward(output, grad, inputs=list(stage.parameters()))
            return None
        leaf, output = held.pop(place)
        grad = received[0] if received else torch.ones_like(output)
        if action.kind is Kind.BACKWARD:
            torch.autograd.backward(output, grad)
            return leaf.grad
        waiting[place] = output, grad
        return torch.autograd.grad(output, leaf, grad, retain_graph=True)[0]

    return work
