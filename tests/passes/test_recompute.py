import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.ir import Kind
from pipeloom.ir.peaks import peak_held_to_input_grad
from pipeloom.ir.verify import verify
from pipeloom.passes import add_recompute, add_transfers
from pipeloom.schedules import schedule as made
from tests.random_schedules import shapes
from tests.texts import interleaved, schedule_of, text_of, zb_h1


def recomputed(text: str, stages: set[int]) -> list[str]:
    return text_of(add_recompute(schedule_of(text), stages))


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        (set(), ["0F0 0B0", "1F0 1B0"]),
        ({0}, ["0F0 0R0 0B0", "1F0 1B0"]),
        ({0, 1}, ["0F0 0R0 0B0", "1F0 1R0 1B0"]),
        ({7}, ["0F0 0B0", "1F0 1B0"]),
    ],
)
def test_chosen_stages_run_again_before_their_backward(stages: set[int], expected: list[str]) -> None:
    assert recomputed("0F0 0B0\n1F0 1B0", stages) == expected


def test_halves_share_one_recomputation() -> None:
    assert recomputed("0F0 0I0 0W0", {0}) == ["0F0 0R0 0I0 0W0"]


def test_recomputation_is_not_added_twice() -> None:
    once = add_recompute(zb_h1(), {0, 1})
    assert add_recompute(once, {0, 1}) == once


def test_evaluation_recomputes_nothing() -> None:
    forward = made("1f1b", num_ranks=3, num_microbatches=4, forward_only=True)
    assert add_recompute(forward, range(3)) == forward


@pytest.mark.parametrize("schedule", [zb_h1(), interleaved()])
def test_written_schedules_stay_right(schedule: object) -> None:
    found = add_recompute(schedule, {1, 3})  # type: ignore[arg-type]
    assert {action.stage for action in found if action.kind is Kind.RECOMPUTE} == {1, 3}
    assert verify(found) == verify(add_transfers(found)) == []


def test_lowered_schedule_can_be_recomputed() -> None:
    found = add_recompute(add_transfers(zb_h1()), range(4))
    assert verify(found) == []


@settings(max_examples=25)
@given(stages=st.sets(st.integers(0, 15)), **shapes)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_generated_schedules_stay_right(name: str, stages: set[int], num_ranks: int, num_microbatches: int) -> None:
    schedule = made(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    found = add_recompute(schedule, stages)
    assert len(found) - len(schedule) == num_microbatches * len(stages & set(range(num_ranks)))
    assert peak_held_to_input_grad(found) == peak_held_to_input_grad(schedule)
    assert verify(found) == []
