"""Copies that compute what their originals compute."""

import pytest
import torch

from pipeloom.batch.copies import copied_alike


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(7, 5)[3:],
        torch.randn(4, 6).t(),
        torch.randn(4, 1).expand(4, 3),
        torch.zeros(0, 2),
        torch.arange(9)[1::2],
    ],
    ids=["rows", "transposed", "expanded", "empty", "strided"],
)
def test_a_copy_is_laid_out_and_aligned_as_its_original(tensor):
    made = copied_alike(tensor)
    assert torch.equal(made, tensor)
    assert made.stride() == tensor.stride()
    if tensor.numel():
        assert made.data_ptr() % 64 == tensor.data_ptr() % 64
        assert made.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
