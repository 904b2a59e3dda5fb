import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.cost import Costs
from pipeloom.errors import CostError, ScheduleError, UnknownSchedule, UnsupportedShape
from pipeloom.ir.verify import verify
from pipeloom.schedules import ENTRIES, GENERATORS, gpipe, one_f_one_b, schedule

every_name = pytest.mark.parametrize("name", ENTRIES)


@pytest.mark.parametrize(("name", "generator"), [("gpipe", gpipe), ("1f1b", one_f_one_b), ("GPipe", gpipe)])
def test_name_finds_its_generator(name, generator):
    made = schedule(name, num_ranks=3, num_microbatches=5)
    assert made == generator(3, 5)
    assert made.name == name.lower()


@every_name
def test_a_schedule_has_the_name_that_it_is_found_by(name):
    assert schedule(name, num_ranks=4, num_microbatches=8).name == name


SPELLINGS = {
    "pipedream-flush": "1f1b",
    "DAPPLE": "1f1b",
    "Schedule1F1B": "1f1b",
    "ScheduleGPipe": "gpipe",
    "Eager 1F1B": "eager-1f1b",
    "ScheduleInterleaved1F1B": "interleaved",
    "Interleaved1F1B": "interleaved",
    "1f1b_interleaved": "interleaved",
    "ScheduleLoopedBFS": "looped-bfs",
    "breadth-first": "looped-bfs",
    "zbh1": "zb-h1",
    "ZB-H1": "zb-h1",
    "zero-bubble": "zb-h1",
    "zbh2": "zb-h2",
    "ZB1P": "zb-1p",
    "zb_2p": "zb-2p",
    "ScheduleInterleavedZeroBubble": "interleaved-zb",
    "InterleavedZeroBubble": "interleaved-zb",
    "ScheduleZBVZeroBubble": "zb-v",
    "ZBVZeroBubble": "zb-v",
    "zbv": "zb-v",
    "V-Half": "v-half",
    "vmin": "v-min",
    "DualPipe": "dualpipe",
    "ScheduleDualPipeV": "dualpipe-v",
    "DualPipeV": "dualpipe-v",
    "Chimera": "chimera",
    "wave": "hanayo",
    "GIS_H": "gis-h",
    "PipeDream": "pipedream",
    "pipedream_vsync": "pipedream-vertical-sync",
    "PipeDream-2BW": "pipedream-2bw",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_names_are_read_as_people_write_them(spelling):
    assert schedule(spelling, num_ranks=2, num_microbatches=2).name == SPELLINGS[spelling]


def test_every_multi_stage_class_of_torch_is_known():
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    names = {name for name in vars(schedules) if name.startswith("Schedule")}
    assert {"ScheduleGPipe", "ScheduleDualPipeV"} <= names
    assert all(schedule(name, num_ranks=2, num_microbatches=4) for name in names)


def test_no_two_schedules_share_a_spelling():
    keys = [re.sub(r"[-_\s]", "", each).lower() for entry in ENTRIES.values() for each in {entry.name, *entry.aliases}]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("1f1", "did you mean '1f1b' or '1f1b-i' or 'eager-1f1b'?"),
        ("gpip", "did you mean 'gpipe' or 'vpp' or 'gis'?"),
        ("zbh9", "did you mean 'zb-h2' or 'zb-h1' or 'zb-v'?"),
        ("dappel", "did you mean 'dapple' or 'dualpipe' or 'dualpipe-v'?"),
    ],
)
def test_unknown_name_offers_near_ones(name, hint):
    with pytest.raises(UnknownSchedule, match=rf"schedule '{name}' is unknown.*gpipe, 1f1b, ") as caught:
        schedule(name, num_ranks=2, num_microbatches=2)
    assert caught.value.hint == hint


def test_name_that_is_near_to_nothing():
    with pytest.raises(UnknownSchedule, match="'qqq' is unknown; the known ones are gpipe, 1f1b") as caught:
        schedule("qqq", num_ranks=2, num_microbatches=2)
    assert caught.value.hint is None


