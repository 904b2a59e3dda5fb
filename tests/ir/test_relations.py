import enum

import pytest
from hypothesis import given

from pipeloom.ir import Action, Kind, Links, Placement, Schedule
from pipeloom.ir.links import NO_LINKS
from pipeloom.ir.notation import parse_action
from pipeloom.ir.relations import (
    channel_of,
    counterpart,
    destinations_of,
    needs,
    other_stage,
    resolve,
    sources_of,
    stage_needs,
    takes,
    waits_for,
)
from pipeloom.passes import add_transfers
from tests.random_schedules import links_of
from tests.texts import schedule_of, zb_h1

TRANSFERS = [kind for kind in Kind if kind.is_transfer]


def empty(num_stages: int, links: Links = NO_LINKS) -> Schedule:
    return Schedule(Placement.single(num_stages), ((),) * num_stages, 8, links=links)


def needs_text(action: str, num_stages: int = 4, links: Links = NO_LINKS) -> list[str]:
    return ["|".join(map(str, need)) for need in needs(parse_action(action), empty(num_stages, links))]


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("0F5", []),
        ("2F5", ["2RECV_F5|1F5"]),
        ("3B5", ["3R5|3F5"]),
        ("2B5", ["2R5|2F5", "2RECV_B5|3B5|3I5"]),
        ("2I5", ["2R5|2F5", "2RECV_B5|3B5|3I5"]),
        ("2W5", ["2I5"]),
        ("2U5", ["2B5|2W5"]),
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
    assert all(isinstance(other, Kind) and 0 <= stage < 3 for need in found for other, stage, _ in need)


def test_kind_without_needs_is_refused() -> None:
    """Whoever adds a kind hears of it here, and from mypy by `assert_never`."""

    class Unheard(enum.Enum):
        UNHEARD = "UNHEARD"

    with pytest.raises(AssertionError, match=r"Expected code to be unreachable, but got: .*UNHEARD"):
        stage_needs(Unheard.UNHEARD, 1, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", Kind)
def test_what_is_needed_is_of_the_same_microbatch(kind: Kind) -> None:
    found = needs(Action(kind, 1, 7), empty(3))
    assert {action.microbatch for need in found for action in need} <= {7}


def test_best_alternative_that_is_held_is_waited_for() -> None:
    need = (parse_action("1R0"), parse_action("1F0"))
    assert resolve(need, set(need)) == need[0]
    assert resolve(need, {need[1]}) == need[1]
    assert resolve(need, set()) is None


def test_waiting_leaves_out_what_the_schedule_lacks() -> None:
    schedule = schedule_of("0F0 0I0\n1F0 1I0")
    assert [str(found) for found in waits_for(parse_action("0I0"), schedule)] == ["0F0", "1I0"]
    assert list(waits_for(parse_action("0I0"), empty(2))) == []


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
    assert needs(receive, empty(4)) == ((counterpart(receive),),)


def test_computation_has_no_counterpart() -> None:
    with pytest.raises(KeyError, match="FORWARD"):
        counterpart(parse_action("0F0"))


def test_channel_is_the_pair_of_ranks() -> None:
    schedule = Schedule(Placement.of((1, 0, 1)), ((), ()), 1)
    assert channel_of(parse_action("0SEND_F0"), schedule) == (1, 0)
    assert channel_of(parse_action("2SEND_B0"), schedule) == (1, 0)


def test_weight_gradient_is_waited_for_by_nobody() -> None:
    schedule = zb_h1()
    waited = {need for action in schedule for need in waits_for(action, schedule)}
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


# Links

LINKS = Links(forward=((0, 3), (0, 2), (1, 3)), backward=((3, 1), (2, 0), (3, 0)))


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("1F5", ["1RECV_F5|0F5"]),
        ("3F5", ["3RECV_F5|2F5", "3RECV_F5<0|0F5", "3RECV_F5<1|1F5"]),
        ("3B5", ["3R5|3F5"]),
        ("0I5", ["0R5|0F5", "0RECV_B5|1B5|1I5", "0RECV_B5<2|2B5|2I5", "0RECV_B5<3|3B5|3I5"]),
        ("3R5", ["3F5"]),
        ("0SEND_F5>2", ["0F5"]),
        ("3SEND_B5>1", ["3B5|3I5"]),
        ("2RECV_F5<0", ["0SEND_F5>2"]),
        ("1RECV_B5<3", ["3SEND_B5>1"]),
    ],
)
def test_links_are_needs_like_the_chain(action: str, expected: list[str]) -> None:
    assert needs_text(action, links=LINKS) == expected


@pytest.mark.parametrize(
    ("kind", "stage", "sources", "destinations"),
    [
        (Kind.FORWARD, 0, (), (1, 2, 3)),
        (Kind.FORWARD, 3, (2, 0, 1), ()),
        (Kind.BACKWARD, 3, (), (2, 1, 0)),
        (Kind.BACKWARD, 0, (1, 2, 3), ()),
        (Kind.INPUT_GRAD, 1, (2, 3), (0,)),
    ],
)
def test_values_come_and_go_in_a_fixed_order(
    kind: Kind, stage: int, sources: tuple[int, ...], destinations: tuple[int, ...]
) -> None:
    """The neighbour first; then sources by stage, destinations by nearness."""
    assert sources_of(kind, stage, 4, LINKS) == sources
    assert destinations_of(kind, stage, 4, LINKS) == destinations


@given(links_of(6))
def test_sources_and_destinations_are_one_relation(links: Links) -> None:
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        there = {(stage, to) for stage in range(6) for to in destinations_of(kind, stage, 6, links)}
        back = {(source, stage) for stage in range(6) for source in sources_of(kind, stage, 6, links)}
        skips = links.forward if kind is Kind.FORWARD else links.backward
        assert there == back
        assert {(a, b) for a, b in there if abs(a - b) > 1} == set(skips)


@pytest.mark.parametrize(("send", "receive"), [("0SEND_F3>2", "2RECV_F3<0"), ("3SEND_B3>1", "1RECV_B3<3")])
def test_ends_of_a_skip_know_each_other(send: str, receive: str) -> None:
    first, second = parse_action(send), parse_action(receive)
    assert (counterpart(first), counterpart(second)) == (second, first)
    assert (other_stage(first), other_stage(second)) == (second.stage, first.stage)
    assert channel_of(first, empty(4)) == (first.stage, second.stage)


@pytest.mark.parametrize(("kind", "stage"), [(Kind.FORWARD, 3), (Kind.BACKWARD, 0)])
@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (0, 1, 0, 1), (1, 0, 0, 1), (0, 0, 0, 0)])
def test_values_are_taken_in_the_order_of_their_sources(kind: Kind, stage: int, ranks: tuple[int, ...]) -> None:
    programs: list[list[str]] = [[] for _ in range(max(ranks) + 1)]
    for each in [*(f"{s}F0" for s in range(4)), *(f"{s}B0" for s in reversed(range(4)))]:
        programs[ranks[int(each[0])]].append(each)
    text = "\n".join(map(" ".join, programs))
    lowered = add_transfers(schedule_of(text, ranks=ranks, links=LINKS))
    taken = takes(Action(kind, stage, 0), lowered)
    found = [other_stage(each) if each.kind.is_recv else each.stage for each in taken]
    assert tuple(found) == sources_of(kind, stage, 4, LINKS)
