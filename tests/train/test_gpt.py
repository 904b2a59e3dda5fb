"""The default model: causal, cut anywhere, and able to learn."""

import pytest
import torch
from torch import nn

from pipeloom import Pipeline
from pipeloom.errors import ConfigError
from pipeloom.testing import sequential_step
from pipeloom.train.config import ModelConfig, TrainingConfig
from pipeloom.train.factory import build_model
from pipeloom.train.gpt import Embedding, gpt, rotate
from pipeloom.train.held_out import next_byte_loss

SMALL = ModelConfig(num_layers=2, width=16, num_heads=2, sequence_length=12)


def test_logits_are_per_byte() -> None:
    logits = gpt(SMALL)(torch.randint(256, (3, 12)))
    assert logits.shape == (3, 12, 256)


def test_default_has_a_few_million_parameters() -> None:
    model = build_model(TrainingConfig().model, seed=0)
    assert 2e6 < sum(parameter.numel() for parameter in model.parameters()) < 5e6


@pytest.mark.parametrize("position", [0, 5, 11])
def test_later_bytes_change_nothing_before(position: int) -> None:
    model, inputs = gpt(SMALL).eval(), torch.randint(256, (1, 12))
    changed = inputs.clone()
    changed[0, position] = (changed[0, position] + 1) % 256
    before, after = model(inputs), model(changed)
    assert torch.equal(before[0, :position], after[0, :position])
    assert not torch.equal(before[0, position], after[0, position])


def test_first_loss_is_near_uniform() -> None:
    torch.manual_seed(0)
    inputs = torch.randint(256, (8, 12))
    loss = next_byte_loss(gpt(TrainingConfig().model)(inputs), inputs.roll(-1, 1))
    assert loss.item() == pytest.approx(5.545, abs=0.9)


def test_embedding_sees_three_bytes_back_and_no_further() -> None:
    embedding = Embedding(8)
    inputs = torch.arange(1, 8)[None]
    changed = inputs.clone()
    changed[0, 1] = 99
    differs = (embedding(inputs) != embedding(changed)).any(-1)[0]
    assert differs.tolist() == [False, True, True, True, True, False, False]


def test_rotation_keeps_lengths_and_relative_angles() -> None:
    query, key = torch.randn(2, 8, dtype=torch.float64), torch.randn(2, 8, dtype=torch.float64)
    queries = rotate(query[:, None, None].expand(2, 1, 6, 8))
    keys = rotate(key[:, None, None].expand(2, 1, 6, 8))
    scores = queries @ keys.transpose(-1, -2)
    assert torch.allclose(queries.norm(dim=-1), query.norm(dim=-1)[:, None, None].expand(2, 1, 6))
    assert torch.allclose(scores[..., 1:, 1:], scores[..., :-1, :-1], atol=1e-5)


def test_rotation_keeps_the_dtype() -> None:
    assert rotate(torch.ones(1, 1, 3, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("cuts", [[1], [2], [3], [1, 2, 3, 4]])
def test_any_cut_gives_the_oracles_bits(cuts: list[int]) -> None:
    config = SMALL.model_copy(update={"dropout": 0.2})
    inputs = torch.randint(256, (4, 12))
    whole, cut = build_model(config, seed=1), build_model(config, seed=1)
    expected = sequential_step(whole, inputs, target=inputs, num_microbatches=4, loss_fn=next_byte_loss, seed=1)
    with Pipeline(cut, cuts=cuts, num_microbatches=4, loss_fn=next_byte_loss, seed=1) as pipe:
        assert torch.equal(pipe.step(inputs, target=inputs), expected)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(whole.parameters(), cut.parameters(), strict=True))


def test_dropout_acts_in_training_only() -> None:
    model = gpt(SMALL.model_copy(update={"dropout": 0.5}))
    inputs = torch.randint(256, (2, 12))
    assert not torch.equal(model(inputs), model(inputs))
    model.eval()
    assert torch.equal(model(inputs), model(inputs))


def test_it_learns_a_repeated_text_by_heart() -> None:
    model = build_model(SMALL, seed=0)
    text = torch.tensor(list(b"abcabdabe abcabdabe abcabd"))
    inputs, targets = text[None, :-1], text[None, 1:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(60):
        loss = next_byte_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.5


def test_odd_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.width is 20; with 4 heads .* must be a multiple of 8"):
        gpt(ModelConfig(width=20, num_heads=4))


def test_branches_into_the_residual_start_smaller() -> None:
    model = gpt(ModelConfig(num_layers=8, width=64))
    block = model[1]
    assert isinstance(model, nn.Sequential)
    assert block.down.weight.std() < 0.4 * block.up.weight.std()
    assert block.up.bias.abs().max() == 0