@pytest.mark.parametrize("name", [None, 3, ["1f1b"]])
def test_name_that_is_no_text(name):
    with pytest.raises(UnknownSchedule, match="is unknown; the known ones are gpipe, 1f1b"):
        schedule(name, num_ranks=2, num_microbatches=2)


def test_unknown_name_comes_before_a_wrong_shape():
    with pytest.raises(UnknownSchedule, match="'1fb' is unknown"):
        schedule("1fb", num_ranks=2, num_microbatches=2, stages_per_rank=2)


REFUSED = {
    ("gpipe", 2, 2): ("it holds exactly 1 stage on each: several stages", "2 ranks × 1 stage per rank"),
    ("zb-v", 4, 1): ("it holds exactly 2 stages on each: one on the way down", "4 ranks × 2 stages per rank"),
    ("v-min", 4, 4): ("it holds exactly 2 stages on each", "4 ranks × 2 stages per rank"),
    ("hanayo", 3, 3): (
        "an even number of stages on each: a wave",
        "3 ranks × 2 stages per rank or 3 ranks × 4 stages per rank",
    ),
    ("hanayo", 3, 1): ("an even number of stages on each", "3 ranks × 2 stages per rank"),
    ("chimera", 5, 1): (
        "it needs an even number of ranks: the two directions meet",
        "4 ranks × 1 stage per rank or 6 ranks × 1 stage per rank",
    ),
    ("dualpipe", 1, 1): ("it needs an even number of ranks", "2 ranks × 1 stage per rank"),
    ("dualpipe", 3, 2): (
        "it holds exactly 1 stage on each: of each of two copies",
        "2 ranks × 1 stage per rank or 4 ranks × 1 stage per rank",
    ),
}


@pytest.mark.parametrize("asked", REFUSED, ids=str)
def test_refused_shapes_name_the_demand_and_the_nearest_that_fit(asked):
    name, num_ranks, stages_per_rank = asked
    message, nearest = REFUSED[asked]
    with pytest.raises(UnsupportedShape, match=message) as caught:
        schedule(name, num_ranks=num_ranks, num_microbatches=8, stages_per_rank=stages_per_rank)
    assert f"schedule {name!r} was asked for with {num_ranks} rank" in caught.value.message
    assert caught.value.hint == f"the nearest shapes that fit: {nearest}"


@every_name
@pytest.mark.parametrize("num_ranks", [1, 3, 4])
@pytest.mark.parametrize("stages_per_rank", [1, 2, 3])
def test_the_nearest_shapes_do_fit(name, num_ranks, stages_per_rank):
    def made(ranks, stages):
        return schedule(name, num_ranks=ranks, num_microbatches=6, stages_per_rank=stages)

    try:
        fitting = [made(num_ranks, stages_per_rank)]
    except UnsupportedShape as error:
        shapes = re.findall(r"(\d+) ranks? × (\d+) stages?", error.hint or "")
        fitting = [made(int(ranks), int(stages)) for ranks, stages in shapes]
        assert len(fitting) in (1, 2, 3)
    assert [verify(each) for each in fitting] == [[]] * len(fitting)


def test_a_shape_that_is_far_from_any_that_fits():
    with pytest.raises(UnsupportedShape, match="2 ranks × 3000 stages per rank") as caught:
        schedule("gpipe", num_ranks=2, num_microbatches=2, stages_per_rank=3000)
    assert caught.value.hint is None


