"""The processes of a pipeline: who is there, what they agree on, how each of them ends. By job:

::

    who is there       rendezvous   addresses in a store, tokens
                       link         one connection: frames
                       mesh         all of them, and the thread that reads them
    what they agree    collective   everybody says something at the same place
                       waiting      with a limit
    how they end       cause        what went wrong
                       failure      the same on all ranks
                       ending       of this process
                       stall        who keeps everybody waiting
"""

from pipeloom.peers.cause import Cause
from pipeloom.peers.collective import Collective
from pipeloom.peers.ending import Ending
from pipeloom.peers.failure import Failures
from pipeloom.peers.link import Link
from pipeloom.peers.mesh import Handler, Mesh
from pipeloom.peers.rendezvous import Rendezvous, Store, local_host
from pipeloom.peers.stall import Stalls, State
from pipeloom.peers.waiting import Overdue, Patience

__all__ = [
    "Cause",
    "Collective",
    "Ending",
    "Failures",
    "Handler",
    "Link",
    "Mesh",
    "Overdue",
    "Patience",
    "Rendezvous",
    "Stalls",
    "State",
    "Store",
    "local_host",
]
