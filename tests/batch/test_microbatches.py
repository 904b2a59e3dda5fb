import re
from collections import OrderedDict, UserDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.batch.microbatches import PerSample, Replicated, batch_size, merge_outputs, split_batch
from pipeloom.errors import BatchError, PipeloomWarning

BATCH = torch.arange(14.0).reshape(7, 2)


def sizes(num_rows: int, num_microbatches: int) -> list[int]:
    return [part.num_samples for part in split_batch((torch.zeros(num_rows),), {}, None, num_microbatches)]


def merge(*outputs: Any, num_samples: list[int] | None = None) -> Any:
    return merge_outputs(outputs, num_samples=num_samples or [2] * len(outputs))


# Splitting


@pytest.mark.parametrize(
    ("num_rows", "num_microbatches", "expected"),
    [(8, 4, [2, 2, 2, 2]), (7, 3, [3, 2, 2]), (5, 3, [2, 2, 1]), (3, 3, [1, 1, 1]), (6, 1, [6])],
)
def test_sizes_differ_by_one_larger_first(num_rows: int, num_microbatches: int, expected: list[int]) -> None:
    assert sizes(num_rows, num_microbatches) == expected


@given(st.integers(1, 200), st.data())
def test_sizes_are_those_of_tensor_split(num_rows: int, draw: st.DataObject) -> None:
    num_microbatches = draw.draw(st.integers(1, num_rows))
    expected = [len(part) for part in torch.tensor_split(torch.zeros(num_rows), num_microbatches)]
    assert sizes(num_rows, num_microbatches) == expected


def test_args_kwargs_and_target_are_cut_together() -> None:
    parts = split_batch((BATCH,), {"mask": BATCH > 3}, BATCH[:, 0], 3)
    assert torch.equal(torch.cat([part.args[0] for part in parts]), BATCH)
    assert torch.equal(torch.cat([part.kwargs["mask"] for part in parts]), BATCH > 3)
    assert [part.target.tolist() for part in parts] == [[0, 2, 4], [6, 8], [10, 12]]


def test_parts_are_views_of_the_batch() -> None:
    parts = split_batch((BATCH,), {}, None, 3)
    assert [part.args[0].data_ptr() - BATCH.data_ptr() for part in parts] == [0, 24, 40]


def test_gradient_of_the_batch_is_whole() -> None:
    batch = BATCH.clone().requires_grad_()
    for part in split_batch((batch,), {}, None, 3):
        part.args[0].square().sum().backward()
    assert torch.equal(batch.grad, 2 * BATCH)


@pytest.mark.parametrize("value", [torch.tensor(3.0), "text", 7, None, torch.Size((7, 2)), np.zeros(())])
def test_what_has_no_rows_goes_to_all_as_it_is(value: Any) -> None:
    parts = split_batch((BATCH, value), {"same": value}, None, 2)
    assert all(part.args[1] is value and part.kwargs["same"] is value for part in parts)


def test_target_may_be_absent() -> None:
    assert [part.target for part in split_batch((BATCH,), {}, None, 2)] == [None, None]


def test_replicated_goes_to_all_unwrapped() -> None:
    table = torch.zeros(3, 5)
    parts = split_batch((Replicated(table), BATCH), {}, {"weights": Replicated(BATCH)}, 2)
    assert all(part.args[0] is table and part.target["weights"] is BATCH for part in parts)


@pytest.mark.parametrize(
    ("args", "kwargs", "target", "expected"),
    [
        ((BATCH,), {}, None, 7),
        ((3, torch.tensor(1.0), [torch.zeros(4)]), {"x": BATCH}, BATCH, 4),
        ((), {"x": {"y": torch.zeros(5)}}, BATCH, 5),
        ((Replicated(torch.zeros(2)),), {}, BATCH, 7),
    ],
)
def test_first_tensor_with_a_dimension_gives_the_batch_size(
    args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, expected: int
) -> None:
    assert batch_size(args, kwargs, target) == expected


@pytest.mark.parametrize("args", [(), (3, "text"), (torch.tensor(1.0),), (Replicated(BATCH),)])
def test_batch_without_tensors_is_refused(args: tuple[Any, ...]) -> None:
    with pytest.raises(BatchError, match=rf"{len(args)} arguments .* no tensor with a dimension"):
        split_batch(args, {}, None, 2)


def test_too_few_rows_name_both_numbers() -> None:
    with pytest.raises(BatchError, match="a batch of 3 samples was given for 4 micro-batches"):
        sizes(3, 4)


def test_no_microbatches_are_refused() -> None:
    with pytest.raises(BatchError, match="0 micro-batches were asked for"):
        sizes(3, 0)


