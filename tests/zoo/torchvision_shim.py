"""Import torchvision beside a build of torch that it was not made for.

PyPI's torchvision does not load its operators beside torch's CPU build, and then refuses to be imported because it
cannot describe them; transformers, which probes for it, goes down with it. None of the zoo's models calls them:
declared operators without kernels are enough.
"""

from __future__ import annotations

import importlib.util
import sys

import torch

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def load_torchvision() -> None:
    """Import torchvision if it is there; a build that fits is left alone."""
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        _declare_operators()
        import torchvision  # noqa: F401


def _declare_operators() -> None:
    # Kept for ever: the declarations go when the library object goes.
    global _library
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in SCHEMAS:
        _library.define(schema)
