import pytest

from pipeloom.errors import UnknownSchedule, UnsupportedShape
from pipeloom.ir import Kind
from pipeloom.schedules import GENERATORS, gpipe, one_f_one_b, schedule


@pytest.mark.parametrize(("name", "generator"), [("gpipe", gpipe), ("1f1b", one_f_one_b), ("GPipe", gpipe)])
def test_name_finds_its_generator(name, generator):
    made = schedule(name, num_ranks=3, num_microbatches=5)
    assert made == generator(3, 5)
    assert made.name == name.lower()


@pytest.mark.parametrize(
    ("name", "hint"),
    [("1f1", "did you mean '1f1b'?"), ("gpip", "did you mean 'gpipe'?"), ("F1B1", "did you mean '1f1b'?")],
)
def test_unknown_name_offers_near_ones(name, hint):
    with pytest.raises(UnknownSchedule, match=rf"schedule '{name}' is unknown.*gpipe, 1f1b") as caught:
        schedule(name, num_ranks=2, num_microbatches=2)
    assert caught.value.hint == hint


def test_name_that_is_near_to_nothing():
    with pytest.raises(UnknownSchedule, match="'zzz' is unknown; the known ones are gpipe, 1f1b") as caught:
        schedule("zzz", num_ranks=2, num_microbatches=2)
    assert caught.value.hint is None


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("stages_per_rank", [0, 2, -1])
def test_several_stages_per_rank_are_refused(name, stages_per_rank):
    with pytest.raises(UnsupportedShape, match=rf"with {stages_per_rank} stages per rank; it holds exactly 1"):
        schedule(name, num_ranks=2, num_microbatches=2, stages_per_rank=stages_per_rank)


def test_unknown_name_comes_before_a_wrong_shape():
    with pytest.raises(UnknownSchedule, match="'1fb' is unknown"):
        schedule("1fb", num_ranks=2, num_microbatches=2, stages_per_rank=2)


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches", "message"),
    [
        (0, 4, "0 ranks were given; at least 1 is needed"),
        (-2, 4, "-2 ranks were given; at least 1 is needed"),
        (4, 0, "0 micro-batches were given; at least 1 is needed"),
        (4, -1, "-1 micro-batches were given; at least 1 is needed"),
    ],
)
def test_no_rank_or_no_micro_batch(name, num_ranks, num_microbatches, message):
    with pytest.raises(UnsupportedShape, match=message):
        schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)


@pytest.mark.parametrize("name", GENERATORS)
def test_forward_only_keeps_the_order(name):
    whole = schedule(name, num_ranks=3, num_microbatches=4)
    made = schedule(name, num_ranks=3, num_microbatches=4, forward_only=True)
    assert made.is_forward_only
    assert [[a for a in p if a.kind is Kind.FORWARD] for p in whole.programs] == list(map(list, made.programs))


@pytest.mark.parametrize(
    "counts", [{"num_ranks": 2.0}, {"num_ranks": "2"}, {"num_microbatches": None}, {"num_ranks": True}]
)
def test_counts_that_are_no_whole_numbers(counts):
    with pytest.raises(UnsupportedShape, match=r"was given for the number of (ranks|micro-batches); a whole number"):
        schedule("gpipe", **{"num_ranks": 2, "num_microbatches": 2, **counts})


@pytest.mark.parametrize("name", [None, 3, ["1f1b"]])
def test_name_that_is_no_text(name):
    with pytest.raises(UnknownSchedule, match="is unknown; the known ones are gpipe, 1f1b"):
        schedule(name, num_ranks=2, num_microbatches=2)
