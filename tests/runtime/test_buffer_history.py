"""What buffers held before each forward, kept as long as somebody may ask."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeloom.runtime.batch_norm import frozen_buffers
from pipeloom.runtime.buffer_history import BufferHistory, OwnBuffers, Snapshot, copied, storage, version


def module(**buffers: torch.Tensor | None) -> nn.Module:
    made = nn.Module()
    for name, buffer in buffers.items():
        made.register_buffer(name, buffer)
    return made


def forward(history: BufferHistory, write) -> Snapshot:
    with history.forward() as snapshot:
        write()
    return snapshot


def read(owner: nn.Module, snapshot: Snapshot, name: str = "state"):
    with frozen_buffers(owner, snapshot):
        return getattr(owner, name)


def test_each_forward_finds_what_it_read() -> None:
    owner = module(state=torch.zeros(2))
    history = BufferHistory(owner)
    snapshots = [forward(history, lambda: owner.state.add_(1)) for _ in range(3)]
    assert [read(owner, each)[0].item() for each in snapshots] == [0, 1, 2]
    assert owner.state.tolist() == [3, 3]


def test_a_value_is_kept_once_for_all_who_read_it() -> None:
    owner = module(state=torch.zeros(2))
    history = BufferHistory(owner)
    one, other = (forward(history, lambda: None) for _ in range(2))
    forward(history, lambda: owner.state.fill_(7))
    assert one[(owner, "state")] is other[(owner, "state")]
    assert read(owner, one).tolist() == read(owner, other).tolist() == [0, 0]


def test_what_nobody_writes_is_not_kept() -> None:
    owner = module(table=torch.ones(4), state=torch.zeros(1))
    snapshot = forward(BufferHistory(owner), lambda: owner.state.add_(1))
    assert snapshot[(owner, "table")].value is None
    assert snapshot[(owner, "state")].value.tolist() == [0]


@pytest.mark.parametrize("value", [None, torch.ones(1)])
def test_buffers_may_be_replaced(value: torch.Tensor | None) -> None:
    owner = module(state=value)
    snapshot = forward(BufferHistory(owner), lambda: setattr(owner, "state", torch.full((1,), 5.0)))
    assert read(owner, snapshot) is None if value is None else read(owner, snapshot).tolist() == [1]
    assert owner.state.tolist() == [5]


def test_a_shared_buffer_stays_shared_in_the_past() -> None:
    one = module(state=torch.zeros(2))
    both = nn.ModuleList([one, module(state=one.state)])
    snapshot = forward(BufferHistory(both), lambda: one.state.add_(1))
    with frozen_buffers(both, snapshot):
        both[0].state.add_(5)
        assert both[1].state.tolist() == [5, 5]
    assert both[1].state.tolist() == [1, 1]


def test_a_buffer_that_came_later_is_read_as_it_is() -> None:
    owner = module()
    snapshot = forward(BufferHistory(owner), lambda: owner.register_buffer("state", torch.ones(1)))
    assert not snapshot
    assert read(owner, snapshot).tolist() == [1]


def test_inference_tensors_have_no_version() -> None:
    with torch.inference_mode():
        made = torch.ones(2)
    assert version(made) == version(None) == 0
    assert version(torch.ones(2).add_(1)) == 1


def test_copies_are_made_once() -> None:
    buffer, copies = torch.ones(2), {}
    assert copied(buffer, copies) is copied(buffer, copies)
    assert copied(None, copies) is None


def test_a_buffer_leaves_as_a_copy_once_more_after_each_write() -> None:
    owner = module(state=torch.zeros(2), table=torch.ones(2))
    own = OwnBuffers(owner)
    places = [own.part(owner.state.add_(write)).data_ptr() for write in (0, 1)]
    assert owner.state.data_ptr() not in places
    tables = [own.part(owner.table[1:]).data_ptr() == owner.table[1:].data_ptr() for _ in range(3)]
    assert tables == [False, True, True]


def test_what_is_no_buffer_leaves_as_it_is() -> None:
    own, grown, sparse = OwnBuffers(module(state=torch.ones(1))), torch.ones(2, requires_grad=True) * 2, torch.eye(2)
    assert own.part(grown).data_ptr() == grown.data_ptr()
    assert not own.part(grown).requires_grad
    assert own.part(sparse).data_ptr() == sparse.data_ptr()
    assert own.part(sparse.to_sparse()).layout is torch.sparse_coo


def test_storages() -> None:
    tensor = torch.ones(4)
    assert storage(tensor) == storage(tensor[1:].detach())
    assert storage(tensor) != storage(tensor.clone())
    assert storage(torch.eye(2).to_sparse()) is None