@every_name
@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"num_ranks": 0}, "0 ranks were given; at least 1 is needed"),
        ({"num_ranks": -2}, "-2 ranks were given; at least 1 is needed"),
        ({"num_microbatches": 0}, "0 micro-batches were given; at least 1 is needed"),
        ({"num_microbatches": -1}, "-1 micro-batches were given; at least 1 is needed"),
        ({"stages_per_rank": 0}, "0 stages per rank were given; at least 1 is needed"),
    ],
)
def test_no_rank_or_no_micro_batch(name, counts, message):
    with pytest.raises(UnsupportedShape, match=message):
        schedule(name, **{"num_ranks": 4, "num_microbatches": 4, **counts})


@pytest.mark.parametrize("generator", GENERATORS.values(), ids=GENERATORS)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(0, 4), (4, 0)])
def test_generators_refuse_nothing_by_themselves_too(generator, num_ranks, num_microbatches):
    with pytest.raises(UnsupportedShape, match="at least 1 is needed"):
        generator(num_ranks, num_microbatches)


@pytest.mark.parametrize(
    "counts",
    [
        {"num_ranks": 2.0},
        {"num_ranks": "2"},
        {"num_microbatches": None},
        {"num_ranks": True},
        {"stages_per_rank": 1.0},
    ],
)
def test_counts_that_are_no_whole_numbers(counts):
    with pytest.raises(UnsupportedShape, match=r"was given for the number of .*; a whole number is needed"):
        schedule("gpipe", **{"num_ranks": 2, "num_microbatches": 2, **counts})


@every_name
def test_stages_per_rank_are_the_schedules_own_by_default(name):
    made = schedule(name, num_ranks=4, num_microbatches=8)
    assert made.num_stages == 4 * ENTRIES[name].stages_per_rank


@pytest.mark.parametrize("name", ["interleaved", "interleaved-zb"])
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 3), st.integers(1, 30), st.integers(1, 31))
def test_any_group_size_runs(name, num_ranks, stages_per_rank, num_microbatches, group_size):
    """Also those that papers exclude: fewer than the ranks, and a last group that is shorter."""
    shape = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "stages_per_rank": stages_per_rank}
    assert verify(schedule(name, **shape, group_size=group_size)) == []


@pytest.mark.parametrize("group_size", [0, -1, 2.0, "4"])
def test_group_sizes_that_are_none(group_size):
    with pytest.raises(UnsupportedShape, match="a whole number of at least 1 is needed"):
        schedule("interleaved", num_ranks=2, num_microbatches=4, group_size=group_size)


@pytest.mark.parametrize("group_size", [1, 5, 2.0])
def test_gis_takes_groups_of_half_the_ranks_to_all(group_size):
    with pytest.raises(UnsupportedShape, match=r"'gis' on 4 ranks; 2 to 4 are possible: fewer than half"):
        schedule("gis", num_ranks=4, num_microbatches=8, group_size=group_size)


def test_an_option_of_another_schedule():
    with pytest.raises(ScheduleError, match="'group_size' was given to schedule 'gpipe'; it has none of its own"):
        schedule("gpipe", num_ranks=2, num_microbatches=2, group_size=2)


def test_a_misspelt_option():
    with pytest.raises(ScheduleError, match=r"'groupsize' was given.*; its own are group_size") as caught:
        schedule("interleaved", num_ranks=2, num_microbatches=2, groupsize=2)
    assert caught.value.hint == "did you mean 'group_size'?"


@every_name
def test_costs_go_to_those_that_are_made_from_them(name):
    """And to others they make no difference, so that all can be compared with one call."""
    num_stages = 4 * ENTRIES[name].stages_per_rank
    costs = Costs.uniform(num_stages, forward_s=3.0, input_grad_s=2.0, weight_grad_s=1.0, transfer_s=0.5)
    plain, made = (schedule(name, num_ranks=4, num_microbatches=8, costs=each) for each in (None, costs))
    assert (plain != made) == (name in ("zb-1p", "zb-2p"))


def test_costs_of_other_stages():
    with pytest.raises(CostError, match="costs of 3 stages were given for a schedule of 4"):
        schedule("zb-1p", num_ranks=4, num_microbatches=8, costs=Costs.unit(3))
