"""What ranks that are processes do with models of Hugging Face's."""

import copy
from pathlib import Path

import peft
import pytest
import torch
import transformers as T

import pipeloom as pl
from pipeloom.testing import sequential_step
from tests.hf import models


def adapted():
    return peft.get_peft_model(models.llama(), peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))


KINDS = {"llama": models.llama, "llama, tied": models.tied, "lora": adapted}


def train_and_save(kinds: list[str], folder: str) -> None:
    """One after another: to load transformers takes a process longer than all of them."""
    for kind in kinds:
        trains_and_saves(kind, f"{folder}/{kind}")
    hears_that_it_cannot_be_written(folder)


def trains_and_saves(kind: str, folder: str) -> None:
    """Two steps with the bits of the oracle; what plain transformers loads is what unwrap() gives back."""
    model, batch = KINDS[kind]().train(), models.batch()
    plain = copy.deepcopy(model)
    pipe = pl.Pipeline(model, num_stages=2, num_microbatches=4)
    optimizer, other = pipe.optimizer(torch.optim.SGD, lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    for step_index in range(2):
        options = {"num_stages": 2, "num_microbatches": 4, "step_index": step_index}
        assert pipe.step(**batch) == sequential_step(plain, **options, **batch)
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    pipe.save_pretrained(folder)
    logits = pipe.eval()(input_ids=batch["input_ids"], broadcast_output=True).logits
    whole = pipe.unwrap().eval()
    assert torch.equal(whole(input_ids=batch["input_ids"]).logits, logits)
    assert torch.equal(loaded(kind, folder)(input_ids=batch["input_ids"]).logits, logits)


def loaded(kind, folder):
    if kind == "lora":
        return peft.PeftModel.from_pretrained(models.llama(), folder).eval()
    return T.AutoModelForCausalLM.from_pretrained(folder).eval()


def hears_that_it_cannot_be_written(folder: str) -> None:
    """Rank 0 raises what was in the way, the other says so; both go on."""
    Path(folder, "file").touch()
    pipe = pl.Pipeline(models.llama().train(), num_stages=2, num_microbatches=4)
    pipe.step(**models.batch())
    kind = NotADirectoryError if pipe.group.rank == 0 else pl.errors.CheckpointError
    with pytest.raises(kind, match="is a file; a folder is needed"):
        pipe.save_pretrained(Path(folder, "file"))
    assert pipe.step(**models.batch()).isfinite()
    pipe.close()
