"""Training without a flush: stages update their weights while micro-batches are on their way (PipeDream, 2BW).

::

    streaming    `Pipeline.stream`: what is refused, and how a stream of batches is run
    stream       what the user holds: an optimizer for each stage, and `train`
    versions     the weights of a stage while several versions of them are in use
    losses       the losses of many batches
"""

from pipeloom.asynchronous.stream import Stream
from pipeloom.asynchronous.streaming import Streaming

__all__ = ["Stream", "Streaming"]
