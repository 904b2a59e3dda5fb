"""Save and load training state: safetensors and JSON, whole or not at all, checked before it is used.

`own_loop` is for a loop of your own; `pipeloom train` uses the rest. `pipeloom.archive` is what lies on the disk.
"""

from pipeloom.archive.group import Alone, Group
from pipeloom.archive.steps import step_of
from pipeloom.archive.verify import faults_of, verify_folder
from pipeloom.checkpoint.compare import check_same_model
from pipeloom.checkpoint.merge import merge_model
from pipeloom.checkpoint.opened import Opened
from pipeloom.checkpoint.optimizer import load_optimizer_state, optimizer_state
from pipeloom.checkpoint.own_loop import group_of, load_checkpoint, save_checkpoint, snapshot_of
from pipeloom.checkpoint.saver import Saver
from pipeloom.checkpoint.snapshot import Layout, Snapshot, load_snapshot
from pipeloom.checkpoint.store import CheckpointStore, save_snapshot

__all__ = [
    "Alone",
    "CheckpointStore",
    "Group",
    "Layout",
    "Opened",
    "Saver",
    "Snapshot",
    "check_same_model",
    "faults_of",
    "group_of",
    "load_checkpoint",
    "load_optimizer_state",
    "load_snapshot",
    "merge_model",
    "optimizer_state",
    "save_checkpoint",
    "save_snapshot",
    "snapshot_of",
    "step_of",
    "verify_folder",
]
