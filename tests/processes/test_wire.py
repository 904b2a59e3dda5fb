"""Tensors as memory: what arrives lies as what was sent, and shares what it shared."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.errors import BatchError
from pipeloom.processes.wire import CACHE_LINE, packed, rooms, unpacked

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
VIEWS = {
    "itself": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1),
    "columns": lambda x: x[:, 1:3],
    "one column": lambda x: x[:, 0],
    "every other row": lambda x: x[::2],
    "expanded": lambda x: x[:1].expand(4, -1),
    "one element": lambda x: x[1, 1],
    "nothing": lambda x: x[:0],
    "conjugated": lambda x: x.conj(),
}


def sent(leaves):
    """Through pickle and bytes, as between processes."""
    description, memory = packed(leaves)
    description = pickle.loads(pickle.dumps(description))
    received = rooms(description, torch.device("cpu"))
    for room, part in zip(received, memory, strict=True):
        room.copy_(part)
    return unpacked(description, received)


def whole(dtype, num_rows=5, num_columns=7):
    return torch.arange(num_rows * num_columns).reshape(num_rows, num_columns).to(dtype)


def place(tensor):
    return tensor.data_ptr() % CACHE_LINE


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_arrives_as_it_lay(view, dtype):
    leaf = VIEWS[view](whole(dtype))
    (found,) = sent([leaf])
    assert torch.equal(found, leaf.resolve_conj())
    assert found.stride() == leaf.stride()
    assert not leaf.numel() or view == "conjugated" or place(found) == place(leaf)


@given(views=st.lists(st.sampled_from(sorted(VIEWS)), min_size=1, max_size=5))
def test_views_of_one_tensor_still_share_its_memory(views):
    base = whole(torch.float32)
    leaves = [VIEWS[view](base) for view in views]
    found = sent(leaves)
    assert all(torch.equal(one, other) for one, other in zip(found, leaves, strict=True))
    storages = {each.untyped_storage().data_ptr() for each in found if each.numel()}
    assert len(storages) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_memory_that_begins_within_an_element(dtype):
    """It came from numpy, and its numbers were read from the element before."""
    room = torch.zeros(200, dtype=torch.uint8).numpy()
    leaf = torch.from_numpy(room[4:].view(room.dtype)[: 8 * 20].view(str(dtype).removeprefix("torch.")))
    leaf.copy_(torch.arange(len(leaf)))
    assert torch.equal(sent([leaf])[0], leaf)
    assert torch.equal(sent([leaf[1::3]])[0], leaf[1::3])


def test_a_write_into_one_leaf_reaches_its_view():
    base = whole(torch.float32)
    found = sent([base, base[:, 2]])
    found[0][:, 2] = -1.0
    assert found[1].tolist() == [-1.0] * 5


def test_one_tensor_twice_is_one_tensor_twice():
    leaf = whole(torch.float32)
    found = sent([leaf, 3, leaf, None, "text"])
    assert found[0] is found[2]
    assert found[1] == 3
    assert found[3:] == (None, "text")


def test_a_column_does_not_bring_its_table_along():
    _, memory = packed([whole(torch.float32, 100, 50)[:, 0]])
    assert [part.numel() for part in memory] == [400]


@pytest.mark.parametrize(
    ("leaf", "said"),
    [
        (torch.eye(3).to_sparse(), r"a torch.sparse_coo tensor"),
        (torch.ones(2).as_subclass(type("Own", (torch.Tensor,), {})), r"a Own"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(leaf, said):
    with pytest.raises(BatchError, match=rf"a stage handed on {said}; between processes[^$]*hint: return a dense"):
        packed([leaf])
