"""What a rank's memory is while a model is read from files: its own stages, and one tensor.

    python -m benchmarks.loading [--width 1024] [--layers 12] [--ranks 2]

Saves a Llama with random weights as sharded safetensors, then starts one process for each rank that makes a pipeline
with ``factory=`` and ``weights=``, and prints, by rank: bytes of its own parameters, the largest tensor, the growth of
its peak memory from before the pipeline was made until it was there, and what of that the same took with a model that
is as small as can be (groups, sockets, code that is loaded at first use).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MIB = 1 << 20


def config(width: int, num_layers: int) -> Any:
    import transformers

    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": num_layers}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 8192}
    return transformers.LlamaConfig(**sizes, **heads, use_cache=False)


def peak_bytes() -> int:
    """The peak of this process's resident memory."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def rank(folder: str) -> None:
    """One rank: make a pipeline, say what it took."""
    import torch
    import transformers

    import pipeloom as pl

    made = config(**json.loads((Path(folder) / "sizes.json").read_text()))
    ids = torch.zeros(1, 8, dtype=torch.long)
    before = peak_bytes()
    pipe = pl.Pipeline(
        factory=lambda: transformers.LlamaForCausalLM(made),
        weights=folder,
        num_stages=int(os.environ["WORLD_SIZE"]),
        example_kwargs={"input_ids": ids, "labels": ids},
    )
    sizes = [each.numel() * each.element_size() for each in pipe.parameters()]
    grown = peak_bytes() - before
    found = {"rank": pipe.group.rank, "own": sum(sizes), "largest": max(sizes), "grown": grown}
    pipe.close()
    print(json.dumps(found), flush=True)


def measured(width: int, num_layers: int, num_ranks: int) -> list[dict[str, int]]:
    """What each rank says."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        model = transformers.LlamaForCausalLM(config(width, num_layers))
        model.save_pretrained(folder, max_shard_size="200MB")
        (Path(folder) / "sizes.json").write_text(json.dumps({"width": width, "num_layers": num_layers}))
        del model
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        words = [*launch, "-m", "benchmarks.loading", "--rank", folder]
        ran = subprocess.run(
            words, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
        )
    if ran.returncode:
        raise RuntimeError(ran.stderr[-3000:])
    return sorted(
        (json.loads(line) for line in ran.stdout.splitlines() if line.startswith('{"rank"')),
        key=lambda each: each["rank"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", metavar="FOLDER", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank(given.rank)
        return
    empty = measured(64, given.ranks, given.ranks)
    print("rank  own MiB  largest tensor MiB  peak grew by MiB  of a tiny model MiB  beyond own + largest MiB")
    for each, tiny in zip(measured(given.width, given.layers, given.ranks), empty, strict=True):
        beyond = each["grown"] - tiny["grown"] - each["own"] - each["largest"]
        row = (each["own"], each["largest"], each["grown"], tiny["grown"], beyond)
        cells = [f"{value / MIB:{width}.0f}" for value, width in zip(row, (9, 20, 18, 21, 26), strict=True)]
        print(f"{each['rank']:4}" + "".join(cells))


if __name__ == "__main__":
    main()
