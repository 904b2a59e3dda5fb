"""Ranks that are processes, where `pipeloom.runtime` has them as threads. By job:

::

    who they are    world       the processes that torchrun, or the user, has started
                    company     their connections, and what any of them failed of
                    meeting     what they compare before the first step
    one of them     runtime     its part of a step, and what all ranks agree on at the end of it
                    opposite    two replicas: what the two owners of a stage tell each other
                    norms       clip_grad_norm_ over all of them
                    whereabouts where it is, for causes and reports
                    checksum    whether all were given the same batch
    what travels    transport   what the executor asks for
                    post        parcels under a key, from rank to rank
                    parcels     what they are, in full or by a number
                    direct      small ones, on connections that the rank reads itself
                    lanes       large tensors, over torch.distributed
                    wire        tensors as stretches of memory
"""

from pipeloom.processes.company import Company, join
from pipeloom.processes.norms import clip_grad_norm
from pipeloom.processes.runtime import DistributedRuntime
from pipeloom.processes.world import TransportName, World, find_world

__all__ = ["Company", "DistributedRuntime", "TransportName", "World", "clip_grad_norm", "find_world", "join"]
