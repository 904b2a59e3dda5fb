"""What it costs to cut a model by running it.

    python -m benchmarks.splitting [--rows gpt tied llama plans large] [--steps 15] [--json]

- gpt, tied, llama: a training step of a model of 12 layers × 256 that is cut by running it, ÷ that of the same layers
  as an `nn.Sequential` written by hand, in which no glue is intercepted. Both live in this process and take turns, with
  the same weights and batch; their losses have to be the same to the bit. Tied is the GPT whose head is its embedding;
  Llama is Hugging Face's own code. 2 and 4 stages, 8 micro-batches. Needed of the GPTs: at most 1.03. Beside it stands
  what the model's own code takes beyond the layers alone where nothing is pipelined: that is no cost of cutting.
- plans: how long it takes to find the plan for a micro-batch like one that was seen, of a model whose code looks at
  shapes only, and of those that look at their padding mask, which are asked each time which way they go.
- large: seconds and peak memory to build Llama-3-70B's configuration without weights and to cut it into 8 stages, in a
  process of its own. Needed: 20 s, 2 GiB.

llama, large and one of the plans need transformers, and are left out without it.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import pipeloom as pl
from benchmarks.peers.worker import peak_bytes
from pipeloom.splitting.cut import Cut, Inputs
from pipeloom.weights.build import build

NUM_LAYERS, WIDTH, NUM_HEADS, VOCABULARY = 12, 256, 4, 1024
NUM_STAGES, NUM_MICROBATCHES = (2, 4), 8
BATCH, LENGTH = 8, 128
NEEDED = ("gpt", "tied")
MOST_STEP_RATIO, MOST_LARGE_S, MOST_LARGE_BYTES = 1.03, 20.0, 2 * 2**30
ROWS = ("gpt", "tied", "llama", "plans", "large")
LLAMA_3_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
}
LLAMA_12_256 = {
    "hidden_size": WIDTH,
    "intermediate_size": 688,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2 * LENGTH,
}


class Block(nn.Module):
    """Causal attention and MLP, each added to what came in: (B, T, C) → (B, T, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """``mask`` (1 or B, 1, T, T) says where to look."""
        projected = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, NUM_HEADS, -1))
        query, key, value = projected.permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
        attended = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        added: Tensor = x + self.down(gelu(self.up(self.mlp_norm(x))))
        return added


class Gpt(nn.Module):
    """A GPT as people write it: one forward, which makes positions and mask and calls blocks in a loop."""

    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) for tokens (B, T); ``padding`` (B, T) is true where there is a token."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        mask = causal(tokens.shape[1])
        if padding is not None and not padding.all():  # what makes the way depend on numbers
            mask = mask & padding[:, None, None, :]
        for block in self.blocks:
            x = block(x, mask)
        logits: Tensor = self.head(self.norm(x))
        return logits


def causal(length: int) -> Tensor:
    """True where a position may look, (1, 1, T, T)."""
    return torch.ones(length, length, dtype=torch.bool).tril()[None, None]


class Given(nn.Module):
    """A module with its other arguments built in, so that it is the child of a Sequential."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module, self.args, self.kwargs = module, args, kwargs

    def forward(self, x: Tensor) -> Any:
        """Call it."""
        return self.module(x, *self.args, **self.kwargs)


class Embedded(nn.Module):
    """The first layers of the GPT: (B, T) → (B, T, C)."""

    def __init__(self, model: Gpt) -> None:
        super().__init__()
        self.tokens, self.positions = model.tokens, model.positions

    def forward(self, tokens: Tensor) -> Tensor:
        """Add both tables."""
        embedded: Tensor = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return embedded


def gpt_by_hand(model: Gpt) -> nn.Sequential:
    """The same layers, one after another; the mask is made once and for all."""
    mask = causal(LENGTH)
    return nn.Sequential(Embedded(model), *(Given(block, mask) for block in model.blocks), model.norm, model.head)


class Logits(nn.Module):
    """A model of transformers that returns logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) for tokens (B, T)."""
        logits: Tensor = self.model(input_ids=tokens, attention_mask=padding, use_cache=False).logits
        return logits


def llama(config: dict[str, Any]) -> nn.Module:
    """A Llama of transformers."""
    import transformers

    made: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config, use_cache=False))
    return made


def llama_by_hand(model: Any) -> nn.Sequential:
    """The same layers, one after another; rotary tables are made once and for all, and SDPA's own flag masks."""
    inner = model.model.model
    angles = inner.rotary_emb(torch.zeros(1, LENGTH, WIDTH), torch.arange(LENGTH)[None])
    layers = [Given(layer, position_embeddings=angles) for layer in inner.layers]
    return nn.Sequential(inner.embed_tokens, *layers, inner.norm, model.model.lm_head)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], nn.Sequential]]] = {
    "gpt": (Gpt, gpt_by_hand),
    "tied": (lambda: Gpt(is_tied=True), gpt_by_hand),
    "llama": (lambda: Logits(llama(LLAMA_12_256)), llama_by_hand),
}


