"""Messages, the copies that recomputation keeps, and one stage's backward."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipeloom.errors import BatchError
from pipeloom.runtime.boundary import InputUse, KeptInput, Message, described, detached, moved, run_backward


def grown(*shape):
    """A tensor with a graph."""
    return torch.ones(*shape, requires_grad=True) * 2


def test_message_shares_memory_but_no_graph():
    sent = grown(3)
    message, leaves = Message.of(sent)
    assert leaves[0] is sent
    assert message.leaves[0].data_ptr() == sent.data_ptr()
    assert not message.leaves[0].requires_grad


def test_message_knows_whose_gradient_comes_back():
    message, leaves = Message.of({"a": grown(2), "b": (torch.ones(2), None), "c": torch.tensor([1])})
    assert message.needs_grad == (True, False, False, False)
    assert len(leaves) == 4
    assert message.value().keys() == {"a", "b", "c"}


def test_opened_value_collects_its_gradient():
    message, _ = Message.of((grown(2, 3), torch.ones(2)))
    value, inputs = message.opened()
    (value[0] * value[1][:, None]).sum().backward()
    assert inputs[0].grad.tolist() == [[1.0] * 3] * 2
    assert inputs[1] is None
    assert not value[1].requires_grad


def test_opened_value_may_be_written_into():
    message, leaves = Message.of(grown(3))
    value, inputs = message.opened()
    value.mul_(3)
    value.sum().backward()
    assert inputs[0].grad.tolist() == [3.0] * 3
    assert leaves[0].tolist() == [6.0] * 3


def test_each_opening_has_a_graph_of_its_own():
    message, _ = Message.of(grown(2))
    first, second = message.opened(), message.opened()
    first[0].sum().backward()
    assert first[1][0].grad is not None
    assert second[1][0].grad is None


def test_inputs_keep_their_need():
    given_input = torch.ones(2, requires_grad=True)
    message = Message.of_inputs((given_input, 3), {"mask": torch.ones(2)})
    assert message.needs_grad == (True, False, False)
    args, kwargs = message.value()
    assert args == (given_input, 3)
    assert kwargs.keys() == {"mask"}


@pytest.mark.parametrize("weight", [torch.ones(2), torch.ones(1).expand(2)], ids=["whole", "expanded"])
def test_a_stage_may_hook_what_it_is_given(weight):
    """What a hook of the stage's own made of a gradient was lost where that had come in another layout.

    The collector's hook came first, kept the gradient for its layout, and handed that on.
    """
    value, (collector,) = Message.of(grown(2))[0].opened_to_read(is_last_use=True)
    seen = []
    removed = value.register_hook(seen.append)
    value.register_hook(lambda grad: 3 * grad)
    removed.remove()
    collector.go_last()
    value.backward(weight)
    assert seen == []
    assert collector.grad.tolist() == [3, 3]


@pytest.mark.parametrize("needs_grad", [True, False])
def test_one_argument_comes_as_it_was_given(needs_grad):
    """It is packed without looking into containers; the model is called as with any other arguments."""
    given = torch.ones(2, requires_grad=needs_grad)
    message = Message.of_inputs((given,), {})
    ((used,), kwargs), inputs = message.opened()
    assert (message.needs_grad, kwargs) == ((needs_grad,), {})
    assert used.data_ptr() == given.data_ptr()
    assert [each is not None for each in inputs] == [needs_grad]
    assert not message.is_one_tensor


@pytest.mark.parametrize("leaf", [object(), iter([]), {1, 2}, lambda: None, nn.Linear(1, 1)])
def test_leaves_that_may_hide_tensors(leaf):
    with pytest.raises(BatchError, match=r"a stage returned a \w+; tensors, plain values.*\nhint: return its tensors"):
        Message.of((torch.ones(1), leaf))


@pytest.mark.parametrize(
    "leaf",
    [None, True, 3, 0.5, 1j, "text", b"bytes", torch.float32, torch.device("cpu"), np.int64(3), range(2), slice(1)],
)
def test_plain_values_cross(leaf):
    message, leaves = Message.of([leaf])
    assert message.value() == [leaf]
    assert leaves == (leaf,)


def test_devices():
    message, _ = Message.of((grown(2), "text"))
    assert message.to(None) is message
    assert message.to(torch.device("cpu")).leaves[0].data_ptr() == message.leaves[0].data_ptr()
    assert message.to(torch.device("meta")).leaves[0].is_meta
    assert message.to(torch.device("meta")).needs_grad == (True, False)


def test_moved_and_detached_walk_containers():
    value = {"a": [grown(2), 3]}
    assert moved(value, None) is value
    assert moved(value, torch.device("meta"))["a"][0].is_meta
    assert not detached(value)["a"][0].requires_grad
    assert detached(value)["a"][1] == 3


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.ones(2, 3), "float32(2, 3)"),
        ((torch.ones(4).long(), None), "int64(4,), None"),
        ({"a": torch.ones(()), "b": "x"}, "float32(), 'x'"),
        ((), ""),
    ],
)
def test_described(value, text):
    assert described(value) == text
    assert described(Message.of(value)[0].value()) == text


def test_backward_leaves_out_what_needs_none():
    weight = torch.ones(2, requires_grad=True)
    run_backward([weight * 2, torch.ones(2), "text", weight * 5], [torch.ones(2), torch.ones(2), None, None])
    assert weight.grad.tolist() == [2.0, 2.0]
    run_backward([weight * 2], [None])
    assert weight.grad.tolist() == [2.0, 2.0]


def test_backward_of_the_same_output_twice():
    weight = torch.ones(2, requires_grad=True)
    output = weight * 2
    run_backward([output, output], [torch.ones(2), torch.ones(2)])
    assert weight.grad.tolist() == [4.0, 4.0]


def layouts():
    base = torch.arange(60.0).reshape(3, 4, 5)
    return {
        "plain": base,
        "slice": base[:, 1:3],
        "transposed": base.transpose(0, 2),
        "every other": base[::2, :, ::2],
        "expanded": torch.ones(1, 4).expand(3, 4),
        "one value": base[0, 0, 0],
        "empty": base[:0],
        "offset": base.flatten()[7:],
        "bytes": (base > 3)[1:],
        "double": base.double()[1:],
        "expanded in the middle": base[:, :1].expand(3, 4, 5),
        "sparse": base[0].to_sparse(),
        "complex": torch.complex(base, base)[1:],
    }


@pytest.mark.parametrize("name", layouts())
def test_input_comes_back_as_it_was(name):
    """Written into or not: the second forward gets the same numbers, in the same layout."""
    original = layouts()[name]
    expected = original.clone()
    kept = KeptInput(Message.of(original)[0])
    if "expanded" not in name:
        original.zero_()
    kept.forget_unchanged()
    found = kept.as_it_was().value()
    assert torch.equal(found.to_dense() if found.is_sparse else found, expected.to_dense())
    assert found.dtype == original.dtype
    assert found.is_sparse or found.stride() == original.stride()


@given(start=st.integers(0, 20), size=st.integers(1, 20), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_copies_lie_as_their_originals_do(start, size, dtype):
    """Another place within a cache line would be another order of sums in some kernels."""
    original = torch.arange(60, dtype=dtype)[start : start + size]
    kept = KeptInput(Message.of(original)[0])
    original.add_(1)
    kept.forget_unchanged()
    copy = kept.as_it_was().value()
    assert copy.data_ptr() != original.data_ptr()
    assert (copy.data_ptr() - original.data_ptr()) % 64 == 0
    assert torch.equal(copy + 1, original)


def test_unchanged_input_is_not_copied():
    one, other = torch.ones(3), torch.ones(3)
    kept = KeptInput(Message.of((one, other, None))[0])
    other.mul_(2)
    kept.forget_unchanged()
    found = kept.as_it_was().value()
    assert found[0].data_ptr() == one.data_ptr()
    assert found[1].tolist() == [1.0, 1.0, 1.0]
    assert found[2] is None


def test_a_tensor_that_is_there_twice_crosses_once():
    sent, mask = grown(2), torch.ones(2)
    message, _ = Message.of((sent, mask, sent, mask))
    value, inputs = message.to(torch.device("meta")).opened()
    assert value[0] is value[2]
    assert value[1] is value[3]
    assert [each is None for each in inputs] == [False, True, True, True]


def test_writes_into_micro_batches_are_counted_apart():
    batch = torch.ones(4)
    one, other = (Message.of_inputs((part,), {}).leaves[0] for part in batch.split(2))
    one.add_(1)
    assert (one._version, other._version) == (1, 0)
    assert batch.tolist() == [2, 2, 1, 1]


def test_a_copy_serves_all_places_of_a_tensor():
    sent = torch.ones(2)
    kept = KeptInput(Message.of((sent, sent))[0])
    sent.add_(1)
    kept.forget_unchanged()
    one, other = kept.as_it_was().value()
    assert one is other
    assert one.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("one", "other", "is_refused"),
    [
        (lambda x: x[:, 1:], lambda x: x[:, :2], True),
        (lambda x: x[:, ::2], lambda x: x[:, 1::2], False),
        (lambda x: x[0], lambda x: x.view(-1)[1], True),
        (lambda x: x[:0], lambda x: x, False),
        (lambda x: x[:1].expand(3, 4), lambda x: x[1:], False),
    ],
)
def test_overlaps_are_found_element_by_element(one, other, is_refused):
    base = torch.ones(3, 4, requires_grad=True) * 1
    message, _ = Message.of((one(base), other(base)))
    refusal = pytest.raises(BatchError, match="share memory") if is_refused else nullcontext()
    with refusal, message.guarded(is_recomputed=False):
        message.leaves[1].mul_(2)
    assert message.leaves[1].flatten()[0] == 2


def test_a_tensor_that_is_only_read_needs_no_alias():
    message, leaves = Message.of(grown(3))
    value, inputs = message.opened_to_read(is_last_use=False)
    (value * 5).sum().backward()
    assert value is inputs[0].leaf
    assert inputs[0].grad.tolist() == [5.0] * 3
    assert not message.leaves[0].requires_grad
    assert value.data_ptr() == leaves[0].data_ptr()


def test_a_message_that_is_opened_for_the_last_time_collects_itself():
    message, leaves = Message.of(grown(3))
    value, _ = message.opened_to_read(is_last_use=True)
    assert value is message.leaves[0]
    assert value._version == leaves[0]._version
    assert leaves[0].grad_fn is not None


@pytest.mark.parametrize("write", [lambda x: x.mul_(3), lambda x: x.view(-1).relu_(), lambda x: x[0].zero_()])
def test_a_write_into_a_tensor_that_was_opened_to_read_is_refused_before_it_happens(write):
    use, (message, _) = InputUse(nn.Identity()), Message.of(grown(3))
    use.note(is_written=False)
    assert use.is_reading
    value, _ = message.opened_to_read(is_last_use=True)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad") as caught:
        write(value)
    assert use.note_refusal(caught.value)
    assert not use.is_reading
    assert value.tolist() == [2.0] * 3


def test_what_a_stage_does_is_known_after_its_first_forward():
    use = InputUse(nn.Linear(2, 2))
    assert not use.is_reading
    use.note(is_written=False)
    assert use.is_reading
    assert not use.note_refusal(RuntimeError("out of memory"))
    use.note(is_written=True)
    assert not use.is_reading


def test_a_stage_with_buffers_always_gets_an_alias():
    """Its forward can't begin again: buffers would be updated twice."""
    use = InputUse(nn.BatchNorm1d(2))
    use.note(is_written=False)
    assert not use.is_reading


@pytest.mark.parametrize("value", [grown(2), torch.ones(2), (grown(2),), {"a": grown(2)}, 3])
def test_one_tensor_is_one_that_needs_a_gradient_and_lies_in_nothing(value):
    message, _ = Message.of(value)
    assert message.is_one_tensor is (isinstance(value, torch.Tensor) and value.requires_grad)
