"""What a call leaves in its arguments."""

import torch

from pipeloom.recording.filled import Changes
from pipeloom.standins.placeholder import Computing, storage_of


def test_what_a_module_writes_is_written_by_those_around_it():
    x, now = torch.zeros(2), Computing()
    with Changes(((x,), {}), now) as around:
        with Changes(((x,), {}), now) as inner:
            now.written.add(storage_of(x))
        with Changes(((x,), {}), now) as later:
            pass
    assert inner.has_any()
    assert not later.has_any()
    assert around.has_any()
    assert now.written == {storage_of(x)}
