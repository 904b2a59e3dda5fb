"""Tensors without numbers."""

import pytest
import torch

from pipeloom.standins.placeholder import NoNumbers, Placeholder, computing, storage_of

CPU = torch.device("cpu")


def placeholder(*shape, requires_grad=False):
    return Placeholder(torch.empty(*shape, device="meta"), CPU, requires_grad)


def test_a_placeholder_reports_the_models_device_and_shape():
    made = placeholder(2, 3)
    assert (made.device, made.shape, made.dtype) == (CPU, (2, 3), torch.float32)
    assert repr(made) == "Placeholder(float32(2, 3))"


def test_kernels_run_on_shapes_only_where_they_may():
    with computing():
        made = placeholder(2, 3) @ torch.ones(3, 4)
    assert isinstance(made, Placeholder)
    assert made.shape == (2, 4)
    with pytest.raises(NoNumbers, match="needs the numbers of a value of another stage"):
        made + 1


@pytest.mark.parametrize("ask", [torch.Tensor.item, bool, lambda x: x.nonzero()], ids=["item", "bool", "nonzero"])
def test_numbers_are_not_there(ask):
    with computing(), pytest.raises(NoNumbers, match="needs numbers, not only shapes"):
        ask(placeholder(1).detach())


def test_matrix_products_are_counted_as_torch_counts_them():
    with computing() as seen:
        placeholder(2, 3) @ placeholder(3, 4)
    assert seen.num_flops == 2 * 2 * 3 * 4


@pytest.mark.parametrize(
    "write",
    [lambda x: x.relu_(), lambda x: x[:, 0].fill_(1), lambda x: torch.add(x, 1, out=x), lambda x: x.__setitem__(0, 1)],
    ids=["method", "view", "out", "setitem"],
)
def test_writes_are_noted_by_the_memory_that_they_go_to(write):
    with computing() as seen, torch.no_grad():
        made, other = placeholder(2, 3), placeholder(2, 3)
        write(made)
    assert storage_of(made) in seen.written
    assert storage_of(other) not in seen.written


def test_a_write_of_a_placeholder_into_a_real_tensor_is_noted():
    real = torch.zeros(2, 3)
    with computing() as seen:
        real[0] = placeholder(3)
    assert seen.written == {storage_of(real)}


def test_a_write_is_seen_in_inference_mode_where_torch_counts_no_versions():
    with torch.inference_mode(), computing() as seen:
        made = placeholder(2)
        made.add_(1)
    assert storage_of(made) in seen.written


def test_a_placeholder_is_a_leaf_where_its_tensor_is_and_may_be_written_into_where_that_may():
    leaf = torch.ones(2, requires_grad=True)
    with computing():
        inner = Placeholder.like(leaf * 2)
        inner.add_(1)
        assert inner.requires_grad
        assert not inner.is_leaf
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            Placeholder.like(leaf).add_(1)


def test_a_mask_of_real_numbers_selects_and_that_is_a_look_at_them():
    mask = torch.tensor([True, False, True])
    with computing() as seen:
        assert placeholder(3, 4)[mask].shape == (2, 4)
    assert seen.has_read


def test_a_kernel_that_returns_what_it_was_given_returns_that_placeholder():
    with computing(), torch.no_grad():
        made = placeholder(3)
        assert made.add_(1) is made
