import pytest

from pipeloom.cost import Costs
from pipeloom.ir.notation import parse_csv
from pipeloom.report import describe, figures_in_seconds, figures_in_ticks, whole
from pipeloom.schedules import gpipe, one_f_one_b, schedule
from pipeloom.sim import simulate


def described(made):
    return list(describe(simulate(made, Costs.unit(made.num_stages))))


@pytest.mark.parametrize(("num_microbatches", "percent"), [(6, "33%"), (24, "11%"), (1, "75%")])
def test_forward_only_says_how_idle(num_microbatches, percent):
    made = schedule("gpipe", num_ranks=4, num_microbatches=num_microbatches, forward_only=True)
    assert described(made) == [f"Idle fraction: {percent}"]


def test_training_says_what_is_held():
    assert described(one_f_one_b(4, 8)) == [
        "Idle fraction: 27%",
        "Held until the input gradient, at most: 4 3 2 1 micro-batches, by GPU",
        "Held until the weight gradient, at most: 4 3 2 1 micro-batches, by GPU",
        "Gradients add up in the order: ascending micro-batches",
    ]


def test_two_peaks_where_backwards_are_split():
    lines = described(parse_csv("0F0,0I0,0F1,0I1,0W0,0W1\n"))
    assert [line.split(": ")[1].split()[0] for line in lines[1:3]] == ["1", "2"]


def test_descending_order_is_spelled_out():
    lines = described(parse_csv("0F0,0F1,0F2,0B2,0B1,0B0\n"))
    assert lines[-1] == "Gradients add up in the order: micro-batches 2 1 0"


def test_stages_that_differ_in_order_are_named():
    lines = described(parse_csv("0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n1F0,1F1,1B1,1B0\n"))
    assert lines[-2:] == [
        "Gradients of stage 0 2 add up in the order: ascending micro-batches",
        "Gradients of stage 1 add up in the order: micro-batches 1 0",
    ]


def test_never_idle_is_not_below_zero():
    """0.1 + 0.2 is above 0.3: a rank can seem busier than the makespan."""
    made = parse_csv(",".join(f"0F{i}" for i in range(3)))
    costs = Costs.uniform(1, forward_s=0.1, input_grad_s=0.0, weight_grad_s=0.0)
    assert next(describe(simulate(made, costs))) == "Idle fraction: 0%"


def test_figures_in_ticks_are_whole_where_they_can_be():
    figures = figures_in_ticks(simulate(gpipe(4, 6), Costs.unit(4)))
    assert (figures["makespan"], figures["longest_rank_span"]) == (27, 27)
    assert {type(figures[name]) for name in ("makespan", "longest_rank_span")} == {int}
    assert figures["programs"][3][:2] == ["3F0", "3F1"]


def test_figures_in_seconds_agree_with_the_timeline():
    timeline = simulate(one_f_one_b(4, 8), Costs.unit(4))
    figures = figures_in_seconds(timeline)
    names = list(figures)[list(figures).index("makespan_s") :]
    assert names[0] == "makespan_s"
    assert [figures[name] for name in names] == [getattr(timeline, name) for name in names]


@pytest.mark.parametrize(("ticks", "shown"), [(3.0, "3"), (2.5, "2.5")])
def test_whole(ticks, shown):
    assert str(whole(ticks)) == shown