@pytest.mark.parametrize(
    ("args", "kwargs", "target", "path"),
    [
        ((BATCH,), {"mask": torch.zeros(3, 2)}, None, r"kwargs\['mask'\]"),
        ((BATCH, [1, {"x": torch.zeros(3, 2)}]), {}, None, r"args\[1\]\[1\]\['x'\]"),
        ((BATCH,), {}, torch.zeros(3, 2), "target"),
    ],
)
def test_tensor_with_other_rows_is_named(args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, path: str) -> None:
    expected = rf"{path} has shape \(3, 2\), but the batch has 7 samples \(dimension 0 of args\[0\]\)"
    with pytest.raises(BatchError, match=expected) as caught:
        split_batch(args, kwargs, target, 2)
    assert "Replicated(" in caught.value.hint


def test_several_texts_to_an_image_the_texts_first() -> None:
    """OWL-ViT's processor gives the texts of all images first; the hint was to give every micro-batch all images."""
    texts, images = torch.zeros(6, 5), torch.zeros(2, 3)
    with pytest.raises(BatchError) as caught:
        split_batch((), {"texts": texts, "images": images}, None, 2)
    assert "2 samples with 3 rows of kwargs['texts'] each, give kwargs['images'] before" in str(caught.value.hint)
    with pytest.warns(PipeloomWarning, match="3 consecutive rows"):
        split_batch((), {"images": images, "texts": texts}, None, 2)


def test_containers_of_any_kind_are_cut() -> None:
    value = OrderedDict(a=[BATCH, (BATCH, "x")], b=UserDict(c=BATCH))
    first, second = (part.args[0] for part in split_batch((value,), {}, None, 2))
    assert (type(second), type(second["b"]), second["a"][1][1]) == (OrderedDict, UserDict, "x")
    assert torch.equal(torch.cat([first["b"]["c"], second["b"]["c"]]), BATCH)
    assert len(value["b"]["c"]) == 7


# Merging


def test_rows_are_concatenated() -> None:
    parts = split_batch((BATCH,), {}, None, 3)
    merged = merge_outputs([part.args[0] for part in parts], num_samples=[part.num_samples for part in parts])
    assert torch.equal(merged, BATCH)


def test_single_output_is_returned_as_it_is() -> None:
    output = {"anything": object()}
    assert merge(output) is output


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(-100, 100)), min_size=2, max_size=6))
def test_scalars_become_their_weighted_mean(parts: list[tuple[int, float]]) -> None:
    counts, values = [count for count, _ in parts], [value for _, value in parts]
    merged = merge_outputs([torch.tensor(value, dtype=torch.float64) for value in values], num_samples=counts)
    assert merged.item() == pytest.approx(np.average(values, weights=counts), rel=1e-12, abs=1e-12)


def test_scalars_are_averaged_in_float32() -> None:
    outputs = [torch.tensor(value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, 1.0)]
    merged = merge(*outputs)
    assert (merged.item(), merged.dtype) == (65.0, torch.bfloat16)  # a sum in bfloat16 stays at 64


def test_scalar_mean_is_taken_in_float32() -> None:
    """Sevenths of 29 in bfloat16 add up to 29.125."""
    merged = merge_outputs([torch.tensor(29.0, dtype=torch.bfloat16)] * 7, [1] * 7)
    assert merged.dtype == torch.bfloat16
    assert merged == 29.0


def test_scalar_mean_keeps_its_graph() -> None:
    x = torch.tensor(2.0, requires_grad=True)
    merge(x, x * x, num_samples=[1, 3]).backward()
    assert x.grad.item() == 0.25 + 0.75 * 4


@pytest.mark.parametrize(
    "value", [torch.zeros(5, 2), torch.tensor(3), torch.tensor(True), torch.zeros(5, dtype=torch.int8)]
)
def test_equal_tensors_stay_as_they_are(value: torch.Tensor) -> None:
    assert merge(value, value.clone()) is value


@pytest.mark.parametrize("value", [None, 3, "text", {1, 2}, 2.5, torch.float32, range(3)])
def test_equal_values_stay_as_they_are(value: Any) -> None:
    assert merge(value, value) == value


def test_arrays_are_compared_as_a_whole() -> None:
    assert merge(np.arange(3), np.arange(3)).tolist() == [0, 1, 2]
    with pytest.raises(BatchError, match=r"output is array\(\[0, 1, 2\]\) in micro-batch 0"):
        merge(np.arange(3), np.arange(3) + 1)


