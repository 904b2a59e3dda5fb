"""`save_pretrained` writes what plain transformers, or PEFT, loads."""

import pytest
import torch
from torch import nn

import pipeloom as pl
from tests.hf import models
from tests.processes.ranks import start

peft = pytest.importorskip("peft")
T = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
KINDS = {"llama": models.llama, "llama, tied": models.tied, "gpt2": models.gpt2}


def stepped(model):
    pipe = pl.Pipeline(model.train(), num_stages=2, num_microbatches=4)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    pipe.step(**models.batch())
    optimizer.step()
    return pipe


@pytest.mark.parametrize("kind", KINDS)
def test_plain_transformers_loads_it(kind, tmp_path):
    pipe = stepped(KINDS[kind]())
    pipe.save_pretrained(tmp_path)
    loaded, info = T.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    models.assert_equal(loaded.state_dict(), pipe.unwrap().state_dict())
    assert not any(info.values())


def test_a_large_model_in_several_files(tmp_path):
    pipe = stepped(models.llama())
    pipe.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    models.assert_equal(T.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict(), pipe.unwrap().state_dict())


def test_of_a_peft_model_the_adapters(tmp_path):
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    pipe = stepped(peft.get_peft_model(models.llama(), config))
    pipe.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(models.llama(), tmp_path)
    models.assert_equal(loaded.state_dict(), pipe.unwrap().state_dict())
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == ["adapter_model.safetensors"]


class Wrapped(nn.Module):
    """A model of the user's around one of Hugging Face's."""

    def __init__(self):
        super().__init__()
        self.inner = models.llama()

    def forward(self, **inputs):
        return self.inner(**inputs).loss


@pytest.mark.parametrize("model", [Wrapped(), [nn.Linear(2, 2), nn.Linear(2, 2)]], ids=["module", "list"])
def test_a_model_that_has_no_such_method(model, tmp_path):
    pipe = pl.Pipeline(model, num_stages=2)
    with pytest.raises(pl.errors.CheckpointError, match=r"has no save_pretrained.*\nhint: save pipe\.full_state_dict"):
        pipe.save_pretrained(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_adapters_that_transformers_does_not_know_of(tmp_path):
    model = models.llama()
    pipe = pl.Pipeline(model, num_stages=2, num_microbatches=4)
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    pipe.step(**models.batch())
    with pytest.raises(pl.errors.CheckpointError, match=r"PEFT put adapters.*\nhint: make the pipeline of the model"):
        pipe.save_pretrained(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").touch()
    pipe = stepped(models.llama())
    with pytest.raises(NotADirectoryError, match="is a file; a folder is needed"):
        pipe.save_pretrained(tmp_path / "file")


def test_from_processes(tmp_path):
    from tests.hf import ranks

    found = start(ranks.train_and_save, 2, tmp_path, ["llama", "llama, tied", "lora"], str(tmp_path))
    assert found.wait() == [0, 0], found.output(0) + found.output(1)
