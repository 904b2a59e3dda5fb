from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.cost import Costs
from pipeloom.errors import CostError
from pipeloom.ir import Kind

BASE = {"forward_s": 1.0, "input_grad_s": 2.0, "weight_grad_s": 3.0}


def uniform(**changes):
    return Costs.uniform(3, **{**BASE, **changes})


def test_number_counts_for_every_stage():
    costs = uniform(input_grad_s=[1.0, 2.0, 4.0], bytes_held_to_input_grad=5)
    assert (costs.forward_s, costs.input_grad_s) == ((1.0, 1.0, 1.0), (1.0, 2.0, 4.0))
    assert (costs.bytes_held_to_input_grad, costs.bytes_held_to_weight_grad) == ((5, 5, 5), (0, 0, 0))


@pytest.mark.parametrize(
    ("kind", "duration_s"),
    [
        (Kind.FORWARD, 1.0),
        (Kind.INPUT_GRAD, 2.0),
        (Kind.WEIGHT_GRAD, 3.0),
        (Kind.BACKWARD, 5.0),
        (Kind.RECOMPUTE, 1.0),
        *((kind, 0.0) for kind in Kind if not kind.is_compute),
    ],
)
def test_duration_of_each_kind(kind, duration_s):
    assert uniform().duration_s(kind, 1) == duration_s


def test_every_kind_has_a_duration():
    """A kind that is added without a cost must not run for nothing."""
    assert {kind for kind in Kind if uniform().duration_s(kind, 0) > 0} == {k for k in Kind if k.is_compute}


def test_unit_costs_are_ticks():
    costs = Costs.unit(2)
    assert [costs.duration_s(kind, 0) for kind in (Kind.FORWARD, Kind.BACKWARD)] == [1.0, 2.0]
    assert (costs.num_stages, costs.transfer_s, costs.has_bytes) == (2, 0.0, False)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), -float("inf"), 10**400])
@pytest.mark.parametrize("name", [*BASE, "transfer_s"])
def test_impossible_seconds_are_refused(name, value):
    with pytest.raises(CostError, match=rf"{name} holds .*; a finite number of at least 0 is needed"):
        uniform(**{name: value})


@pytest.mark.parametrize("value", ["1", None, True, [None]], ids=str)
def test_what_is_no_number_is_refused(value):
    with pytest.raises(CostError, match=r"a number is needed|one for each is needed"):
        uniform(forward_s=value)


@pytest.mark.parametrize("value", [1.5, -1, float("nan")])
def test_impossible_bytes_are_refused(value):
    with pytest.raises(CostError, match=r"bytes_held_to_input_grad holds .*needed"):
        uniform(bytes_held_to_input_grad=value)


def test_whole_float_is_a_count_of_bytes():
    held = uniform(bytes_held_to_input_grad=2e9).bytes_held_to_input_grad
    assert held == (2_000_000_000,) * 3
    assert {type(count) for count in held} == {int}


@pytest.mark.parametrize("name", [*BASE, "bytes_held_to_input_grad", "bytes_held_to_recompute"])
@pytest.mark.parametrize("values", [[1, 2], [1, 2, 3, 4]], ids=["short", "long"])
def test_lists_of_another_length_are_refused(name, values):
    message = f"{name} has {len(values)} values for 3 stages; one for each is needed"
    with pytest.raises(CostError, match=message):
        uniform(**{name: values})


@pytest.mark.parametrize("num_stages", [0, -1])
def test_no_stage_is_refused(num_stages):
    with pytest.raises(CostError, match="costs of no stages were given"):
        Costs.unit(num_stages)


def test_tuples_of_different_lengths_are_refused():
    with pytest.raises(CostError, match="input_grad_s has 1 values for 2 stages"):
        Costs((1.0, 1.0), (1.0,), (1.0, 1.0))


def test_bandwidth_needs_sizes():
    with pytest.raises(CostError, match="boundary_bytes has 0 values for 2 boundaries"):
        uniform(transfer_bytes_per_s=1e9)


def test_bandwidth_of_nothing_is_refused():
    with pytest.raises(CostError, match="transfer_bytes_per_s is 0; nothing would ever arrive"):
        uniform(transfer_bytes_per_s=0.0, boundary_bytes=1)


def test_sizes_need_a_bandwidth():
    with pytest.raises(CostError, match="without transfer_bytes_per_s; a size alone takes no time"):
        uniform(boundary_bytes=1)


def test_occupancy_of_a_boundary():
    costs = uniform(transfer_bytes_per_s=100.0, boundary_bytes=[50, 200])
    assert [costs.occupancy_s(0, 1), costs.occupancy_s(1, 2)] == [0.5, 2.0]
    assert [costs.occupancy_s(1, 0), costs.occupancy_s(2, 1)] == [0.5, 2.0]


def test_occupancy_without_a_bandwidth_is_nothing():
    assert uniform().occupancy_s(0, 1) == 0.0


def test_one_stage_has_no_boundary():
    costs = Costs.uniform(1, **BASE, transfer_bytes_per_s=1.0, boundary_bytes=8)
    assert costs.boundary_bytes == ()


@given(st.integers(1, 8), st.floats(0, 1e9), st.integers(0, 2**70))
def test_costs_are_values(num_stages, seconds, held):
    first, second = (
        Costs.uniform(
            num_stages,
            forward_s=seconds,
            input_grad_s=seconds,
            weight_grad_s=0,
            bytes_held_to_input_grad=held,
        )
        for _ in range(2)
    )
    assert first == second
    assert len({first, second}) == 1
    assert first.bytes_held_to_input_grad == (held,) * num_stages


def test_costs_are_frozen():
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'transfer_s'"):
        uniform().transfer_s = 2.0