def test_nan_that_is_one_object_is_equal() -> None:
    nan = float("nan")
    assert merge({"loss": nan}, {"loss": nan})["loss"] is nan


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (torch.zeros(5), torch.ones(5), r"output\['x'\]\[1\] is tensor\(\[0.*in micro-batch 0 and tensor\(\[1"),
        (torch.zeros(5), torch.zeros(6), r"output\['x'\]\[1\] is tensor"),
        (torch.zeros(5), torch.zeros(5, dtype=torch.float64), r"output\['x'\]\[1\] is tensor"),
        (torch.tensor(1), torch.tensor(2), r"is tensor\(1\) in micro-batch 0 and tensor\(2\) in micro-batch 1"),
        (torch.zeros(9, 9), torch.ones(9, 9), r"is a tensor of shape \(9, 9\) and torch.float32"),
        (3, 4, r"output\['x'\]\[1\] is 3 in micro-batch 0 and 4 in micro-batch 1"),
        ("a", None, r"is 'a' in micro-batch 0 and None in micro-batch 1"),
    ],
)
def test_values_that_differ_are_named(one: Any, other: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        merge({"x": (0, one)}, {"x": (0, other)})


def test_the_micro_batch_that_differs_is_named() -> None:
    with pytest.raises(BatchError, match="output is 1 in micro-batch 0 and 5 in micro-batch 2"):
        merge(1, 1, 5)


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ({"a": 1}, {"b": 1}, r"output is dict of \['a'\] in micro-batch 0 and dict of \['b'\] in micro-batch 1"),
        ((1,), [1], r"output is tuple of \[0\] in micro-batch 0 and list of \[0\]"),
        ((1, 2), (1,), r"output is tuple of \[0\], \[1\] .* tuple of \[0\] in"),
        ({"a": []}, {"a": [1]}, r"output\['a'\] is list of nothing in micro-batch 0 and list of \[0\]"),
        (BATCH, None, "output is a tensor in micro-batch 0 and NoneType in micro-batch 1"),
        ({"a": 1}, BATCH, r"output is dict of \['a'\] in micro-batch 0 and a tensor in micro-batch 1"),
    ],
)
def test_other_structure_is_refused(one: Any, other: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        merge(one, other)


def test_order_of_keys_does_not_matter() -> None:
    merged = merge({"a": 1, "b": torch.zeros(2)}, {"b": torch.ones(2), "a": 1})
    assert (merged["a"], merged["b"].tolist()) == (1, [0, 0, 1, 1])


def test_rows_of_other_widths_are_refused() -> None:
    with pytest.raises(
        BatchError, match=r"output\[0\] has shape \(2, 3\) in micro-batch 0 and \(2, 4\) in micro-batch 1"
    ):
        merge([torch.zeros(2, 3)], [torch.zeros(2, 4)])


@pytest.mark.parametrize("outputs", [[], [1, 2]])
def test_each_micro_batch_needs_one_output(outputs: list[Any]) -> None:
    with pytest.raises(BatchError, match=rf"{len(outputs)} outputs were given for 3 micro-batches"):
        merge_outputs(outputs, num_samples=[1, 1, 1])


@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 6))
def test_split_then_merge_gives_the_batch(num_rows: int, width: int, num_microbatches: int) -> None:
    num_microbatches = min(num_rows, num_microbatches)
    value = {"x": torch.rand(num_rows, width), "y": [torch.arange(num_rows), "text", torch.tensor(2.0)]}
    parts = split_batch((value,), {}, None, num_microbatches)
    merged = merge_outputs([part.args[0] for part in parts], num_samples=[part.num_samples for part in parts])
    assert torch.equal(merged["x"], value["x"])
    assert torch.equal(merged["y"][0], value["y"][0])
    assert merged["y"][1:] == ["text", pytest.approx(2.0)]


@pytest.mark.parametrize("place", ["args[1]", "kwargs['mask']", "target"])
def test_arrays_that_are_no_tensors_are_refused(place: str) -> None:
    """Every micro-batch got the whole batch's targets, and a loss that broadcasts had nothing to say against it."""
    given = {"args[0]": torch.ones(4, 2), "args[1]": None, "kwargs['mask']": None, "target": None}
    given[place] = np.ones((4, 2))
    message = rf"{re.escape(place)} is a ndarray of shape \(4, 2\)[^$]*hint: pass torch.as_tensor"
    with pytest.raises(BatchError, match=message):
        split_batch([given["args[0]"], given["args[1]"]], {"mask": given["kwargs['mask']"]}, given["target"], 2)


def test_an_array_may_be_replicated() -> None:
    array = np.ones((3, 2))
    made = split_batch([torch.ones(4, 2), Replicated(array), np.float32(3)], {}, None, 2)
    assert [each.args[1] is array for each in made] == [True, True]
    assert made[1].args[2] == 3


