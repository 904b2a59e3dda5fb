"""The processes of a pipeline: who is there, what they agree on, how each of them ends. By job:

::

    who is there       rendezvous   addresses in a store, tokens
                       link         one connection: frames
                       mesh         all of them, and the thread that reads them
    what they agree    collective   everybody says something at the same place
                       waiting      with a limit
    how they end       failure      one cause on all ranks
"""

from pipeloom.peers.collective import Collective
from pipeloom.peers.failure import Cause, Failures
from pipeloom.peers.mesh import Handler, Mesh
from pipeloom.peers.rendezvous import Store
from pipeloom.peers.waiting import Overdue, Patience

__all__ = ["Cause", "Collective", "Failures", "Handler", "Mesh", "Overdue", "Patience", "Store"]
