import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.errors import NotationError
from pipeloom.ir import Action, Kind, Placement
from pipeloom.ir.action import ALL, STAGE_KINDS
from pipeloom.ir.notation import format_csv, format_program, parse_action, parse_csv
from pipeloom.ir.verify import verify
from pipeloom.passes import add_transfers
from pipeloom.schedules import GENERATORS, gpipe, schedule
from tests.random_schedules import runnable_schedules, shapes

actions = st.one_of(
    st.builds(
        Action, st.sampled_from([k for k in Kind if not k.is_of_stage]), st.integers(0, 999), st.integers(0, 99_999)
    ),
    st.builds(Action, st.sampled_from(sorted(STAGE_KINDS, key=str)), st.integers(0, 999), st.just(ALL)),
)


@given(actions)
def test_action_is_read_back(action):
    assert parse_action(str(action)) == action


@given(st.text(alphabet="0123456789FBIWRSEND_CV ,x", max_size=8))
def test_text_is_an_action_as_a_whole_or_not_at_all(text):
    try:
        action = parse_action(text)
    except NotationError:
        return
    stage, microbatch = text.split(action.kind.text)
    assert (int(stage), int(microbatch)) == (action.stage, action.microbatch)


@pytest.mark.parametrize(
    "text",
    ["", "F", "2F", "F0", "2F0xyz", "x2F0", " 2F0", "2F0\n", "2f0", "-1F0", "2X0", "2F-1", "٢F0", "2SENDF0", "2.0F1"],
)
def test_what_is_no_action_is_refused(text):
    with pytest.raises(NotationError, match=r"is not an action: a stage, a kind and a micro-batch are needed"):
        parse_action(text)


def test_hint_lists_the_kinds():
    with pytest.raises(NotationError, match="hint: the kinds are F B I W R SEND_F RECV_F SEND_B RECV_B"):
        parse_action("2Q0")


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("is_lowered", [False, True])
@settings(max_examples=8)
@given(**shapes)
def test_generated_schedules_are_read_back(name, is_lowered, num_ranks, num_microbatches):
    has_two_ways = name in ("chimera", "dualpipe")  # of which a single micro-batch shows one
    even, at_least = (num_ranks + num_ranks % 2, 2) if has_two_ways else (num_ranks, 1)
    made = schedule(name, num_ranks=even, num_microbatches=max(num_microbatches, at_least))
    if is_lowered and not made.overlaps:  # torch's text has no room for transfers within a pair
        made = add_transfers(made)
    assert parse_csv(format_csv(made)) == made


@pytest.mark.parametrize("name", GENERATORS)
def test_forward_only_is_read_back(name):
    made = schedule(name, num_ranks=4, num_microbatches=4, forward_only=True)
    assert parse_csv(format_csv(made), name=name) == made
    assert parse_csv(format_csv(add_transfers(made))).is_forward_only


@given(runnable_schedules())
def test_any_schedule_is_read_back(made):
    assert parse_csv(format_csv(made)) == made
    assert parse_csv(format_csv(add_transfers(made))) == add_transfers(made)


def test_csv_is_a_row_for_each_rank():
    assert format_csv(gpipe(2, 2)).split() == ["0F0,0F1,0B0,0B1", "1F0,1F1,1B0,1B1"]
    assert format_program(gpipe(1, 1).program(0)) == ["0F0", "0B0"]


def test_idle_slots_and_blanks_are_skipped():
    made = parse_csv("0F0,,0F1, 0B0 ,0B1,,\n,1F0,1F1,,1B0,1B1\n\n")
    assert made == gpipe(2, 2)


def test_movements_of_sharded_parameters_are_kept():
    """torch's lowered tables hold them; they were read, and forgotten when the schedule was written again."""
    text = "0UNSHARD,0F0,0F1,0B0,0B1,0REDUCE_GRAD,0RESHARD\r\n1UNSHARD,1F0,1F1,1B0,1B1\r\n"
    made = parse_csv(text)
    assert not made.is_lowered
    assert verify(made) == []
    assert format_csv(made) == text


def test_pairs_that_overlap_are_read_as_torch_writes_them():
    text = "0F0,(0F1;0B0)OVERLAP_F_B,0B1\r\n"
    made = parse_csv(text)
    assert [str(action) for action in made] == ["0F0", "0F1", "0B0", "0B1"]
    assert str(made) == "rank 0: 0F0 (0F1+0B0) 0B1"
    assert format_csv(made) == text
    assert made != parse_csv("0F0,0F1,0B0,0B1")
    assert made.digest != parse_csv("0F0,0F1,0B0,0B1").digest


def test_a_stage_in_two_rows_belongs_to_two_replicas():
    made = parse_csv("0F0,1F1,1B1,0B0\n1F0,0F1,1B0,0B1\n")
    assert made.placement == Placement.bidirectional(2)
    assert verify(made) == []
    assert [made.rank_of(0, microbatch) for microbatch in (0, 1)] == [0, 1]


def test_placement_is_read_off_the_rows():
    made = parse_csv("0F0,3F0\n1F0,2F0\n", name="v")
    assert made.placement == Placement.of([0, 1, 1, 0])
    assert (made.name, made.is_forward_only, made.num_microbatches) == ("v", True, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the text holds no action; a row of actions per rank is needed"),
        (",,\n,\n", "the text holds no action"),
        ("0F0,0F1\n1F0,banana\n", "'banana' is not an action"),
        ("0F0,1F0\n0F0\n", "0F0 stands in row 1, but stage 0 was seen in row 0; a stage belongs to one rank"),
        ("0F0,0F1,1F0\n0F2,0F3,1F1\n", "1F1 stands in row 1, but stage 1 was seen in row 0"),
        ("0F0,1F0\n0F1,1B0\n", "1B0 stands in row 1, but stage 1 was seen in row 0"),
        ("0F0,0F1,1F0,1F1,0F3,1F2\n0B0,1B3,1F3\n", "stands in row 1, but stage 0 was seen in row 0"),
        ("0UNSHARD3,0F0\n", "'0UNSHARD3' is not an action"),
        ("(0F0;0B0)OVERLAP\n", "is not an action"),
        ("0F0\n2F0\n", "stage 1 has no action, but stage 2 has; none may be missing"),
    ],
)
def test_faulty_tables_are_refused(text, message):
    with pytest.raises(NotationError, match=message):
        parse_csv(text)


def test_empty_row_between_rows_is_refused():
    """A rank that does nothing holds no stage, and then the rows would no longer be the ranks."""
    with pytest.raises(ValueError, match="leaves rank 1 without a stage"):
        parse_csv("0F0\n,\n1F0\n")


@pytest.mark.parametrize("text", ["0F" + "9" * 5_000, "9" * 5_000 + "F0"], ids=["micro-batch", "stage"])
def test_absurd_numbers_are_refused(text):
    with pytest.raises(NotationError, match="is not an action"):
        parse_csv(text)
