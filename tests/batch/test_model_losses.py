"""A model's own loss: found in its output, and weighted so that micro-batches give what the whole batch gives."""

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from pipeloom.batch.losses import LossRule
from pipeloom.batch.microbatches import merge_outputs, split_batch
from pipeloom.batch.model_losses import ModelLoss, own_loss
from pipeloom.errors import LossError, PipeloomWarning

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # by peft

ROWS, LENGTH, VOCABULARY = 6, 7, 19
SIZES = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
IMAGES = {"image_size": 4, "patch_size": 2, "num_channels": 1, "num_labels": 5}
T5 = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}


def made(name: str, config: Any) -> nn.Module:
    """A model of transformers with random weights, in float64 and without dropout."""
    torch.manual_seed(0)
    return getattr(transformers, name)(config).double().eval()


def llama(**options: Any) -> nn.Module:
    return made("LlamaForCausalLM", transformers.LlamaConfig(**SIZES, **SMALL, **options))


def gpt2() -> nn.Module:
    return made("GPT2LMHeadModel", transformers.GPT2Config(**SIZES, n_embd=8, n_layer=1, n_head=2))


def bert(name: str, **options: Any) -> nn.Module:
    return made(name, transformers.BertConfig(**SIZES, **SMALL, **options))


def t5() -> nn.Module:
    return made("T5ForConditionalGeneration", transformers.T5Config(**SIZES, **T5))


def bart_decoder() -> nn.Module:
    sizes = {"d_model": 8, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8}
    return made("BartForCausalLM", transformers.BartConfig(**SIZES, **sizes))


def vit() -> nn.Module:
    return made("ViTForImageClassification", transformers.ViTConfig(**SMALL, **IMAGES))


def segformer(**options: Any) -> nn.Module:
    sizes = {"hidden_sizes": [4, 4, 4, 4], "depths": [1] * 4, "num_attention_heads": [1] * 4, "decoder_hidden_size": 4}
    config = transformers.SegformerConfig(**sizes, num_channels=1, num_labels=5, **options)
    return made("SegformerForSemanticSegmentation", config)


def distilbert() -> nn.Module:
    return made(
        "DistilBertForMaskedLM", transformers.DistilBertConfig(**SIZES, dim=8, hidden_dim=8, n_layers=1, n_heads=2)
    )


class Wrapped(nn.Module):
    """A user's own module around a model that computes its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        return self.inner(input_ids=input_ids, labels=labels)


def lora(model: nn.Module) -> nn.Module:
    """Adapters whose second factor is not zero, so that both get a gradient."""
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, lora_dropout=0.0)
    )
    return wrapped.double().eval()


def prompted(model: nn.Module) -> nn.Module:
    return (
        peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)).double().eval()
    )


TOKENS = {
    "llama": llama,
    "gpt2": gpt2,
    "bert-mlm": lambda: bert("BertForMaskedLM"),
    "bert-decoder": lambda: bert("BertLMHeadModel", is_decoder=True),
    "bert-tokens": lambda: bert("BertForTokenClassification", num_labels=VOCABULARY),
    "distilbert": distilbert,
    "t5": t5,
    "bart-decoder": bart_decoder,
    "llama-lora": lambda: lora(llama()),
    "llama-prompt": lambda: prompted(llama()),
    "llama-wrapped": lambda: Wrapped(llama()),
}


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


def uneven(ignored: int = -100) -> Tensor:
    """Labels of which the micro-batches count very different numbers, the first column not everywhere among them."""
    labels = tokens(1)
    labels[0, 0], labels[1, 1:], labels[2, :], labels[3, 5:], labels[5, :6] = (ignored,) * 5
    return labels


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def by_parts(
    model: nn.Module, num_microbatches: int, args: tuple[Any, ...] = (), **kwargs: Any
) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of the micro-batches one by one, weighted as the rule says."""
    model = copy.deepcopy(model)
    inputs = split_batch(args, kwargs, None, num_microbatches)
    loss = LossRule(None, model=ModelLoss.of(model)).for_inputs(inputs, 1.0)
    for i, each in enumerate(inputs):
        (loss.compute(i, model(*each.args, **each.kwargs), None) * loss.seed(i)).backward()
    return loss.total(), gradients(model)