def padded() -> dict[str, Tensor]:
    """One micro-batch of which the last quarter is padding."""
    mask = torch.ones(1, LENGTH, dtype=torch.bool)
    mask[:, -LENGTH // 4 :] = False
    return {"padding": mask}


PLANNED: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "GPT": (Gpt, dict),
    "GPT that looks at its padding": (Gpt, padded),
    "Llama that looks at its padding": (lambda: Logits(llama(LLAMA_12_256)), padded),
}


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least two values."""
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy of logits (B, T, V) for tokens (B, T)."""
    return cross_entropy(output.flatten(0, 1), target.flatten())


def compare(name: str, num_stages: int, num_steps: int) -> dict[str, Any]:
    """Steps of both in turn, after two of each that don't count; what one takes ÷ what the other takes, pair by pair.

    Raises:
        RuntimeError: they don't compute the same, so that the comparison is void.
    """
    torch.manual_seed(0)
    make, by_hand = MODELS[name]
    model = make()
    tokens, target = torch.randint(VOCABULARY, (2, BATCH, LENGTH))
    common: dict[str, Any] = {"num_microbatches": NUM_MICROBATCHES, "loss_fn": token_loss, "num_stages": num_stages}
    uncut = uncut_ratio(copy.deepcopy(model), by_hand(copy.deepcopy(model)), tokens[:1], target[:1], num_steps)
    taken: dict[str, list[tuple[float, float]]] = {"cut": [], "by_hand": []}
    with pl.Pipeline(by_hand(copy.deepcopy(model)), **common) as second, pl.Pipeline(model, **common) as first:
        for turn in range(num_steps + 2):
            losses = []
            pairs = [("cut", first), ("by_hand", second)]
            for what, pipe in pairs if turn % 2 else reversed(pairs):
                start_s, start_cpu_s = time.perf_counter(), time.process_time()
                losses.append(pipe.step(tokens, target=target))
                taken[what].append((time.perf_counter() - start_s, time.process_time() - start_cpu_s))
            if not torch.equal(*losses):
                raise RuntimeError(f"the losses of {name} differ, {losses}: the two don't compute the same")
    pairs_s = list(zip(taken["cut"][2:], taken["by_hand"][2:], strict=True))
    wall, cpu = (Spread.of([ours[clock] / theirs[clock] for ours, theirs in pairs_s]) for clock in (0, 1))
    return {
        "row": name,
        "num_stages": num_stages,
        "by_hand_step_s": statistics.median(theirs[0] for _, theirs in pairs_s),
        "step_ratio": asdict(wall),
        "cpu_ratio": asdict(cpu),
        "uncut_cpu_ratio": asdict(uncut),
        "is_met": wall.median <= MOST_STEP_RATIO if name in NEEDED else None,
    }


def uncut_ratio(model: nn.Module, by_hand: nn.Module, tokens: Tensor, target: Tensor, num_pairs: int) -> Spread:
    """CPU time of the whole model ÷ that of its layers one after another, on one micro-batch in this thread."""
    taken_s: dict[nn.Module, list[float]] = {model: [], by_hand: []}
    for turn in range(num_pairs + 2):
        for each in (model, by_hand) if turn % 2 else (by_hand, model):
            start_s = time.process_time()
            torch.autograd.backward(token_loss(each(tokens), target))
            taken_s[each].append(time.process_time() - start_s)
    return Spread.of([ours / theirs for ours, theirs in zip(taken_s[model][2:], taken_s[by_hand][2:], strict=True)])


