"""The backward of a stage in two halves: I, the gradients of its inputs, at once; W, those of its parameters, later.

The obvious ways are two. `torch.autograd.grad` for the inputs and again for the parameters walks the graph twice: the
second walk repeats the first. torch's own pipelining cuts the graph afterwards, into groups of parameters, and walks
each from where its group begins; what lies between is walked twice, and a checkpoint is recomputed for every group.

Here the forward itself makes two graphs. A function that takes an activation and a weight (`linear`, `conv2d`) runs on
a detached activation, which makes a graph of one function, and its output goes on through a node that stands for it.
I passes that node: it asks the small graph for the gradient of the activation and keeps the gradient of the output. W
then walks all small graphs of the stage in one backward, in the order in which the whole backward would have. Both use
autograd's own formulas, so every bit is that of the whole backward, hooks fire, and weights that are computed from
parameters need no special case. By job:

::

    halves      the two halves of one micro-batch on one stage
    mode        torch functions, seen one by one in the forward: which are split
    functions   which torch functions are worth it
    nodes       what stands in the graph for a function that was split
    waiting     gradients that wait for W
    frames      torch.utils.checkpoint: recomputed once, for I and W together
    frozen      modules without anything to train, where nobody looks
"""

from pipeloom.halves.frozen import frozen_in
from pipeloom.halves.functions import splittable
from pipeloom.halves.halves import Halves

__all__ = ["Halves", "frozen_in", "splittable"]