def whole(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, list[Tensor]]:
    model = copy.deepcopy(model)
    loss = own_loss(model(*args, **kwargs))
    loss.backward()
    return loss.detach(), gradients(model)


def assert_same(ours: tuple[Tensor, list[Tensor]], truth: tuple[Tensor, list[Tensor]]) -> None:
    """Within 1e-6 of the largest gradient; transformers computes losses, and norms, in float32 whatever the model."""
    largest = max(each.abs().max().item() for each in truth[1])
    assert largest > 1e-3
    torch.testing.assert_close(ours, truth, rtol=1e-6, atol=1e-6 * largest)


# Against the whole batch in one forward


@pytest.mark.parametrize("num_microbatches", [2, 4, 6])
@pytest.mark.parametrize("name", TOKENS)
def test_tokens_weigh_the_same_in_any_micro_batch(name: str, num_microbatches: int) -> None:
    model, batch = TOKENS[name](), {"input_ids": tokens(), "labels": uneven()}
    assert_same(by_parts(model, num_microbatches, **batch), whole(model, **batch))


@pytest.mark.parametrize("num_microbatches", [2, 4])
@pytest.mark.parametrize("labels", [[1, -100, -100, 3, 0, 4], [1, 2, 3, 4, 0, 1]])
def test_ignored_images_weigh_nothing(labels: list[int], num_microbatches: int) -> None:
    model, batch = (
        vit(),
        {"pixel_values": torch.rand(ROWS, 1, 4, 4, dtype=torch.float64), "labels": torch.tensor(labels)},
    )
    assert_same(by_parts(model, num_microbatches, **batch), whole(model, **batch))


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        ({"num_labels": 1}, torch.tensor([1.0, 2.0, -100.0, 3.0, 4.0, 5.0]).double()),
        ({"num_labels": 3}, torch.eye(3).double().repeat(2, 1)),
        ({"num_labels": 3}, torch.tensor([0, 1, -100, -100, 2, 2])),
    ],
    ids=["regression", "several labels", "one label"],
)
def test_classification_counts_by_its_problem(options: dict[str, Any], labels: Tensor) -> None:
    model, batch = bert("BertForSequenceClassification", **options), {"input_ids": tokens(), "labels": labels}
    assert_same(by_parts(model, 4, **batch), whole(model, **batch))


@pytest.mark.parametrize("ignored", [255, 3])
def test_segmentation_ignores_its_own_index(ignored: int) -> None:
    pixels = torch.rand(ROWS, 1, 32, 32, dtype=torch.float64)
    labels = torch.randint(0, 5, (ROWS, 32, 32), generator=torch.Generator().manual_seed(0))
    labels[0, 3:] = labels[3:5, :, 1:] = ignored
    model = segformer(semantic_loss_ignore_index=ignored)
    assert_same(
        by_parts(model, 3, pixel_values=pixels, labels=labels), whole(model, pixel_values=pixels, labels=labels)
    )


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_speech_is_added_up_or_averaged_as_configured(reduction: str) -> None:
    layers = {"conv_dim": (4, 4), "conv_stride": (2, 2), "conv_kernel": (2, 2), "num_conv_pos_embeddings": 2}
    groups = {"num_conv_pos_embedding_groups": 1, "feat_extract_norm": "layer", "ctc_loss_reduction": reduction}
    model = made("Wav2Vec2ForCTC", transformers.Wav2Vec2Config(**SIZES, **SMALL, **layers, **groups))
    labels = uneven()
    labels[2, 0] = 4
    batch = {"input_values": torch.rand(ROWS, 120, dtype=torch.float64), "labels": labels}
    assert_same(by_parts(model, 4, **batch), whole(model, **batch))


