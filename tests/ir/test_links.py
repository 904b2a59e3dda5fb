"""Links: which stages hand over values beside the chain, in a schedule and as text."""

import pickle

import pytest
from hypothesis import given

from pipeloom.errors import NotationError, UnsupportedShape
from pipeloom.ir import Action, Kind, Links
from pipeloom.ir.notation import format_csv, parse_action, parse_csv
from pipeloom.ir.verify import Fault, verify
from pipeloom.passes import add_transfers
from pipeloom.schedules import gpipe
from tests.random_schedules import links_of, runnable_schedules
from tests.texts import schedule_of, text_of

SKIP = Links(forward=((0, 2),), backward=((2, 0),))


def test_pairs_are_sorted_and_stand_once():
    links = Links(forward=((1, 4), (0, 3), (1, 4)), backward=((4, 0), (3, 1)))
    assert (links.forward, links.backward) == (((0, 3), (1, 4)), ((3, 1), (4, 0)))
    assert links == Links(((0, 3), (1, 4)), ((3, 1), (4, 0)))


@pytest.mark.parametrize("pair", [(0, 1), (2, 2), (3, 1), (-1, 2)])
def test_forward_links_skip_to_later_stages(pair):
    with pytest.raises(
        UnsupportedShape,
        match=rf"forward link \({pair[0]}, {pair[1]}\) was given; a forward link leads over .* a later",
    ):
        Links(forward=(pair,))


@pytest.mark.parametrize("pair", [(1, 0), (2, 2), (1, 3), (2, -1)])
def test_backward_links_skip_to_earlier_stages(pair):
    with pytest.raises(
        UnsupportedShape,
        match=rf"backward link \({pair[0]}, {pair[1]}\) was given; a backward link leads over .* an earlier",
    ):
        Links(backward=(pair,))


@pytest.mark.parametrize("links", [Links(forward=((0, 3),)), Links(backward=((3, 0),))])
def test_links_join_stages_that_are_there(links):
    with pytest.raises(UnsupportedShape, match=r"link \(\d, \d\) names stage 3; there are 3, counted from 0"):
        gpipe(3, 2).with_links(links)


def test_links_are_part_of_a_schedule():
    plain, linked = gpipe(3, 2), gpipe(3, 2).with_links(SKIP)
    assert (linked == plain, linked.digest == plain.digest) == (False, False)
    assert linked.with_programs(plain.programs) == linked
    assert linked.with_links(Links()) == plain
    assert linked.with_links(Links()).digest == plain.digest


@pytest.mark.parametrize("other", [Links(((0, 3),)), Links(((0, 2),), ((3, 0),)), Links((), ((2, 0),))])
def test_digest_tells_links_apart(other):
    made = gpipe(4, 2)
    assert made.with_links(SKIP).digest != made.with_links(other).digest


@given(links_of(7))
def test_links_can_be_read_off_transfers(links):
    sends = [Action(Kind.SEND_F, a, 0, b) for a, b in links.forward]
    receives = [Action(Kind.RECV_B, b, 0, a) for a, b in links.backward]
    assert Links.of([*sends, *receives, Action(Kind.SEND_F, 0, 0)]) == links
    assert all(links.has(each) for each in (*sends, *receives))


# Actions and their text


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Action(Kind.SEND_F, 0, 3, 2), "0SEND_F3>2"),
        (Action(Kind.RECV_F, 2, 3, 0), "2RECV_F3<0"),
        (Action(Kind.SEND_B, 13, 0, 1), "13SEND_B0>1"),
        (Action(Kind.RECV_B, 1, 0, 13), "1RECV_B0<13"),
    ],
)
def test_text_of_a_skip_names_the_other_stage(action, text):
    assert str(action) == text
    assert parse_action(text) == action
    assert pickle.loads(pickle.dumps(action)) == action


def test_peers_tell_actions_apart():
    actions = {Action(Kind.SEND_F, 0, 3, peer) for peer in (None, 2, 3)}
    assert len(actions) == 3
    assert hash(Action(Kind.SEND_F, 0, 3, 2)) == hash(Action(Kind.SEND_F, 0, 3, 2))


@pytest.mark.parametrize("text", ["0F3>2", "0SEND_F3<2", "2RECV_F3>0", "0SEND_F3>", "0SEND_F3>-2", "0SEND_F3>2>3"])
def test_what_skips_nowhere_is_refused(text):
    with pytest.raises(NotationError, match="is not an action"):
        parse_action(text)


