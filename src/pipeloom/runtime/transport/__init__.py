"""How messages travel between ranks."""

from pipeloom.runtime.transport.base import Aborted, Transport
from pipeloom.runtime.transport.local import LocalTransport

__all__ = ["Aborted", "LocalTransport", "Transport"]