@settings(deadline=None, max_examples=25)
@given(st.lists(st.booleans(), min_size=ROWS * LENGTH, max_size=ROWS * LENGTH), st.integers(1, ROWS), st.booleans())
def test_any_pattern_of_ignored_labels(is_ignored: list[bool], num_microbatches: int, is_shifted: bool) -> None:
    model = SHIFTED if is_shifted else UNSHIFTED
    labels = tokens(1).masked_fill(torch.tensor(is_ignored).view(ROWS, LENGTH), -100)
    labels[:2] = -100  # with three micro-batches or more, the first counts nothing
    labels[3, 3] = 5
    batch = {"input_ids": tokens(), "labels": labels}
    assert_same(by_parts(model, num_microbatches, **batch), whole(model, **batch))


SHIFTED, UNSHIFTED = llama(), bert("BertForMaskedLM")


def test_tuples_and_positional_labels() -> None:
    """``return_dict=False`` gives (loss, logits, ...); labels are found wherever the forward takes them."""
    args, flags = (tokens(), None, None, None, None, uneven()), {"return_dict": False, "use_cache": False}
    assert_same(by_parts(llama(), 4, args, **flags), whole(llama(), *args, **flags))


def test_labels_that_are_shifted_already() -> None:
    batch = {"input_ids": tokens(), "labels": tokens(), "shift_labels": uneven()}
    assert_same(by_parts(llama(), 4, **batch), whole(llama(), **batch))


def test_merged_loss_is_that_of_the_whole_batch() -> None:
    """Evaluation merges outputs; their loss must weigh by labels too, though a micro-batch counts nothing."""
    model, batch = llama(), {"input_ids": tokens(), "labels": uneven()}
    inputs = split_batch((), batch, None, 6)
    with torch.no_grad():
        outputs = [model(**each.kwargs, use_cache=False) for each in inputs]
        truth = model(**batch, use_cache=False)
    weights = LossRule(None, model=ModelLoss.of(model)).weights(inputs)
    merged = merge_outputs(outputs, [each.num_samples for each in inputs], weights)
    assert math.isnan(outputs[2].loss)
    torch.testing.assert_close((merged.loss, merged.logits), (truth.loss, truth.logits), rtol=1e-6, atol=1e-9)


# What is counted


def counts(model: Any, num_microbatches: int = 2, **kwargs: Any) -> list[float] | None:
    inputs = split_batch((), kwargs, None, num_microbatches)
    return LossRule(None, model=ModelLoss.of(model)).for_inputs(inputs, 1.0).counts


WRAPPERS = {
    "none": lambda model: model,
    "peft": lora,
    "user's": Wrapped,
    "user's around peft": lambda model: Wrapped(lora(model)),
    "torch's": nn.DataParallel,
    "compiled": torch.compile,
    "a list": lambda model: [model, nn.Identity()],
}


@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")  # by torch.compile itself
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_counts_as_what_it_wraps(name: str) -> None:
    assert counts(WRAPPERS[name](llama()), labels=uneven()) == [6.0, 11.0]


def test_a_model_without_labels_counts_rows() -> None:
    assert counts(llama(), input_ids=tokens()) is None
    assert counts([nn.Linear(2, 2)], labels=uneven()) is None
    assert counts(bert("BertForQuestionAnswering"), start_positions=torch.ones(6), end_positions=torch.ones(6)) is None


def test_a_loss_function_of_the_users_is_not_guessed() -> None:
    model = llama()
    model.loss_function = lambda logits, labels, **_: F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert counts(model, labels=uneven()) is None


def test_equal_counts_weigh_as_equal_rows_do() -> None:
    """Equal to the bit to a plain loop's ``loss / num_microbatches``."""
    inputs = split_batch((), {"labels": torch.ones(ROWS, 50, dtype=torch.long)}, None, 3)
    loss = LossRule(None, model=ModelLoss.of(llama())).for_inputs(inputs, 1.0)
    assert loss.counts == [98.0] * 3
    assert [loss.seed(i) for i in range(3)] == [1 / 3] * 3