def plan_times(name: str, num_times: int) -> dict[str, Any]:
    """Make a plan for two forms of inputs, and find the first again and again for other inputs of that form."""
    make, keywords = PLANNED[name]
    tokens = torch.randint(VOCABULARY, (1, LENGTH))
    cut = Cut(make(), ((tokens,), keywords()), num_stages=4, cuts=None)
    cut.plan(((tokens,), keywords()))
    times_s = []
    for _ in range(num_times):
        given: Inputs = ((torch.randint(VOCABULARY, (1, LENGTH)),), keywords())
        start_s = time.perf_counter()
        cut.plan(given)
        times_s.append(time.perf_counter() - start_s)
    start_s = time.perf_counter()
    shorter = {key: value[:, : LENGTH // 2] for key, value in keywords().items()}
    cut.plan(((tokens[:, : LENGTH // 2],), shorter))
    new_form_s = time.perf_counter() - start_s
    return {
        "row": "plans",
        "model": name,
        "looks_at_numbers": cut.plan_of_first.recording.has_reads,
        "again_s": asdict(Spread.of(times_s)),
        "new_form_s": new_form_s,
    }


def cut_large(config: dict[str, Any], num_stages: int) -> dict[str, Any]:
    """Build a Llama without weights and cut it, in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_cut_large_here, config, num_stages).result()


def _cut_large_here(config: dict[str, Any], num_stages: int) -> dict[str, Any]:
    import transformers  # which takes longer than all that follows

    del transformers
    start_s = time.perf_counter()
    model = build(lambda: llama(config))
    built_s = time.perf_counter()
    tokens = torch.zeros(1, config["max_position_embeddings"], dtype=torch.int64)
    cut = Cut(model, ((), {"input_ids": tokens}), num_stages, None)
    end_s = time.perf_counter()
    peak = peak_bytes()
    is_met = end_s - start_s <= MOST_LARGE_S and (peak is None or peak <= MOST_LARGE_BYTES)
    return {
        "row": "large",
        "num_parameters": sum(each.numel() for each in model.parameters()),
        "num_stages": cut.num_stages,
        "build_s": built_s - start_s,
        "cut_s": end_s - built_s,
        "peak_bytes": peak,
        "is_met": is_met,
    }


def rows_of(names: Sequence[str], num_steps: int) -> Iterator[dict[str, Any]]:
    """Measure row by row; those that need transformers are left out where it is not installed."""
    has_transformers = importlib.util.find_spec("transformers") is not None
    for name in names:
        if name == "plans":
            yield from (plan_times(each, 40 * num_steps) for each in PLANNED if has_transformers or "Llama" not in each)
        elif name not in MODELS:
            yield from [cut_large(LLAMA_3_70B, 8)] if has_transformers else []
        elif has_transformers or name != "llama":
            yield from (compare(name, num_stages, num_steps) for num_stages in NUM_STAGES)


def line(row: dict[str, Any]) -> str:
    """One row as it is read."""
    verdict = {True: ": met", False: ": MISSED", None: ""}[row.get("is_met")]
    if row["row"] == "large":
        peak = "?" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f}"
        return (
            f"large   {row['num_parameters'] / 1e9:.1f} · 10⁹ parameters in {row['num_stages']} stages: built in "
            f"{row['build_s']:.1f} s, cut in {row['cut_s']:.1f} s, peak {peak} MiB{verdict}"
        )
    if row["row"] == "plans":
        again, new_s = row["again_s"], row["new_form_s"]
        return f"plans   {row['model']}: {again['median'] * 1e6:.0f} µs {_quartiles(again, 1e6, 0)}, new {new_s:.2f} s"
    step, cpu, uncut = row["step_ratio"], row["cpu_ratio"], row["uncut_cpu_ratio"]
    return (
        f"{row['row']:6}  {row['num_stages']} stages  {row['by_hand_step_s']:.2f} s  "
        f"{step['median']:.3f} {_quartiles(step)}  CPU {cpu['median']:.3f} {_quartiles(cpu)}, "
        f"uncut {uncut['median']:.3f}{verdict}"
    )


def _quartiles(spread: dict[str, float], scale: float = 1.0, places: int = 3) -> str:
    return f"[{spread['low'] * scale:.{places}f}, {spread['high'] * scale:.{places}f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, help="which rows (default all)")
    parser.add_argument("--steps", type=int, default=15, help="counted steps of each, at least 2 (default 15)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    rows = rows_of(options.rows, options.steps)
    if options.json:
        print(json.dumps(list(rows), indent=2))
        return
    print("model   stages    by hand  step ÷ by hand's [quartiles], CPU time likewise, and of the models uncut")
    for row in rows:
        print(line(row), flush=True)


if __name__ == "__main__":
    main()
