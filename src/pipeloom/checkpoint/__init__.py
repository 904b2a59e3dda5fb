"""Save and load training state: safetensors and JSON, whole or not at all, checked before it is used."""

from pipeloom.checkpoint.compare import check_same_model
from pipeloom.checkpoint.folder import verify_folder
from pipeloom.checkpoint.optimizer import load_optimizer_state, optimizer_state
from pipeloom.checkpoint.snapshot import Snapshot, load_snapshot, save_snapshot
from pipeloom.checkpoint.store import CheckpointStore, step_of

__all__ = [
    "CheckpointStore",
    "Snapshot",
    "check_same_model",
    "load_optimizer_state",
    "load_snapshot",
    "optimizer_state",
    "save_snapshot",
    "step_of",
    "verify_folder",
]