def test_csv_holds_the_skips():
    lowered = add_transfers(gpipe(3, 1).with_links(SKIP))
    assert format_csv(lowered).splitlines()[0] == "0F0,0SEND_F0,0SEND_F0>2,0RECV_B0,0RECV_B0<2,0B0"
    assert parse_csv(format_csv(lowered)).links == SKIP


@given(runnable_schedules(has_links=True))
def test_any_schedule_with_links_is_read_back(made):
    lowered = add_transfers(made)
    assert parse_csv(format_csv(made)).with_links(made.links) == made
    assert parse_csv(format_csv(lowered)).with_links(made.links) == lowered


def test_text_that_skips_to_a_neighbour_is_refused():
    with pytest.raises(UnsupportedShape, match=r"forward link \(0, 1\) was given"):
        parse_csv("0F0,0SEND_F0>1\n1RECV_F0<0,1F0\n")


# Faults


def lowered_texts() -> list[str]:
    return text_of(add_transfers(gpipe(3, 2).with_links(SKIP)))


def faults(texts: list[str], links: Links = SKIP) -> list[tuple[Fault, str]]:
    schedule = schedule_of("\n".join(texts), num_microbatches=2, links=links)
    return [(each.fault, each.message) for each in verify(schedule)]


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("0SEND_F1>2", "2RECV_F1<0 has no 0SEND_F1>2 to match it"),
        ("2RECV_F1<0", "0SEND_F1>2 has no 2RECV_F1<0 to match it"),
        ("0RECV_B0<2", "2SEND_B0>0 has no 0RECV_B0<2 to match it"),
        ("2SEND_B0>0", "0RECV_B0<2 has no 2SEND_B0>0 to match it"),
    ],
)
def test_half_a_skip_is_found(gone, message):
    texts = [" ".join(each for each in line.split() if each != gone) for line in lowered_texts()]
    assert (Fault.UNMATCHED, message) in faults(texts)


def test_skip_that_nobody_brings_is_found():
    texts = [" ".join(each for each in line.split() if "F1>2" not in each) for line in lowered_texts()]
    texts = [" ".join(each for each in line.split() if "F1<0" not in each) for line in texts]
    assert faults(texts) == [(Fault.UNMATCHED, "2F1 needs 0F1 of another rank, and no 2RECV_F1<0 brings it")]


def test_skips_out_of_order_are_found():
    texts = [
        "0F0 0SEND_F0 0SEND_F0>2 0F1 0SEND_F1 0SEND_F1>2",
        "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1",
        "2RECV_F0 2RECV_F1<0 2RECV_F0<0 2F0 2RECV_F1 2F1",
    ]
    schedule = schedule_of("\n".join(texts), num_microbatches=2, is_forward_only=True, links=SKIP)
    message = "2RECV_F1<0 is posted out of the order in which rank 0 sends"
    assert [(each.fault, each.message) for each in verify(schedule)] == [(Fault.UNMATCHED, message)]


@pytest.mark.parametrize("links", [Links(), Links(((0, 2),)), Links((), ((2, 0),))])
def test_skips_without_their_link_are_misplaced(links):
    found = faults(lowered_texts(), links)
    assert {fault for fault, _ in found} == {Fault.MISPLACED}
    assert found[0][1].endswith("skips stages, but no link of the schedule leads there")


def test_computations_have_no_peer():
    program = (Action(Kind.FORWARD, 0, 0, 2), Action(Kind.BACKWARD, 0, 0))
    schedule = gpipe(3, 1).with_links(SKIP)
    broken = schedule.with_programs([program, *schedule.programs[1:]])
    assert [each.fault for each in verify(broken)][:1] == [Fault.MISPLACED]


def test_skip_of_one_rank_needs_no_transfer():
    text = "0F0 2F0 2B0 0B0\n1F0 1B0"
    schedule = schedule_of(text, ranks=(0, 1, 0), links=SKIP)
    assert text_of(add_transfers(schedule))[0] == "0F0 0SEND_F0 2RECV_F0 2F0 2B0 2SEND_B0 0RECV_B0 0B0"
    assert verify(add_transfers(schedule)) == []


def test_value_that_is_used_before_it_is_made_is_found():
    """The chain is in order, the skip is not."""
    schedule = schedule_of("2F0 0F0\n1F0", ranks=(0, 1, 0), is_forward_only=True, links=Links(((0, 2),)))
    assert (Fault.BACKWARDS, "2F0 stands before 0F0, which it needs") in [
        (v.fault, v.message) for v in verify(schedule)
    ]
