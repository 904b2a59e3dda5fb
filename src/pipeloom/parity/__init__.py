"""A pipeline held against the model itself: does one step compute what the un-pipelined model computes?"""

from pipeloom.parity.comparison import Comparison, Difference
from pipeloom.parity.first_step import FirstStep

__all__ = ["Comparison", "Difference", "FirstStep"]