@pytest.mark.parametrize("has_target", [False, True])
def test_a_count_of_the_users_wins(has_target: bool) -> None:
    """Without a loss function it is called with the target, or with the labels if there is none."""
    inputs = split_batch((), {"labels": uneven()}, tokens() if has_target else None, 2)
    rule = LossRule(None, count=lambda given: (given == -100).sum(), model=ModelLoss.of(llama()))
    assert rule.for_inputs(inputs, 1.0).counts == ([0.0, 0.0] if has_target else [14.0, 8.0])
    assert rule.weights(inputs) == [14.0, 8.0]


def test_dividing_twice_is_refused() -> None:
    given = {"labels": uneven(), "num_items_in_batch": 17}
    with pytest.raises(LossError, match="num_items_in_batch was given, but labels are counted here"):
        counts(llama(), **given)
    loss = LossRule(None, "sum", model=ModelLoss.of(llama())).for_inputs(split_batch((), given, None, 2), 1.0)
    assert (loss.counts, loss.seed(0)) == (None, 1.0)


def test_labels_divided_by_the_user_are_added_up() -> None:
    """The way of transformers' own Trainer: each loss is a sum over the whole batch's count."""
    model, batch = llama(), {"input_ids": tokens(), "labels": uneven()}
    inputs = split_batch((), {**batch, "num_items_in_batch": 17}, None, 4)
    loss = LossRule(None, "sum", model=ModelLoss.of(model)).for_inputs(inputs, 1.0)
    for i, each in enumerate(inputs):
        loss.compute(i, model(**each.kwargs), None)
    torch.testing.assert_close(loss.total(), whole(model, **batch)[0], rtol=1e-6, atol=0)


class Plain(nn.Module):
    """A user's model that computes its loss and says nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.layer(inputs), labels)}


def test_ignored_labels_of_an_unknown_model_are_warned_of() -> None:
    batch = {"inputs": torch.ones(4, 4), "labels": torch.tensor([1, -100, 2, 0])}
    with pytest.warns(PipeloomWarning, match=r"targets hold ignore_index \(-100\).*loss_count="):
        by_parts(Plain(), 2, **batch)


def test_a_count_makes_an_unknown_model_right() -> None:
    batch = {"inputs": torch.rand(4, 4), "labels": torch.tensor([1, -100, 2, 0])}
    model, inputs = Plain(), split_batch((), batch, None, 2)
    loss = LossRule(None, count=lambda labels: (labels != -100).sum(), model=ModelLoss.of(model)).for_inputs(
        inputs, 1.0
    )
    for i, each in enumerate(inputs):
        loss.compute(i, model(**each.kwargs), None)
    torch.testing.assert_close(loss.total(), whole(model, **batch)[0])


@pytest.mark.parametrize("labelled", [0, 1])
def test_nothing_counted_at_all_is_said(labelled: int) -> None:
    """The first column is never counted where labels are shifted."""
    labels = torch.full((ROWS, LENGTH), -100)
    labels[:, :labelled] = 3
    inputs = split_batch((), {"input_ids": tokens(), "labels": labels}, None, 2)
    model = llama()
    loss = LossRule(None, model=ModelLoss.of(model)).for_inputs(inputs, 1.0)
    for i, each in enumerate(inputs):
        loss.compute(i, model(**each.kwargs), None)
    assert loss.total().isnan()
    assert "no target of the whole batch counts" in str(loss.non_finite(0))


def test_the_micro_batch_to_blame_is_one_that_counts() -> None:
    loss = LossRule(None, count=float).for_step([1, 1], [0, 1], 1.0)
    for i in range(2):
        loss.compute(i, torch.tensor(math.nan, requires_grad=True), None)
    assert loss.non_finite(0).microbatch == 1
