"""The loop that one writes for one model where no framework is at hand: 1F1B, or GPipe, in twenty lines.

It knows the shapes beforehand, checks nothing, says nothing when a process dies, and gives the loss to the last
process only.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peers.trial import Part


class ByHand:
    """One process's stage; a call trains one batch up to the gradients and returns the loss on the last process."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.stage = part.own_stage()
        ahead = part.num_stages - 1 - part.rank
        self.num_warmup = part.num_microbatches if part.schedule == "gpipe" else min(ahead, part.num_microbatches)

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        count = self.part.num_microbatches
        self.inputs, self.targets = inputs.chunk(count), targets.chunk(count)
        self.held: deque[tuple[Tensor, Tensor]] = deque()
        self.sent: list[tuple[dist.Work | None, Tensor]] = []
        self.losses: list[Tensor] = []
        for microbatch in range(self.num_warmup):
            self.forward(microbatch)
        for microbatch in range(self.num_warmup, count):
            self.forward(microbatch)
            self.backward()
        for _ in range(self.num_warmup):
            self.backward()
        for work, _ in self.sent:
            if work is not None:
                work.wait()
        return torch.stack(self.losses).sum() if self.part.is_last else None

    def forward(self, microbatch: int) -> None:
        received = self.inputs[microbatch] if self.part.is_first else self.receive(-1).requires_grad_()
        output = self.stage(received)
        if self.part.is_last:
            output = self.part.loss_fn(output, self.targets[microbatch]) / self.part.num_microbatches
            self.losses.append(output.detach())
        else:
            self.send(output.detach(), +1)
        self.held.append((received, output))

    def backward(self) -> None:
        received, output = self.held.popleft()
        torch.autograd.backward(output, None if self.part.is_last else self.receive(+1))
        if received.grad is not None and not self.part.is_first:
            self.send(received.grad, -1)

    def send(self, value: Tensor, step: int) -> None:
        value = value.contiguous()
        self.sent.append((dist.isend(value, self.part.rank + step, self.part.group), value))

    def receive(self, step: int) -> Tensor:
        value = torch.empty(self.part.boundary_shape)
        dist.recv(value, self.part.rank + step, self.part.group)
        return value
