"""What crosses between stages, from recordings written by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.recording.ops import INPUT, Form, Kind, Op, Recording, Value
from pipeloom.splitting.dataflow import flow
from pipeloom.splitting.together import Bond, together

UNIT, GLUE, EVERYWHERE = Kind.UNIT, Kind.GLUE, Kind.EVERYWHERE


def recording(*ops, results=(), **more):
    """Ops as (kind, ops whose first output they use); all need gradients."""
    made = [
        Op(
            i,
            kind,
            f"op{i}",
            None if kind is UNIT else torch.add,
            inputs=tuple(Value(op, 0) for op in inputs),
            grads={0},
        )
        for i, (kind, inputs) in enumerate(ops)
    ]
    results = tuple(Value(op, 0) for op in results)
    forms = {Value(op, 0): Form((2,), torch.float32) for op in range(-1, len(made))}
    return Recording(made, results, forms=forms, **more)


def v(*ops):
    return tuple(Value(op, 0) for op in ops)


def test_a_chain_hands_one_value_on():
    found = flow(recording((UNIT, ()), (GLUE, (0,)), (UNIT, (1,)), results=[2]), [0, 1], 2)
    first, last = found.stages
    assert found.stage_of == (0, 0, 1)
    assert (first.sends, last.receives, last.returns, first.seeds) == ({1: v(1)}, {0: v(1)}, {0: v(1)}, {1: v(1)})


def test_glue_of_the_inputs_is_nobodys_and_sends_nothing():
    found = flow(recording((EVERYWHERE, ()), (UNIT, (0,)), (UNIT, (1,)), results=[2]), [0, 1], 2)
    assert found.stage_of == (None, 0, 1)
    assert found.stages[1].incoming == v(1)


def test_a_value_that_skips_goes_straight_and_its_gradient_travels_back_through_all_that_used_it():
    ops = [(UNIT, ()), (UNIT, (0,)), (UNIT, (0, 1)), (UNIT, (0, 2))]
    found = flow(recording(*ops, results=[3]), [0, 1, 2, 3], 4)
    assert found.stages[0].sends == {1: v(0), 2: v(0), 3: v(0)}
    assert [each.returns for each in found.stages] == [{}, {0: v(0)}, {1: v(0, 1)}, {2: v(0, 2)}]
    assert found.forward_links == {(0, 2), (0, 3)}
    assert found.backward_links == set()


def test_a_value_without_a_gradient_sends_none_back():
    made = recording((UNIT, ()), (UNIT, (0,)), results=[1])
    made.ops[0].grads.clear()
    assert flow(made, [0, 1], 2).stages[1].returns == {}


def test_what_the_model_returns_goes_to_the_last_stage():
    found = flow(recording((UNIT, ()), (UNIT, (0,)), (UNIT, (1,)), results=[0, 2]), [0, 1, 2], 3)
    assert found.stages[0].sends == {1: v(0), 2: v(0)}
    assert found.stages[2].incoming == (*v(0), *v(1))


def test_an_input_that_requires_a_gradient_comes_from_the_first_stage():
    found = flow(recording((UNIT, (INPUT,)), (UNIT, (0, INPUT)), results=[1], grad_inputs=(0,)), [0, 1], 2)
    assert found.stages[1].receives == {0: v(INPUT, 0)}


def test_memory_that_is_written_over_needs_the_value_before():
    made = recording((UNIT, ()), (UNIT, (0,)), results=[])
    made.ops[1].holders[1] = Value(0, 1)
    made.results = (Value(1, 1),)
    assert flow(made, [0, 1], 2).stages[1].incoming == (Value(0, 0), Value(0, 1))


def test_a_stage_stops_where_a_later_one_begins_but_not_before_what_all_write():
    made = recording((UNIT, ()), (UNIT, (0,)), (EVERYWHERE, ()), (UNIT, (1,)), results=[3])
    assert [each.end for each in flow(made, [0, 1, 2], 3).stages] == [1, 3, 4]
    made.ops[2].is_state = True
    assert [each.end for each in flow(made, [0, 1, 2], 3).stages] == [3, 3, 4]


@given(data=st.data(), num_stages=st.integers(1, 5))
def test_every_value_that_is_used_elsewhere_comes_once_and_its_gradient_returns_to_whoever_made_it(data, num_stages):
    count = data.draw(st.integers(num_stages, 9))
    uses = [data.draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set() for i in range(count)]
    rest = st.lists(st.integers(0, num_stages - 1), min_size=count - num_stages, max_size=count - num_stages)
    stages = sorted([*range(num_stages), *data.draw(rest)])
    made = flow(recording(*[(UNIT, tuple(each)) for each in uses], results=[count - 1]), stages, num_stages)
    for stage, each in enumerate(made.stages):
        needed = {op for i in range(count) if stages[i] == stage for op in uses[i] if stages[op] != stage}
        assert {value.op for value in each.incoming} == needed
        assert len(set(each.incoming)) == len(each.incoming)
        for source, values in each.receives.items():
            assert made.stages[source].sends[stage] == values
    sent = [value for each in made.stages for values in each.returns.values() for value in values]
    seeded = [value for each in made.stages for values in each.seeds.values() for value in values]
    assert sorted(sent) == sorted(seeded)


def test_calls_of_a_unit_that_writes_its_buffers_stay_together():
    made = recording((UNIT, ()), (UNIT, (0,)), (UNIT, (1,)), (UNIT, (2,)))
    made.ops[1].what = made.ops[2].what = "norm"
    made.written_buffers = (("norm.inner", "mean"),)
    assert together(made, ()) == [Bond(1, 2)]


def test_ops_that_use_a_buffer_which_a_value_is_written_into_stay_together():
    made = recording((UNIT, ()), (GLUE, (0,)), (UNIT, (1,)), (GLUE, (2,)))
    made.ops[1].weights = made.ops[3].weights = (("", "average"),)
    assert together(made, {("", "average")}) == [Bond(0, 1)]
    assert together(made, ()) == []


@pytest.mark.parametrize(("uses", "found"), [((0, 1), [Bond(0, 1)]), ((1,), [])], ids=["used after", "not used"])
def test_a_write_stays_with_what_shares_its_memory_and_is_used_later(uses, found):
    made = recording((UNIT, ()), (UNIT, (0,)), (UNIT, uses))
    made.ops[1].holders[1] = Value(0, 0)
    made.ops[1].inputs = ()
    assert together(made, ()) == found