def test_a_sparse_batch_is_cut() -> None:
    """torch has no views of it: "Could not run 'aten::as_strided'"."""
    parts = split_batch([BATCH.to_sparse()], {}, None, 3)
    assert [each.args[0].layout for each in parts] == [torch.sparse_coo] * 3
    assert torch.equal(torch.cat([each.args[0].to_dense() for each in parts]), BATCH)


# Lists with an entry for each sample, and several rows for each

PIXELS = torch.rand(6, 3, 4, 4)


def targets(num_boxes: int = 2) -> list[dict[str, torch.Tensor]]:
    return [{"boxes": torch.rand(num_boxes + i % 2, 4), "label": torch.tensor(i)} for i in range(6)]


def test_a_list_with_an_entry_for_each_sample_is_cut_as_a_list() -> None:
    """DETR's format of labels was refused, with the advice to hand the labels of all images to each micro-batch."""
    labels = targets()
    parts = split_batch((), {"pixel_values": PIXELS, "labels": labels}, None, 4)
    assert [each for part in parts for each in part.kwargs["labels"]] == labels
    assert [len(part.kwargs["labels"]) for part in parts] == [2, 2, 1, 1]
    assert type(parts[0].kwargs["labels"]) is list


def test_a_list_that_may_be_meant_either_way_is_refused_until_it_is_said() -> None:
    """With as many boxes in each image as images, each image's boxes were cut, and the loss was another, in silence."""
    boxes = [torch.rand(6, 4) for _ in range(6)]
    with pytest.raises(BatchError, match=r"kwargs\['boxes'\] is a list of 6 entries for a batch of 6 samples, and its"):
        split_batch((PIXELS,), {"boxes": boxes}, None, 2)
    parts = split_batch((PIXELS,), {"boxes": PerSample(boxes)}, None, 2)
    assert [each for part in parts for each in part.kwargs["boxes"]] == boxes
    assert all(a is b for a, b in zip(parts[1].kwargs["boxes"], boxes[3:], strict=True))
    parts = split_batch((PIXELS,), {"boxes": tuple(boxes)}, None, 2)
    assert [each.shape for each in parts[0].kwargs["boxes"]] == [(3, 4)] * 6


def test_images_of_several_sizes_say_how_many_samples_there_are() -> None:
    images = [torch.rand(3, 4 + i, 4) for i in range(6)]
    assert batch_size((PerSample(images),), {}) == 6
    parts = split_batch((PerSample(images),), {}, targets(), 3)
    assert [[image.shape[1] for image in part.args[0]] for part in parts] == [[4, 5], [6, 7], [8, 9]]
    assert [len(part.target) for part in parts] == [2, 2, 2]


def test_other_lists_are_containers_as_ever() -> None:
    parts = split_batch((PIXELS, [PIXELS, PIXELS[:, 0]], ["six"] * 6, [PIXELS] * 5 + [None]), {}, None, 2)
    assert [each.shape[0] for each in parts[0].args[1]] == [3, 3]
    assert parts[0].args[2] == ["six"] * 6
    assert parts[0].args[3][0].shape[0] == 3


def test_entries_for_another_number_of_samples_are_refused() -> None:
    with pytest.raises(BatchError, match=r"args\[1\] has entries for 2 samples, but the batch has 6"):
        split_batch((PIXELS, PerSample([1, 2])), {}, None, 2)


def test_several_rows_for_each_sample_stay_with_it() -> None:
    """Qwen-VL's patches of all images lie in one tensor: no micro-batch got the right ones, nothing could say so."""
    patches = torch.arange(24.0).reshape(24, 1)
    with pytest.warns(
        PipeloomWarning, match=r"args\[1\] has 24 rows for 6 samples .*: 4 consecutive rows are taken to"
    ):
        parts = split_batch((PIXELS, patches), {}, None, 4)
    assert [part.args[1].shape[0] for part in parts] == [8, 8, 4, 4]
    assert torch.equal(torch.cat([part.args[1] for part in parts]), patches)
    merged = merge_outputs([part.args[1] for part in parts], [part.num_samples for part in parts])
    assert torch.equal(merged, patches)
    table = torch.rand(24, 2)
    assert merge_outputs([table, table.clone()], [3, 3]) is table
    with pytest.raises(BatchError, match="the batch has 6 samples"):
        split_batch((PIXELS, patches[:23]), {}, None, 2)


def test_with_one_micro_batch_all_of_it_is_the_batch() -> None:
    given = (PIXELS, torch.rand(23, 2), Replicated(7), PerSample((1, 2)))
    (part,) = split_batch(given, {}, targets(), 1)
    assert part.args == (PIXELS, given[1], 7, [1, 2])
    assert part.args[0] is PIXELS
