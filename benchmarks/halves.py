"""What it costs to run the backward in two halves.

    python -m benchmarks.halves [--rows stack functions checkpoint] [--width 512] [--layers 4] [--rounds 15] [--json]

- stack: forward, I and W of a transformer stack in CPU time, beside its whole backward and beside torch's
  ``stage_backward_input`` + ``stage_backward_weight`` of the same module, in turns within this process. Needed: I + W
  at most 1.05 of the whole backward.
- functions: 16 square layers of a few sizes, all of them split: where I begins to be shorter than the whole backward.
- checkpoint: multiplications, by torch's counter, of forward, I and W with one checkpoint over 16 blocks, ÷ those of
  the forward and backward without one. Needed: at most one forward more.

C's allocator hands large blocks back to the system at once, and the system clears them when they are asked for again;
what is kept for W pays for that. It is told to keep them, as allocators of GPUs do.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from pipeloom.halves import Halves, functions

ROWS = ("stack", "functions", "checkpoint")
MOST_RATIO = 1.05
NUM_BLOCKS = 16
Stage = Callable[[Tensor], Tensor]
Times = tuple[float, float, float]


def whole(stage: Stage, _: nn.Module, value: Tensor, grad: Tensor) -> Times:
    """Forward and one backward; 0 for W."""
    start = time.process_time()
    output = stage(value)
    forward = time.process_time()
    output.backward(grad)
    return forward - start, time.process_time() - forward, 0.0


def halves(stage: Stage, _: nn.Module, value: Tensor, grad: Tensor) -> Times:
    """Ours."""
    start, both = time.process_time(), Halves()
    with both.forward():
        output = stage(value)
    forward = time.process_time()
    with both.input_gradients():
        output.backward(grad)
    del output
    first = time.process_time()
    both.weight_gradients()
    return forward - start, first - forward, time.process_time() - first


def torchs(stage: Stage, model: nn.Module, value: Tensor, grad: Tensor) -> Times:
    """torch.distributed.pipelining's."""
    start = time.process_time()
    output = stage(value)
    forward = time.process_time()
    _, groups = stage_backward_input([output], [grad], [value], model.parameters())
    first = time.process_time()
    stage_backward_weight(model.parameters(), groups)
    return forward - start, first - forward, time.process_time() - first


CONTESTANTS = {"whole": whole, "halves": halves, "torch": torchs}
SIZES = ((1, 32), (8, 32), (8, 64), (16, 64), (32, 64), (64, 64), (256, 64), (512, 64), (512, 128), (512, 512))
"""Rows and width of what ``functions`` measures."""


def blocks(count: int, width: int) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, width // 32, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, count, enable_nested_tensor=False)


def times_of(width: int, num_layers: int, rounds: int) -> dict[str, list[Times]]:
    """Of each contestant, in turns; the first round warms up."""
    model = blocks(num_layers, width)
    value, grad = torch.randn(4, 128, width), torch.randn(4, 128, width)
    times: dict[str, list[Times]] = {name: [] for name in CONTESTANTS}
    for _ in range(rounds + 1):
        for name, run in CONTESTANTS.items():
            model.zero_grad()
            times[name].append(run(model, model, value.clone().requires_grad_(), grad))
    return {name: each[1:] for name, each in times.items()}


def stack(width: int, num_layers: int, rounds: int) -> dict[str, float]:
    """Ratios of medians."""
    times = times_of(width, num_layers, rounds)
    median = {
        name: [statistics.median(each[part] for each in rows) for part in range(3)] for name, rows in times.items()
    }
    back = {name: statistics.median(sum(each[1:]) for each in rows) for name, rows in times.items()}
    found = {"whole backward, ms": back["whole"] * 1e3}
    for name in ("halves", "torch"):
        found[f"{name}: (I + W) ÷ whole"] = back[name] / back["whole"]
        found[f"{name}: I ÷ whole"] = median[name][1] / back["whole"]
        found[f"{name}: F ÷ plain F"] = median[name][0] / median["whole"][0]
    return found


def of_functions(rounds: int) -> dict[str, float]:
    """By rows and width: I, and I + W, ÷ the whole backward, all products split."""
    least, functions.MIN_MULTIPLICATIONS = functions.MIN_MULTIPLICATIONS, 0
    found = {}
    for rows, width in SIZES:
        model = nn.Sequential(*[nn.Linear(width, width) for _ in range(16)])
        value, grad = torch.randn(rows, width), torch.randn(rows, width)
        times: dict[str, list[Times]] = {"whole": [], "halves": []}
        for _ in range(rounds * max(1, (1 << 20) // (rows * width * width)).bit_length() + 1):
            for name, each in times.items():
                model.zero_grad()
                each.append(CONTESTANTS[name](model, model, value.clone().requires_grad_(), grad))
        whole_s, first_s, second_s = (
            statistics.median(each[part] for each in times[name][1:])
            for name, part in (("whole", 1), ("halves", 1), ("halves", 2))
        )
        found[f"{rows} × {width}: I ÷ whole"] = first_s / whole_s
        found[f"{rows} × {width}: (I + W) ÷ whole"] = (first_s + second_s) / whole_s
    functions.MIN_MULTIPLICATIONS = least
    return found


def multiplications(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def checkpointed(width: int) -> dict[str, float]:
    """Of forward, I and W, by kind of checkpoint; torch's halves cannot do with the reentrant one."""
    model = blocks(NUM_BLOCKS, width)
    value, grad = torch.randn(1, 16, width), torch.randn(1, 16, width)
    plain = multiplications(lambda: whole(model, model, value.clone().requires_grad_(), grad))
    found = {"allowed": (plain + multiplications(lambda: model(value))) / plain}
    for kind, is_reentrant in (("hooks", False), ("reentrant", True)):

        def stage(x: Tensor, is_reentrant: bool = is_reentrant) -> Tensor:
            # No leaf: torch's counter follows modules by hooks that fail for one.
            out: Tensor = checkpoint(model, x * 1, use_reentrant=is_reentrant)
            return out

        for name in ("halves", "torch") if not is_reentrant else ("halves",):
            run = CONTESTANTS[name]
            counted = multiplications(lambda run=run: run(stage, model, value.clone().requires_grad_(), grad))
            found[f"{name}, {kind}"] = counted / plain
    return found


def keep_memory() -> None:
    """Let glibc's malloc keep what is freed; elsewhere do nothing."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        library.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the rows that were asked for."""
    parser = argparse.ArgumentParser(description="What it costs to run the backward in two halves.")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    keep_memory()
    found = {}
    if "stack" in options.rows:
        found["stack"] = stack(options.width, options.layers, options.rounds)
    if "functions" in options.rows:
        found["functions"] = of_functions(options.rounds)
    if "checkpoint" in options.rows:
        found["checkpoint"] = checkpointed(64)
    if options.json:
        print(json.dumps(found, ensure_ascii=False, indent=2))
        return
    for row, figures in found.items():
        for name, figure in figures.items():
            print(f"{row:12}{name:28}{figure:10.3f}")
    if "stack" in found:
        is_met = found["stack"]["halves: (I + W) ÷ whole"] <= MOST_RATIO
        print(f"needed: I + W at most {MOST_RATIO} of the whole backward: {'met' if is_met else 'missed'}")


if __name__ == "__main__":
    main()
