import enum

import pytest

from pipeloom.ir import Action, Kind, Placement, Schedule
from pipeloom.ir.notation import parse_action
from pipeloom.ir.relations import channel_of, counterpart, needs, other_stage, resolve, stage_needs, takes, waits_for
from pipeloom.passes import add_transfers
from tests.texts import schedule_of, zb_h1

TRANSFERS = [kind for kind in Kind if not kind.is_compute]


def needs_text(action: str, num_stages: int = 4) -> list[str]:
    return ["|".join(map(str, need)) for need in needs(parse_action(action), num_stages)]


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("0F5", []),
        ("2F5", ["2RECV_F5|1F5"]),
        ("3B5", ["3R5|3F5"]),
        ("2B5", ["2R5|2F5", "2RECV_B5|3B5|3I5"]),
        ("2I5", ["2R5|2F5", "2RECV_B5|3B5|3I5"]),
        ("2W5", ["2I5"]),
        ("2R5", ["2F5"]),
        ("2SEND_F5", ["2F5"]),
        ("2SEND_B5", ["2B5|2I5"]),
        ("2RECV_F5", ["1SEND_F5"]),
        ("2RECV_B5", ["3SEND_B5"]),
    ],
)
def test_needs_are_the_relation(action: str, expected: list[str]) -> None:
    assert needs_text(action) == expected


def test_single_stage_needs_nothing_from_others() -> None:
    assert (needs_text("0F0", 1), needs_text("0B0", 1)) == ([], ["0R0|0F0"])


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_has_its_needs(kind: Kind) -> None:
    found = stage_needs(kind, 1, 3)
    assert isinstance(found, tuple)
    assert all(isinstance(other, Kind) and 0 <= stage < 3 for need in found for other, stage in need)


def test_kind_without_needs_is_refused() -> None:
    """Whoever adds a kind hears of it here, and from mypy by `assert_never`."""

    class Unheard(enum.Enum):
        UNSHARD = "UNSHARD"

    with pytest.raises(AssertionError, match=r"Expected code to be unreachable, but got: .*UNSHARD"):
        stage_needs(Unheard.UNSHARD, 1, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", Kind)
def test_what_is_needed_is_of_the_same_microbatch(kind: Kind) -> None:
    found = needs(Action(kind, 1, 7), 3)
    assert {action.microbatch for need in found for action in need} <= {7}


def test_best_alternative_that_is_held_is_waited_for() -> None:
    need = (parse_action("1R0"), parse_action("1F0"))
    assert resolve(need, set(need)) == need[0]
    assert resolve(need, {need[1]}) == need[1]
    assert resolve(need, set()) is None


def test_waiting_leaves_out_what_the_schedule_lacks() -> None:
    held = {parse_action(text) for text in ("0F0", "1F0", "1I0", "0I0")}
    assert [str(found) for found in waits_for(parse_action("0I0"), 2, held)] == ["0F0", "1I0"]
    assert list(waits_for(parse_action("0I0"), 2, set())) == []


@pytest.mark.parametrize("kind", TRANSFERS)
def test_counterparts_are_mutual(kind: Kind) -> None:
    action = Action(kind, 1, 3)
    other = counterpart(action)
    assert counterpart(other) == action
    assert other_stage(action) == other.stage
    assert (other.kind.is_send, other.microbatch) == (kind.is_recv, 3)


@pytest.mark.parametrize("kind", TRANSFERS)
def test_receives_need_their_counterpart(kind: Kind) -> None:
    receive = next(each for each in (Action(kind, 1, 0), counterpart(Action(kind, 1, 0))) if each.kind.is_recv)
    assert needs(receive, 4) == ((counterpart(receive),),)


def test_computation_has_no_counterpart() -> None:
    with pytest.raises(KeyError, match="FORWARD"):
        counterpart(parse_action("0F0"))


def test_channel_is_the_pair_of_ranks() -> None:
    schedule = Schedule(Placement.of((1, 0, 1)), ((), ()), 1)
    assert channel_of(parse_action("0SEND_F0"), schedule) == (1, 0)
    assert channel_of(parse_action("2SEND_B0"), schedule) == (1, 0)


def test_weight_gradient_is_waited_for_by_nobody() -> None:
    schedule = zb_h1()
    waited = {need for action in schedule for need in waits_for(action, 4, schedule.actions)}
    assert {action.kind for action in schedule.actions - waited} == {Kind.WEIGHT_GRAD}


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("0F0", []),
        ("1F0", ["1RECV_F0"]),
        ("1SEND_F0", ["1F0"]),
        ("1RECV_B0", []),
        ("1I0", ["1RECV_B0"]),
        ("1SEND_B0", ["1I0"]),
        ("1W0", []),
        ("3I0", []),
    ],
)
def test_values_are_taken_over_and_activations_stay(action: str, expected: list[str]) -> None:
    assert [str(found) for found in takes(parse_action(action), add_transfers(zb_h1()))] == expected


def test_stages_of_one_rank_take_from_each_other() -> None:
    schedule = schedule_of("0F0 1F0 1R0 1B0 0B0", ranks=(0, 0))
    taken = {str(action): [str(found) for found in takes(action, schedule)] for action in schedule}
    assert taken == {"0F0": [], "1F0": ["0F0"], "1R0": [], "1B0": [], "0B0": ["1B0"]}
